// Weight versions on their way from the trainer to the engines.

import { LineChart } from "../chart.js";
import { empty, h, panel, table, tiles } from "../dom.js";
import { fetched } from "../fetched.js";
import { bytes, clock, count, duration, elapsed, plural } from "../format.js";

export const title = "Weights";

const SHOWN = 100;

export function mount(root, app) {
  const took = new LineChart({
    title: "Time of a sync", height: 200, x: { label: "version", format: (value) => `v${count(value)}` }, y: { low: 0, format: duration },
    curves: [{ name: "took", label: "time", colour: "accent", fill: true, points: true }],
  });
  const lag = new LineChart({
    title: "Versions", height: 200, x: { format: elapsed, label: "time" },
    curves: [{ name: "version", label: "trainer", colour: "accent" }, { name: "published_version", label: "all engines", colour: "c2" }],
  });
  const { fill, leave } = fetched(root, app, "/weights", {
    draw: (found) => content(found, took, lag),
    drawn: (found) => {
      const done = found.syncs.filter((one) => one.took_s !== null && !one.failed).reverse();
      took.set(done.length ? { took: { x: done.map((one) => one.version), y: done.map((one) => one.took_s) } } : {});
      lag.set(app.data.pulses);
    },
  });
  return {
    update: (change) => {
      if (change.all || change.syncs || change.statistics) fill();
      else lag.set(app.data.pulses);
    },
    destroy: () => { leave(); took.destroy(); lag.destroy(); },
  };
}

function content({ recorded, syncs, seen, sync, engines, version, published_version: published }, took, lag) {
  if (!recorded && !sync) return [panel(null, {}, empty("No weights were sent yet", "The first version goes out after the first step."))];
  const made = [
    tiles([
      ["Trainer", version === null ? "–" : `v${count(version)}`],
      ["All engines", published === null ? "–" : `v${count(published)}`, null, "the newest that each of them holds"],
      sync && ["Last sync", duration(sync.last_sync_s), null, `mean ${duration(sync.mean_sync_s)}`],
      sync && ["Longest", duration(sync.longest_sync_s)],
      sync && ["Failed attempts", count(sync.sync_failures), null, "each was tried again"],
      syncs[0]?.bytes ? ["Size", bytes(syncs[0].bytes), null, "of a version"] : null,
    ]),
    panel("Time of a sync", { span: 6 }, recorded ? took.element : empty("Not recorded", "This run has no rows of single syncs.")),
    panel("Versions", { span: 6 }, lag.element),
  ];
  if (engines.length) {
    made.push(panel("Engines", { span: 12 }, h("div", { class: "picks" }, engines.map((one) => h("span", { class: `chip ${one.fenced ? "bad" : one.behind ? "warn" : one.behind === 0 ? "good" : ""}` },
      `${one.name} v${count(one.version)}${one.fenced ? ", fenced off: its update failed" : one.behind ? `, ${plural(one.behind, "version")} behind` : ""}`)))));
  }
  if (recorded) {
    made.push(panel("Sync log", { span: 12, note: seen > SHOWN ? `the last ${SHOWN} of ${count(seen)}` : plural(seen, "sync") }, table(
      ["Version", "When", { right: "Took" }, { right: "Size" }, "Engines", "Result"],
      syncs.slice(0, SHOWN).map((one) => {
        const parts = Object.entries(one.engines);
        const errors = parts.filter(([, engine]) => engine.error);
        return [
          `v${count(one.version)}`, clock(one.time), { right: duration(one.took_s) }, { right: bytes(one.bytes) },
          h("span", { class: "muted" }, parts.map(([name, engine]) => `${name} ${duration(engine.took_s)}${engine.attempts > 1 ? ` (${engine.attempts} attempts)` : ""}`).join(", ") || "–"),
          one.failed ? h("span", { class: "bad" }, errors.map(([name, engine]) => `${name}: ${engine.error}`).join("; ") || "failed")
            : errors.length ? h("span", { class: "warn" }, errors.map(([name, engine]) => `${name}: ${engine.error}`).join("; ")) : h("span", { class: "good" }, "published"),
        ];
      }), { label: "Weight syncs, newest first" })));
  }
  return made;
}
