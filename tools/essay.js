// The essay: which explorer stands in which scene, and the figures that only the essay has. Python puts shared.js and the
// explorers, EXPLORERS {name: {render}}, in front of this file.

const page = JSON.parse(document.getElementById("data").textContent);
const figure = name => document.querySelector(`#${name} .figure`);

// An explorer in an element; `heard` gets its state whenever that changes.
function explorer(name, el, data, heard = () => {}) {
  const model = { get: () => data, set: (_, state) => heard(state), save_changes() {}, on() {} };
  EXPLORERS[name].render({ model, el });
}

// 1. The ten answers in a sentence, and pictures to begin with ---------------------------------------------------------
const COUNT = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];

function draw(el, data) {
  const said = part(el, "p", { class: "said", "aria-live": "polite" }), at = part(el, "div");
  const votes = ({ members }) => {
    const named = members.map(p => p.indexOf(Math.max(...p))), kinds = new Set(named).size;
    const sure = Math.round(100 * average(members.map(p => Math.max(...p))));
    change(said, {}, (kinds === 1 ? `All ten say ${data.classes[named[0]]}` : `The ten name ${COUNT[kinds]} different digits`)
      + `, each ${sure} % sure on average.`);
  };
  explorer("draw", at, data, votes);
  const easel = at.querySelector(".easel"), chosen = easel.querySelectorAll("select")[1];
  const wall = part(easel, "div", { class: "wall", role: "group", "aria-label": "Pictures to begin with" });
  at.querySelector(".tools").after(wall);
  const sketch = document.createElement("canvas"), pen = sketch.getContext("2d"), side = data.side;
  [sketch.width, sketch.height] = [side, side];
  data.examples.forEach((text, i) => { // the explorer's own menu, as pictures
    const image = pen.createImageData(side, side);
    [...atob(text)].forEach((letter, k) => image.data.set([...Array(3).fill(letter.charCodeAt(0)), 255], 4 * k));
    pen.putImageData(image, 0, 0);
    const made = button(wall, "", data.called[i], () => {
      chosen.value = i;
      chosen.dispatchEvent(new Event("change"));
    });
    part(made, "img", { src: sketch.toDataURL(), alt: data.called[i] });
  });
}

// 2. Two situations of ten members with one mean -----------------------------------------------------------------------
function cloud(el, data) {
  const tools = part(el, "div", { class: "choice" }), at = part(el, "div");
  const all = [];
  all.push(...Object.entries(data.situations).map(([name, members]) => button(tools, name, "put the ten points there", () => {
    all.forEach(each => change(each, { "aria-pressed": each.textContent === name }));
    at.replaceChildren();
    explorer("cloud", at, { ...data, members });
    if (name !== all[0].textContent) at.querySelector(".missions").remove(); // its task is to come here
  })));
  all[0].click();
}

// 4, 5. An alarm over columns that split the mean uncertainty of the chosen OOD set; stack: [set] of {kind: [setting]} --
function alarm(el, data) {
  const at = part(el, "div"), mark = data.stack ? columns(el, data) : () => {};
  explorer("alarm", at, data, mark);
  if (data.stack) at.querySelector(".row").after(el.querySelector(".stack").parentElement); // beside the slider
}

const TALL = 130, GAP = 54;

function columns(el, { colors, settings, stack, what }) {
  const root = box(el, { colors }), kinds = Object.keys(stack[0]), wide = GAP * settings.length;
  const top = Math.max(...stack.flatMap(set => settings.map((_, i) => sum(kinds.map(kind => set[kind][i])))));
  const chart = part(root, "svg", { viewBox: `-44 -20 ${wide + 170} ${TALL + 62}`, class: "stack", role: "img" });
  chart.style.maxWidth = `${1.2 * (wide + 170)}px`;
  part(chart, "path", { d: `M0,${TALL}H${wide}`, class: "axis" });
  part(chart, "text", { x: wide / 2, y: TALL + 38, "text-anchor": "middle", class: "small" }, what);
  part(chart, "text", { x: -8, y: TALL / 2, "text-anchor": "middle", class: "small",
    transform: `rotate(-90 -8 ${TALL / 2})` }, "mean, nats");
  kinds.forEach((kind, k) => {
    const y = TALL - 22 - 24 * k;
    part(chart, "rect", { x: wide + 8, y, width: 14, height: 14, class: kind });
    part(chart, "text", { x: wide + 28, y: y + 11 }, kind);
  });
  const all = settings.map((name, i) => {
    const column = part(chart, "g", { transform: `translate(${GAP * i + 7},0)` });
    for (const kind of kinds) part(column, "rect", { width: GAP - 14, class: kind });
    part(column, "text", { x: (GAP - 14) / 2, "text-anchor": "middle", class: "small" });
    part(column, "text", { x: (GAP - 14) / 2, y: TALL + 16, "text-anchor": "middle", class: "small" }, name);
    return column;
  });
  const now = part(chart, "rect", { y: -16, width: GAP - 4, height: TALL + 36, rx: 4, class: "now" });
  return ({ at, s }) => {
    change(now, { x: GAP * at + 2 });
    all.forEach((column, i) => {
      let foot = TALL;
      kinds.forEach((kind, k) => {
        const height = (TALL * stack[s][kind][i]) / top;
        change(column.children[k], { y: (foot -= height), height });
      });
      change(column.children[kinds.length], { y: foot - 5 }, sum(kinds.map(kind => stack[s][kind][i])).toFixed(2));
      change(column, { class: i === at ? "column" : "" });
    });
    const values = kinds.map(kind => `${kind} ${stack[s][kind][at].toFixed(2)}`).join(", ");
    change(chart, { "aria-label": `Mean uncertainty at ${what} ${settings[at]}: ${values} nats` });
  };
}

