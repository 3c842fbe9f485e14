// Members of an ensemble as points of a triangle that the hand moves; data: members [[p_A, p_B, p_C]], groups or null.

const HIGH = Math.sqrt(0.75), SIDE = 280, LEFT = 30, FOOT = 275, REACH = 19;
const xy = p => [LEFT + SIDE * (p[1] + p[2] / 2), FOOT - SIDE * HIGH * p[2]];

// The point of the triangle nearest to a place of the drawing.
function nearest(x, y) {
  const c = (FOOT - y) / (SIDE * HIGH), b = (x - LEFT) / SIDE - c / 2;
  const raw = [1 - b - c, b, c], sorted = [...raw].sort((u, v) => v - u);
  let shift = 0;
  for (let i = 0, run = 0; i < 3; i++) {
    run += sorted[i];
    if (sorted[i] > (run - 1) / (i + 1)) shift = (run - 1) / (i + 1);
  }
  const p = raw.map(u => Math.max(u - shift, 0));
  return p.map(u => u / sum(p));
}

const close = (p, q, by) => p.every((x, c) => Math.abs(x - q[c]) <= by);

// The first members, or hardly moved, in groups of two or more.
const fair = (now, first) => now.sizes.length > 1 && Math.min(...now.sizes) > 1 && now.parts.epistemic > 0.05
  && now.members.length === first.members.length && now.members.every((p, m) => close(p, first.members[m], 0.1));

const TODO = {
  alone: "Drag the points: each is what one member says of A, B and C. The diamond is their mean.",
  groups: "Choose a group, then click its members. A diamond is what a group says together.",
};
const MISSIONS = {
  alone: [
    ["Keep the mean in the ring and lose the epistemic part, with two members or more.",
      "The ensemble predicts the same as before, and nobody disagrees: the mean does not show the split.",
      (now, first) => first.parts.epistemic > 0.05 && now.members.length > 1 && now.parts.epistemic < 0.005
        && close(now.mean, first.mean, 0.02)],
    ["Copy one member nine times, and leave another as it is. What happens to the epistemic part?",
      "The copies outvote the other: the numbers count voices, not what is known.",
      now => now.members.some(p => now.members.filter(q => close(p, q, 1e-9)).length > 9)
        && !now.members.every(p => close(p, now.members[0], 0.05))],
  ],
  groups: [
    ["Leave the members where they are. Make groups of two or more so that everything hides within: between is less "
      + "than 5 % of epistemic.",
      "Each group holds all opinions, so the groups agree. Nobody has learned anything.",
      (now, first) => fair(now, first) && now.parts.between < 0.05 * now.parts.epistemic],
    ["Now so that hardly anything hides: within is less than 15 % of epistemic.",
      "Each group is a camp. Grouping costs everything or nothing, depending on who sits together.",
      (now, first) => fair(now, first) && now.parts.within < 0.15 * now.parts.epistemic],
  ],
};

