// Transfers of weight versions from the trainer to the engines.

import { LineChart } from "../chart.js";
import { emptyState, h, panel, table, tiles } from "../dom.js";
import { bytes, clock, count, duration, elapsed, plural } from "../format.js";
import { loadView } from "../view_loader.js";

export const title = "Weights";

const MAX_ROWS = 100;

export function mount(root, app) {
  const durationChart = new LineChart({
    title: "Sync duration", height: 200, x: { label: "version", format: (value) => `v${count(value)}` }, y: { low: 0, format: duration },
    curves: [{ name: "took", label: "duration", colour: "accent", fill: true, points: true }],
  });
  const versionChart = new LineChart({
    title: "Versions", height: 200, x: { format: elapsed, label: "time" },
    curves: [{ name: "version", label: "trainer", colour: "accent" }, { name: "published_version", label: "all engines", colour: "c2" }],
  });
  const { refresh, destroy } = loadView(root, app, "/weights", {
    build: (data) => buildPanels(data, durationChart, versionChart),
    afterBuild: (data) => {
      const done = data.syncs.filter((sync) => sync.took_s !== null && !sync.failed).reverse();
      durationChart.setData(done.length ? { took: { x: done.map((sync) => sync.version), y: done.map((sync) => sync.took_s) } } : {});
      versionChart.setData(app.data.pulses);
    },
  });
  return {
    update: (change) => {
      if (change.all || change.syncs || change.statistics) refresh();
      else versionChart.setData(app.data.pulses);
    },
    destroy: () => { destroy(); durationChart.destroy(); versionChart.destroy(); },
  };
}

function buildPanels({ recorded, syncs, seen, sync, engines, version, published_version: published }, durationChart, versionChart) {
  if (!recorded && !sync) return [panel(null, {}, emptyState("No weights sent yet", "The first version is sent after the first step."))];
  const panels = [
    tiles([
      ["Trainer", version === null ? "–" : `v${count(version)}`],
      ["All engines", published === null ? "–" : `v${count(published)}`, null, "newest version on every engine"],
      sync && ["Last sync", duration(sync.last_sync_s), null, `mean ${duration(sync.mean_sync_s)}`],
      sync && ["Longest sync", duration(sync.longest_sync_s)],
      sync && ["Failed attempts", count(sync.sync_failures), null, "all were retried"],
      syncs[0]?.bytes ? ["Size", bytes(syncs[0].bytes), null, "per version"] : null,
    ]),
    panel("Sync duration", { span: 6 }, recorded ? durationChart.element : emptyState("Not recorded", "This run has no records of individual syncs.")),
    panel("Versions", { span: 6 }, versionChart.element),
  ];
  if (engines.length) {
    panels.push(panel("Engines", { span: 12 }, h("div", { class: "picks" }, engines.map((engine) => h("span", { class: `chip ${engine.fenced ? "bad" : engine.behind ? "warn" : engine.behind === 0 ? "good" : ""}` },
      `${engine.name} v${count(engine.version)}${engine.fenced ? ", fenced: its update failed" : engine.behind ? `, ${plural(engine.behind, "version")} behind` : ""}`)))));
  }
  if (recorded) {
    panels.push(panel("Sync log", { span: 12, note: seen > MAX_ROWS ? `last ${MAX_ROWS} of ${count(seen)}` : plural(seen, "sync") }, table(
      ["Version", "Time", { right: "Duration" }, { right: "Size" }, "Engines", "Result"],
      syncs.slice(0, MAX_ROWS).map((row) => {
        const parts = Object.entries(row.engines);
        const errors = parts.filter(([, engine]) => engine.error);
        return [
          `v${count(row.version)}`, clock(row.time), { right: duration(row.took_s) }, { right: bytes(row.bytes) },
          h("span", { class: "muted" }, parts.map(([name, engine]) => `${name} ${duration(engine.took_s)}${engine.attempts > 1 ? ` (${engine.attempts} attempts)` : ""}`).join(", ") || "–"),
          row.failed ? h("span", { class: "bad" }, errors.map(([name, engine]) => `${name}: ${engine.error}`).join("; ") || "failed")
            : errors.length ? h("span", { class: "warn" }, errors.map(([name, engine]) => `${name}: ${engine.error}`).join("; ")) : h("span", { class: "good" }, "published"),
        ];
      }), { label: "Weight syncs, newest first" })));
  }
  return panels;
}
