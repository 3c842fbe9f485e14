// A canvas, and what networks in the page predict for the drawing; data: side, what, models {name: [member]}, classes
// [name], examples [image] and their names, called, images [image] and their labels. An image is a text of bytes. A member
// is a list of layers {weights, scale, bias}: bytes [out, in], each row times its scale.

const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const greys = text => Float64Array.from(bytes(text), value => value / 255);
const network = layers => layers.map(layer => ({ ...layer, weights: new Int8Array(bytes(layer.weights).buffer) }));

// The probabilities of a perceptron.
function predicted(layers, pixels) {
  let h = pixels;
  layers.forEach(({ weights, scale, bias }, l) => {
    const inputs = l ? h.map(value => Math.max(0, value)) : h, count = inputs.length;
    h = Float64Array.from(bias, (b, row) => {
      let total = 0;
      for (let i = 0; i < count; i++) total += weights[row * count + i] * inputs[i];
      return b + scale[row] * total;
    });
  });
  const top = Math.max(...h), powers = Array.from(h, value => Math.exp(value - top)), all = sum(powers);
  return powers.map(value => value / all);
}

function render({ model, el }) {
  const data = model.get("data"), side = data.side, root = box(el, data), top = Math.log(data.classes.length);
  const row = part(root, "div", { class: "row" }), left = part(row, "div", { class: "easel" });
  const models = Object.values(data.models).map(members => members.map(network)), images = data.images.map(greys);
  let pixels = new Float64Array(side * side), trail = [], gesture = 0; // what is drawn, and was before

  // The canvas ----------------------------------------------------------------------------------------------------
  const canvas = part(left, "canvas", { width: side, height: side, tabindex: 0, role: "application" });
  change(canvas, { "aria-label": `A canvas of ${side} by ${side} pixels: arrow keys move the brush, space paints, `
    + "Delete clears" });
  const context = canvas.getContext("2d"), brush = side / 22;
  let cursor = [side / 2, side / 2], keyed = false, down = false;

  function put(on, values) {
    const image = on.createImageData(side, side);
    values.forEach((value, i) => image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i));
    on.putImageData(image, 0, 0);
  }

  const paintImage = paced(() => {
    put(context, pixels);
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
    answer();
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
    answer();
  }

  // The controls --------------------------------------------------------------------------------------------------
  const tools = part(left, "div", { class: "tools" });
  button(tools, "clear", "an empty canvas", clear);
  button(tools, "forget", "an empty trail", () => {
    trail = [];
    drawAnswer();
  });
  const which = menu(tools, data.what, Object.keys(data.models).map((name, i) => [i, name]), () => answer());
  const names = data.called.map((name, i) => [i, name]), blend = () => {
    const [a, b] = [first, second].map(each => greys(data.examples[each.value]));
    show(a.map((value, i) => (value * (10 - share.value) + b[i] * share.value) / 10));
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

  // A bar for each probability; of many members, whose rows are low, a shade.
  function drawMembers(members) {
    const wide = 24, rows = [middle(members), ...members], high = Math.min(22, 264 / rows.length), barred = high > 15;
    const most = rows.map(p => data.classes[p.indexOf(Math.max(...p))]);
    table.replaceChildren();
    change(table, { viewBox: `-64 -16 ${64 + wide * data.classes.length} ${20 + high * rows.length + 6}`,
      "aria-label": `Most probable for the mean: ${most[0]}; for the members: ${most.slice(1).join(", ")}` });
    data.classes.forEach((name, c) =>
      part(table, "text", { x: wide * (c + 0.5), y: -4, "text-anchor": "middle", class: "small" }, name.slice(0, 3)));
    rows.forEach((p, m) => {
      const y = m * high + (m ? 6 : 0);
      const name = ["mean", "members"][m];
      if (name) part(table, "text", { x: -6, y: y + 12, "text-anchor": "end", class: "small" }, name);
      if (barred) part(table, "path", { d: `M0,${y + high - 1}H${wide * p.length - 1}`, class: "guide" });
      p.forEach((value, c) => {
        const tall = (high - 2) * (barred ? value : 1);
        const cell = part(table, "rect", { x: wide * c, y: y + high - 1 - tall, width: wide - 2, height: tall,
          class: "cell" });
        change(cell, { "fill-opacity": barred ? 1 : value.toFixed(3), "data-value": value });
      });
    });
  }

  function drawNearest() {
    const far = images.map(image => image.reduce((total, value, i) => total + (value - pixels[i]) ** 2, 0));
    const order = [...far.keys()].sort((a, b) => far[a] - far[b]).slice(0, 4), sketch = document.createElement("canvas");
    [sketch.width, sketch.height] = [side, side];
    near.replaceChildren();
    for (const i of order) {
      put(sketch.getContext("2d"), images[i]);
      part(near, "img", { src: sketch.toDataURL(), alt: `a training image: ${data.classes[data.labels[i]]}` });
    }
  }

  const answer = paced(() => {
    const members = models[which.value].map(layers => predicted(layers, pixels));
    const q = middle(members), best = q.indexOf(Math.max(...q)), parts = decompose(members);
    const votes = members.filter(p => p.indexOf(Math.max(...p)) === best).length;
    if (trail.at(-1)?.gesture === gesture) trail.pop(); // the same stroke, farther on
    trail = [...trail, { parts, pixels: pixels.slice(), gesture }].slice(-60);
    drawAnswer();
    drawMembers(members);
    drawNearest();
    const { total, aleatoric, epistemic } = parts;
    change(seen, {}, `${data.classes[best]} (${Math.round(100 * q[best])} %): so predict ${votes} of ${members.length}. `
      + `${total.toFixed(3)} nats in total = ${aleatoric.toFixed(3)} aleatoric + ${epistemic.toFixed(3)} epistemic.`);
    change(plane, { "aria-label": `Aleatoric ${aleatoric.toFixed(3)}, epistemic ${epistemic.toFixed(3)} nats` });
    model.set("state", { members: members.map(p => [...p]), parts });
    model.save_changes();
  });

  blend();
}

export default { render };
