// The frame around the views: which run, which view, what changes, and the keys.
//
//     address (#view/run/rest) ─▶ view.mount      events of the run ─▶ app.data ─▶ view.update

import { AGAIN_MS, Failed, follow, get, runPath } from "./api.js";
import { empty, h } from "./dom.js";
import { ago, count, duration, ending } from "./format.js";
import * as theme from "./theme.js";
import * as compare from "./views/compare.js";
import * as judge from "./views/judge.js";
import * as ledger from "./views/ledger.js";
import * as overview from "./views/overview.js";
import * as samples from "./views/samples.js";
import * as timeline from "./views/timeline.js";
import * as weights from "./views/weights.js";

const VIEWS = { overview, judge, weights, timeline, samples, ledger, compare };
const NAMES = Object.keys(VIEWS);
const MOST_POINTS = 6000; // of a curve that grew while the page was open; then it is fetched again, thinned
const SILENT_MS = 40_000; // the server says a word every 15 s at least
const BREAK_MS = 4000; // a connection that is made anew within it is not worth a word
const TICK_MS = 1000;
const [NAME_CHARS, NAME_CHARS_NARROW, NARROW] = [36, 20, 760]; // of a run's name in the header; on a phone; in pixels
const content = document.getElementById("content");
const by = (id) => document.getElementById(id);

const app = { runs: [], run: null, data: null, view: null, name: null, heard: 0, shown: 0, open, get: (rest, params) => get(runPath(app.run, rest), params) };
let stop = () => {};
let opened = 0;
let loads = 0;
let again;

// -- where --------------------------------------------------------------------------------------------------------

