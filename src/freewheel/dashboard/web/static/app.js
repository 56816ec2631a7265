// The frame around the views: selects the run and the view, applies changes as they arrive, and handles keys.
//
//     location hash (#view/run/rest) ─▶ view.mount      events of the run ─▶ app.data ─▶ view.update

import { RETRY_MS, RequestError, follow, get, runPath } from "./api.js";
import { emptyState, h } from "./dom.js";
import { ago, count, duration, truncateStart } from "./format.js";
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
const MAX_POINTS = 6000; // a curve that grows beyond this while the page is open is fetched again, thinned
const SILENT_MS = 40_000; // the server sends an event at least every 15 s
const GRACE_MS = 4000; // a connection that is restored within this time causes no notice
const CLOCK_MS = 1000;
const [NAME_CHARS, NAME_CHARS_NARROW, NARROW] = [36, 20, 760]; // characters of a run's name in the header; on a phone; width of a phone in pixels
const content = document.getElementById("content");
const byId = (id) => document.getElementById(id);

const app = { runs: [], run: null, data: null, view: null, name: null, lastMessageMs: 0, visibilityMs: 0, open, get: (rest, params) => get(runPath(app.run, rest), params) };
let stopFollowing = () => {};
let navigations = 0;
let loads = 0;
let retryTimer;

// -- navigation ---------------------------------------------------------------------------------------------------

