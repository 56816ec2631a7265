// What the run is doing now, whether it learns, and what limits it.

import { get, runPath } from "../api.js";
import { histogram, timeShares } from "../bars.js";
import { LineChart } from "../chart.js";
import { emptyState, h, panel, tiles } from "../dom.js";
import { clock, count, duration, elapsed, number, plural, share, short, spanColour } from "../format.js";

export const title = "Overview";

const HEALTH = [
  ["actor/entropy", "Entropy"], ["actor/kl", "KL to the sampling policy"], ["actor/ess", "Effective sample size"], ["actor/grad_norm", "Gradient norm"],
  ["rollout/response_length_mean", "Response length"], ["rollout/truncation_ratio", "Cut off"], ["rollout/masked_ratio", "Masked (scoring failed)"], ["rollout/zero_variance_ratio", "Groups with zero variance"],
];

export function mount(root, app) {
  const charts = [];
  const addChart = (options) => { const chart = new LineChart(options); charts.push(chart); return chart; };
  const addStepChart = (options) => {
    const chart = addChart(options);
    const names = options.curves.map((curve) => curve.name).filter((name) => !name.startsWith("eval/"));
    chart.onZoom = async (from, to) => {
      if (from === null) { refresh(); return; }
      const results = await Promise.all(names.map((name) => get(runPath(app.run, "/series"), { name, kind: "step", from, to }).catch(() => null)));
      if (chart.range?.[0] !== from) return;
      chart.setData({ ...chart.data, ...Object.fromEntries(results.filter(Boolean).map((series) => [series.name, { x: series.x, y: series.y }])) });
    };
    return chart;
  };
  const headline = h("p", { class: "says" });
  const learning = h("p", { class: "learns" });
  const resumeCommand = h("code", {});
  const missing = h("div", { class: "warn" });
  const hero = h("section", { class: "panel hero span-12", "aria-label": "Current state" }, headline, learning, resumeCommand, missing);
  const figures = h("div", { class: "span-12" });
  const ages = panel("Staleness", { span: 4, note: "lag in versions" });
  const waits = panel("Time by component", { span: 8, wide: true, note: "recent" });
  const logBox = panel("Events", { span: 4 });

  const reward = addStepChart({
    title: "Reward", height: 268,
    curves: [
      { name: "rollout/reward_mean", label: "training reward", colour: "accent", smooth: true },
      { name: "rollout/raw_reward_mean", label: "before shaping", colour: "faint", thin: true, smooth: true },
      { name: "eval/reward", label: "held out", colour: "c2", points: true, band: "eval/reward_se" },
    ],
  });
  const time = { format: elapsed, label: "time" };
  const speed = addChart({ title: "Throughput", height: 190, x: time, y: { low: 0 }, curves: [{ name: "tokens_per_s", label: "tokens/s", colour: "accent", fill: true, smooth: true }] });
  const queue = addChart({
    title: "Queue depth", height: 190, x: time, y: { low: 0 },
    curves: [{ name: "queue_size", label: "ready to train on", colour: "accent", smooth: true }, { name: "in_progress", label: "being generated or scored", colour: "faint", thin: true, smooth: true }],
  });
  const waiting = addChart({
    title: "Waiting", height: 190, x: time, y: { low: 0, high: 1, format: (value) => share(value) },
    curves: [{ name: "wait_batch", label: "trainer waits for a batch", colour: spanColour("wait_batch"), smooth: true }, { name: "wait_reward", label: "generation waits for rewards", colour: spanColour("wait_reward"), smooth: true }, { name: "wait_room", label: "generation held back", colour: spanColour("wait_room"), smooth: true }],
  });
  const lag = addStepChart({
    title: "Age of samples", height: 190, y: { low: 0 },
    curves: [{ name: "avg_sample_age", label: "mean", colour: "accent", smooth: true }, { name: "max_sample_age", label: "oldest", colour: "faint", thin: true }],
  });
  const health = HEALTH.map(([name, label]) => [name, label, addStepChart({ title: label, height: 130, curves: [{ name, label, colour: "accent", smooth: true }] })]);

  // any metric, selected by name
  const metricChart = addChart({ title: "Metric", height: 220, curves: [{ name: "picked", label: "value", colour: "accent", smooth: true }] });
  const metricSelect = h("select", { class: "select", "aria-label": "Metric" });
  const loadMetric = async (from = null, to = null) => {
    if (!metricSelect.value) return;
    const [kind, name] = [metricSelect.value.slice(0, 4), metricSelect.value.slice(5)];
    const series = await get(runPath(app.run, "/series"), { name, kind, from, to }).catch(() => ({ x: [], y: [] }));
    metricChart.title = name;
    metricChart.setData({ picked: series });
  };
  metricChart.onZoom = loadMetric;
  metricSelect.addEventListener("change", () => { metricChart.range = null; loadMetric(); });

  const grid = h("div", { class: "grid" },
    hero, figures,
    panel("Does it learn?", { span: 8, wide: true, note: "reward per step, and on held-out prompts" }, reward.element),
    logBox,
    panel("Throughput", { span: 4, note: "generated tokens per second" }, speed.element),
    panel("Queue", { span: 4, note: "groups" }, queue.element),
    panel("Waiting", { span: 4, note: "share of each second" }, waiting.element),
    waits, ages,
    panel("Age of samples", { span: 12, note: "versions behind the trainer when trained on" }, lag.element),
    health.map(([, label, chart]) => panel(label, { span: 3 }, chart.element)),
    panel("Any metric", { span: 12 }, h("div", { class: "toolbar" }, metricSelect, h("span", { class: "muted" }, "Drag in a chart to zoom, double-click to reset")), metricChart.element));
  root.append(grid);

  function refresh() {
    const { data } = app;
    const { now } = data;
    setText(headline, describe(data));
    setText(learning, now.learning.words);
    learning.dataset.trend = now.learning.trend;
    resumeCommand.hidden = now.state !== "ended";
    if (missing.textContent !== now.missing.join("")) missing.replaceChildren(...now.missing.map((text) => h("p", {}, text)));
    setText(resumeCommand, `freewheel train resume=${data.folder}`);
    figures.replaceChildren(tiles([
      ["Reward", number(now.reward), null, now.recorded_step < now.step ? `at step ${count(now.recorded_step)}` : "mean of the last step"],
      ["Held out", number(now.held_out), now.held_out_se ? `± ${number(now.held_out_se)}` : null, now.held_out_step !== null ? `at step ${count(now.held_out_step)}` : now.recorded_step < now.step ? "not recorded" : "not measured yet"],
      [now.state === "live" ? "Throughput" : "Mean throughput", now.tokens_per_s === null ? "–" : short(Math.round(now.tokens_per_s)), null, `tokens/s${now.samples_per_s === null ? "" : `, ${number(now.samples_per_s, 1)} responses/s`}`],
      ["Queue", count(now.queue_size), null, now.in_progress === null ? "groups ready" : `groups ready,  ${count(now.in_progress)} in progress`],
      ["Weights", now.version === null ? "–" : `v${count(now.version)}`, null, now.published_version === null ? null : `engines at v${count(now.published_version)}`],
      now.state === "live" ? ["Time left", duration(now.eta_s), null, `${duration(now.elapsed_s)} so far`] : ["Duration", duration(now.elapsed_s), null, now.recorded_step < now.step ? `until the last recorded step, ${count(now.recorded_step)}` : plural(now.step, "step")],
    ]));
    for (const chart of [speed, queue, waiting]) chart.setData(data.pulses);
    for (const chart of [reward, lag, ...health.map(([, , healthChart]) => healthChart)]) if (!chart.range) chart.setData({ ...data.steps, ...data.evals });
    const hasAges = data.ages.counts.length > 0;
    replaceContent(ages, hasAges ? histogram(data.ages, data.bounds) : emptyState("Not recorded", "This run does not record the ages of its groups."));
    if (hasAges) ages.querySelector(".note").textContent = `lag in versions, steps ${count(data.ages.from_step)}–${count(data.ages.to_step)}`;
    replaceContent(waits, Object.keys(now.waits).length ? timeShares(now.waits) : emptyState("Not recorded", "A run records how it spends its time about once a second."));
    const logKey = `${data.events.length} ${now.warnings.map((warning) => warning.time).join()}`;
    if (logBox.dataset.shown !== logKey) replaceContent(logBox, buildLog(data));
    logBox.dataset.shown = logKey;
    const names = [...data.metrics.eval.map((name) => `eval ${name}`), ...data.metrics.step.map((name) => `step ${name}`)];
    if (metricSelect.options.length !== names.length) {
      const selected = metricSelect.value || "step actor/loss";
      metricSelect.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === selected }, name.slice(5))));
      loadMetric();
    }
  }

  refresh();
  return {
    update: () => refresh(),
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}

