// What each method is worth against what it costs, and which one to take; data: boards {kind: {methods [{name, label,
// color, marker}], t: Student's quantile for its seeds, t_judged: for the second half of them, columns {name: [method][seed]}}}, cared [[column, words]],
// limits [[column, words, values]], less: the columns in which less is better.

const WIDE = 460, TALL = 260;
const MARKS = {
  s: "M-6,-6H6V6H-6Z", D: "M0,-8L8,0L0,8L-8,0Z", d: "M0,-9L6,0L0,9L-6,0Z", "^": "M0,-8L8,6H-8Z", v: "M0,8L8,-6H-8Z",
  "<": "M-8,0L6,-8V8Z", ">": "M8,0L-6,-8V8Z", P: "M-3,-8H3V-3H8V3H3V8H-3V3H-8V-3H-3Z", p: "M0,-8L8,-2L5,7H-5L-8,-2Z",
  X: "M-7,-4L-4,-7L0,-3L4,-7L7,-4L3,0L7,4L4,7L0,3L-4,7L-7,4L-3,0Z", h: "M0,-8L7,-4V4L0,8L-7,4V-4Z",
  H: "M-8,0L-4,-7H4L8,0L4,7H-4Z", 8: "M-3,-8H3L8,-3V3L3,8H-3L-8,3V-3Z",
  "*": "M0,-9L2.4,-3L9,-3L3.6,1.4L5.6,8L0,4L-5.6,8L-3.6,1.4L-9,-3L-2.4,-3Z",
};
const ROUND = "M-7,0A7,7 0 0 1 7,0A7,7 0 0 1 -7,0Z";

const plain = value => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : brief(value));

// The interval of the mean of values, one a seed, by Student's t: as metrics.paired_t.
function interval(values, t) {
  const mean = average(values), squares = sum(values.map(value => (value - mean) ** 2));
  const half = t * Math.sqrt(squares / (values.length - 1) / values.length);
  return [mean - half, mean + half];
}

// As scoreboard.recommend; limits: [[column, value]].
function recommend(board, quality, limits, less) {
  const sign = column => (less.includes(column) ? -1 : 1);
  const means = Object.fromEntries([quality, ...limits.map(([column]) => column)]
    .map(column => [column, board.columns[column].map(average)]));
  const values = board.columns[quality], seeds = values[0].length, half = Math.max(1, Math.floor(seeds / 2));
  const worth = values.map(value => sign(quality) * average(value.slice(0, half))), refused = {};
  for (const [column, limit] of [...limits].reverse()) {
    const least = sign(column) * limit - 1e-9 * Math.abs(limit); // a sum in another order may differ in the last digit
    means[column].forEach((value, m) => sign(column) * value < least && (refused[m] = column));
  }
  const left = worth.map((_, m) => m).filter(m => !(m in refused)).sort((a, b) => worth[b] - worth[a]);
  const called = m => board.methods[m].label, [best, second] = left;
  let margin = NaN, low = NaN, high = NaN;
  let reason = `no method keeps ${limits.map(([column]) => column).join(" and ")} within the limits`;
  if (left.length) {
    reason = left.length > 1
      ? `${called(best)} has the best ${quality} on ${half} of ${seeds} seeds of the ${left.length} methods that you can afford; `
        + `${called(second)} is next`
      : `${called(best)} is the only method that you can afford`;
  }
  if (left.length > 1) {
    const gaps = values[best].map((value, seed) => sign(quality) * (value - values[second][seed])).slice(half);
    if (gaps.length > 1) {
      margin = average(gaps);
      [low, high] = interval(gaps, board.t_judged);
      reason += `, and on the other seeds ${low > 0 ? "it is ahead" : "the difference is not significant"} `
        + `(${brief(margin)}, 95 %: ${brief(low)} to ${brief(high)})`;
    } else {
      reason += ", and too few seeds are left to compare them";
    }
  }
  const better = left.length ? worth.map((_, m) => m).filter(m => worth[m] > worth[best]) : [];
  if (better.length) {
    reason += `; better but too expensive: ${better.map(m => `${called(m)} (${refused[m]})`).join(", ")}`;
  }
  return { best, second, margin, low, high, refused, reason: `${reason}.` };
}

// Which methods no other equals or beats in both and beats in one; more is better in both.
const undominated = (worth, price) => worth.map((w, m) => m).filter(m => !worth.some((_, n) =>
  worth[n] >= worth[m] && price[n] >= price[m] && (worth[n] > worth[m] || price[n] > price[m])));

