// What the run does now, whether it learns, and what holds it back.

import { get, runPath } from "../api.js";
import { histogram, shares } from "../bars.js";
import { LineChart } from "../chart.js";
import { empty, h, panel, tiles } from "../dom.js";
import { clock, count, duration, elapsed, number, plural, share, short, spanColour } from "../format.js";

export const title = "Overview";

const HEALTH = [
  ["actor/entropy", "Entropy"], ["actor/kl", "KL to the sampling policy"], ["actor/ess", "Effective sample size"], ["actor/grad_norm", "Gradient norm"],
  ["rollout/response_length_mean", "Response length"], ["rollout/truncation_ratio", "Cut off"], ["rollout/masked_ratio", "Masked: scoring failed"], ["rollout/zero_variance_ratio", "Groups without variance"],
];

export function mount(root, app) {
  const charts = [];
  const chart = (options) => { const made = new LineChart(options); charts.push(made); return made; };
  const ofSteps = (options) => {
    const made = chart(options);
    const names = options.curves.map((one) => one.name).filter((name) => !name.startsWith("eval/"));
    made.zoomed = async (from, to) => {
      if (from === null) { fill(); return; }
      const found = await Promise.all(names.map((name) => get(runPath(app.run, "/series"), { name, kind: "step", from, to }).catch(() => null)));
      if (made.range?.[0] !== from) return;
      made.set({ ...made.data, ...Object.fromEntries(found.filter(Boolean).map((one) => [one.name, { x: one.x, y: one.y }])) });
    };
    return made;
  };
  const says = h("p", { class: "says" });
  const learns = h("p", { class: "learns" });
  const how = h("code", {});
  const missing = h("div", { class: "warn" });
  const hero = h("section", { class: "panel hero span-12", "aria-label": "Now" }, says, learns, how, missing);
  const figures = h("div", { class: "span-12" });
  const ages = panel("Staleness", { span: 4, note: "lag in versions" });
  const waits = panel("What each part spends its time on", { span: 8, wide: true, note: "lately" });
  const logBox = panel("What happened", { span: 4 });

  const reward = ofSteps({
    title: "Reward", height: 268,
    curves: [
      { name: "rollout/reward_mean", label: "training reward", colour: "accent", smooth: true },
      { name: "rollout/raw_reward_mean", label: "before shaping", colour: "faint", thin: true, smooth: true },
      { name: "eval/reward", label: "held out", colour: "c2", points: true, band: "eval/reward_se" },
    ],
  });
  const time = { format: elapsed, label: "time" };
  const speed = chart({ title: "Throughput", height: 190, x: time, y: { low: 0 }, curves: [{ name: "tokens_per_s", label: "tokens/s", colour: "accent", fill: true, smooth: true }] });
  const queue = chart({
    title: "Queue depth", height: 190, x: time, y: { low: 0 },
    curves: [{ name: "queue_size", label: "ready to train on", colour: "accent", smooth: true }, { name: "in_progress", label: "in generation or scoring", colour: "faint", thin: true, smooth: true }],
  });
  const waiting = chart({
    title: "Waiting", height: 190, x: time, y: { low: 0, high: 1, format: (value) => share(value) },
    curves: [{ name: "wait_batch", label: "trainer for a batch", colour: spanColour("wait_batch"), smooth: true }, { name: "wait_reward", label: "generation for rewards", colour: spanColour("wait_reward"), smooth: true }, { name: "wait_room", label: "generation held back", colour: spanColour("wait_room"), smooth: true }],
  });
  const lag = ofSteps({
    title: "Age of samples", height: 190, y: { low: 0 },
    curves: [{ name: "avg_sample_age", label: "mean", colour: "accent", smooth: true }, { name: "max_sample_age", label: "oldest", colour: "faint", thin: true }],
  });
  const health = HEALTH.map(([name, label]) => [name, label, ofSteps({ title: label, height: 130, curves: [{ name, label, colour: "accent", smooth: true }] })]);

  // any metric, by its name
  const picked = chart({ title: "Metric", height: 220, curves: [{ name: "picked", label: "value", colour: "accent", smooth: true }] });
  const pick = h("select", { class: "select", "aria-label": "Metric" });
  const pickMetric = async (from = null, to = null) => {
    if (!pick.value) return;
    const [kind, name] = [pick.value.slice(0, 4), pick.value.slice(5)];
    const found = await get(runPath(app.run, "/series"), { name, kind, from, to }).catch(() => ({ x: [], y: [] }));
    picked.title = name;
    picked.set({ picked: found });
  };
  picked.zoomed = pickMetric;
  pick.addEventListener("change", () => { picked.range = null; pickMetric(); });

  const grid = h("div", { class: "grid" },
    hero, figures,
    panel("Does it learn?", { span: 8, wide: true, note: "reward a step, and on held-out prompts" }, reward.element),
    logBox,
    panel("Throughput", { span: 4, note: "generated tokens a second" }, speed.element),
    panel("Queue", { span: 4, note: "groups" }, queue.element),
    panel("Waiting", { span: 4, note: "share of each second" }, waiting.element),
    waits, ages,
    panel("Age of samples", { span: 12, note: "versions behind the trainer, when trained on" }, lag.element),
    health.map(([, label, made]) => panel(label, { span: 3 }, made.element)),
    panel("Any metric", { span: 12 }, h("div", { class: "toolbar" }, pick, h("span", { class: "muted" }, "drag in a chart to zoom, double-click for all of it")), picked.element));
  root.append(grid);

  function fill() {
    const { data } = app;
    const { now } = data;
    write(says, sentence(data));
    write(learns, now.learning.words);
    learns.dataset.trend = now.learning.trend;
    how.hidden = now.state !== "ended";
    if (missing.textContent !== now.missing.join("")) missing.replaceChildren(...now.missing.map((one) => h("p", {}, one)));
    write(how, `freewheel train resume=${data.folder}`);
    figures.replaceChildren(tiles([
      ["Reward", number(now.reward), null, now.recorded_step < now.step ? `at step ${count(now.recorded_step)}` : "mean of the last step"],
      ["Held out", number(now.held_out), now.held_out_se ? `± ${number(now.held_out_se)}` : null, now.held_out_step !== null ? `at step ${count(now.held_out_step)}` : now.recorded_step < now.step ? "not recorded" : "not measured yet"],
      [now.state === "live" ? "Throughput" : "Mean throughput", now.tokens_per_s === null ? "–" : short(Math.round(now.tokens_per_s)), null, `tokens/s${now.samples_per_s === null ? "" : `, ${number(now.samples_per_s, 1)} responses/s`}`],
      ["Queue", count(now.queue_size), null, now.in_progress === null ? "groups ready" : `groups ready,  ${count(now.in_progress)} in progress`],
      ["Weights", now.version === null ? "–" : `v${count(now.version)}`, null, now.published_version === null ? null : `engines at v${count(now.published_version)}`],
      now.state === "live" ? ["Time left", duration(now.eta_s), null, `${duration(now.elapsed_s)} so far`] : ["Took", duration(now.elapsed_s), null, now.recorded_step < now.step ? `until the last row, of step ${count(now.recorded_step)}` : plural(now.step, "step")],
    ]));
    for (const made of [speed, queue, waiting]) made.set(data.pulses);
    for (const made of [reward, lag, ...health.map(([, , one]) => one)]) if (!made.range) made.set({ ...data.steps, ...data.evals });
    const counted = data.ages.counts.length > 0;
    swap(ages, counted ? histogram(data.ages, data.bounds) : empty("Not recorded", "Steps of this run have no ages of their groups."));
    if (counted) ages.querySelector(".note").textContent = `lag in versions, steps ${count(data.ages.from_step)}–${count(data.ages.to_step)}`;
    swap(waits, Object.keys(now.waits).length ? shares(now.waits) : empty("Not recorded", "Shares of time come with the pulses of a run, once a second."));
    const happened = `${data.events.length} ${now.warnings.map((one) => one.time).join()}`;
    if (logBox.dataset.shown !== happened) swap(logBox, log(data));
    logBox.dataset.shown = happened;
    const names = [...data.metrics.eval.map((name) => `eval ${name}`), ...data.metrics.step.map((name) => `step ${name}`)];
    if (pick.options.length !== names.length) {
      const before = pick.value || "step actor/loss";
      pick.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === before }, name.slice(5))));
      pickMetric();
    }
  }

  fill();
  return {
    update: () => fill(),
    destroy: () => charts.forEach((made) => made.destroy()),
  };
}

