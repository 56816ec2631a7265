// A view that is fetched as one, and drawn anew from what came.

import { empty, h, panel } from "./dom.js";

/** draw(found): its panels; drawn(found): they are on the page, charts can be set. `fill` fetches it again. */
export function fetched(root, app, path, { draw, drawn }) {
  const box = h("div", { class: "grid" });
  root.append(box);
  let gone = false;

  async function fill() {
    let found;
    try {
      found = await app.get(path);
    } catch (error) {
      if (!gone) box.replaceChildren(panel(null, {}, empty("This cannot be shown", error.message)));
      return;
    }
    if (gone) return;
    const focus = document.activeElement;
    box.replaceChildren(...draw(found));
    if (focus && box.contains(focus)) focus.focus({ preventScroll: true });
    drawn(found);
  }

  fill();
  return { fill, leave: () => { gone = true; } };
}
