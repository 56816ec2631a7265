// Pictures made of boxes: a histogram, shares of a whole, a ranking.

import { colour, h } from "./dom.js";
import { count, share, spanColour, spanName } from "./format.js";

/** Groups by how many versions old they were. */
export function histogram({ counts }, { staleness_threshold: threshold, max_staleness_allowed: allowed }) {
  const total = counts.reduce((sum, one) => sum + one, 0) || 1;
  const most = Math.max(...counts, 1);
  const zone = (lag) => (allowed !== null && lag > allowed ? "refused" : threshold !== null && lag > threshold ? "over" : "fresh");
  const told = counts.map((one, lag) => `${share(one / total)} lagged ${lag}`).join(", ");
  return h("div", { class: "histogram", role: "img", "aria-label": `Groups by lag in versions: ${told}` }, counts.map((one, lag) =>
    h("div", { class: "bin", data: { zone: zone(lag) }, title: `${count(one)} groups, ${share(one / total, 1)}` },
      h("span", { class: "share" }, one ? share(one / total) : ""),
      h("div", { class: "bar", style: { height: `${(one / most) * 100}%` } }),
      h("span", { class: "lag" }, String(lag)))));
}

/** What each part spends its time on. */
export function shares(waits) {
  const names = new Set();
  const rows = Object.entries(waits).sort(([a], [b]) => (a === "trainer" ? -1 : b === "trainer" ? 1 : a.localeCompare(b))).map(([part, spans]) => {
    const known = Object.entries(spans).filter(([, value]) => value > 0.0005);
    // Spans of a rollouter may overlap: it generates while it waits for rewards. Then they are shown to scale of their sum.
    const sum = Math.max(1, known.reduce((total, [, value]) => total + value, 0));
    known.sort(([a], [b]) => Number(a.startsWith("wait")) - Number(b.startsWith("wait")));
    known.forEach(([name]) => names.add(name));
    const told = known.map(([name, value]) => `${spanName(name)} ${share(value)}`).join(", ");
    return [h("span", {}, part), h("div", { class: "track", role: "img", "aria-label": `${part}: ${told}` },
      known.map(([name, value]) => h("div", { title: `${spanName(name)} ${share(value, 1)}`, style: { width: `${(value / sum) * 100}%`, background: colour(spanColour(name)) } })))];
  });
  return h("div", {}, h("div", { class: "shares" }, rows), legend([...names].map((name) => [spanName(name), spanColour(name)])));
}

export function legend(items) {
  return h("div", { class: "legend" }, items.map(([label, ink]) => h("span", { class: "item" }, h("i", { class: "swatch block", style: { background: colour(ink) } }), label)));
}

/** Reasons by how often. */
export function ranked(found, ink = "bad") {
  const rows = Object.entries(found).sort(([, a], [, b]) => b - a);
  const most = rows[0]?.[1] || 1;
  return h("div", { class: "ranked" }, rows.map(([name, value]) => [
    h("span", {}, name.replaceAll("_", " ")),
    h("div", { class: "track" }, h("div", { style: { width: `${(value / most) * 100}%`, background: colour(ink) } })),
    h("span", { class: "num" }, count(value))]));
}
