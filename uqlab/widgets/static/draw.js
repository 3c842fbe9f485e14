// A canvas whose drawing the members answer; data: side, what, models [name], classes [name], examples [[pixel]] and
// their names, called. A kernel answers {ask, model, pixels} with {ask, members [[p_class]], near [[name, image]]}.

const PATIENCE = 3000; // milliseconds until the page says that no kernel answers
const LOST = "The kernel does not answer: it is busy, interrupted or absent. You can go on drawing; what you see "
  + "beside the canvas is its last answer.";

function render({ model, el }) {
  const data = model.get("data"), side = data.side, root = box(el, data), top = Math.log(data.classes.length);
  const row = part(root, "div", { class: "row" }), left = part(row, "div", { class: "easel" });
  let pixels = new Float64Array(side * side), sent, trail = [], gesture = 0; // what is drawn, was asked, was answered
  let asked = 0, number = 0, waiting = false, stale = false; // when, how many, and whether an answer is awaited

  // The canvas ----------------------------------------------------------------------------------------------------
  const canvas = part(left, "canvas", { width: side, height: side, tabindex: 0, role: "application" });
  change(canvas, { "aria-label": `A canvas of ${side} by ${side} pixels: arrow keys move the brush, space paints, `
    + "Delete clears" });
  const context = canvas.getContext("2d"), brush = side / 22;
  let cursor = [side / 2, side / 2], keyed = false, down = false;

  const paintImage = paced(() => {
    const image = context.createImageData(side, side);
    pixels.forEach((value, i) => image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i));
    context.putImageData(image, 0, 0);
    if (keyed) {
      context.strokeStyle = data.colors.mark;
      context.strokeRect(Math.floor(cursor[0]) - 0.5, Math.floor(cursor[1]) - 0.5, 2, 2);
    }
  });

  function stroke(from, to) {
    const steps = 1 + Math.ceil(2 * Math.hypot(to[0] - from[0], to[1] - from[1]));
    for (let s = 0; s <= steps; s++) {
      const [x, y] = [0, 1].map(k => from[k] + ((to[k] - from[k]) * s) / steps);
      for (let j = Math.max(0, Math.floor(y - 3)); j < Math.min(side, y + 3); j++) {
        for (let i = Math.max(0, Math.floor(x - 3)); i < Math.min(side, x + 3); i++) {
          const ink = Math.min(1, Math.max(0, 1.6 - Math.hypot(i + 0.5 - x, j + 0.5 - y) / brush));
          pixels[j * side + i] = Math.max(pixels[j * side + i], ink);
        }
      }
    }
    paintImage();
    ask();
  }

  const at = event => {
    const place = canvas.getBoundingClientRect();
    return [((event.clientX - place.left) * side) / place.width, ((event.clientY - place.top) * side) / place.height];
  };
  canvas.addEventListener("pointerdown", event => {
    event.preventDefault();
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    [down, keyed, cursor] = [true, false, at(event)];
    gesture++;
    stroke(cursor, cursor);
  });
  canvas.addEventListener("pointermove", event => {
    if (!down) return;
    const to = at(event);
    stroke(cursor, to);
    cursor = to;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (down = false));
  canvas.addEventListener("keydown", event => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Delete" || event.key === "Backspace") clear();
    else if (event.key === " ") stroke(cursor, cursor);
    else if (step) cursor = cursor.map((x, k) => Math.min(side - 0.5, Math.max(0.5, x + step[k])));
    else return;
    event.preventDefault();
    keyed = true;
    paintImage();
  });

  const clear = () => show(new Float64Array(side * side));
  function show(image) {
    gesture++;
    pixels = Float64Array.from(image);
    paintImage();
    ask();
  }

  // The controls --------------------------------------------------------------------------------------------------
  const tools = part(left, "div", { class: "tools" });
  button(tools, "clear", "an empty canvas", clear);
  button(tools, "forget", "an empty trail", () => {
    trail = [];
    drawAnswer();
  });
  const which = menu(tools, data.what, data.models.map((name, i) => [i, name]), () => ask());
  const names = data.called.map((name, i) => [i, name]), blend = () => {
    const [a, b] = [first, second].map(each => data.examples[each.value]);
    show(a.map((value, i) => (value * (10 - share.value) + b[i] * share.value) / 2550));
  };
  const mix = part(left, "div", { class: "tools" });
  const first = menu(mix, "from", names, blend), second = menu(mix, "to", names, blend);
  second.value = Math.min(1, names.length - 1);
  const share = slider(mix, "blend", Array.from({ length: 11 }, (_, i) => `${10 * i} %`), 0, blend);
  const near = part(left, "div", { class: "wall", role: "group", "aria-label": "The nearest training images" });

  // The answers ---------------------------------------------------------------------------------------------------
  const right = part(row, "div", { class: "side" }), SIZE = 230, limit = 1.05 * top, place = v => (SIZE * v) / limit;
  const plane = part(right, "svg", { viewBox: `-30 -22 ${SIZE + 50} ${SIZE + 62}`, class: "plane", role: "img" });
  part(plane, "path", { d: `M0,0V${SIZE}H${SIZE}`, class: "axis" });
  part(plane, "path", { d: `M0,${SIZE - place(top)}L${place(top)},${SIZE}`, class: "guide" });
  part(plane, "text", { x: SIZE, y: SIZE + 32, "text-anchor": "end" }, "aleatoric (nats)");
  part(plane, "text", { x: -26, y: -8 }, "epistemic (nats)");
  for (let tick = 0.5; tick < limit; tick += 0.5) {
    part(plane, "text", { x: place(tick), y: SIZE + 15, "text-anchor": "middle", class: "small" }, tick);
    part(plane, "text", { x: -6, y: SIZE - place(tick) + 4, "text-anchor": "end", class: "small" }, tick);
  }
  const path = part(plane, "path", { class: "trail" }), points = part(plane, "g");
  const table = part(right, "svg", { class: "bars", role: "img" });
  const seen = part(right, "p", { "aria-live": "polite", class: "seen" });

  function drawAnswer() {
    const spot = ({ aleatoric, epistemic }) => [place(aleatoric), SIZE - place(epistemic)];
    change(path, { d: trail.length ? `M${trail.map(each => spot(each.parts)).join("L")}` : "" });
    points.replaceChildren();
    trail.forEach((each, i) => {
      const now = i === trail.length - 1, [cx, cy] = spot(each.parts);
      const dot = part(points, "circle", { cx, cy, r: now ? 7 : 4, class: now ? "now" : "past", tabindex: now ? -1 : 0,
        role: "button", "aria-label": `drawing ${i + 1}: show it again` });
      const again = () => show(each.pixels);
      dot.addEventListener("click", again);
      dot.addEventListener("keydown", event => event.key === "Enter" && again());
    });
  }

  function drawMembers(members) {
    const wide = 24, rows = [middle(members), ...members], high = Math.min(22, 220 / rows.length);
    table.replaceChildren();
    change(table, { viewBox: `-64 -16 ${64 + wide * data.classes.length} ${20 + high * rows.length + 6}` });
    data.classes.forEach((name, c) =>
      part(table, "text", { x: wide * (c + 0.5), y: -4, "text-anchor": "middle", class: "small" }, name.slice(0, 3)));
    rows.forEach((p, m) => {
      const y = m * high + (m ? 6 : 0);
      const name = ["mean", "members"][m];
      if (name) part(table, "text", { x: -6, y: y + 12, "text-anchor": "end", class: "small" }, name);
      p.forEach((value, c) => {
        const cell = part(table, "rect", { x: wide * c, y, width: wide - 1, height: high - 1, class: "cell" });
        change(cell, { "fill-opacity": value.toFixed(3), "data-value": value });
      });
    });
  }

  // One question at a time; what was drawn meanwhile is asked when the answer comes.
  function ask() {
    stale = true;
    if (waiting && performance.now() - asked < PATIENCE) return;
    if (!model.send) {
      change(seen, {}, LOST);
      return;
    }
    stale = false;
    waiting = true;
    asked = performance.now();
    sent = { pixels: pixels.slice(), gesture };
    const mine = ++number;
    const numbers = Array.from(sent.pixels, value => Math.round(255 * value));
    try {
      model.send({ ask: mine, model: data.models[which.value], pixels: numbers });
    } catch { // the kernel was shut down, or started again
      waiting = false;
      change(seen, {}, LOST);
      return;
    }
    setTimeout(() => waiting && number === mine && change(seen, {}, LOST), PATIENCE);
  }

  function answer(message) {
    if (message.ask !== number) return;
    waiting = false;
    if (message.error) {
      change(seen, {}, message.error);
      return;
    }
    const members = message.members, q = middle(members), best = q.indexOf(Math.max(...q));
    const parts = decompose(members), milliseconds = performance.now() - asked;
    const votes = members.filter(p => p.indexOf(Math.max(...p)) === best).length;
    if (trail.at(-1)?.gesture === sent.gesture) trail.pop(); // the same stroke, farther on
    trail = [...trail, { parts, ...sent }].slice(-60);
    drawAnswer();
    drawMembers(members);
    near.replaceChildren();
    for (const [name, source] of message.near) part(near, "img", { src: source, alt: `a training image: ${name}` });
    const { total, aleatoric, epistemic } = parts;
    change(seen, { "data-milliseconds": milliseconds }, `${data.classes[best]} (${Math.round(100 * q[best])} %): so `
      + `say ${votes} of ${members.length}. ${total.toFixed(3)} nats in total = ${aleatoric.toFixed(3)} aleatoric + `
      + `${epistemic.toFixed(3)} epistemic. Answered in ${Math.round(milliseconds)} ms.`);
    if (stale) ask();
  }

  model.on?.("msg:custom", answer);
  blend();
  return () => model.off?.("msg:custom", answer);
}

export default { render };