function render({ model, el }) {
  const data = model.get("data"), several = data.groups !== null, inks = data.colors;
  const palette = [inks.epistemic, inks.mark, inks.group_3, inks.group_4];
  const copy = value => JSON.parse(JSON.stringify(value));
  const start = () => ({ members: copy(data.members), groups: several ? copy(data.groups) : null });
  const root = box(el, data), top = part(root, "div", { class: "row" });
  let { members, groups } = start(), chosen = 0, paint = -1, jackknife = false;
  const measured = () =>
    ({ members, mean: middle(members), parts: decompose(members, groups ?? undefined, jackknife) });
  const first = { ...measured(), members: data.members };

  // The triangle --------------------------------------------------------------------------------------------------
  const stage = part(top, "div", { class: "stage" });
  const triangle = part(stage, "svg", { viewBox: "0 0 340 300", role: "group" });
  change(triangle, { "aria-label": "The members in the triangle of three probabilities. Arrow keys move the member "
    + "that has the focus, c copies it, Delete removes it" + (several ? ", 1 to 4 choose its group." : ".") });
  for (let shade = 1; shade < 9; shade++) { // one lies upon the other: darker is more entropy
    const edge = Array.from({ length: 90 }, (_, i) => {
      const angle = (Math.PI * i) / 45, turn = [0, 2, 4].map(k => Math.cos(angle + (Math.PI * k) / 3));
      let inside = 0, outside = 1;
      for (let halving = 0; halving < 12; halving++) {
        const t = (inside + outside) / 2, p = turn.map(x => 1 / 3 + t * x);
        if (Math.min(...p) >= 0 && entropy(p) >= (shade * Math.log(3)) / 9) inside = t;
        else outside = t;
      }
      return xy(turn.map(x => 1 / 3 + inside * x));
    });
    part(triangle, "polygon", { points: edge.join(" "), class: "shade" });
  }
  const outline = [[1, 0, 0], [0, 1, 0], [0, 0, 1]];
  part(triangle, "polygon", { points: outline.map(xy).join(" "), class: "outline" });
  outline.forEach((p, c) => {
    const [x, y] = xy(p);
    part(triangle, "text", { x: x + [-12, 12, 0][c], y: y + [12, 12, -9][c], "text-anchor": "middle" }, "ABC"[c]);
  });
  const ring = xy(first.mean);
  if (!several) part(triangle, "circle", { cx: ring[0], cy: ring[1], r: 15, class: "ring" });
  const threads = part(triangle, "g"), dots = part(triangle, "g"), voices = part(triangle, "g");
  part(stage, "p", { class: "todo" }, TODO[several ? "groups" : "alone"]);

  // The bars ------------------------------------------------------------------------------------------------------
  const names = ["total", "aleatoric", "epistemic", ...(several ? ["between", "within"] : [])];
  const side = part(top, "div", { class: "side" });
  const height = 34 * names.length + 30;
  const chart = part(side, "svg", { viewBox: `0 0 340 ${height}`, class: "bars", role: "img" });
  const limit = 1.3, wide = 190, scale = value => (wide * Math.min(value, limit)) / limit;
  const most = 80 + scale(Math.log(3));
  part(chart, "path", { d: `M${most},4V${height - 26}`, class: "guide" });
  const bars = Object.fromEntries(names.map((name, i) => {
    part(chart, "text", { x: 72, y: 34 * i + 23, "text-anchor": "end" }, name);
    const bar = part(chart, "rect", { x: 80, y: 34 * i + 6, height: 24, class: name });
    return [name, { bar, value: part(chart, "text", { y: 34 * i + 23, "data-name": name }) }];
  }));
  part(chart, "text", { x: most, y: height - 10, "text-anchor": "middle", class: "small" }, "log 3");
  part(chart, "text", { x: 80, y: height - 10, class: "small" }, "nats");

  // The controls --------------------------------------------------------------------------------------------------
  const tools = part(side, "div", { class: "tools" });
  const act = change => () => {
    change();
    settle();
  };
  button(tools, "add", "a new member in the middle", act(() => insert([1 / 3, 1 / 3, 1 / 3], 0)));
  button(tools, "copy", "one more like the chosen member (c)", act(duplicate));
  button(tools, "remove", "without the chosen member (Delete)", act(remove));
  button(tools, "reset", "back to the first members", act(() => {
    ({ members, groups } = start());
    chosen = 0;
    jackknife = corrected.checked = false;
  }));
  const corrected = checkbox(tools, several ? "jackknife over groups" : "jackknife",
    act(() => (jackknife = corrected.checked)));
  if (several) {
    const chips = part(side, "div", { class: "tools", role: "group", "aria-label": "What a click does" });
    part(chips, "span", {}, "a click:");
    const options = ["moves", ...palette.map((_, k) => `group ${k + 1}`)].map((name, i) => {
      const chip = button(chips, name, i ? `a click puts a member into group ${i}` : "a click chooses a member", () => {
        paint = i - 1;
        options.forEach((other, k) => change(other, { "aria-pressed": k === i }));
      });
      if (i) chip.style.setProperty("--chip", palette[i - 1]);
      change(chip, { "aria-pressed": i === 0, class: i ? "chip" : "" });
      return chip;
    });
  }
  const seen = part(side, "p", { "aria-live": "polite", class: "seen" });
  const look = checklist(side, MISSIONS[several ? "groups" : "alone"]);

  function insert(p, k) {
    if (members.length >= 64) return;
    members.push([...p]);
    groups?.push(k);
    chosen = members.length - 1;
  }

  function duplicate() {
    insert(members[chosen], groups?.[chosen]);
  }

  function remove() {
    if (members.length < 2) return;
    members.splice(chosen, 1);
    groups?.splice(chosen, 1);
    chosen = Math.min(chosen, members.length - 1);
  }

  // Drawing -------------------------------------------------------------------------------------------------------
  const label = (p, m) => `member ${m + 1}${groups ? `, group ${groups[m] + 1}` : ""}: `
    + p.map((x, c) => `${"ABC"[c]} ${x.toFixed(2)}`).join(", ");

  function draw() {
    const now = measured();
    while (dots.childElementCount > members.length) dots.lastChild.remove();
    while (dots.childElementCount < members.length) {
      const dot = part(dots, "g", { tabindex: 0, role: "button", class: "member" });
      for (const [r, kind] of [[REACH, "touch"], [10, "dot"]]) part(dot, "circle", { r, class: kind });
      part(dot, "text", { y: 4, "text-anchor": "middle" });
      part(dot, "text", { x: 11, y: -9, class: "count" });
    }
    members.forEach((p, m) => {
      const dot = dots.children[m], same = members.filter(q => close(p, q, 1e-9)).length;
      change(dot, { transform: `translate(${xy(p)})`, "aria-label": label(p, m), "aria-pressed": m === chosen });
      change(dot.children[1], { fill: palette[groups ? groups[m] : 0] });
      change(dot.children[2], {}, groups ? `${groups[m] + 1}` : "");
      change(dot.children[3], {}, same > 1 ? `×${same}` : "");
    });
    const used = groups ? [...new Set(groups)] : [];
    const means = [now.mean, ...used.map(k => middle(members.filter((_, m) => groups[m] === k)))];
    while (voices.childElementCount > means.length) voices.lastChild.remove();
    while (voices.childElementCount < means.length) part(voices, "path", { d: "M0,-9L9,0L0,9L-9,0Z" });
    means.forEach((p, i) => {
      const ink = i ? palette[used[i - 1]] : "currentColor";
      change(voices.children[i], { transform: `translate(${xy(p)})`, class: i ? "voice" : "mean", stroke: ink });
    });
    while (threads.childElementCount > (groups ? members.length : 0)) threads.lastChild.remove();
    groups?.forEach((k, m) => {
      const thread = threads.children[m] ?? part(threads, "path", { class: "thread" });
      change(thread, { d: `M${xy(members[m])}L${xy(means[1 + used.indexOf(k)])}` });
    });
    for (const [name, { bar, value }] of Object.entries(bars)) {
      change(bar, { width: scale(now.parts[name]) });
      change(value, { x: 86 + scale(now.parts[name]), "data-value": now.parts[name] }, now.parts[name].toFixed(3));
    }
    return now;
  }

  const soon = paced(draw);

  // The hand rests: say what is seen, look at the missions, tell the kernel.
  function settle() {
    const now = draw(), { total, aleatoric, epistemic, between } = now.parts;
    const sizes = groups ? [...new Set(groups)].map(k => groups.filter(g => g === k).length) : [];
    now.sizes = sizes;
    const unequal = jackknife && !now.parts.corrected;
    change(chart, { "aria-label": names.map(name => `${name} ${now.parts[name].toFixed(3)}`).join(", ") + " nats" });
    change(seen, {}, `${members.length} members: ${total.toFixed(3)} nats in total = ${aleatoric.toFixed(3)} aleatoric`
      + ` + ${epistemic.toFixed(3)} epistemic` + (groups ? `, of which the ${sizes.length} groups show `
      + `${epistemic > 0 ? Math.round((100 * between) / epistemic) : 0} %.` : ".")
      + (unequal ? ` The jackknife needs two ${groups ? "groups or more, all of one size" : "members or more"}: `
        + "these are plug-in values." : ""));
    look(now, first);
    model.set("state", { members, groups, jackknife, parts: now.parts });
    model.save_changes();
  }

  // The hand ------------------------------------------------------------------------------------------------------
  const at = target => [...dots.children].indexOf(target.closest?.(".member"));
  const under = event => {
    const place = triangle.getBoundingClientRect(), zoom = 340 / place.width;
    return [(event.clientX - place.left) * zoom, (event.clientY - place.top) * zoom];
  };
  let held = -1, grip; // the member, and where it is held, seen from its middle
  triangle.addEventListener("pointerdown", event => {
    const [x, y] = under(event), far = members.map(p => Math.hypot(x - xy(p)[0], y - xy(p)[1]));
    const least = Math.min(...far), near = far.flatMap((each, m) => (each === least ? [m] : [])); // copies are as near
    const m = near.findLast(each => paint >= 0 && groups[each] !== paint) ?? near.at(-1);
    if (least > REACH) return;
    event.preventDefault();
    held = chosen = m;
    grip = xy(members[m]).map((at, i) => [x, y][i] - at);
    if (paint >= 0) groups[m] = paint;
    dots.children[m].focus();
    triangle.setPointerCapture(event.pointerId);
    soon();
  });
  const still = event => event.target.closest(".member") && event.preventDefault(); // elsewhere a finger scrolls the page
  triangle.addEventListener("touchstart", still, { passive: false });
  triangle.addEventListener("pointermove", event => {
    if (held < 0 || paint >= 0) return;
    members[held] = nearest(...under(event).map((at, i) => at - grip[i]));
    soon();
  });
  for (const end of ["pointerup", "pointercancel"]) {
    triangle.addEventListener(end, () => {
      if (held >= 0) settle();
      held = -1;
    });
  }
  triangle.addEventListener("focusin", event => {
    if (at(event.target) >= 0) chosen = at(event.target);
    soon();
  });
  triangle.addEventListener("keydown", event => {
    const m = at(event.target), by = event.shiftKey ? 20 : 4, key = event.key;
    const step = { ArrowLeft: [-by, 0], ArrowRight: [by, 0], ArrowUp: [0, -by], ArrowDown: [0, by] }[key];
    if (m < 0 || event.ctrlKey || event.metaKey) return;
    if (step) members[m] = nearest(...xy(members[m]).map((x, i) => x + step[i]));
    else if (key === "c") duplicate();
    else if (key === "Delete" || key === "Backspace") remove();
    else if (groups && palette[key - 1]) groups[m] = key - 1;
    else return;
    event.preventDefault();
    settle();
    dots.children[chosen].focus();
  });
  settle();
}

export default { render };