function parseLocation() {
  const [name, run, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  return { name: Object.hasOwn(VIEWS, name) ? name : "overview", run: run || null, rest };
}

function hashFor(name, run, ...rest) {
  return `#${[name, run, ...rest].filter((part) => part !== null && part !== undefined).map(encodeURIComponent).join("/")}`;
}

function open(name, ...rest) {
  location.hash = hashFor(name, app.run, ...rest);
}

async function navigate() {
  clearTimeout(retryTimer);
  const navigation = (navigations += 1);
  const { name, run, rest } = parseLocation();
  try {
    if (!app.runs.length || (run && !app.runs.some((known) => known.id === run))) app.runs = (await get("/runs")).runs;
    const wanted = run ? app.runs.find((known) => known.id === run) : app.runs[0];
    if (navigation !== navigations) return;
    if (!app.runs.length) { showMessage(emptyState("No runs yet", "A run appears here once its folder exists.")); return; }
    if (!wanted) { showUnknownRun(name, run); return; }
    if (app.run !== wanted.id || !app.data) await load(wanted.id);
    if (navigation !== navigations) return;
    mount(name, rest);
  } catch (error) {
    if (!(error instanceof RequestError)) console.error(error);
    if (navigation === navigations) showFailure(error);
  }
}

/** Load a run and follow it. Returns false if a later call replaced this run. The previous run stops receiving changes. */
async function load(id) {
  const loadId = (loads += 1);
  stopFollowing();
  if (app.run !== id) {
    unmount();
    Object.assign(app, { run: id, data: null });
  }
  let data;
  try {
    data = await get(runPath(id));
  } catch (error) {
    if (loadId !== loads) return false;
    throw error;
  }
  if (loadId !== loads) return false;
  app.data = data;
  app.lastMessageMs = Date.now();
  byId("runs").value = id;
  updateFrame();
  stopFollowing = follow(id, data.cursor, { change: applyChange, reload, connected: setConnected });
  return true;
}

async function reload() {
  try {
    if (await load(app.run)) app.view?.update?.({ all: true });
  } catch (error) {
    showFailure(error);
  }
}

function showFailure(error) {
  stopFollowing();
  showMessage(emptyState("Cannot load the run", error.message));
  app.data = null;
  updateFrame();
  retryTimer = setTimeout(navigate, RETRY_MS);
}

/** Shown when the location hash names a run that does not exist. */
function showUnknownRun(name, run) {
  stopFollowing();
  loads += 1;
  Object.assign(app, { run: null, data: null, name });
  updateLinks(name);
  updateFrame();
  showMessage(h("div", {}, emptyState(`There is no run named ${run}`, app.runs.length === 1 ? "The only run is:" : "The runs are:"),
    h("ul", { class: "plain-list" }, app.runs.map((run) => h("li", {}, h("a", { href: hashFor(name, run.id), title: run.folder }, run.name))))));
  document.title = "freewheel";
}

function updateLinks(name) {
  for (const link of document.querySelectorAll("[data-view]")) {
    link.href = hashFor(link.dataset.view, app.run);
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function mount(name, rest) {
  unmount();
  app.name = name;
  updateLinks(name);
  content.replaceChildren();
  window.scrollTo(0, 0);
  app.view = VIEWS[name].mount(content, app, rest);
  document.title = `${VIEWS[name].title} · ${app.data.name} · freewheel`;
}

function unmount() {
  app.view?.destroy?.();
  app.view = null;
}

function showMessage(node) {
  unmount();
  content.replaceChildren(h("section", { class: "panel" }, node));
}

// -- changes ------------------------------------------------------------------------------------------------------

/** Append new points to curves. Returns whether a curve is now too long. */
function appendPoints(curves, rows, x) {
  const xs = rows[x] || [];
  for (const [name, values] of Object.entries(rows)) {
    if (name === x || name === "elapsed_s") continue;
    const curve = (curves[name] ||= { x: [], y: [] });
    values.forEach((value, index) => { if (value !== null) { curve.x.push(xs[index]); curve.y.push(value); } });
  }
  return Object.values(curves).some((curve) => curve.x.length > MAX_POINTS);
}

function applyChange(change) {
  const { data } = app;
  const tooLong = [appendPoints(data.steps, change.steps, "step"), appendPoints(data.evals, change.evals, "step"), appendPoints(data.pulses, change.pulses, "elapsed_s")];
  Object.assign(data, { now: change.now, ages: change.ages, state: change.state, metrics: change.metrics });
  data.events.push(...change.events);
  app.lastMessageMs = Date.now();
  updateFrame();
  if (tooLong.some(Boolean)) reload();
  else app.view?.update?.(change);
}

function setConnected(connected) {
  app.connected = connected;
  if (connected) app.lastMessageMs = Date.now();
  updateFrame();
}

function updateFrame() {
  const { data } = app;
  for (const id of ["state", "about", "progress-row"]) byId(id).hidden = !data;
  updateRunList();
  updateClock();
  if (!data) return;
  const { now } = data;
  byId("about").textContent = [data.mode.replaceAll("_", " "), data.task, data.model].filter(Boolean).join(" · ");
  const done = now.total_steps ? Math.min(1, now.step / now.total_steps) : 0;
  const bar = byId("progress");
  bar.setAttribute("aria-valuenow", String(Math.round(done * 100)));
  bar.firstElementChild.style.width = `${done * 100}%`;
}

/** Update what changes with time alone, including the notice about a lost connection. */
function updateClock() {
  const { data } = app;
  const silentMs = Date.now() - Math.max(app.lastMessageMs, app.visibilityMs);
  const lost = data !== null && (app.connected === false || silentMs > SILENT_MS);
  byId("lost").hidden = !lost || silentMs < GRACE_MS;
  if (!data) return;
  const { now } = data;
  const pill = byId("state");
  pill.dataset.state = lost ? "lost" : now.state;
  const stateText = lost ? "no connection" : now.state_words;
  if (pill.textContent !== stateText) pill.textContent = stateText;
  if (lost) byId("lost").textContent = `No message from the server for ${duration(Math.round((Date.now() - app.lastMessageMs) / 1000))}. This page shows the last data it received. Either the run ended or the server was stopped. To open the run again: freewheel dashboard ${data.folder}`;
  const left = now.eta_s !== null && now.state === "live" && !lost ? ` · ${duration(now.eta_s)} left` : "";
  const when = (now.state === "live" && !lost) || !now.last_row ? "" : ` · ${ago(now.last_row)}`;
  byId("progress-words").textContent = `${count(now.step)}${now.total_steps ? ` / ${count(now.total_steps)}` : ""} steps · ${duration(now.elapsed_s)}${left}${when}`;
}

function updateRunList() {
  const runs = byId("runs");
  const shown = [app.run, ...app.runs.map((run) => run.id)].join();
  if (runs.dataset.shown === shown) return; // replacing its options would close an open list
  runs.dataset.shown = shown;
  const maxChars = window.innerWidth < NARROW ? NAME_CHARS_NARROW : NAME_CHARS;
  runs.replaceChildren(
    ...(app.run === null ? [h("option", { selected: true, disabled: true }, "choose a run")] : []),
    ...app.runs.map((run) => h("option", { value: run.id, selected: run.id === app.run, title: run.folder }, truncateStart(run.name, maxChars))));
  runs.title = app.runs.find((run) => run.id === app.run)?.folder ?? "";
  const single = app.runs.length < 2 && app.run !== null;
  runs.toggleAttribute("data-single", single);
  runs.tabIndex = single ? -1 : 0;
}

// -- input --------------------------------------------------------------------------------------------------------

function handleKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= NAMES.length) open(NAMES[number - 1]);
  else if (event.key === "t") theme.toggle();
  else if (event.key === "?") byId("keys").showModal();
  else if (!app.view?.key?.(event)) return;
  event.preventDefault();
}

theme.start();
byId("skip").addEventListener("click", (event) => { event.preventDefault(); content.focus(); }); // the hash selects a view
byId("theme").addEventListener("click", theme.toggle);
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("keys-close").addEventListener("click", () => byId("keys").close());
byId("runs").addEventListener("change", (event) => { location.hash = hashFor(app.name || "overview", event.target.value); });
document.addEventListener("keydown", handleKey);
document.addEventListener("visibilitychange", () => { app.visibilityMs = Date.now(); }); // a hidden page requests nothing
window.addEventListener("hashchange", navigate);
setInterval(updateClock, CLOCK_MS);
navigate();