/** Change the text only if it is new, so that screen readers do not repeat it. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function replaceContent(box, node) {
  const head = box.querySelector(".panel-head");
  box.replaceChildren(...[head, node].filter(Boolean));
}

/** Describe the run in one sentence. */
function describe({ now }) {
  const at = now.step || !now.missing.length ? `step ${count(now.step)}${now.total_steps ? ` of ${count(now.total_steps)}` : ""}` : "an unrecorded step";
  if (now.state === "waiting") return "Starting: nothing recorded yet";
  if (now.state === "removed") return "The run's folder was deleted. This page shows the data read before that";
  if (now.state === "finished") return `Finished at ${at}${now.verdict ? `. It was ${lower(now.verdict)}` : ""}`;
  if (now.state === "ended") return `Not running. It stopped at ${at} and can be resumed${now.verdict ? `. It was ${lower(now.verdict)}` : ""}`;
  if (now.paused) return `Paused: ${now.paused}`;
  return upper(now.verdict || now.doing || `at ${at}`);
}

const lower = (text) => text.charAt(0).toLowerCase() + text.slice(1);
const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function buildLog({ events, now }) {
  const rows = [
    ...events.map((event) => ({ time: event.time, text: event.text, level: "" })),
    ...now.warnings.map((warning) => ({ time: warning.time, text: `${warning.role ? `${warning.role}: ` : ""}${warning.message}`, level: warning.level })),
  ].sort((a, b) => b.time - a.time).slice(0, 60);
  if (!rows.length) return emptyState("No events yet", "");
  return h("ul", { class: "log", tabindex: "0", "aria-label": "Events and warnings, newest first" }, rows.map((row) => h("li", {},
    h("time", {}, clock(row.time)),
    h("span", { class: row.level === "ERROR" || row.level === "CRITICAL" ? "bad" : row.level ? "warn" : "" }, row.text))));
}
