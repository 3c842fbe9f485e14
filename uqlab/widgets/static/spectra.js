// Directions of weights after training against those before; data: methods, layers, first (layer), k, threshold, shades
// [colour of |cos| from 0 to 1], level [layer], after [method][layer][member] {before and values (singular), largest
// (|cos|), cosines (bytes, [directions, directions before])}.

const WIDE = 320, HIGH = 240, SLIM = 150;
const CUTS = Array.from({ length: 20 }, (_, i) => (i + 1) / 20);

// The bytes as an image of so many rows, each in its colour.
function colored(bytes, rows, shades) {
  const canvas = document.createElement("canvas"), wide = bytes.length / rows;
  [canvas.width, canvas.height] = [wide, rows];
  const brush = canvas.getContext("2d");
  bytes.forEach((value, i) => {
    brush.fillStyle = shades[value];
    brush.fillRect(i % wide, Math.floor(i / wide), 1, 1);
  });
  return canvas.toDataURL();
}

function render({ model, el }) {
  const data = model.get("data"), root = box(el, data), { methods, layers, shades } = data;
  const most = data.after[0][0][0].values.length;
  const tools = part(root, "div", { class: "tools wide" });
  const listed = names => names.map((name, i) => [i, name]), cut = Math.max(0, Math.round(20 * data.threshold) - 1);
  const counted = (count, from) => Array.from({ length: count }, (_, i) => `${i + from}`);
  const method = menu(tools, "method", listed(methods), () => settle());
  const layer = menu(tools, "layer", listed(layers), () => settle());
  const member = slider(tools, "member", counted(data.after[0][0].length, 0), 0, () => soon());
  const rows = slider(tools, "directions k", counted(most, 1), data.k - 1, () => soon());
  const level = slider(tools, "threshold |cos|", CUTS.map(value => value.toFixed(2)), cut, () => soon());
  const start = () => ([method.value, layer.value, member.value, rows.value, level.value] = [0, data.first, 0, data.k - 1, cut]);
  button(tools, "reset", "back to the first values", () => {
    start();
    settle();
  });

  const seen = part(root, "p", { "aria-live": "polite", class: "seen" }), row = part(root, "div", { class: "row" });
  const upright = (chart, x, text) => part(chart, "text", { transform: `translate(${x},${HIGH / 2})rotate(-90)`,
    "text-anchor": "middle", class: "small" }, text);
  const map = part(row, "svg", { viewBox: `-44 -8 ${WIDE + 110} ${HIGH + 48}`, class: "cosines", role: "img" });
  const stretched = { height: HIGH, preserveAspectRatio: "none", class: "pixels" };
  const image = part(map, "image", { width: WIDE, ...stretched });
  const ends = ["0", "1"].map(() => part(map, "text", { "text-anchor": "end", x: -14, class: "small" }));
  upright(map, -32, "rank after training");
  const ranks = ["start", "end"].map(side => part(map, "text",
    { x: side === "end" ? WIDE : 0, y: HIGH + 16, "text-anchor": side, class: "small" }));
  part(map, "text", { x: WIDE / 2, y: HIGH + 32, "text-anchor": "middle", class: "small" }, "rank of the direction before");
  const marks = part(map, "path", { class: "intruders" });
  const scale = Uint8Array.from({ length: 256 }, (_, i) => 255 - i);
  part(map, "image", { x: WIDE + 12, width: 14, ...stretched, href: colored(scale, 256, shades) });
  for (const tick of [0, 0.5, 1]) {
    part(map, "text", { x: WIDE + 31, y: HIGH * (1 - tick) + 4, class: "small" }, tick);
  }
  upright(map, WIDE + 62, "|cos|");
  const line = part(map, "path", { class: "alarm" });
  const chart = part(row, "svg", { viewBox: `-12 -8 ${SLIM + 28} ${HIGH + 48}`, class: "values", role: "img" });
  part(chart, "path", { d: `M0,0V${HIGH}H${SLIM}`, class: "axis" });
  part(chart, "text", { x: SLIM / 2, y: HIGH + 32, "text-anchor": "middle", class: "small" }, "singular value");
  const ticks = part(chart, "g"), old = part(chart, "path", { class: "line guide before" });
  const fresh = part(chart, "path", { class: "line after" });
  part(chart, "text", { x: SLIM, y: HIGH - 24, "text-anchor": "end", class: "small" }, "dashed: before");
  part(chart, "text", { x: SLIM, y: HIGH - 8, "text-anchor": "end", class: "small new" }, "after");

  function draw(k, threshold) {
    const l = +layer.value, found = data.after[method.value][l][member.value], { before } = found;
    const bytes = Uint8Array.from(atob(found.cosines), letter => letter.charCodeAt(0)), wide = bytes.length / most;
    const y = rank => (HIGH * (rank + 0.5)) / k;
    change(image, { href: colored(bytes.slice(0, k * wide), k, shades) });
    [0, k - 1].forEach((rank, i) => change(ends[i], { y: y(rank) + 4 }, i && k === 1 ? "" : `${rank + 1}`));
    ["1", `${wide}`].forEach((rank, i) => change(ranks[i], {}, rank));
    const strange = counted(k, 0).map(Number).filter(rank => found.largest[rank] < threshold);
    change(marks, { d: strange.map(rank => `M-10,${y(rank) - 4}l8,4l-8,4Z`).join("") });
    change(line, { d: `M${WIDE + 9},${HIGH * (1 - threshold)}h20` });
    const x = axis([0, before[0], found.values[0]]);
    ticks.replaceChildren();
    for (const tick of x.ticks.filter(tick => tick >= 0)) {
      part(ticks, "text", { x: SLIM * x.at(tick), y: HIGH + 16, "text-anchor": "middle", class: "small" }, brief(tick));
    }
    const drawn = values => `M${values.slice(0, k).map((value, rank) => [SLIM * x.at(value), y(rank)]).join("L")}h0`;
    change(old, { d: drawn(before) });
    change(fresh, { d: drawn(found.values) });
    return { strange, squares: found.values.slice(0, k).map(value => value * value), level: data.level[l] };
  }

  function settle() {
    const k = rows.value + 1, threshold = CUTS[level.value], now = draw(k, threshold), count = now.strange.length;
    const energy = sum(now.strange.map(rank => now.squares[rank])) / sum(now.squares);
    change(map, { "aria-label": `|cos| of ${k} directions after training with those before; ${count} are intruders` });
    change(chart, { "aria-label": "Singular values before and after training" });
    change(seen, {}, `${count} of ${k} leading directions are intruders (red), with ${(100 * energy).toFixed(0)} % of the `
      + "energy: no old direction is like them. A random direction would have a largest |cos| of "
      + `${now.level.toFixed(2)} on average.`);
    model.set("state", { method: methods[method.value], layer: layers[layer.value], member: member.value, k, threshold,
      intruders: count, energy });
    model.save_changes();
  }

  const soon = paced(settle);
  start();
  settle();
}

export default { render };
