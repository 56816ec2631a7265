// Charts made of boxes: a histogram, stacked shares, a ranking.

import { colour, h } from "./dom.js";
import { count, share, spanColour, spanName } from "./format.js";

/** Number of groups by lag, in versions. */
export function histogram({ counts }, { staleness_threshold: threshold, max_staleness_allowed: allowed }) {
  const total = counts.reduce((sum, value) => sum + value, 0) || 1;
  const highest = Math.max(...counts, 1);
  const zone = (lag) => (allowed !== null && lag > allowed ? "refused" : threshold !== null && lag > threshold ? "over" : "fresh");
  const description = counts.map((value, lag) => `${share(value / total)} with lag ${lag}`).join(", ");
  return h("div", { class: "histogram", role: "img", "aria-label": `Groups by lag in versions: ${description}` }, counts.map((value, lag) =>
    h("div", { class: "bin", data: { zone: zone(lag) }, title: `${count(value)} groups, ${share(value / total, 1)}` },
      h("span", { class: "share" }, value ? share(value / total) : ""),
      h("div", { class: "bar", style: { height: `${(value / highest) * 100}%` } }),
      h("span", { class: "lag" }, String(lag)))));
}

/** How each component spends its time: one stacked bar per component, the trainer first. */
export function timeShares(waits) {
  const names = new Set();
  const rows = Object.entries(waits).sort(([a], [b]) => (a === "trainer" ? -1 : b === "trainer" ? 1 : a.localeCompare(b))).map(([part, spans]) => {
    const visible = Object.entries(spans).filter(([, value]) => value > 0.0005);
    // A rollouter's spans may overlap, because it generates while it waits for rewards. Scale them if they exceed 100%.
    const sum = Math.max(1, visible.reduce((total, [, value]) => total + value, 0));
    visible.sort(([a], [b]) => Number(a.startsWith("wait")) - Number(b.startsWith("wait")));
    visible.forEach(([name]) => names.add(name));
    const description = visible.map(([name, value]) => `${spanName(name)} ${share(value)}`).join(", ");
    return [h("span", {}, part), h("div", { class: "track", role: "img", "aria-label": `${part}: ${description}` },
      visible.map(([name, value]) => h("div", { title: `${spanName(name)} ${share(value, 1)}`, style: { width: `${(value / sum) * 100}%`, background: colour(spanColour(name)) } })))];
  });
  return h("div", {}, h("div", { class: "shares" }, rows), legend([...names].map((name) => [spanName(name), spanColour(name)])));
}

/** A legend of [label, name of a theme colour] pairs. */
export function legend(items) {
  return h("div", { class: "legend" }, items.map(([label, name]) => h("span", { class: "item" }, h("i", { class: "swatch block", style: { background: colour(name) } }), label)));
}

/** Reasons and their counts, the most frequent first. */
export function ranking(counts, colourName = "bad") {
  const rows = Object.entries(counts).sort(([, a], [, b]) => b - a);
  const highest = rows[0]?.[1] || 1;
  return h("div", { class: "ranked" }, rows.map(([name, value]) => [
    h("span", {}, name.replaceAll("_", " ")),
    h("div", { class: "track" }, h("div", { style: { width: `${(value / highest) * 100}%`, background: colour(colourName) } })),
    h("span", { class: "num" }, count(value))]));
}
