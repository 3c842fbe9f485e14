// What the explorers share: the arithmetic of uqlab.uncertainty and uqlab.metrics, and parts of a page. Python puts
// this file in front of each explorer's own. Nothing is loaded, and data become text and attributes only.

const SVG = "http://www.w3.org/2000/svg"; // a name, not an address that is asked
const sum = values => values.reduce((total, value) => total + value, 0);
const average = values => sum(values) / values.length;
const middle = rows => rows[0].map((_, c) => average(rows.map(row => row[c])));
const entropy = p => sum(p.map(x => (x > 0 ? -x * Math.log(x) : 0)));
const divergence = (p, q) =>
  sum(p.map((x, c) => (q[c] > 0 ? x * Math.log1p(Math.max((x - q[c]) / q[c], Number.EPSILON / 2 - 1)) - x + q[c] : 0)));

// As uncertainty.decompose_groups; groups of several sizes weigh by their members, and are then not corrected.
function decompose(members, groups = members.map((_, m) => m), jackknife = false) {
  const parts = [...new Set(groups)].map(k => members.filter((_, m) => groups[m] === k));
  const q = middle(members), voices = parts.map(middle), shares = parts.map(part => part.length / members.length);
  const aleatoric = average(members.map(entropy));
  const within = sum(parts.map((part, k) => shares[k] * average(part.map(p => divergence(p, voices[k])))));
  let between = sum(voices.map((voice, k) => shares[k] * divergence(voice, q)));
  const corrected = jackknife && parts.length > 1 && new Set(parts.map(part => part.length)).size === 1;
  if (corrected) {
    const others = parts.length - 1;
    between += others * average(voices.map(voice => divergence(q.map((x, c) => x - (voice[c] - x) / others), q)));
  }
  const epistemic = within + between;
  return { total: aleatoric + epistemic, aleatoric, epistemic, between, within, corrected };
}

// The share of pairs in which the OOD input has more, ties one half: as metrics.ood_detection.
function auroc(known, unknown) {
  const sorted = [...known].sort((a, b) => a - b);
  return average(unknown.map(x => (place(sorted, x) + place(sorted, x, true)) / 2)) / known.length;
}

// How many of the sorted values are less than x, or at most x.
function place(sorted, x, equal = false) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const at = (low + high) >> 1;
    if (sorted[at] < x || (equal && sorted[at] === x)) low = at + 1;
    else high = at;
  }
  return low;
}

// Linear between neighbours, as numpy and torch have it.
function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b), at = share * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

// As Python's format(value, ".3g").
function brief(value) {
  const power = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(+value.toPrecision(3))));
  if (power >= -4 && power < 3) return `${+value.toPrecision(3)}`;
  const [digits, exponent] = value.toExponential(2).split("e");
  return `${+digits}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

// An axis through all values: where a value lies between 0 and 1, and some round values.
function axis(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)], log = low > 0 && high > 2 * low;
  const f = log ? Math.log10 : x => x, room = 0.06 * (f(high) - f(low)) || 0.5, ticks = [];
  const start = f(low) - room, span = f(high) - f(low) + 2 * room;
  if (log) {
    for (let power = Math.floor(start); power <= start + span; power++) {
      const digits = span < 0.8 ? [1, 1.5, 2, 3, 5, 7] : span < 2 ? [1, 2, 5] : [1];
      ticks.push(...digits.map(digit => digit * 10 ** power));
    }
  } else {
    const steps = [-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap(k => [1, 2, 5].map(d => d * 10 ** k));
    const step = steps.find(size => span / size < 6);
    for (let i = Math.ceil(start / step); i * step <= start + span; i++) ticks.push(i * step);
  }
  return { at: value => (f(value) - start) / span, ticks: ticks.filter(t => f(t) >= start && f(t) <= start + span) };
}

function part(parent, tag, attributes = {}, text = undefined) {
  const made = document.createElementNS(tag === "svg" ? SVG : parent.namespaceURI, tag);
  change(made, attributes, text);
  if (made.tabIndex >= 0) made.setAttribute("data-lm-suppress-shortcuts", "true"); // no keys for JupyterLab
  parent.append(made);
  return made;
}

function change(element, attributes, text = undefined) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== `${value}`) element.setAttribute(name, value); // what stays is not painted again
  }
  if (text !== undefined && element.textContent !== text) element.textContent = text;
}

// The box of an explorer.
function box(el, data) {
  const made = part(el, "div", { class: "uqlab-hand" });
  for (const [name, color] of Object.entries(data.colors)) made.style.setProperty(`--${name}`, color);
  return made;
}

function button(parent, text, title, act) {
  const made = part(parent, "button", { type: "button", title }, text);
  made.addEventListener("click", act);
  return made;
}

function checkbox(parent, text, act) {
  const label = part(parent, "label"), made = part(label, "input", { type: "checkbox" });
  part(label, "span", {}, text);
  made.addEventListener("change", act);
  return made;
}

function menu(parent, text, options, act) {
  const label = part(parent, "label");
  part(label, "span", {}, text);
  const made = part(label, "select");
  for (const [value, name] of options) part(made, "option", { value }, name);
  made.addEventListener("change", act);
  return made;
}

// Buttons of which one is pressed; `at` undefined: none yet.
function radio(parent, text, names, at, act) {
  const group = part(parent, "span", { role: "radiogroup", "aria-label": text, class: "radio" });
  const apart = `${Math.random()}`; // groups of one name are one group, however far apart
  part(group, "span", { "aria-hidden": true }, text);
  const all = names.map((name, i) => {
    const label = part(group, "label"), made = part(label, "input", { type: "radio", name: apart, value: i });
    part(label, "span", {}, name);
    made.checked = i === at;
    made.addEventListener("change", act);
    return made;
  });
  return { get value() { return all.findIndex(each => each.checked); }, set value(place) { all[place].checked = true; } };
}

// A slider over named places.
function slider(parent, text, names, at, act) {
  const label = part(parent, "label", { class: "slider" });
  part(label, "span", {}, text);
  const made = part(label, "input", { type: "range", min: 0, max: names.length - 1, step: 1 });
  const shown = part(label, "output");
  const say = () => {
    change(shown, {}, names[made.value]);
    change(made, { "aria-valuetext": names[made.value] });
  };
  made.value = at;
  made.addEventListener("input", () => (say(), act()));
  say();
  return { get value() { return +made.value; }, set value(place) { made.value = place; say(); } };
}

// Missions, [[task, lesson, whether it is done]], each with a mark; returns what looks for those that are done.
function checklist(parent, missions) {
  const list = part(parent, "ul", { class: "missions", "aria-label": "Missions", "aria-live": "polite" });
  const open = missions.map(([task, lesson, done]) => {
    const item = part(list, "li", { "data-done": false }), mark = part(item, "span", { class: "mark" }, "☐ ");
    part(item, "span", {}, task);
    return { item, mark, lesson, done };
  });
  return (...now) => {
    for (const { item, mark, lesson, done } of open) {
      if (item.dataset.done === "true" || !done(...now)) continue;
      change(item, { "data-done": true });
      change(mark, { "aria-label": "done" }, "☑ ");
      part(item, "span", { class: "lesson" }, ` ${lesson}`);
    }
  };
}

// Call `draw` in the next frame, once however often it is asked for.
function paced(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}
