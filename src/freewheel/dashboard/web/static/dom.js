// Builders for DOM elements. Text is always inserted as text, so model output can never become markup.

/** Create an element. `attributes` may also hold `on…` listeners, `class`, `data`, and `style` (an object of properties). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "style") for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A panel with an optional title, and an optional note to the right of it. */
export function panel(title, { span = 12, note = null, wide = false, id = null } = {}, ...children) {
  const head = title ? h("div", { class: "panel-head" }, h("h2", {}, title), note ? h("span", { class: "note" }, note) : null) : null;
  return h("section", { class: `panel span-${span}${wide ? " wide" : ""}`, "aria-label": title || null, id }, head, ...children);
}

/** A message shown instead of missing data, with the reason. */
export function emptyState(title, detail) {
  return h("p", { class: "empty" }, h("b", {}, title), detail || "");
}

/**
 * A body that a message can replace while there is nothing to show. `showMessage(node)` hides the body; `showMessage(null)`
 * shows it again. The body stays in the page, so it can be filled while hidden.
 */
export function bodyOrMessage(...children) {
  const body = h("div", {}, ...children);
  const message = h("div", {});
  const showMessage = (node) => { body.hidden = node !== null; message.replaceChildren(...(node === null ? [] : [node])); };
  return { body, message, showMessage };
}

/** A row of figures: [name, value, unit, text below the value]. */
export function tiles(rows) {
  return h("div", { class: "tiles span-12" }, rows.filter(Boolean).map(([name, value, unit, note]) =>
    h("dl", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, unit ? h("small", {}, ` ${unit}`) : null),
      note ? h("dd", { class: "sub" }, note) : null)));
}

/** A table. A cell given as `{right: value}` is right-aligned. */
export function table(head, rows, { label }) {
  const buildCell = (tag, cell) => (cell && typeof cell === "object" && !(cell instanceof Node) && "right" in cell
    ? h(tag, { class: "right num" }, cell.right) : h(tag, {}, cell));
  return h("div", { class: "scroll" }, h("table", { "aria-label": label },
    h("thead", {}, h("tr", {}, head.map((cell) => buildCell("th", cell)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => buildCell("td", cell)))))));
}

/** A line icon from the data of an SVG path. */
export function icon(path, label) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  element.setAttribute("viewBox", "0 0 24 24");
  if (label) element.setAttribute("aria-label", label);
  else element.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  element.append(line);
  return element;
}

/** A colour of the current theme. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