// 6. What an alarm catches as the shared network grows -----------------------------------------------------------------
function cheap(el, { colors, methods, sets, widths, shares, lines }) {
  const root = box(el, { colors }), tools = part(root, "div", { class: "tools" }), W = 420, H = 180;
  const method = radio(tools, "ensemble", methods, 0, () => settle());
  const set = radio(tools, "inputs", sets, 0, () => settle());
  const chart = part(root, "svg", { viewBox: `-60 -24 ${W + 150} ${H + 66}`, class: "keeps", role: "img" });
  const x = i => 20 + ((W - 40) * i) / (widths.length - 1), y = share => H * (1 - Math.min(1, Math.max(0, share)));
  part(chart, "path", { d: `M0,0V${H}H${W}`, class: "axis" });
  part(chart, "text", { x: -56, y: -10, class: "small" }, "share that triggers the alarm");
  part(chart, "text", { x: W / 2, y: H + 36, "text-anchor": "middle", class: "small" }, "width of the shared network");
  for (const tick of [0, 0.5, 1]) {
    part(chart, "text", { x: -6, y: y(tick) + 4, "text-anchor": "end", class: "small" }, `${100 * tick} %`);
  }
  widths.forEach((width, i) => part(chart, "text", { x: x(i), y: H + 17, "text-anchor": "middle", class: "small" }, width));
  const drawn = ["known", "outside"].map(kind => {
    const group = part(chart, "g", { class: `line ${kind}` });
    part(group, "path");
    for (const _ of widths) part(group, "circle", { r: 4.5 });
    part(group, "text", { x: W - 8, "text-anchor": "start" });
    return group;
  });
  const seen = part(root, "p", { "aria-live": "polite", class: "seen" });
  function settle() {
    const [m, s] = [method.value, set.value];
    drawn.forEach((group, k) => {
      const values = shares[m][k ? 1 + s : 0], marks = [...group.querySelectorAll("circle")]; // [mean, low, high]
      const bars = values.map(([, low, high], i) => `M${x(i)},${y(low)}V${y(high)}`).join("");
      change(group.firstChild, { d: `M${values.map(([mean], i) => `${x(i)},${y(mean)}`).join("L")}${bars}` });
      marks.forEach((dot, i) => change(dot, { cx: x(i), cy: y(values[i][0]) }));
      change(group.lastChild, { y: y(values.at(-1)[0]) + 4 }, k ? sets[s] : "digits");
    });
    change(chart, { "aria-label": `${methods[m]}: share of ${sets[s]} and of digits that triggers the alarm, by width` });
    change(seen, {}, lines[m][s]);
  }
  settle();
}

// 7. Scores and simple baselines; scores: [{name, kind, values [set]}], the first always shown -------------------------
function baselines(el, { colors, sets, scores }) {
  const root = box(el, { colors }), tools = part(root, "div", { class: "tools" }), W = 300, ROW = 19;
  const key = (parent, { kind }) => parent.prepend(part(parent, "span", { class: `key ${kind}`, "aria-hidden": true }));
  key(part(tools, "span", { class: "always" }, scores[0].name), scores[0]);
  const boxes = scores.slice(1).map(score => checkbox(tools, score.name, () => settle()));
  const chart = part(root, "svg", { class: "scores", role: "img" });
  const seen = part(root, "p", { "aria-live": "polite", class: "seen" });
  function settle() {
    const shown = scores.filter((_, i) => !i || boxes[i - 1].checked), high = ROW * shown.length + 16;
    chart.replaceChildren();
    change(chart, { viewBox: `-96 -6 ${W + 164} ${high * sets.length + 44}` });
    const x = value => (W * Math.max(0, value - 0.5)) / 0.5, foot = high * sets.length;
    for (const tick of [0.5, 0.75, 1]) {
      part(chart, "path", { d: `M${x(tick)},0V${foot}`, class: "guide" });
      part(chart, "text", { x: x(tick), y: foot + 15, "text-anchor": "middle", class: "small" }, tick);
    }
    part(chart, "text", { x: 0, y: foot + 33, class: "small" }, "AUROC against digits; 0.5 is chance");
    sets.forEach((name, s) => {
      part(chart, "text", { x: -8, y: high * s + high / 2, "text-anchor": "end" }, name);
      shown.forEach(({ kind, values }, k) => {
        const at = high * s + ROW * k + 6;
        part(chart, "rect", { x: 0, y: at, width: x(values[s]), height: ROW - 4, class: kind });
        part(chart, "text", { x: x(values[s]) + 5, y: at + 12, class: "small" }, values[s].toFixed(3));
      });
    });
    const said = shown.map(({ name, values }) => `${name}: ${sets.map((set, s) => `${set} ${values[s].toFixed(3)}`).join(", ")}`);
    change(chart, { "aria-label": `AUROC. ${said.join(". ")}` });
    const best = sets.map((set, s) => shown.reduce((a, b) => (b.values[s] > a.values[s] ? b : a)).name);
    change(seen, {}, `Best of what is shown: ${sets.map((set, s) => `${set}, ${best[s]}`).join("; ")}.`);
  }
  boxes.forEach((each, i) => key(each.parentElement, scores[i + 1]));
  settle();
}

// The first scene at once, the others when it is on the screen.
const SCENES = { draw, cloud, alarm, committees: alarm, wider: alarm, cheap, baselines };
draw(figure("draw"), page.draw);
requestAnimationFrame(() => setTimeout(() => {
  for (const [name, scene] of Object.entries(SCENES).slice(1)) scene(figure(name), page[name]);
  document.body.dataset.ready = "";
}));
