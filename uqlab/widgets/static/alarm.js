// An alarm that is set at the first setting and keeps its threshold; data: what (of the settings), settings, pass (shares
// of known inputs, of several the reader chooses), known {name, values}, outside [{name, values, shown, images}]; values
// are [setting][input], in nats.

const FLOOR = 1e-4, BINS = 36, WIDE = 460, TALL = 78;
const MISSIONS = what => [
  [`Slide the ${what} until the alarm misses three in ten of what it caught at first, while the AUROC moves by less than `
    + "0.05.", "The AUROC sees only the ranking, and the alarm only the level.", now => now.failed],
  [`Leave the ${what} there, and let the alarm catch more again.`,
    "The ranking was there all the time: an alarm must be set on the network that it watches.",
    now => now.failed && now.mute && now.more],
];

function render({ model, el }) {
  const data = model.get("data"), root = box(el, data), known = data.known;
  const top = [known, ...data.outside].flatMap(set => set.values.flat()).reduce((a, b) => Math.max(a, b));
  const reach = Math.log10(Math.max(top, 10 * FLOOR) / FLOOR);
  const x = value => (Math.log10(Math.max(value, FLOOR) / FLOOR) / reach) * WIDE;

  const percent = (share, digits = 0) => `${+(100 * share).toFixed(digits)} %`;
  const tools = part(root, "div", { class: "tools" }), several = data.settings.length > 1;
  const choose = (text, names) => (names.length > 1 ? slider(tools, text, names, 0, () => soon()) : { value: 0 });
  const setting = choose(data.what, data.settings);
  const passing = choose(`${known.name} that pass`, data.pass.map(share => percent(share, 1)));
  const which = menu(tools, "OOD set", data.outside.map((set, i) => [i, set.name]), () => settle());
  const anew = several ? checkbox(tools, "set the alarm anew here", () => settle()) : { checked: false };
  button(tools, "reset", "back to the first setting", () => {
    setting.value = passing.value = which.value = 0;
    anew.checked = false;
    settle();
  });

  const row = part(root, "div", { class: "row" });
  const chart = part(row, "svg", { viewBox: `-26 -18 ${WIDE + 32} ${2 * TALL + 62}`, class: "histogram", role: "img" });
  const towers = [1, -1].map(up => Array.from({ length: BINS }, (_, i) => part(chart, "rect",
    { x: (i * WIDE) / BINS + 0.5, width: WIDE / BINS - 1, class: up > 0 ? "known" : "outside" })));
  part(chart, "path", { d: `M0,${TALL}H${WIDE}`, class: "axis" });
  for (let power = Math.log10(FLOOR); FLOOR * 10 ** reach >= 10 ** power; power++) {
    const at = x(10 ** power);
    part(chart, "path", { d: `M${at},${2 * TALL}v5`, class: "axis" });
    if (power % 2) continue;
    const first = power === Math.log10(FLOOR), name = `${first ? "≤ " : ""}${+(10 ** power).toPrecision(1)}`;
    part(chart, "text", { x: first ? -24 : at, y: 2 * TALL + 19, "text-anchor": first ? "start" : "middle",
      class: "small" }, name);
  }
  part(chart, "text", { x: WIDE / 2, y: 2 * TALL + 39, "text-anchor": "middle", class: "small" },
    "mutual information (nats)");
  part(chart, "text", { x: 0, y: -6, class: "small" }, `above: ${known.name} (ID)`);
  const below = part(chart, "text", { x: 0, y: 2 * TALL - 4, class: "small" });
  const line = part(chart, "path", { class: "alarm" });
  const said = part(chart, "text", { y: -6, class: "small" }, "alarm");

  // Half circles that fill from the left.
  const dials = part(row, "div", { class: "dials" });
  const dial = (name, low, note) => {
    const made = part(dials, "svg", { viewBox: "0 0 130 96", role: "img" });
    for (const kind of ["empty", "full"]) part(made, "path", { class: `dial ${kind}`, d: "M15,70A50,50 0 0 1 115,70" });
    const text = part(made, "text", { x: 65, y: 66, "text-anchor": "middle", class: "large" });
    part(made, "text", { x: 65, y: 90, "text-anchor": "middle", class: "small" }, `${name}${note}`);
    return (value, shown) => {
      const length = (Math.PI * 50 * Math.max(value - low, 0)) / (1 - low);
      change(made.children[1], { "stroke-dasharray": `${length} 999` });
      change(text, { "data-value": value, "data-name": name }, shown);
      change(made, { "aria-label": `${name} ${shown}` });
    };
  };
  const order = dial("AUROC", 0.5, " (from 0.5)"), caught = dial("caught", 0, " of the OOD set");

  const seen = part(root, "p", { "aria-live": "polite", class: "seen" });
  const look = checklist(root, several ? MISSIONS(data.what) : []);
  let failed = false; // whether the reader has seen it
  const wall = part(root, "div", { class: "wall", role: "group", "aria-label": "Some inputs of the OOD set" });

  const orders = data.outside.map(set => set.values.map((values, i) => auroc(known.values[i], values)));
  const sorted = [known, ...data.outside].map(set => set.values.map(values => [...values].sort((a, b) => a - b)));

  const bin = value => Math.min(BINS - 1, Math.floor((x(value) / WIDE) * BINS));
  const shares = [known, ...data.outside].map(set => set.values.map(values => {
    const counts = Array(BINS).fill(0);
    for (const value of values) counts[bin(value)] += 1 / values.length;
    return counts;
  }));
  const peak = Math.max(...shares.flat(2));

  function measured(at = setting.value, own = anew.checked) {
    const s = +which.value, threshold = quantile(known.values[own ? at : 0], data.pass[passing.value]);
    const above = k => 1 - place(sorted[k][at], threshold, true) / sorted[k][at].length;
    return { at, s, threshold, auroc: orders[s][at], caught: above(1 + s), false_alarms: above(0) };
  }

  function draw() {
    const now = measured(), set = data.outside[now.s];
    [0, 1 + now.s].forEach((k, side) => shares[k][now.at].forEach((share, i) => {
      const height = TALL * Math.sqrt(share / peak); // few are seen beside many
      change(towers[side][i], { height, y: side ? TALL : TALL - height });
    }));
    change(line, { d: `M${x(now.threshold)},-14V${2 * TALL}` });
    change(said, { x: x(now.threshold) + 5 });
    change(below, {}, `below: ${set.name} (OOD)`);
    order(now.auroc, now.auroc.toFixed(3));
    caught(now.caught, `${Math.round(100 * now.caught)} %`);
    if (wall.dataset.set !== `${now.s}`) {
      wall.replaceChildren();
      wall.dataset.set = now.s;
      for (const source of set.images) part(wall, "img", { src: source });
    }
    set.shown.forEach((input, i) => {
      const loud = set.values[now.at][input] > now.threshold;
      const fate = loud ? "caught" : "missed";
      change(wall.children[i], { class: fate, alt: `${set.name}, ${fate}` });
    });
    return now;
  }

  function settle() {
    const now = draw(), set = data.outside[now.s], at = place => `at ${data.what} ${data.settings[place]}`;
    change(chart, { "aria-label": `Histograms of the mutual information ${several ? at(now.at) : ''}; heights: square roots of shares` });
    const first = measured(0), back = value => (now.at ? ` (at ${data.settings[0]}: ${value})` : "");
    const kept = measured(now.at, false), stands = Math.abs(now.auroc - first.auroc) < 0.05;
    const mute = stands && kept.caught < 0.7 * first.caught; // with the alarm of the first setting
    failed ||= mute && !anew.checked;
    change(seen, {}, `The alarm is set ${several ? `${at(anew.checked ? now.at : 0)}, ` : ""}where `
      + `${percent(data.pass[passing.value], 1)} of ${known.name} pass. ${several ? `A${at(now.at).slice(1)} it` : "It"} `
      + `catches ${percent(now.caught)} of ${set.name}`
      + `${back(percent(first.caught))}, with ${percent(now.false_alarms, 1)} false alarms; the AUROC is `
      + `${now.auroc.toFixed(3)}${back(first.auroc.toFixed(3))}. `
      + (mute && !anew.checked ? "The ranking stays, the level collapses: OOD inputs still lie above ID inputs, but below "
      + "the line. " : "")
      + "Framed images are caught, pale ones pass.");
    look({ mute, failed, more: now.caught > kept.caught });
    model.set("state", now);
    model.save_changes();
  }

  const soon = paced(settle);
  settle();
}

export default { render };
