// What scoring does, where it is held up, and what it costs.

import { ranked } from "../bars.js";
import { LineChart } from "../chart.js";
import { empty, h, panel, table, tiles } from "../dom.js";
import { fetched } from "../fetched.js";
import { count, duration, elapsed, number, plural, share } from "../format.js";

export const title = "Judge";

const TIME = { format: elapsed, label: "time" };

export function mount(root, app) {
  const charts = {
    flight: new LineChart({
      title: "Requests in flight", height: 230, x: TIME, y: { low: 0 },
      curves: [{ name: "limit", label: "limit, found by itself", colour: "c2" }, { name: "in_flight", label: "in flight", colour: "accent", fill: true }, { name: "queued", label: "waiting", colour: "faint", thin: true }],
    }),
    rate: new LineChart({
      title: "Verdicts a second", height: 230, x: TIME, y: { low: 0 },
      curves: [{ name: "scored_per_s", label: "scored", colour: "accent", fill: true }, { name: "sent_per_s", label: "calls sent", colour: "faint", thin: true }],
    }),
    trouble: new LineChart({
      title: "429s and failed calls a second", height: 180, x: TIME, y: { low: 0 },
      curves: [{ name: "throttled_per_s", label: "429s", colour: "wait" }, { name: "faults_per_s", label: "failed calls", colour: "c2" }, { name: "failed_per_s", label: "given up", colour: "bad" }],
    }),
    stage: new LineChart({
      title: "Responses being scored", height: 230, x: TIME, y: { low: 0 },
      curves: [{ name: "scoring", label: "being scored", colour: "accent", fill: true }, { name: "waiting", label: "waiting", colour: "faint", thin: true }],
    }),
  };
  const { fill, leave } = fetched(root, app, "/judge", {
    draw: (found) => (found.rewards ? content(found, charts) : [panel(null, {}, empty("Nothing was scored yet", `Figures of scoring come every ${found.every_s ?? 10} s.`))]),
    drawn: (found) => Object.values(charts).forEach((one) => one.set(found.curves)),
  });
  return {
    update: (change) => { if (change.all || change.statistics) fill(); },
    destroy: () => { leave(); Object.values(charts).forEach((one) => one.destroy()); },
  };
}

function content({ rewards, judge, asked_for: askedFor }, charts) {
  const failed = Object.values(judge?.failed ?? rewards.failed).reduce((sum, one) => sum + one, 0);
  if (!judge) {
    return [
      panel(null, {}, empty(askedFor ? "The judge's own figures are not recorded" : "This run has no LLM judge", askedFor
        ? "A judge is configured; what follows is what the reward stage counts around it." : "Rewards come from a function; what follows is how scoring went.")),
      tiles([
        ["Scored", count(rewards.scored), null, "responses"], ["Failed", count(failed), null, "masked, never a zero"], ["Skipped", count(rewards.skipped)],
        ["In flight", count(rewards.in_flight), null, `${count(rewards.waiting)} waiting`], ["Latency", duration(rewards.mean_latency_s), null, "mean"],
        ["Groups scored again", count(rewards.retried_groups), null, `${count(rewards.dropped_groups)} dropped`],
      ]),
      panel("Responses being scored", { span: 7, wide: true }, charts.stage.element),
      panel("Failures by reason", { span: 5 }, failed ? ranked(rewards.failed) : empty("No failures", "Every response got a verdict.")),
      panel("Verdicts a second", { span: 12 }, charts.rate.element),
    ];
  }
  return [
    judge.down ? h("p", { class: "notice span-12", role: "status" }, judge.down) : null,
    tiles([
      ["Limit", count(judge.limit), null, `${count(judge.in_flight)} in flight`],
      ["Waiting", count(judge.queued), null, "for a slot or a back-off"],
      ["Scored", count(judge.scored), null, `of ${count(judge.submitted)} asked for`],
      ["429s", count(judge.throttled), null, judge.sent ? `${share(judge.throttled / judge.sent, 1)} of ${count(judge.sent)} calls` : null],
      ["Calls saved", share(judge.saved_share), null, `${count(judge.cache_hits)} cached, ${count(judge.shared)} shared`],
      ["Cost", judge.cost ? number(judge.cost, 4) : "–", null, judge.cost ? `${count(judge.tokens)} tokens` : "no prices are set"],
      ["Failed", count(failed), null, "masked, never a zero"],
    ]),
    panel("Requests in flight", { span: 7, wide: true, note: "the limit adapts to what the judge takes" }, charts.flight.element),
    panel("Failures by reason", { span: 5 }, failed ? ranked(judge.failed) : judge.waiting ? empty("None so far", `${plural(judge.waiting, "request")} had no verdict yet.`) : empty("No failures", "Every request ended with a verdict."),
      Object.keys(judge.faults).length ? [h("h2", { style: { margin: "20px 0 8px" } }, "Failed calls by kind"), ranked(judge.faults, "wait")] : null),
    panel("Verdicts a second", { span: 7, wide: true }, charts.rate.element),
    panel("429s and failed calls a second", { span: 5 }, charts.trouble.element),
    panel("Endpoints", { span: 12, note: `${count(judge.retries)} retries, ${count(judge.reasks)} asked again for an unreadable reply, ${count(judge.restarts)} restarts` }, table(
      ["Endpoint", "Model", { right: "Limit" }, { right: "In flight" }, { right: "Sent" }, { right: "429s" }, { right: "p50" }, { right: "p90" }, { right: "p99" }, { right: "Cost" }, "State"],
      judge.endpoints.map((one) => [
        h("span", { class: "mono" }, one.url), one.model, { right: count(one.limit) }, { right: count(one.in_flight) }, { right: count(one.sent) }, { right: count(one.throttled) },
        { right: duration(one.latency_p50_s) }, { right: duration(one.latency_p90_s) }, { right: duration(one.latency_p99_s) }, { right: number(one.cost, 4) },
        h("span", { class: `chip ${one.state ? "bad" : "good"}` }, one.state || "up"),
      ]), { label: "Judge endpoints" })),
  ].filter(Boolean);
}
