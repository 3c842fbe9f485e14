// A map of attention heads that is clicked; data: cells [layer][head] {value, color}, order [[layer, head]], removed
// [count], known, others [set], path {measure: [value after 0, 1, ... removed]}, alone {measure: [layer][head]}, clouds
// [removed][layer][head] {points [set][x, y, x, y, ...] between -99 and 99, apart [other][Euclidean, Mahalanobis]}.

const CELL = 34, SIZE = 200;

function render({ model, el }) {
  const data = model.get("data"), root = box(el, data), { cells, order, removed, others } = data;
  const layers = cells.length, heads = cells[0].length, measures = Object.keys(data.path);
  const place = Object.fromEntries(order.map((pair, i) => [pair, i]));
  const start = order.at(-1) ?? [0, 0];
  let picked = start;

  const tools = part(root, "div", { class: "tools" }), last = removed.length - 1;
  const gone = slider(tools, "heads removed", removed.map(String), last, () => soon());
  const other = menu(tools, "OOD set", others.map((name, i) => [i, name]), () => settle());
  button(tools, "reset", "back to the first head", () => {
    [picked, gone.value, other.value] = [start, last, 0];
    settle();
  });

  // The map -------------------------------------------------------------------------------------------------------
  const row = part(root, "div", { class: "row" });
  const high = CELL * layers, wide = CELL * heads, whole = Math.max(wide + 36, 180);
  const map = part(row, "svg", { viewBox: `-32 -18 ${whole} ${high + 52}`, class: "map", role: "group",
    "aria-label": "A map of the heads: a click or the arrow keys pick one" });
  map.style.flex = `0 1 ${whole}px`;
  part(map, "text", { x: 0, y: -7, class: "small" }, "place in the order");
  part(map, "text", { x: wide / 2, y: high + 30, "text-anchor": "middle", class: "small" }, "head");
  part(map, "text", { transform: `translate(-21,${high / 2})rotate(-90)`, "text-anchor": "middle", class: "small" },
    "layer");
  for (let h = 0; h < heads; h++) {
    part(map, "text", { x: CELL * (h + 0.5), y: high + 14, "text-anchor": "middle", class: "small" }, h);
  }
  const dark = color => [1, 3, 5].reduce((light, at, i) =>
    light + [0.3, 0.59, 0.11][i] * parseInt(color.slice(at, at + 2), 16), 0) < 130;
  const squares = cells.map((line, l) => {
    part(map, "text", { x: -6, y: CELL * (l + 0.5) + 4, "text-anchor": "end", class: "small" }, l);
    return line.map(({ color }, h) => {
      const square = part(map, "g", { role: "button", class: dark(color) ? "head" : "head light", tabindex: -1,
        transform: `translate(${CELL * h},${CELL * l})` });
      part(square, "rect", { width: CELL, height: CELL, fill: color });
      part(square, "text", { x: CELL / 2, y: CELL / 2 + 4, "text-anchor": "middle" });
      square.addEventListener("click", () => pick(l, h));
      return square;
    });
  });
  const frame = part(map, "rect", { width: CELL, height: CELL, class: "frame" });
  map.addEventListener("keydown", event => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const inside = (at, size) => Math.min(size - 1, Math.max(0, at));
    pick(inside(picked[0] + step[0], layers), inside(picked[1] + step[1], heads));
  });

  function pick(l, h) {
    picked = [l, h];
    settle();
    squares[l][h].focus();
  }

  // The whole network along the order, and the features of one head -----------------------------------------------
  const inks = ["ink", "epistemic"], now = [], single = [];
  const panel = title => {
    const made = part(row, "svg", { viewBox: `-40 -18 ${SIZE + 52} ${SIZE + 52}`, class: "panel", role: "img" });
    return [made, part(made, "text", { x: 0, y: -7, class: "small" }, title)];
  };
  if (measures.length) {
    const [chart] = panel("the whole network"), ends = [0, order.length];
    const x = axis(ends), y = axis(measures.flatMap(name => [...data.path[name], ...(data.alone[name] ?? []).flat()]));
    const spot = (count, value) => [SIZE * x.at(count), SIZE * (1 - y.at(value))];
    part(chart, "path", { d: `M0,0V${SIZE}H${SIZE}`, class: "axis" });
    for (const tick of x.ticks) {
      part(chart, "text", { x: SIZE * x.at(tick), y: SIZE + 14, "text-anchor": "middle", class: "small" }, brief(tick));
    }
    for (const tick of y.ticks) {
      part(chart, "text", { x: -4, y: spot(0, tick)[1] + 4, "text-anchor": "end", class: "small" }, brief(tick));
    }
    part(chart, "text", { x: SIZE / 2, y: SIZE + 30, "text-anchor": "middle", class: "small" }, "heads removed");
    measures.forEach((name, i) => {
      const color = `var(--${inks[i]})`, values = data.path[name];
      const d = `M${values.map((value, k) => spot(k, value)).join("L")}`;
      part(chart, "path", { d, style: `stroke: ${color}`, class: "line" });
      part(chart, "text", { x: SIZE, y: 10 + 14 * i, "text-anchor": "end", class: "small", style: `fill: ${color}` }, name);
      now.push(() => spot(removed[gone.value], values[removed[gone.value]]));
      single.push(() => spot(1, data.alone[name]?.[picked[0]][picked[1]] ?? NaN));
    });
    now.dots = measures.map((_, i) => part(chart, "circle", { r: 5, style: `fill: var(--${inks[i]})` }));
    single.dots = data.alone[measures[0]] ? measures.map((_, i) =>
      part(chart, "path", { d: "M0,-6L6,0L0,6L-6,0Z", style: `stroke: var(--${inks[i]})`, class: "line" })) : [];
  }
  const [view, title] = panel("");
  part(view, "rect", { width: SIZE, height: SIZE, class: "outline" });
  part(view, "text", { x: SIZE / 2, y: SIZE + 14, "text-anchor": "middle", class: "small" }, "principal component 1");
  part(view, "text", { transform: `translate(-8,${SIZE / 2})rotate(-90)`, "text-anchor": "middle", class: "small" },
    "principal component 2");
  const clouds = ["known", "outside"].map(kind => part(view, "path", { class: `cloud ${kind}` }));
  const seen = part(root, "p", { "aria-live": "polite", class: "seen" });

  function draw() {
    const at = gone.value, o = +other.value, [layer, head] = picked, cloud = data.clouds[at][layer][head];
    const away = pair => place[pair] < removed[at];
    cells.forEach((line, l) => line.forEach(({ value }, h) => {
      const rank = place[[l, h]], square = squares[l][h], chosen = l === layer && h === head;
      change(square, { tabindex: chosen ? 0 : -1, "aria-pressed": chosen, "aria-label": `layer ${l}, head ${h}: `
        + `${brief(value)}${rank === undefined ? "" : `, place ${rank + 1} in the order`}`
        + (away([l, h]) ? ", removed" : "") });
      change(square.children[1], {}, away([l, h]) ? "–" : rank === undefined ? "" : `${rank + 1}`);
    }));
    change(frame, { x: CELL * head, y: CELL * layer });
    now.dots?.forEach((dot, i) => {
      const [cx, cy] = now[i]();
      change(dot, { cx, cy });
    });
    single.dots?.forEach((dot, i) => change(dot, { transform: `translate(${single[i]()})` }));
    change(title, {}, `layer ${layer}, head ${head}`);
    [0, 1 + o].forEach((set, k) => {
      const xy = cloud.points[set], to = value => (SIZE * (105 + value)) / 210, steps = [];
      for (let i = 0; i < xy.length; i += 2) steps.push(`M${to(xy[i])},${to(-xy[i + 1])}h0`);
      change(clouds[k], { d: steps.join("") });
    });
    return { gone: removed[at], layer, head, other: others[o], apart: cloud.apart[o] };
  }

  function settle() {
    const found = draw(), { layer, head } = found, count = found.gone;
    const worth = measures.map(name => `, ${name} ${data.path[name][count].toFixed(3)}`).join("");
    const alone = measures.filter(name => data.alone[name])
      .map(name => `${name} ${data.alone[name][layer][head].toFixed(3)}`).join(", ");
    const [near, far] = found.apart.map(value => value?.toFixed(2) ?? "–");
    change(view, { "aria-label": `Features of layer ${layer}, head ${head} in their principal plane` });
    change(seen, {}, `${count} of ${order.length} heads removed${worth}. The framed head, layer ${layer}, head ${head}`
      + `${place[picked] < count ? " (removed too)" : ""}${alone ? `; without it alone: ${alone} (diamond)` : ""}. What `
      + `it says of ${data.known} (grey) and ${found.other} (blue) inputs: separation ${near} Euclidean, ${far} `
      + "Mahalanobis.");
    model.set("state", found);
    model.save_changes();
  }

  const soon = paced(settle);
  settle();
}

export default { render };
