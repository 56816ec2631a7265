// What each part did and waited for, and what became of each group.

import { legend } from "../bars.js";
import { empty, h, orWords, panel } from "../dom.js";
import { count, place, spanColour, spanName } from "../format.js";
import { Gantt } from "../gantt.js";

export const title = "Timeline";

const FOLLOW_MS = 2000; // between two looks at a run that goes on
const RECENT_S = 20; // of a long run, what is shown first

export function mount(root, app) {
  const gantt = new Gantt({ moved: fill, picked: (ordinal) => app.open("ledger", String(ordinal)) });
  const words = h("span", { class: "muted num" });
  const recent = h("button", { type: "button", class: "button", "aria-pressed": "false", onclick: () => { following = !following; press(); if (following) fill(); } }, "Follow");
  const button = (label, text, act) => h("button", { type: "button", class: "button", "aria-label": label, title: label, onclick: () => { following = false; press(); act(); } }, text);
  const tools = h("div", { class: "toolbar" },
    button("Zoom in", "+", () => gantt.zoom(0.5)), button("Zoom out", "−", () => gantt.zoom(2)),
    button("Earlier", "←", () => gantt.move(-0.5)), button("Later", "→", () => gantt.move(0.5)),
    button("All of it", "All", () => gantt.all()), recent, words);
  const key = h("div", {});
  const { body, words: instead, say } = orWords(tools, gantt.element, h("div", { class: "muted", style: { "margin-top": "10px", "font-size": "12.5px" } },
    "Drag to move, double-click for all; the wheel zooms once the timeline has the focus (or with Ctrl). A group opens with a click."), key);
  root.append(panel(null, {}, body, instead));
  let gone = false;
  let following = false;
  let asked = 0;
  let shown = false;

  function press() {
    recent.setAttribute("aria-pressed", String(following));
    recent.hidden = app.data.now.state !== "live";
  }

  async function fill(from = null, to = null) {
    const mine = (asked += 1);
    let found;
    try {
      const latest = following && from === null && shown && gantt.found ? { from: Math.max(0, gantt.found.length_s - RECENT_S) } : { from, to };
      found = await app.get("/timeline", latest);
      if (from === null && !shown && found.recorded && found.length_s > RECENT_S) found = await app.get("/timeline", { from: found.length_s - RECENT_S });
    } catch (error) {
      if (!gone) say(empty("This cannot be shown", error.message));
      return;
    }
    if (gone || mine !== asked) return;
    if (!found.recorded) {
      say(empty("Not recorded", "A timeline comes from the files in trace/, which a run writes unless observe.trace_mb is 0."));
      return;
    }
    if (!shown) following = app.data.now.state === "live";
    shown = true;
    press();
    say(null);
    gantt.set(found);
    const span = found.to_s - found.from_s;
    const hidden = found.groups_in_window - found.groups.length;
    const forgotten = found.whole_from_s > found.from_s ? ` · spans from before ${place(found.whole_from_s, span)} are left out` : "";
    words.textContent = `${place(found.from_s, span)} – ${place(found.to_s, span)} of ${place(found.length_s, span)} · ${count(found.groups_in_window)} groups${hidden > 0 ? `, ${found.groups.length} of them shown: zoom in for the others` : ""}${forgotten}`;
    const names = new Set([...found.lanes.map((lane) => lane.name), ...found.groups.flatMap((group) => group.bars.map((bar) => bar.name))]);
    key.replaceChildren(legend([...names].map((name) => [spanName(name), spanColour(name)])));
  }

  const timer = setInterval(() => { if ((following || body.hidden) && !document.hidden && !gantt.drag) fill(); }, FOLLOW_MS);
  press();
  fill();
  return {
    update: () => press(),
    key(event) {
      const act = { "+": () => gantt.zoom(0.5), "=": () => gantt.zoom(0.5), "-": () => gantt.zoom(2), ArrowLeft: () => gantt.move(-0.25), ArrowRight: () => gantt.move(0.25), 0: () => gantt.all() }[event.key];
      if (!act || body.hidden) return false;
      following = false;
      press();
      act();
      return true;
    },
    destroy: () => { gone = true; clearInterval(timer); gantt.destroy(); },
  };
}
