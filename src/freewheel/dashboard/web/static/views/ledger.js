// Is every prompt accounted for, and what became of one?

import { legend } from "../bars.js";
import { colour, empty, h, panel, svg, table, tiles } from "../dom.js";
import { bytes, count, duration, moment } from "../format.js";
import { response } from "../said.js";

export const title = "Ledger";

const STATES = { trained: "accent", abandoned: "wait", ended: "save", taken: "c5", queued: "c3", failed: "bad", open: "line-strong" };
const MEANINGS = {
  trained: "a committed step has it", abandoned: "given up, for a reason", ended: "by a checkpoint's word; its own record is gone", taken: "in the step that is being trained",
  queued: "scored, and safe in the journal", failed: "to be attempted again", open: "in flight, or issued again by a resume",
};

export function mount(root, app, rest) {
  const number_ = h("input", { class: "field", type: "search", inputmode: "numeric", size: "14", placeholder: "Prompt number", "aria-label": "Prompt number", value: rest[0] ?? "" });
  const look = h("button", { type: "button", class: "button", onclick: () => follow() }, "Look it up");
  const again = h("button", { type: "button", class: "button push", onclick: () => fill() }, "Audit again");
  const life = h("div", { class: "span-12" });
  const report = h("div", { class: "grid span-12" });
  root.append(h("div", { class: "toolbar" }, number_, look, again), h("div", { class: "grid" }, life, report));
  number_.addEventListener("keydown", (event) => { if (event.key === "Enter") follow(); });
  let gone = false;

  async function fill() {
    again.disabled = true;
    again.textContent = "Auditing…";
    try {
      const found = await app.get("/ledger");
      if (!gone) report.replaceChildren(...(found.report ? audit(found.report) : [panel(null, {}, empty("This cannot be audited", found.error))]));
    } catch (error) {
      if (!gone) report.replaceChildren(panel(null, {}, empty("This cannot be audited", error.message)));
    }
    again.disabled = false;
    again.textContent = "Audit again";
  }

  async function follow() {
    const wanted = number_.value.replace(/[#,\s]/g, "");
    if (!/^\d+$/.test(wanted)) { life.replaceChildren(); return; }
    try {
      const found = await app.get(`/prompts/${wanted}`);
      if (!gone) life.replaceChildren(found.life ? one(found.life) : panel(null, {}, empty("Nothing is known of it", found.error)));
    } catch (error) {
      if (!gone) life.replaceChildren(panel(null, {}, empty("This cannot be shown", error.message)));
    }
  }

  fill();
  if (rest[0]) follow();
  return {
    key(event) {
      if (event.key !== "/") return false;
      number_.focus();
      return true;
    },
    destroy: () => { gone = true; },
  };
}

function audit(report) {
  const clean = !report.violations.length;
  const total = Object.values(report.states).reduce((sum, one) => sum + one, 0);
  const known = Object.entries(report.states).filter(([, one]) => one);
  const reasons = { abandoned: report.abandoned, failed: report.failures };
  return [
    panel(null, { span: 12 },
      h("p", { class: `verdict ${clean ? "good" : "bad"}`, role: "status" }, svg(clean ? "M20 6L9 17l-5-5" : "M12 8v5M12 16.5v.01M3.5 20h17L12 4z"),
        clean ? "Every prompt is accounted for" : report.violations.length === 1 ? "1 violation" : `${count(report.violations.length)} violations`),
      clean ? null : h("ul", { class: "plain-list bad", style: { "margin-top": "10px" } }, report.violations.map((text) => h("li", {}, text))),
      !total ? null : h("div", { class: "states", role: "img", "aria-label": known.map(([name, value]) => `${name} ${value}`).join(", ") },
        known.map(([name, value]) => h("div", { title: `${name}: ${count(value)}`, style: { width: `${(value / total) * 100}%`, "min-width": "3px", background: colour(STATES[name] ?? "faint") } }))),
      legend(known.map(([name, value]) => [`${name} ${count(value)}`, STATES[name] ?? "faint"]))),
    tiles([
      ["Prompts", count(total), null, `step ${count(report.steps)}, version ${count(report.version)}`],
      ["Lost", count(report.lost)], ["Repeated", count(report.repeated)], ["Trained too old", count(report.stale_trained)],
      ["Failed attempts", count(Object.values(report.failures).reduce((sum, value) => sum + value, 0))],
      ["Journal", report.journal ? bytes(report.journal.bytes) : "none", null, report.journal ? `base at step ${count(report.journal.base)}` : null],
    ]),
    panel("States", { span: 7, wide: true }, !total ? empty("No prompt is known", "") : table(["State", { right: "Prompts" }, "Meaning"], known.map(([name, value]) => [
      name, { right: count(value) }, h("span", { class: "muted" }, [MEANINGS[name], ...Object.entries(reasons[name] ?? {}).map(([why, times]) => `${why.replaceAll("_", " ")} ${count(times)}`)].filter(Boolean).join(" · ")),
    ]), { label: "Prompts by state" })),
    panel("Checkpoints", { span: 5 }, report.checkpoints.length ? table(["Step", "Version", "State"], report.checkpoints.map((saved) => [
      count(saved.step), saved.version === null ? "–" : `v${count(saved.version)}`, saved.damaged ? h("span", { class: "bad" }, saved.damaged) : h("span", { class: "good" }, "whole"),
    ]), { label: "Checkpoints" }) : empty("None yet", ""),
    report.notes.length ? [h("h2", { style: { margin: "18px 0 8px" } }, "Notes"), h("ul", { class: "plain-list muted" }, report.notes.map((text) => h("li", {}, text)))] : null),
  ];
}

function one(life) {
  const marks = [
    life.created_s && [life.created_s, "generation began"],
    ...life.failed.map((attempt) => [attempt.wall_s, `attempt ${attempt.attempt + 1} failed: ${attempt.reason}${attempt.detail ? ` (${attempt.detail.split("\n")[0]})` : ""}`, true]),
    life.stored_s && [life.stored_s, "scored and stored in the journal"],
    life.committed_s && [life.committed_s, `trained on in step ${count(life.step)}, which made version ${count(life.version)}`],
    life.ended_s && [life.ended_s, `abandoned: ${life.abandoned}`, true],
  ].filter(Boolean).sort((a, b) => a[0] - b[0]);
  return panel(`Prompt #${count(life.group)}: ${life.state}`, { note: life.sequence === null ? null : `sequence ${count(life.sequence)}` },
    marks.length ? h("ol", { class: "life" }, marks.map(([at, words, failed], index) => h("li", { class: failed ? "failed" : null },
      h("span", { class: "muted" }, `${moment(at)}${index ? `, ${duration(at - marks[index - 1][0])} later` : ""} `), h("br"), words))) : null,
    life.prompt_tokens.length ? h("div", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, life.prompt ?? JSON.stringify(life.prompt_tokens)) : null,
    life.responses.map((said, index) => response(index, {
      ...said, tokens: said.tokens.length, segments: [[null, `${said.text ?? JSON.stringify(said.tokens)}\n`]],
      parts: { ...said.parts },
    }, new Map())),
    life.notes.length ? h("ul", { class: "plain-list muted", style: { "margin-top": "12px" } }, life.notes.map((text) => h("li", {}, text))) : null);
}