function place() {
  const [name, run, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  return { name: Object.hasOwn(VIEWS, name) ? name : "overview", run: run || null, rest };
}

function address(name, run, ...rest) {
  return `#${[name, run, ...rest].filter((one) => one !== null && one !== undefined).map(encodeURIComponent).join("/")}`;
}

function open(name, ...rest) {
  location.hash = address(name, app.run, ...rest);
}

async function go() {
  clearTimeout(again);
  const mine = (opened += 1);
  const { name, run, rest } = place();
  try {
    if (!app.runs.length || (run && !app.runs.some((one) => one.id === run))) app.runs = (await get("/runs")).runs;
    const wanted = run ? app.runs.find((one) => one.id === run) : app.runs[0];
    if (mine !== opened) return;
    if (!app.runs.length) { show(empty("There is no run here yet", "It appears when its folder does.")); return; }
    if (!wanted) { unknown(name, run); return; }
    if (app.run !== wanted.id || !app.data) await load(wanted.id);
    if (mine !== opened) return;
    mount(name, rest);
  } catch (error) {
    if (!(error instanceof Failed)) console.error(error);
    if (mine === opened) failed(error);
  }
}

/** Whether it is there: false where another was asked for meanwhile. What is shown of another run stays, and rests. */
async function load(id) {
  const mine = (loads += 1);
  stop();
  if (app.run !== id) {
    leave();
    Object.assign(app, { run: id, data: null });
  }
  let data;
  try {
    data = await get(runPath(id));
  } catch (error) {
    if (mine !== loads) return false;
    throw error;
  }
  if (mine !== loads) return false;
  app.data = data;
  app.heard = Date.now();
  by("runs").value = id;
  frame();
  stop = follow(id, data.cursor, { change, reload, connected });
  return true;
}

async function reload() {
  try {
    if (await load(app.run)) app.view?.update?.({ all: true });
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  stop();
  show(empty("This cannot be shown", error.message));
  app.data = null;
  frame();
  again = setTimeout(go, AGAIN_MS);
}

/** An address that names a run that is not there. */
function unknown(name, run) {
  stop();
  loads += 1;
  Object.assign(app, { run: null, data: null, name });
  links(name);
  frame();
  show(h("div", {}, empty(`There is no run ${run} here`, app.runs.length === 1 ? "This one is:" : "These are:"),
    h("ul", { class: "plain-list" }, app.runs.map((one) => h("li", {}, h("a", { href: address(name, one.id), title: one.folder }, one.name))))));
  document.title = "freewheel";
}

function links(name) {
  for (const link of document.querySelectorAll("[data-view]")) {
    link.href = address(link.dataset.view, app.run);
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function mount(name, rest) {
  leave();
  app.name = name;
  links(name);
  content.replaceChildren();
  window.scrollTo(0, 0);
  app.view = VIEWS[name].mount(content, app, rest);
  document.title = `${VIEWS[name].title} · ${app.data.name} · freewheel`;
}

function leave() {
  app.view?.destroy?.();
  app.view = null;
}

function show(node) {
  leave();
  content.replaceChildren(h("section", { class: "panel" }, node));
}

// -- what changes -------------------------------------------------------------------------------------------------

function append(curves, rows, x) {
  const at = rows[x] || [];
  for (const [name, values] of Object.entries(rows)) {
    if (name === x || name === "elapsed_s") continue;
    const curve = (curves[name] ||= { x: [], y: [] });
    values.forEach((value, index) => { if (value !== null) { curve.x.push(at[index]); curve.y.push(value); } });
  }
  return Object.values(curves).some((curve) => curve.x.length > MOST_POINTS);
}

function change(found) {
  const { data } = app;
  const long = [append(data.steps, found.steps, "step"), append(data.evals, found.evals, "step"), append(data.pulses, found.pulses, "elapsed_s")];
  Object.assign(data, { now: found.now, ages: found.ages, state: found.state, metrics: found.metrics });
  data.events.push(...found.events);
  app.heard = Date.now();
  frame();
  if (long.some(Boolean)) reload();
  else app.view?.update?.(found);
}

function connected(is) {
  app.connected = is;
  if (is) app.heard = Date.now();
  frame();
}

function frame() {
  const { data } = app;
  for (const id of ["state", "about", "progress-row"]) by(id).hidden = !data;
  choice();
  times();
  if (!data) return;
  const { now } = data;
  by("about").textContent = [data.mode.replaceAll("_", " "), data.task, data.model].filter(Boolean).join(" · ");
  const done = now.total_steps ? Math.min(1, now.step / now.total_steps) : 0;
  const bar = by("progress");
  bar.setAttribute("aria-valuenow", String(Math.round(done * 100)));
  bar.firstElementChild.style.width = `${done * 100}%`;
}

/** What goes on while nothing is heard. */
function times() {
  const { data } = app;
  const silent = Date.now() - Math.max(app.heard, app.shown);
  const lost = data !== null && (app.connected === false || silent > SILENT_MS);
  by("lost").hidden = !lost || silent < BREAK_MS;
  if (!data) return;
  const { now } = data;
  const pill = by("state");
  pill.dataset.state = lost ? "lost" : now.state;
  if (pill.textContent !== (lost ? "no connection" : now.state_words)) pill.textContent = lost ? "no connection" : now.state_words;
  if (lost) by("lost").textContent = `This page has not heard from its server for ${duration(Math.round((Date.now() - app.heard) / 1000))}, and shows what it said last. It ended with the run, or was stopped: freewheel dashboard ${data.folder} shows the run again.`;
  const left = now.eta_s !== null && now.state === "live" && !lost ? ` · ${duration(now.eta_s)} left` : "";
  const when = (now.state === "live" && !lost) || !now.last_row ? "" : ` · ${ago(now.last_row)}`;
  by("progress-words").textContent = `${count(now.step)}${now.total_steps ? ` / ${count(now.total_steps)}` : ""} steps · ${duration(now.elapsed_s)}${left}${when}`;
}

function choice() {
  const runs = by("runs");
  const shown = [app.run, ...app.runs.map((one) => one.id)].join();
  if (runs.dataset.shown === shown) return; // else a list that is open would close under the hand
  runs.dataset.shown = shown;
  const most = window.innerWidth < NARROW ? NAME_CHARS_NARROW : NAME_CHARS;
  runs.replaceChildren(
    ...(app.run === null ? [h("option", { selected: true, disabled: true }, "choose a run")] : []),
    ...app.runs.map((one) => h("option", { value: one.id, selected: one.id === app.run, title: one.folder }, ending(one.name, most))));
  runs.title = app.runs.find((one) => one.id === app.run)?.folder ?? "";
  const single = app.runs.length < 2 && app.run !== null;
  runs.toggleAttribute("data-single", single);
  runs.tabIndex = single ? -1 : 0;
}

// -- hands --------------------------------------------------------------------------------------------------------

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || by("keys").open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= NAMES.length) open(NAMES[number - 1]);
  else if (event.key === "t") theme.toggle();
  else if (event.key === "?") by("keys").showModal();
  else if (!app.view?.key?.(event)) return;
  event.preventDefault();
}

theme.start();
by("skip").addEventListener("click", (event) => { event.preventDefault(); content.focus(); }); // its hash would be a view's
by("theme").addEventListener("click", theme.toggle);
by("help").addEventListener("click", () => by("keys").showModal());
by("keys-close").addEventListener("click", () => by("keys").close());
by("runs").addEventListener("change", (event) => { location.hash = address(app.name || "overview", event.target.value); });
document.addEventListener("keydown", keys);
document.addEventListener("visibilitychange", () => { app.shown = Date.now(); }); // while hidden nothing was asked for
window.addEventListener("hashchange", go);
setInterval(times, TICK_MS);
go();
