// A question whose answer is opened once a guess was made; data: question, range [low, high, step or null] with its unit,
// or choices, answer or null, then.

// The places of a slider, at most a hundred steps of 1, 2 or 5 times a power of ten.
function places([low, high, step]) {
  const span = high - low, power = 10 ** Math.floor(Math.log10(span / 100));
  const size = step ?? [1, 2, 5, 10].map(lead => lead * power).find(each => span / each < 100.1);
  return Array.from({ length: Math.floor(span / size + 1e-9) + 1 }, (_, i) => +(low + i * size).toPrecision(10));
}

// Words with **bold**, *italic* and `code`.
function written(parent, text) {
  for (const piece of text.split(/(\*\*.+?\*\*|\*[^*\s].*?\*|`.+?`)/)) {
    const [, mark, words] = /^(\*\*|\*|`)(.+)\1$/s.exec(piece) ?? [, "", piece];
    part(parent, { "**": "strong", "*": "em", "`": "code" }[mark] ?? "span", {}, words);
  }
}

// How far a guess was off.
function judged({ answer, unit, choices }, values, at) {
  const named = value => `${brief(value)} ${unit}`.trim();
  if (answer === null) return "";
  if (choices.length) return values[at] === answer ? "That is it." : `The answer: ${answer}.`;
  const off = values[at] - answer, near = Math.abs(off) <= (values[1] - values[0]) / 2;
  return `The answer: ${named(answer)}. `
    + (near ? "That is it." : `Your guess was ${named(Math.abs(off))} too ${off > 0 ? "high" : "low"}.`);
}

function render({ model, el }) {
  const data = model.get("data"), root = box(el, data), { answer, unit, choices } = data, slid = !choices.length;
  const values = slid ? places(data.range) : choices, names = values.map(value => `${value} ${unit}`.trim());
  const form = part(root, "div", { class: "guess", role: "group", "aria-label": data.question });
  written(part(form, "p", { class: "question" }), data.question);
  const tools = part(form, "div", { class: "tools" });
  const middle = names.length >> 1;
  const guess = slid ? slider(tools, "your guess", names, middle, () => {}) : radio(tools, "your guess", names, -1, () => {});
  const done = button(tools, "this is my guess", "shows what is behind it", open);
  const seen = part(form, "div", { class: "seen", "aria-live": "polite" });

  function open() {
    const at = guess.value;
    if (at < 0) return change(seen, {}, "Choose one first.");
    seen.replaceChildren();
    for (const each of tools.querySelectorAll("input, button")) each.disabled = true; // a guess that was made stands
    done.remove();
    const line = part(seen, "p", { tabindex: -1 });
    part(line, "strong", {}, `Your guess: ${names[at]}. `);
    part(line, "span", {}, judged(data, values, at));
    if (slid && answer !== null) scale(seen, at);
    for (const text of data.then.split(/\n\s*\n/).filter(text => text.trim())) written(part(seen, "p"), text.trim());
    line.focus();
    model.set("state", { guess: values[at] });
    model.save_changes();
  }

  // The guess and the answer on the slider's scale.
  function scale(parent, at) {
    const wide = 300, low = values[0], span = values.at(-1) - low;
    const x = value => wide * Math.min(1.04, Math.max(-0.04, (value - low) / span)); // beyond an end: beside it
    const chart = part(parent, "svg", { viewBox: `-20 0 ${wide + 40} 52`, class: "scale", "aria-hidden": true });
    part(chart, "path", { d: `M0,26H${wide}`, class: "axis" });
    part(chart, "circle", { cx: x(values[at]), cy: 26, r: 6, class: "epistemic" });
    part(chart, "text", { x: x(values[at]), y: 14, "text-anchor": "middle", class: "small" }, "you");
    part(chart, "path", { d: `M${x(answer)},18l6,8l-6,8l-6,-8Z`, class: "answer" });
    part(chart, "text", { x: x(answer), y: 48, "text-anchor": "middle", class: "small" }, "answer");
  }
}

export default { render };
