// Loads a view from one API path and rebuilds its panels on each refresh.

import { emptyState, h, panel } from "./dom.js";

/**
 * Load the view now. `build(data)` returns its panels. `afterBuild(data)` runs once they are on the page, for example to give
 * charts their data. Returns `refresh`, which loads it again, and `destroy`.
 */
export function loadView(root, app, path, { build, afterBuild }) {
  const box = h("div", { class: "grid" });
  root.append(box);
  let destroyed = false;

  async function refresh() {
    let data;
    try {
      data = await app.get(path);
    } catch (error) {
      if (!destroyed) box.replaceChildren(panel(null, {}, emptyState("Cannot show this view", error.message)));
      return;
    }
    if (destroyed) return;
    const focused = document.activeElement;
    box.replaceChildren(...build(data));
    if (focused && box.contains(focused)) focused.focus({ preventScroll: true });
    afterBuild(data);
  }

  refresh();
  return { refresh, destroy: () => { destroyed = true; } };
}