/** Only what is new is announced. */
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function swap(box, node) {
  const head = box.querySelector(".panel-head");
  box.replaceChildren(...[head, node].filter(Boolean));
}

/** The run in one sentence. */
function sentence({ now }) {
  const at = now.step || !now.missing.length ? `step ${count(now.step)}${now.total_steps ? ` of ${count(now.total_steps)}` : ""}` : "a step that is not recorded";
  if (now.state === "waiting") return "Starting: nothing is recorded yet";
  if (now.state === "removed") return "The run's folder is gone; this is what was read of it";
  if (now.state === "finished") return `Finished at ${at}${now.verdict ? `. It was ${lower(now.verdict)}` : ""}`;
  if (now.state === "ended") return `Not running: it came to ${at}, and can be resumed${now.verdict ? `. Until then it was ${lower(now.verdict)}` : ""}`;
  if (now.paused) return `Paused: ${now.paused}`;
  return upper(now.verdict || now.doing || `at ${at}`);
}

const lower = (text) => text.charAt(0).toLowerCase() + text.slice(1);
const upper = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function log({ events, now }) {
  const rows = [
    ...events.map((one) => ({ time: one.time, text: one.text, level: "" })),
    ...now.warnings.map((one) => ({ time: one.time, text: `${one.role ? `${one.role}: ` : ""}${one.message}`, level: one.level })),
  ].sort((a, b) => b.time - a.time).slice(0, 60);
  if (!rows.length) return empty("Nothing yet", "");
  return h("ul", { class: "log", tabindex: "0", "aria-label": "Events and warnings, newest first" }, rows.map((one) => h("li", {},
    h("time", {}, clock(one.time)),
    h("span", { class: one.level === "ERROR" || one.level === "CRITICAL" ? "bad" : one.level ? "warn" : "" }, one.text))));
}
