// What each component did and waited for over time, and the phases of each group.

import { legend } from "../bars.js";
import { bodyOrMessage, emptyState, h, panel } from "../dom.js";
import { count, spanColour, spanName, timestamp } from "../format.js";
import { Gantt } from "../gantt.js";

export const title = "Timeline";

const FOLLOW_MS = 2000; // how often a live run is polled
const RECENT_S = 20; // of a long run, the last part is shown first

export function mount(root, app) {
  const gantt = new Gantt({ onMove: refresh, onPick: (ordinal) => app.open("ledger", String(ordinal)) });
  const summary = h("span", { class: "muted num" });
  const followButton = h("button", { type: "button", class: "button", "aria-pressed": "false", onclick: () => { following = !following; updateFollowButton(); if (following) refresh(); } }, "Follow");
  const button = (label, text, act) => h("button", { type: "button", class: "button", "aria-label": label, title: label, onclick: () => { following = false; updateFollowButton(); act(); } }, text);
  const tools = h("div", { class: "toolbar" },
    button("Zoom in", "+", () => gantt.zoom(0.5)), button("Zoom out", "−", () => gantt.zoom(2)),
    button("Earlier", "←", () => gantt.move(-0.5)), button("Later", "→", () => gantt.move(0.5)),
    button("Show everything", "All", () => gantt.showAll()), followButton, summary);
  const legendBox = h("div", {});
  const { body, message, showMessage } = bodyOrMessage(tools, gantt.element, h("div", { class: "muted", style: { "margin-top": "10px", "font-size": "12.5px" } },
    "Drag to move. Double-click to show everything. The wheel zooms when the timeline has focus, or with Ctrl. Click a group to open it."), legendBox);
  root.append(panel(null, {}, body, message));
  let destroyed = false;
  let following = false;
  let requests = 0;
  let loaded = false;

  function updateFollowButton() {
    followButton.setAttribute("aria-pressed", String(following));
    followButton.hidden = app.data.now.state !== "live";
  }

  async function refresh(from = null, to = null) {
    const request = (requests += 1);
    let data;
    try {
      const range = following && from === null && loaded && gantt.data ? { from: Math.max(0, gantt.data.length_s - RECENT_S) } : { from, to };
      data = await app.get("/timeline", range);
      if (from === null && !loaded && data.recorded && data.length_s > RECENT_S) data = await app.get("/timeline", { from: data.length_s - RECENT_S });
    } catch (error) {
      if (!destroyed) showMessage(emptyState("Cannot show the timeline", error.message));
      return;
    }
    if (destroyed || request !== requests) return;
    if (!data.recorded) {
      showMessage(emptyState("Not recorded", "The timeline is read from the files in trace/. A run writes them unless observe.trace_mb is 0."));
      return;
    }
    if (!loaded) following = app.data.now.state === "live";
    loaded = true;
    updateFollowButton();
    showMessage(null);
    gantt.setData(data);
    const span = data.to_s - data.from_s;
    const hiddenGroups = data.groups_in_window - data.groups.length;
    const cutOff = data.whole_from_s > data.from_s ? ` · spans before ${timestamp(data.whole_from_s, span)} are not shown` : "";
    summary.textContent = `${timestamp(data.from_s, span)} – ${timestamp(data.to_s, span)} of ${timestamp(data.length_s, span)} · ${count(data.groups_in_window)} groups${hiddenGroups > 0 ? `, ${data.groups.length} shown (zoom in for the others)` : ""}${cutOff}`;
    const names = new Set([...data.lanes.map((lane) => lane.name), ...data.groups.flatMap((group) => group.bars.map((bar) => bar.name))]);
    legendBox.replaceChildren(legend([...names].map((name) => [spanName(name), spanColour(name)])));
  }

  const timer = setInterval(() => { if ((following || body.hidden) && !document.hidden && !gantt.drag) refresh(); }, FOLLOW_MS);
  updateFollowButton();
  refresh();
  return {
    update: () => updateFollowButton(),
    key(event) {
      const act = { "+": () => gantt.zoom(0.5), "=": () => gantt.zoom(0.5), "-": () => gantt.zoom(2), ArrowLeft: () => gantt.move(-0.25), ArrowRight: () => gantt.move(0.25), 0: () => gantt.showAll() }[event.key];
      if (!act || body.hidden) return false;
      following = false;
      updateFollowButton();
      act();
      return true;
    },
    destroy: () => { destroyed = true; clearInterval(timer); gantt.destroy(); },
  };
}
