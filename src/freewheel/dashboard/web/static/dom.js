// Elements by their names. Text is always text: what a model said can never become markup.

/** An element; `given` are attributes, `on…` listeners, `class`, `data`, `style` (properties); then children. */
export function h(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

/** A panel with a title and, at its right, a note. */
export function panel(title, { span = 12, note = null, wide = false, id = null } = {}, ...children) {
  const head = title ? h("div", { class: "panel-head" }, h("h2", {}, title), note ? h("span", { class: "note" }, note) : null) : null;
  return h("section", { class: `panel span-${span}${wide ? " wide" : ""}`, "aria-label": title || null, id }, head, ...children);
}

/** What stands where nothing was recorded, and why. */
export function empty(what, why) {
  return h("p", { class: "empty" }, h("b", {}, what), why || "");
}

/**
 * A body, and words that stand in its place while there is nothing to show: `say(node)`, and `say(null)` for the body. It
 * stays where it is, so that what comes later is drawn into it.
 */
export function orWords(...children) {
  const body = h("div", {}, ...children);
  const words = h("div", {});
  const say = (node) => { body.hidden = node !== null; words.replaceChildren(...(node === null ? [] : [node])); };
  return { body, words, say };
}

/** A row of figures: [name, value, unit or words below]. */
export function tiles(rows) {
  return h("div", { class: "tiles span-12" }, rows.filter(Boolean).map(([name, value, small, sub]) =>
    h("dl", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, ` ${small}`) : null),
      sub ? h("dd", { class: "sub" }, sub) : null)));
}

export function table(head, rows, { label }) {
  const cell = (tag, one) => (one && typeof one === "object" && !(one instanceof Node) && "right" in one
    ? h(tag, { class: "right num" }, one.right) : h(tag, {}, one));
  return h("div", { class: "scroll" }, h("table", { "aria-label": label },
    h("thead", {}, h("tr", {}, head.map((one) => cell("th", one)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((one) => cell("td", one)))))));
}

export function svg(path, label) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", "0 0 24 24");
  if (label) made.setAttribute("aria-label", label);
  else made.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  made.append(line);
  return made;
}

/** A colour of the theme that holds now. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
