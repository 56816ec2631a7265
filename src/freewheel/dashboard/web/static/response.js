// A response: its reward and verdict, and its text coloured by the weight version that generated each part.

import { h } from "./dom.js";
import { count, number } from "./format.js";

const COLOURS = 8;
const NOT_GENERATED = -1; // the version of tokens that no engine generated, such as a tool's output

/** Map each version of a group to the index of its colour. */
export function assignColours(versions) {
  const known = [...new Set(versions)].filter((version) => version !== NOT_GENERATED).sort((a, b) => a - b);
  return new Map(known.map((version, index) => [version, (index % COLOURS) + 1]));
}

const tint = (index) => (index === undefined
  ? { background: "var(--sunken)", "border-bottom-color": "var(--line-strong)", "border-bottom-style": "dotted" }
  : { background: `color-mix(in srgb, var(--c${index}) 13%, transparent)`, "border-bottom-color": `color-mix(in srgb, var(--c${index}) 65%, transparent)` });

export const versionName = (version) => (version === NOT_GENERATED ? "not generated" : `version ${count(version)}`);

export function versionLegend(colours, hasUngenerated) {
  const rows = [...colours].map(([version, index]) => h("span", { class: "chip" }, h("i", { style: { background: `var(--c${index})` } }), versionName(version)));
  if (hasUngenerated) rows.push(h("span", { class: "chip" }, h("i", { style: { background: "var(--line-strong)" } }), versionName(NOT_GENERATED)));
  return h("div", { class: "picks", "aria-label": "Colours by weight version" }, rows);
}

/** One response of a group. `segments` is a list of [version, text] pairs. */
export function responseArticle(index, response, colours) {
  const penalty = response.parts?.length_penalty;
  const otherParts = Object.entries(response.parts ?? {}).filter(([name]) => name !== "length_penalty");
  const status = response.status === "failed" ? "bad" : response.status === "skipped" ? "warn" : null;
  return h("article", { class: "response", "aria-label": `Response ${index + 1}` },
    h("div", { class: "facts" },
      h("span", { class: "value" }, response.value === null || response.value === undefined ? "no reward" : number(response.value)),
      status ? h("span", { class: `chip ${status}`, title: response.reason || null }, response.status, response.reason ? `: ${response.reason}` : "") : null,
      response.raw !== null && response.raw !== undefined && response.raw !== response.value ? h("span", {}, `raw ${number(response.raw)}`) : null,
      penalty ? h("span", { class: "warn" }, `length penalty −${number(Math.abs(penalty))}`) : null,
      otherParts.map(([name, value]) => h("span", {}, `${name.replaceAll("_", " ")} ${number(value)}`)),
      h("span", {}, `${count(response.tokens)} tokens`),
      response.finish === "length" ? h("span", { class: "chip warn" }, "cut off") : null),
    h("div", { class: "said" }, response.segments.map(([version, text]) => h("span", {
      class: "token-run", title: version === null ? null : versionName(version), style: version === null ? {} : tint(colours.get(version)),
    }, text))));
}