function render({ model, el }) {
  const data = model.get("data"), root = box(el, data), kinds = Object.keys(data.boards);
  const words = Object.fromEntries([...data.cared, ...data.limits].map(([column, text]) => [column, text]));
  const tools = part(root, "div", { class: "tools" }), changed = () => settle(true);
  const quality = menu(tools, "you care about", data.cared, changed);
  const choices = kinds.map(name => [name, name]);
  const other = () => {
    chosen = -1;
    settle(true);
  };
  const kind = kinds.length > 1 ? menu(tools, "network", choices, other) : { value: kinds[0] };
  const cost = menu(tools, "you pay with", data.limits, changed);
  const grid = part(root, "div", { class: "grid" });
  const limits = data.limits.map(([column, text, values]) =>
    [column, values, slider(grid, `most ${text}`, values.map(plain), values.length - 1, () => settle())]);
  const defaults = [quality.value, kind.value, cost.value];
  button(tools, "reset", "back to the first values", () => {
    [quality.value, kind.value, cost.value] = defaults;
    for (const [, values, each] of limits) each.value = values.length - 1;
    other();
  });
  const seen = part(root, "p", { "aria-live": "polite", class: "seen" });
  const row = part(root, "div", { class: "row" });
  const chart = part(row, "svg", { viewBox: `-52 -16 ${WIDE + 62} ${TALL + 66}`, class: "histogram", role: "group" });
  change(chart, { "aria-label": "Methods by quality and cost; Enter shows the row of a method" });
  const frame = part(chart, "g"), stairs = part(chart, "path", { class: "guide" }), dots = part(chart, "g");
  const names = ["best", "picked"].map(() => part(chart, "text", { class: "name" }));
  const about = part(row, "div", { class: "about", "aria-live": "polite" });
  let chosen = -1, at;

  function settle(anew = false) {
    const board = data.boards[kind.value], [q, c] = [quality.value, cost.value];
    const sign = column => (data.less.includes(column) ? -1 : 1);
    const budget = limits.map(([column, values, each]) => [column, values[each.value]]);
    const said = recommend(board, q, budget, data.less);
    const means = column => board.columns[column].map(average), better = (column, v) => sign(column) * v;
    if (anew) {
      const bands = board.columns[q].map(values => interval(values, board.t));
      const front = undominated(means(q).map(v => better(q, v)), means(c).map(v => better(c, v)));
      const x = axis(means(c)), y = axis(bands.flat());
      const across = value => WIDE * x.at(value), down = value => TALL * (1 - y.at(value));
      frame.replaceChildren();
      dots.replaceChildren();
      part(frame, "path", { d: `M0,0V${TALL}H${WIDE}`, class: "axis" });
      let free = -99;
      for (const tick of x.ticks) { // where there is room for it
        const name = plain(tick), room = 5 * name.length + 4;
        if (across(tick) - room < free) continue;
        part(frame, "text", { x: across(tick), y: TALL + 19, "text-anchor": "middle", class: "small" }, name);
        free = across(tick) + room;
      }
      for (const tick of y.ticks) {
        part(frame, "text", { x: -6, y: down(tick) + 4, "text-anchor": "end", class: "small" }, brief(tick));
      }
      part(frame, "text", { x: WIDE, y: TALL + 43, "text-anchor": "end" }, words[c]);
      part(frame, "text", { x: -48, y: -4 }, `${words[q]}: ${sign(q) > 0 ? "more" : "less"} is better`);
      at = m => [across(means(c)[m]), down(means(q)[m])];
      const steps = [...front].sort((a, b) => means(c)[a] - means(c)[b]);
      change(stairs, { d: `M${steps.map(at).join("L")}` });
      board.methods.forEach((method, m) => {
        const place = at(m);
        const dot = part(dots, "g", { tabindex: 0, role: "button", class: "method", transform: `translate(${place})` });
        dot.style.setProperty("--own", method.color);
        part(dot, "path", { class: "band", d: `M0,${down(bands[m][0]) - place[1]}V${down(bands[m][1]) - place[1]}` });
        part(dot, "circle", { class: "touch", r: 14 });
        part(dot, "path", { class: "shape", d: MARKS[method.marker] ?? ROUND });
        part(dot, "title", {}, method.label);
        const pick = () => {
          chosen = m;
          settle();
        };
        dot.addEventListener("click", pick);
        dot.addEventListener("keydown", event => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          pick();
        });
      });
    }
    board.methods.forEach((method, m) => {
      const dear = m in said.refused, state = m === said.best ? "best" : dear ? "dear" : "able";
      change(dots.children[m], {
        "data-state": state, "aria-pressed": m === chosen,
        "aria-label": `${method.label}: ${q} ${brief(means(q)[m])}, ${c} ${plain(means(c)[m])}`
          + (state === "best" ? ", recommended" : dear ? `, too expensive (${said.refused[m]})` : ""),
      });
    });
    [said.best, chosen === said.best ? -1 : chosen].forEach((m, i) => {
      const method = board.methods[m], [x, y] = method ? at(m) : [0, 0];
      const left = method && x + 11 * method.label.length > WIDE; // no room on the right
      change(names[i], { x: x + (left ? -13 : 13), y: y + (i ? 15 : -9), "text-anchor": left ? "end" : "start" },
        method ? method.label : "");
    });
    change(seen, {}, said.reason[0].toUpperCase() + said.reason.slice(1));
    about.replaceChildren();
    if (board.methods[chosen]) {
      part(about, "strong", {}, board.methods[chosen].label);
      const table = part(about, "table");
      for (const column of Object.keys(words)) {
        const line = part(table, "tr");
        part(line, "th", { scope: "row" }, words[column]);
        part(line, "td", {}, plain(means(column)[chosen]));
      }
      const why = said.refused[chosen];
      part(about, "p", {}, why ? `Too expensive: ${words[why]}.` : chosen === said.best ? "Recommended." : "Affordable.");
    } else {
      part(about, "p", {}, "Click a method to see its row. The filled ones you can afford; the largest is recommended; "
        + "the dashed line is the front.");
    }
    model.set("state", { quality: q, kind: kind.value, limits: Object.fromEntries(budget), reason: said.reason,
      best: board.methods[said.best]?.name ?? "", runner_up: board.methods[said.second]?.name ?? "" });
    model.save_changes();
  }
  settle(true);
}

export default { render };
