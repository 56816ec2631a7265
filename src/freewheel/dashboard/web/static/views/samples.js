// Prompts and what was said to them, with what each response got.

import { empty, h, orWords, panel } from "../dom.js";
import { ago, count, moment, number, plural } from "../format.js";
import { legend, palette, response } from "../said.js";

export const title = "Samples";

const FOLLOW_MS = 3000;
const FILTERS = [["", "All"], ["mixed", "Mixed rewards"], ["failed", "Failed"], ["skipped", "Skipped"], ["cut_off", "Cut off"]];

export function mount(root, app, rest) {
  let only = "";
  let cards = [];
  let current = null;
  let gone = false;
  let asked = 0;
  const find = h("input", { class: "field", type: "search", placeholder: "Find in prompts, or #number", "aria-label": "Find in prompts, or #number", size: "26", value: rest[0] ? `#${rest[0]}` : "" });
  const filters = FILTERS.map(([name, label]) => h("button", { type: "button", class: "button", "aria-pressed": String(name === only), onclick: () => {
    only = name;
    filters.forEach((one, at) => one.setAttribute("aria-pressed", String(FILTERS[at][0] === only)));
    fill(true);
  } }, label));
  const total = h("span", { class: "muted push" });
  const list = h("div", { class: "cards", role: "group", "aria-label": "Groups, newest first" });
  const more = h("button", { type: "button", class: "button", onclick: () => fill(false, cards[cards.length - 1]?.time) }, "Older");
  const shown = h("div", {});
  const { body, words, say } = orWords(h("div", { class: "toolbar" }, find, filters, total), h("div", { class: "samples" }, h("div", {}, list, more), shown));
  root.append(body, words);
  let typing;
  find.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => fill(true), 180); });

  async function fill(fresh, before = null) {
    const mine = (asked += 1);
    let found;
    try {
      found = await app.get("/samples", { find: find.value, only, before });
    } catch (error) {
      if (!gone) say(panel(null, {}, empty("This cannot be shown", error.message)));
      return;
    }
    if (gone || mine !== asked) return;
    if (!found.total) {
      say(panel(null, {}, empty(found.recorded ? "No sample yet" : "Not recorded", found.recorded
        ? "The first group is on its way." : "Samples come from the files in samples/, which a run writes unless observe.samples_per_s is 0.")));
      return;
    }
    say(null);
    cards = before === null ? found.cards : [...cards, ...found.cards];
    more.hidden = cards.length >= found.found + (before === null ? 0 : cards.length - found.cards.length);
    total.textContent = find.value || only ? `${count(found.found)} of ${plural(found.total, "group")}` : plural(found.total, "group");
    drawList();
    if (fresh || !current || !cards.length) pick(cards[0]?.key ?? null);
  }

  function drawList() {
    const { scrollTop } = list;
    const focused = document.activeElement?.dataset?.key;
    list.replaceChildren(...(cards.length ? cards.map(card) : [empty("Nothing matches", "")]));
    list.scrollTop = scrollTop;
    if (focused) list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function card(one) {
    return h("button", { type: "button", class: "card", data: { key: one.key }, "aria-current": String(one.key === current), onclick: () => pick(one.key) },
      h("span", { class: "line" }, h("span", {}, `#${count(one.ordinal)}`), h("span", { title: moment(one.time) }, ago(one.time))),
      h("span", { class: "text" }, one.prompt),
      h("span", { class: "line" }, h("span", { class: "num" }, one.mean === null ? "no reward" : `mean ${number(one.mean, 2)} · ${number(one.worst, 2)} to ${number(one.best, 2)}`),
        one.failed ? h("span", { class: "bad" }, `${one.failed} failed`) : one.cut_off ? h("span", { class: "warn" }, `${one.cut_off} cut off`) : h("span", {}, plural(one.responses, "response"))));
  }

  async function pick(key) {
    current = key;
    list.querySelectorAll(".card").forEach((one) => one.setAttribute("aria-current", String(one.dataset.key === key)));
    if (key === null) { shown.replaceChildren(); return; }
    try {
      const found = await app.get(`/samples/${encodeURIComponent(key)}`);
      if (!gone && current === key) shown.replaceChildren(sample(found, app));
    } catch (error) {
      if (!gone) shown.replaceChildren(panel(null, {}, empty("It is no longer there", error.message)));
    }
  }

  function step(by) {
    const at = cards.findIndex((one) => one.key === current);
    const next = cards[Math.min(Math.max(at + by, 0), cards.length - 1)];
    if (!next) return;
    pick(next.key);
    list.querySelector(`[data-key="${CSS.escape(next.key)}"]`)?.scrollIntoView({ block: "nearest" });
  }

  const timer = setInterval(() => { if (!document.hidden && (body.hidden || (app.data.now.state === "live" && list.scrollTop < 40))) fill(false); }, FOLLOW_MS);
  fill(true);
  return {
    key(event) {
      if (event.key === "/") find.focus();
      else if (event.key === "j") step(1);
      else if (event.key === "k") step(-1);
      else return false;
      return true;
    },
    destroy: () => { gone = true; clearInterval(timer); clearTimeout(typing); },
  };
}

function sample(found, app) {
  const responses = found.responses ?? [];
  const versions = responses.flatMap((one) => one.segments.map(([version]) => version));
  const colours = palette(versions);
  const row = Object.entries(found.row ?? {}).filter(([, value]) => value !== null && value !== "");
  return panel(`Group #${count(found.ordinal)}`, { note: `${found.replica ?? ""} · attempt ${(found.attempt ?? 0) + 1} · ${moment(found.time)}` },
    h("div", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, found.prompt),
    h("div", { class: "toolbar", style: { margin: "12px 0 4px" } }, legend(colours, versions.includes(-1)),
      h("button", { type: "button", class: "button push", onclick: () => app.open("ledger", String(found.ordinal)) }, "Its life in the ledger")),
    row.length ? h("details", { class: "muted" }, h("summary", {}, "Its row of the data"), h("pre", { class: "prompt" }, JSON.stringify(found.row, null, 2))) : null,
    responses.map((one, index) => response(index, one, colours)));
}
