// Several runs overlaid: one metric of each, their results, and the settings that differ.

import { get } from "../api.js";
import { LineChart } from "../chart.js";
import { emptyState, h, panel, table } from "../dom.js";
import { count, duration, elapsed, number, short } from "../format.js";

export const title = "Compare";

const PRESELECTED = 4; // runs that are selected at first
const MAX_SELECTED = 8; // the number of colours
const POLL_MS = 5000;
const colourIndexes = new Map(); // run → index of its colour, until the page is closed

/**
 * Assign a colour to each selected run. A run that already has a colour keeps it. A new run gets the colour of its rank by
 * name, or the next free one.
 */
function assignColours(selected, runs) {
  const names = runs.map((run) => run.id).sort();
  const taken = new Set();
  for (const id of [...selected.filter((run) => colourIndexes.has(run)), ...selected.filter((run) => !colourIndexes.has(run))]) {
    let index = colourIndexes.get(id) ?? names.indexOf(id) % MAX_SELECTED;
    while (taken.has(index)) index = (index + 1) % MAX_SELECTED;
    taken.add(index);
    colourIndexes.set(id, index);
  }
}

export function mount(root, app) {
  let selected = [app.run, ...app.runs.map((run) => run.id).filter((id) => id !== app.run)].slice(0, PRESELECTED);
  let metric = "eval eval/reward";
  let xAxis = "step";
  let chart = null;
  let destroyed = false;
  let requests = 0;
  const runPicker = h("div", { class: "picks", role: "group", "aria-label": "Runs" });
  const metricSelect = h("select", { class: "select", "aria-label": "Metric" });
  const axisSelect = h("select", { class: "select", "aria-label": "X axis" }, h("option", { value: "step" }, "over steps"), h("option", { value: "time" }, "over time"));
  const box = h("div", { class: "grid" });
  root.append(box);
  metricSelect.addEventListener("change", () => { metric = metricSelect.value; refresh(); });
  axisSelect.addEventListener("change", () => { xAxis = axisSelect.value; refresh(); });

  if (app.runs.length < 2) {
    box.append(panel(null, {}, emptyState("Only one run to show", "To compare runs, pass several of them to freewheel dashboard, or the folder that contains them: freewheel dashboard runs/")));
    return {};
  }

  const colourOf = (id) => `c${colourIndexes.get(id) + 1}`;

  function drawRunPicker() {
    assignColours(selected, app.runs);
    runPicker.replaceChildren(...app.runs.map((run) => h("label", { class: "pick" },
      h("input", { type: "checkbox", checked: selected.includes(run.id), disabled: !selected.includes(run.id) && selected.length >= MAX_SELECTED, onchange: (event) => {
        selected = event.target.checked ? [...selected, run.id] : selected.filter((id) => id !== run.id);
        drawRunPicker();
        refresh();
      } }),
      h("i", { class: "swatch dot", style: { background: selected.includes(run.id) ? `var(--${colourOf(run.id)})` : "var(--line-strong)" } }), h("span", { title: run.folder }, run.name))));
  }

  async function refresh() {
    const request = (requests += 1);
    if (!selected.length) { draw(null); return; }
    let data;
    try {
      data = await get("/compare", { runs: selected.join(","), metric: metric.slice(5), kind: metric.slice(0, 4) });
    } catch (error) {
      if (!destroyed) box.replaceChildren(panel(null, {}, emptyState("Cannot compare these runs", error.message)));
      return;
    }
    if (!destroyed && request === requests) draw(data);
  }

  function draw(data) {
    const range = chart?.range;
    const focused = document.activeElement;
    chart?.destroy();
    chart = null;
    const tools = h("div", { class: "toolbar" }, metricSelect, axisSelect);
    if (!data) { box.replaceChildren(panel("Runs", {}, runPicker), panel(null, {}, tools, emptyState("No run selected", ""))); return; }
    metricSelect.replaceChildren(...data.metrics.map((name) => h("option", { value: name, selected: name === metric }, name.slice(5))));
    const curves = data.runs.map((run) => ({ name: run.id, label: run.name, colour: colourOf(run.id), smooth: metric.startsWith("step"), points: metric.startsWith("eval") }));
    chart = new LineChart({ title: metric.slice(5), height: 320, legend: false, curves, x: xAxis === "step" ? {} : { label: "time", format: elapsed } });
    chart.range = range;
    chart.setData(Object.fromEntries(data.runs.filter((run) => run.curve).map((run) => [run.id, { x: xAxis === "step" ? run.curve.x : run.curve.t, y: run.curve.y }])));
    box.replaceChildren(
      panel("Runs", {}, runPicker),
      panel(null, {}, tools, chart.element),
      panel("Results", {}, table(["Run", "State", { right: "Steps" }, { right: "Reward" }, { right: "Held out" }, { right: "Best held out" }, { right: "Time" }, { right: "Steps/min" }, { right: "Tokens/s" }],
        data.runs.map((run) => [
          h("a", { href: `#overview/${encodeURIComponent(run.id)}` }, run.name), run.state_words, { right: count(run.step) }, { right: number(run.reward) }, { right: number(run.held_out) }, { right: number(run.best_held_out) },
          { right: duration(run.elapsed_s) }, { right: run.elapsed_s ? number((run.recorded_step / run.elapsed_s) * 60, 1) : "–" }, { right: run.tokens_per_s === null ? "–" : short(Math.round(run.tokens_per_s)) },
        ]), { label: "Runs" })),
      panel("Settings that differ", {}, data.differing.length ? table(["Setting", ...data.runs.map((run) => run.name)],
        data.differing.map((row) => [h("code", {}, row.key), ...row.values.map((value) => h("code", {}, value))]), { label: "Settings that differ" })
        : emptyState(data.runs.length > 1 ? "None: all settings are the same" : "Select a second run", "")));
    if (focused && box.contains(focused)) focused.focus({ preventScroll: true });
  }

  const timer = setInterval(() => { if (!document.hidden && app.data.now.state === "live") refresh(); }, POLL_MS);
  drawRunPicker();
  refresh();
  return { destroy: () => { destroyed = true; clearInterval(timer); chart?.destroy(); } };
}
