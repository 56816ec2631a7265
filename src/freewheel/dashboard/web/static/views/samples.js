// Prompts, their responses and the rewards.

import { bodyOrMessage, emptyState, h, panel } from "../dom.js";
import { ago, count, dateTime, number, plural } from "../format.js";
import { assignColours, responseArticle, versionLegend } from "../response.js";

export const title = "Samples";

const FOLLOW_MS = 3000;
const FILTERS = [["", "All"], ["mixed", "Mixed rewards"], ["failed", "Failed"], ["skipped", "Skipped"], ["cut_off", "Cut off"]];

export function mount(root, app, rest) {
  let filter = "";
  let cards = [];
  let current = null;
  let destroyed = false;
  let requests = 0;
  const search = h("input", { class: "field", type: "search", placeholder: "Prompt text or #number", "aria-label": "Search prompts, or #number", size: "26", value: rest[0] ? `#${rest[0]}` : "" });
  const filters = FILTERS.map(([name, label]) => h("button", { type: "button", class: "button", "aria-pressed": String(name === filter), onclick: () => {
    filter = name;
    filters.forEach((button, index) => button.setAttribute("aria-pressed", String(FILTERS[index][0] === filter)));
    refresh(true);
  } }, label));
  const total = h("span", { class: "muted push" });
  const list = h("div", { class: "cards", role: "group", "aria-label": "Groups, newest first" });
  const olderButton = h("button", { type: "button", class: "button", onclick: () => refresh(false, cards[cards.length - 1]?.time) }, "Older");
  const details = h("div", {});
  const { body, message, showMessage } = bodyOrMessage(h("div", { class: "toolbar" }, search, filters, total), h("div", { class: "samples" }, h("div", {}, list, olderButton), details));
  root.append(body, message);
  let typing;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => refresh(true), 180); });

  async function refresh(reselect, before = null) {
    const request = (requests += 1);
    let data;
    try {
      data = await app.get("/samples", { find: search.value, only: filter, before });
    } catch (error) {
      if (!destroyed) showMessage(panel(null, {}, emptyState("Cannot show the samples", error.message)));
      return;
    }
    if (destroyed || request !== requests) return;
    if (!data.total) {
      showMessage(panel(null, {}, emptyState(data.recorded ? "No samples yet" : "Not recorded", data.recorded
        ? "The first group has not finished yet." : "Samples are read from the files in samples/. A run writes them unless observe.samples_per_s is 0.")));
      return;
    }
    showMessage(null);
    cards = before === null ? data.cards : [...cards, ...data.cards];
    olderButton.hidden = cards.length >= data.found + (before === null ? 0 : cards.length - data.cards.length);
    total.textContent = search.value || filter ? `${count(data.found)} of ${plural(data.total, "group")}` : plural(data.total, "group");
    drawList();
    if (reselect || !current || !cards.length) select(cards[0]?.key ?? null);
  }

  function drawList() {
    const { scrollTop } = list;
    const focused = document.activeElement?.dataset?.key;
    list.replaceChildren(...(cards.length ? cards.map(buildCard) : [emptyState("Nothing matches", "")]));
    list.scrollTop = scrollTop;
    if (focused) list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function buildCard(card) {
    return h("button", { type: "button", class: "card", data: { key: card.key }, "aria-current": String(card.key === current), onclick: () => select(card.key) },
      h("span", { class: "line" }, h("span", {}, `#${count(card.ordinal)}`), h("span", { title: dateTime(card.time) }, ago(card.time))),
      h("span", { class: "text" }, card.prompt),
      h("span", { class: "line" }, h("span", { class: "num" }, card.mean === null ? "no reward" : `mean ${number(card.mean, 2)} · ${number(card.worst, 2)} to ${number(card.best, 2)}`),
        card.failed ? h("span", { class: "bad" }, `${card.failed} failed`) : card.cut_off ? h("span", { class: "warn" }, `${card.cut_off} cut off`) : h("span", {}, plural(card.responses, "response"))));
  }

  async function select(key) {
    current = key;
    list.querySelectorAll(".card").forEach((card) => card.setAttribute("aria-current", String(card.dataset.key === key)));
    if (key === null) { details.replaceChildren(); return; }
    try {
      const data = await app.get(`/samples/${encodeURIComponent(key)}`);
      if (!destroyed && current === key) details.replaceChildren(buildGroup(data, app));
    } catch (error) {
      if (!destroyed) details.replaceChildren(panel(null, {}, emptyState("This sample no longer exists", error.message)));
    }
  }

  function moveSelection(by) {
    const index = cards.findIndex((card) => card.key === current);
    const next = cards[Math.min(Math.max(index + by, 0), cards.length - 1)];
    if (!next) return;
    select(next.key);
    list.querySelector(`[data-key="${CSS.escape(next.key)}"]`)?.scrollIntoView({ block: "nearest" });
  }

  const timer = setInterval(() => { if (!document.hidden && (body.hidden || (app.data.now.state === "live" && list.scrollTop < 40))) refresh(false); }, FOLLOW_MS);
  refresh(true);
  return {
    key(event) {
      if (event.key === "/") search.focus();
      else if (event.key === "j") moveSelection(1);
      else if (event.key === "k") moveSelection(-1);
      else return false;
      return true;
    },
    destroy: () => { destroyed = true; clearInterval(timer); clearTimeout(typing); },
  };
}

function buildGroup(group, app) {
  const responses = group.responses ?? [];
  const versions = responses.flatMap((response) => response.segments.map(([version]) => version));
  const colours = assignColours(versions);
  const row = Object.entries(group.row ?? {}).filter(([, value]) => value !== null && value !== "");
  return panel(`Group #${count(group.ordinal)}`, { note: `${group.replica ?? ""} · attempt ${(group.attempt ?? 0) + 1} · ${dateTime(group.time)}` },
    h("div", { class: "prompt", tabindex: "0", "aria-label": "Prompt" }, group.prompt),
    h("div", { class: "toolbar", style: { margin: "12px 0 4px" } }, versionLegend(colours, versions.includes(-1)),
      h("button", { type: "button", class: "button push", onclick: () => app.open("ledger", String(group.ordinal)) }, "Show in ledger")),
    row.length ? h("details", { class: "muted" }, h("summary", {}, "Data row"), h("pre", { class: "prompt" }, JSON.stringify(group.row, null, 2))) : null,
    responses.map((response, index) => responseArticle(index, response, colours)));
}
