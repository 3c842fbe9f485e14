// A picture and a line for every combination of the controls, drawn beforehand; data: controls [{name, label, names,
// first}], pictures [address], shown [picture] and lines [text], the last control the fastest, inches [wide, high].

const SCALE = 110, LEAST = 70; // CSS pixels an inch; at 70 letters can be read, and a narrow page scrolls

// A slider where all names begin with numbers, buttons for two or three others, else a menu.
function control(parent, { label, names, first }, act) {
  if (names.length > 1 && names.every(name => !isNaN(parseFloat(name)))) return slider(parent, label, names, first, act);
  if (names.length === 2 || names.length === 3) return radio(parent, label, names, first, act);
  const made = menu(parent, label, names.map((name, i) => [i, name]), act);
  made.value = first;
  return made;
}

function render({ model, el }) {
  const data = model.get("data"), root = box(el, data), { controls, inches } = data;
  const tools = part(root, "div", { class: "tools wide" });
  const made = controls.map(each => control(tools, each, () => settle()));
  button(tools, "reset", "back to the first values", () => {
    made.forEach((control, i) => (control.value = controls[i].first));
    settle();
  });
  const seen = part(root, "p", { "aria-live": "polite", class: "seen" });
  const still = part(root, "div", { class: "still" });
  const size = `width: ${SCALE * inches[0]}px; min-width: ${LEAST * inches[0]}px; max-width: 100%; `
    + `aspect-ratio: ${inches[0] / inches[1]}`; // nothing jumps
  const picture = part(still, "img", { alt: "What the line above says.", style: size });

  function settle() {
    const places = made.map(control => +control.value);
    const at = places.reduce((all, place, i) => all * controls[i].names.length + place, 0);
    change(seen, {}, data.lines[at]);
    change(picture, { src: data.pictures[data.shown[at]] });
    model.set("state", Object.fromEntries(controls.map(({ name, names }, i) => [name, names[places[i]]])));
    model.save_changes();
  }

  settle();
}

export default { render };
