// Audit of all prompts, and the history of one.

import { legend } from "../bars.js";
import { colour, emptyState, h, icon, panel, table, tiles } from "../dom.js";
import { bytes, count, dateTime, duration } from "../format.js";
import { responseArticle } from "../response.js";

export const title = "Ledger";

const STATES = { trained: "accent", abandoned: "wait", ended: "save", taken: "c5", queued: "c3", failed: "bad", open: "line-strong" };
const MEANINGS = {
  trained: "trained on in a committed step", abandoned: "given up", ended: "ended according to a checkpoint; its own record is missing", taken: "in the current training step",
  queued: "scored and stored in the journal", failed: "will be retried", open: "in flight, or to be issued again after a resume",
};

export function mount(root, app, rest) {
  const ordinalInput = h("input", { class: "field", type: "search", inputmode: "numeric", size: "14", placeholder: "Prompt number", "aria-label": "Prompt number", value: rest[0] ?? "" });
  const lookUpButton = h("button", { type: "button", class: "button", onclick: () => lookUp() }, "Look up");
  const auditButton = h("button", { type: "button", class: "button push", onclick: () => runAudit() }, "Audit again");
  const history = h("div", { class: "span-12" });
  const report = h("div", { class: "grid span-12" });
  root.append(h("div", { class: "toolbar" }, ordinalInput, lookUpButton, auditButton), h("div", { class: "grid" }, history, report));
  ordinalInput.addEventListener("keydown", (event) => { if (event.key === "Enter") lookUp(); });
  let destroyed = false;

  async function runAudit() {
    auditButton.disabled = true;
    auditButton.textContent = "Auditing…";
    try {
      const data = await app.get("/ledger");
      if (!destroyed) report.replaceChildren(...(data.report ? buildReport(data.report) : [panel(null, {}, emptyState("Cannot audit this run", data.error))]));
    } catch (error) {
      if (!destroyed) report.replaceChildren(panel(null, {}, emptyState("Cannot audit this run", error.message)));
    }
    auditButton.disabled = false;
    auditButton.textContent = "Audit again";
  }

  async function lookUp() {
    const ordinal = ordinalInput.value.replace(/[#,\s]/g, "");
    if (!/^\d+$/.test(ordinal)) { history.replaceChildren(); return; }
    try {
      const data = await app.get(`/prompts/${ordinal}`);
      if (!destroyed) history.replaceChildren(data.life ? buildHistory(data.life) : panel(null, {}, emptyState("No record of this prompt", data.error)));
    } catch (error) {
      if (!destroyed) history.replaceChildren(panel(null, {}, emptyState("Cannot show this prompt", error.message)));
    }
  }

  runAudit();
  if (rest[0]) lookUp();
  return {
    key(event) {
      if (event.key !== "/") return false;
      ordinalInput.focus();
      return true;
    },
    destroy: () => { destroyed = true; },
  };
}

function buildReport(report) {
  const clean = !report.violations.length;
  const total = Object.values(report.states).reduce((sum, value) => sum + value, 0);
  const states = Object.entries(report.states).filter(([, value]) => value);
  const reasons = { abandoned: report.abandoned, failed: report.failures };
  return [
    panel(null, { span: 12 },
      h("p", { class: `verdict ${clean ? "good" : "bad"}`, role: "status" }, icon(clean ? "M20 6L9 17l-5-5" : "M12 8v5M12 16.5v.01M3.5 20h17L12 4z"),
        clean ? "Every prompt is accounted for" : report.violations.length === 1 ? "1 violation" : `${count(report.violations.length)} violations`),
      clean ? null : h("ul", { class: "plain-list bad", style: { "margin-top": "10px" } }, report.violations.map((text) => h("li", {}, text))),
      !total ? null : h("div", { class: "states", role: "img", "aria-label": states.map(([name, value]) => `${name} ${value}`).join(", ") },
        states.map(([name, value]) => h("div", { title: `${name}: ${count(value)}`, style: { width: `${(value / total) * 100}%`, "min-width": "3px", background: colour(STATES[name] ?? "faint") } }))),
      legend(states.map(([name, value]) => [`${name} ${count(value)}`, STATES[name] ?? "faint"]))),
    tiles([
      ["Prompts", count(total), null, `step ${count(report.steps)}, version ${count(report.version)}`],
      ["Lost", count(report.lost)], ["Repeated", count(report.repeated)], ["Trained while stale", count(report.stale_trained)],
      ["Failed attempts", count(Object.values(report.failures).reduce((sum, value) => sum + value, 0))],
      ["Journal", report.journal ? bytes(report.journal.bytes) : "none", null, report.journal ? `base at step ${count(report.journal.base)}` : null],
    ]),
    panel("States", { span: 7, wide: true }, !total ? emptyState("No prompts", "") : table(["State", { right: "Prompts" }, "Meaning"], states.map(([name, value]) => [
      name, { right: count(value) }, h("span", { class: "muted" }, [MEANINGS[name], ...Object.entries(reasons[name] ?? {}).map(([reason, times]) => `${reason.replaceAll("_", " ")} ${count(times)}`)].filter(Boolean).join(" · ")),
    ]), { label: "Prompts by state" })),
    panel("Checkpoints", { span: 5 }, report.checkpoints.length ? table(["Step", "Version", "State"], report.checkpoints.map((checkpoint) => [
      count(checkpoint.step), checkpoint.version === null ? "–" : `v${count(checkpoint.version)}`, checkpoint.damaged ? h("span", { class: "bad" }, checkpoint.damaged) : h("span", { class: "good" }, "complete"),
    ]), { label: "Checkpoints" }) : emptyState("None yet", ""),
    report.notes.length ? [h("h2", { style: { margin: "18px 0 8px" } }, "Notes"), h("ul", { class: "plain-list muted" }, report.notes.map((text) => h("li", {}, text)))] : null),
  ];
}

function buildHistory(life) {
  const events = [
    life.created_s && [life.created_s, "generation started"],
    ...life.failed.map((attempt) => [attempt.wall_s, `attempt ${attempt.attempt + 1} failed: ${attempt.reason}${attempt.detail ? ` (${attempt.detail.split("\n")[0]})` : ""}`, true]),
    life.stored_s && [life.stored_s, "scored and stored in the journal"],
    life.committed_s && [life.committed_s, `trained on in step ${count(life.step)}, producing version ${count(life.version)}`],
    life.ended_s && [life.ended_s, `abandoned: ${life.abandoned}`, true],
  ].filter(Boolean).sort((a, b) => a[0] - b[0]);
  return panel(`Prompt #${count(life.group)}: ${life.state}`, { note: life.sequence === null ? null : `sequence ${count(life.sequence)}` },
    events.length ? h("ol", { class: "life" }, events.map(([time, text, failed], index) => h("li", { class: failed ? "failed" : null },
      h("span", { class: "muted" }, `${dateTime(time)}${index ? `, ${duration(time - events[index - 1][0])} later` : ""} `), h("br"), text))) : null,
    life.prompt_tokens.length ? h("div", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, life.prompt ?? JSON.stringify(life.prompt_tokens)) : null,
    life.responses.map((response, index) => responseArticle(index, {
      ...response, tokens: response.tokens.length, segments: [[null, `${response.text ?? JSON.stringify(response.tokens)}\n`]],
      parts: { ...response.parts },
    }, new Map())),
    life.notes.length ? h("ul", { class: "plain-list muted", style: { "margin-top": "12px" } }, life.notes.map((text) => h("li", {}, text))) : null);
}
