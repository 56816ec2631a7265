// A response: what it got and why, and its text, coloured by the weight version that made each part.

import { h } from "./dom.js";
import { count, number } from "./format.js";

const COLOURS = 8;
const GIVEN = -1; // tokens that no engine made: what a tool said

/** Version → its place among those of a group, by which it is coloured. */
export function palette(versions) {
  const known = [...new Set(versions)].filter((one) => one !== GIVEN).sort((a, b) => a - b);
  return new Map(known.map((version, at) => [version, (at % COLOURS) + 1]));
}

const tint = (at) => (at === undefined
  ? { background: "var(--sunken)", "border-bottom-color": "var(--line-strong)", "border-bottom-style": "dotted" }
  : { background: `color-mix(in srgb, var(--c${at}) 13%, transparent)`, "border-bottom-color": `color-mix(in srgb, var(--c${at}) 65%, transparent)` });

export const versionName = (version) => (version === GIVEN ? "given, not generated" : `version ${count(version)}`);

export function legend(colours, given) {
  const rows = [...colours].map(([version, at]) => h("span", { class: "chip" }, h("i", { style: { background: `var(--c${at})` } }), versionName(version)));
  if (given) rows.push(h("span", { class: "chip" }, h("i", { style: { background: "var(--line-strong)" } }), versionName(GIVEN)));
  return h("div", { class: "picks", "aria-label": "Colours by weight version" }, rows);
}

/** One response. `segments`: [[version, text], …]. */
export function response(index, one, colours) {
  const penalty = one.parts?.length_penalty;
  const rest = Object.entries(one.parts ?? {}).filter(([name]) => name !== "length_penalty");
  const status = one.status === "failed" ? "bad" : one.status === "skipped" ? "warn" : null;
  return h("article", { class: "response", "aria-label": `Response ${index + 1}` },
    h("div", { class: "facts" },
      h("span", { class: "value" }, one.value === null || one.value === undefined ? "no reward" : number(one.value)),
      status ? h("span", { class: `chip ${status}`, title: one.reason || null }, one.status, one.reason ? `: ${one.reason}` : "") : null,
      one.raw !== null && one.raw !== undefined && one.raw !== one.value ? h("span", {}, `raw ${number(one.raw)}`) : null,
      penalty ? h("span", { class: "warn" }, `length penalty −${number(Math.abs(penalty))}`) : null,
      rest.map(([name, value]) => h("span", {}, `${name.replaceAll("_", " ")} ${number(value)}`)),
      h("span", {}, `${count(one.tokens)} tokens`),
      one.finish === "length" ? h("span", { class: "chip warn" }, "cut off") : null),
    h("div", { class: "said" }, one.segments.map(([version, text]) => h("span", {
      class: "token-run", title: version === null ? null : versionName(version), style: version === null ? {} : tint(colours.get(version)),
    }, text))));
}
