// Several runs in one picture: a metric of each, how each did, and what they were told differently.

import { get } from "../api.js";
import { LineChart } from "../chart.js";
import { empty, h, panel, table } from "../dom.js";
import { count, duration, elapsed, number, short } from "../format.js";

export const title = "Compare";

const FIRST = 4; // runs that are chosen at first
const MOST = 8; // as many as there are colours
const EVERY_MS = 5000;
const inks = new Map(); // run → its colour, for as long as the page is open

/** Who has a colour keeps it; a new one gets that of its place by name, or the next that none of the chosen has. */
function dye(chosen, runs) {
  const names = runs.map((one) => one.id).sort();
  const taken = new Set();
  for (const id of [...chosen.filter((one) => inks.has(one)), ...chosen.filter((one) => !inks.has(one))]) {
    let at = inks.get(id) ?? names.indexOf(id) % MOST;
    while (taken.has(at)) at = (at + 1) % MOST;
    taken.add(at);
    inks.set(id, at);
  }
}

export function mount(root, app) {
  let chosen = [app.run, ...app.runs.map((one) => one.id).filter((id) => id !== app.run)].slice(0, FIRST);
  let metric = "eval eval/reward";
  let over = "step";
  let chart = null;
  let gone = false;
  let asked = 0;
  const picks = h("div", { class: "picks", role: "group", "aria-label": "Runs" });
  const pick = h("select", { class: "select", "aria-label": "Metric" });
  const axis = h("select", { class: "select", "aria-label": "Over" }, h("option", { value: "step" }, "over steps"), h("option", { value: "time" }, "over time"));
  const box = h("div", { class: "grid" });
  root.append(box);
  pick.addEventListener("change", () => { metric = pick.value; fill(); });
  axis.addEventListener("change", () => { over = axis.value; fill(); });

  if (app.runs.length < 2) {
    box.append(panel(null, {}, empty("There is one run here", "Give freewheel dashboard several runs, or the folder that they are in (freewheel dashboard runs/), and they are laid over one another.")));
    return {};
  }

  const ink = (id) => `c${inks.get(id) + 1}`;

  function drawPicks() {
    dye(chosen, app.runs);
    picks.replaceChildren(...app.runs.map((run) => h("label", { class: "pick" },
      h("input", { type: "checkbox", checked: chosen.includes(run.id), disabled: !chosen.includes(run.id) && chosen.length >= MOST, onchange: (event) => {
        chosen = event.target.checked ? [...chosen, run.id] : chosen.filter((id) => id !== run.id);
        drawPicks();
        fill();
      } }),
      h("i", { class: "swatch dot", style: { background: chosen.includes(run.id) ? `var(--${ink(run.id)})` : "var(--line-strong)" } }), h("span", { title: run.folder }, run.name))));
  }

  async function fill() {
    const mine = (asked += 1);
    if (!chosen.length) { draw(null); return; }
    let found;
    try {
      found = await get("/compare", { runs: chosen.join(","), metric: metric.slice(5), kind: metric.slice(0, 4) });
    } catch (error) {
      if (!gone) box.replaceChildren(panel(null, {}, empty("This cannot be shown", error.message)));
      return;
    }
    if (!gone && mine === asked) draw(found);
  }

  function draw(found) {
    const range = chart?.range;
    const focused = document.activeElement;
    chart?.destroy();
    chart = null;
    const tools = h("div", { class: "toolbar" }, pick, axis);
    if (!found) { box.replaceChildren(panel("Runs", {}, picks), panel(null, {}, tools, empty("No run is chosen", ""))); return; }
    pick.replaceChildren(...found.metrics.map((name) => h("option", { value: name, selected: name === metric }, name.slice(5))));
    const curves = found.runs.map((run) => ({ name: run.id, label: run.name, colour: ink(run.id), smooth: metric.startsWith("step"), points: metric.startsWith("eval") }));
    chart = new LineChart({ title: metric.slice(5), height: 320, legend: false, curves, x: over === "step" ? {} : { label: "time", format: elapsed } });
    chart.range = range;
    chart.set(Object.fromEntries(found.runs.filter((run) => run.curve).map((run) => [run.id, { x: over === "step" ? run.curve.x : run.curve.t, y: run.curve.y }])));
    box.replaceChildren(
      panel("Runs", {}, picks),
      panel(null, {}, tools, chart.element),
      panel("How each did", {}, table(["Run", "State", { right: "Steps" }, { right: "Reward" }, { right: "Held out" }, { right: "Best held out" }, { right: "Time" }, { right: "Steps/min" }, { right: "Tokens/s" }],
        found.runs.map((run) => [
          h("a", { href: `#overview/${encodeURIComponent(run.id)}` }, run.name), run.state_words, { right: count(run.step) }, { right: number(run.reward) }, { right: number(run.held_out) }, { right: number(run.best_held_out) },
          { right: duration(run.elapsed_s) }, { right: run.elapsed_s ? number((run.recorded_step / run.elapsed_s) * 60, 1) : "–" }, { right: run.tokens_per_s === null ? "–" : short(Math.round(run.tokens_per_s)) },
        ]), { label: "Runs" })),
      panel("Settings that differ", {}, found.differing.length ? table(["Setting", ...found.runs.map((run) => run.name)],
        found.differing.map((row) => [h("code", {}, row.key), ...row.values.map((value) => h("code", {}, value))]), { label: "Settings that differ" })
        : empty(found.runs.length > 1 ? "None: they were told the same" : "Choose a second run", "")));
    if (focused && box.contains(focused)) focused.focus({ preventScroll: true });
  }

  const timer = setInterval(() => { if (!document.hidden && app.data.now.state === "live") fill(); }, EVERY_MS);
  drawPicks();
  fill();
  return { destroy: () => { gone = true; clearInterval(timer); chart?.destroy(); } };
}
