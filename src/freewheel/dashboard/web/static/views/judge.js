// The judge: throughput, concurrency, failures and cost of scoring.

import { ranking } from "../bars.js";
import { LineChart } from "../chart.js";
import { emptyState, h, panel, table, tiles } from "../dom.js";
import { count, duration, elapsed, number, plural, share } from "../format.js";
import { loadView } from "../view_loader.js";

export const title = "Judge";

const TIME = { format: elapsed, label: "time" };

export function mount(root, app) {
  const charts = {
    inFlight: new LineChart({
      title: "Requests in flight", height: 230, x: TIME, y: { low: 0 },
      curves: [{ name: "limit", label: "limit (adaptive)", colour: "c2" }, { name: "in_flight", label: "in flight", colour: "accent", fill: true }, { name: "queued", label: "waiting", colour: "faint", thin: true }],
    }),
    rate: new LineChart({
      title: "Verdicts per second", height: 230, x: TIME, y: { low: 0 },
      curves: [{ name: "scored_per_s", label: "scored", colour: "accent", fill: true }, { name: "sent_per_s", label: "calls sent", colour: "faint", thin: true }],
    }),
    errors: new LineChart({
      title: "429s and failed calls per second", height: 180, x: TIME, y: { low: 0 },
      curves: [{ name: "throttled_per_s", label: "429s", colour: "wait" }, { name: "faults_per_s", label: "failed calls", colour: "c2" }, { name: "failed_per_s", label: "given up", colour: "bad" }],
    }),
    scoring: new LineChart({
      title: "Responses being scored", height: 230, x: TIME, y: { low: 0 },
      curves: [{ name: "scoring", label: "being scored", colour: "accent", fill: true }, { name: "waiting", label: "waiting", colour: "faint", thin: true }],
    }),
  };
  const { refresh, destroy } = loadView(root, app, "/judge", {
    build: (data) => (data.rewards ? buildPanels(data, charts) : [panel(null, {}, emptyState("Nothing scored yet", `Scoring statistics arrive every ${data.every_s ?? 10} s.`))]),
    afterBuild: (data) => Object.values(charts).forEach((chart) => chart.setData(data.curves)),
  });
  return {
    update: (change) => { if (change.all || change.statistics) refresh(); },
    destroy: () => { destroy(); Object.values(charts).forEach((chart) => chart.destroy()); },
  };
}

function buildPanels({ rewards, judge, asked_for: configured }, charts) {
  const failed = Object.values(judge?.failed ?? rewards.failed).reduce((sum, value) => sum + value, 0);
  if (!judge) {
    return [
      panel(null, {}, emptyState(configured ? "No judge statistics recorded" : "This run has no LLM judge", configured
        ? "A judge is configured, but only the reward stage's own counts are available. They are shown below." : "Rewards come from a function. Scoring statistics are shown below.")),
      tiles([
        ["Scored", count(rewards.scored), null, "responses"], ["Failed", count(failed), null, "masked, not counted as 0"], ["Skipped", count(rewards.skipped)],
        ["In flight", count(rewards.in_flight), null, `${count(rewards.waiting)} waiting`], ["Latency", duration(rewards.mean_latency_s), null, "mean"],
        ["Groups rescored", count(rewards.retried_groups), null, `${count(rewards.dropped_groups)} dropped`],
      ]),
      panel("Responses being scored", { span: 7, wide: true }, charts.scoring.element),
      panel("Failures by reason", { span: 5 }, failed ? ranking(rewards.failed) : emptyState("No failures", "Every response got a verdict.")),
      panel("Verdicts per second", { span: 12 }, charts.rate.element),
    ];
  }
  return [
    judge.down ? h("p", { class: "notice span-12", role: "status" }, judge.down) : null,
    tiles([
      ["Limit", count(judge.limit), null, `${count(judge.in_flight)} in flight`],
      ["Waiting", count(judge.queued), null, "for a slot or a retry"],
      ["Scored", count(judge.scored), null, `of ${count(judge.submitted)} requested`],
      ["429s", count(judge.throttled), null, judge.sent ? `${share(judge.throttled / judge.sent, 1)} of ${count(judge.sent)} calls` : null],
      ["Calls saved", share(judge.saved_share), null, `${count(judge.cache_hits)} cached, ${count(judge.shared)} shared`],
      ["Cost", judge.cost ? number(judge.cost, 4) : "–", null, judge.cost ? `${count(judge.tokens)} tokens` : "no prices configured"],
      ["Failed", count(failed), null, "masked, not counted as 0"],
    ]),
    panel("Requests in flight", { span: 7, wide: true, note: "the limit adapts to the judge's capacity" }, charts.inFlight.element),
    panel("Failures by reason", { span: 5 }, failed ? ranking(judge.failed) : judge.waiting ? emptyState("None so far", `${plural(judge.waiting, "request")} still waiting for a verdict.`) : emptyState("No failures", "Every request got a verdict."),
      Object.keys(judge.faults).length ? [h("h2", { style: { margin: "20px 0 8px" } }, "Failed calls by kind"), ranking(judge.faults, "wait")] : null),
    panel("Verdicts per second", { span: 7, wide: true }, charts.rate.element),
    panel("429s and failed calls per second", { span: 5 }, charts.errors.element),
    panel("Endpoints", { span: 12, note: `${count(judge.retries)} retries, ${count(judge.reasks)} re-asked after an unreadable reply, ${count(judge.restarts)} restarts` }, table(
      ["Endpoint", "Model", { right: "Limit" }, { right: "In flight" }, { right: "Sent" }, { right: "429s" }, { right: "p50" }, { right: "p90" }, { right: "p99" }, { right: "Cost" }, "State"],
      judge.endpoints.map((endpoint) => [
        h("span", { class: "mono" }, endpoint.url), endpoint.model, { right: count(endpoint.limit) }, { right: count(endpoint.in_flight) }, { right: count(endpoint.sent) }, { right: count(endpoint.throttled) },
        { right: duration(endpoint.latency_p50_s) }, { right: duration(endpoint.latency_p90_s) }, { right: duration(endpoint.latency_p99_s) }, { right: number(endpoint.cost, 4) },
        h("span", { class: `chip ${endpoint.state ? "bad" : "good"}` }, endpoint.state || "up"),
      ]), { label: "Judge endpoints" })),
  ].filter(Boolean);
}
