// The frame around the views: which run, which view, what changes, and the keys.
//
//     address (#view/run/rest) ─▶ view.mount      events of the run ─▶ app.data ─▶ view.update

import { AGAIN_MS, Failed, follow, get, runPath } from "./api.js";
import { empty, h } from "./dom.js";
import { ago, count, duration } from "./format.js";
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
const content = document.getElementById("content");
const by = (id) => document.getElementById(id);

const app = { runs: [], run: null, data: null, view: null, name: null, open, get: (rest, params) => get(runPath(app.run, rest), params) };
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
    const wanted = app.runs.find((one) => one.id === run) || app.runs[0];
    if (mine !== opened) return;
    if (!wanted) { show(empty("There is no run here yet", "It appears when its folder does.")); return; }
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
  again = setTimeout(go, AGAIN_MS);
}

function mount(name, rest) {
  leave();
  app.name = name;
  for (const link of document.querySelectorAll("[data-view]")) {
    link.href = address(link.dataset.view, app.run);
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
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
  frame();
  if (long.some(Boolean)) reload();
  else app.view?.update?.(found);
}

function connected(is) {
  app.connected = is;
  frame();
}

function frame() {
  const { data } = app;
  const { now } = data;
  const lost = app.connected === false;
  const pill = by("state");
  pill.dataset.state = lost ? "lost" : now.state;
  pill.textContent = lost ? "no connection" : now.state_words;
  by("about").textContent = [data.mode.replaceAll("_", " "), data.task, data.model].filter(Boolean).join(" · ");
  const done = now.total_steps ? Math.min(1, now.step / now.total_steps) : 0;
  const bar = by("progress");
  bar.setAttribute("aria-valuenow", String(Math.round(done * 100)));
  bar.firstElementChild.style.width = `${done * 100}%`;
  const left = now.eta_s !== null && now.state === "live" ? ` · ${duration(now.eta_s)} left` : "";
  const when = now.state === "live" || !now.last_row ? "" : ` · ${ago(now.last_row)}`;
  by("progress-words").textContent = `${count(now.step)}${now.total_steps ? ` / ${count(now.total_steps)}` : ""} steps · ${duration(now.elapsed_s)}${left}${when}`;
  const runs = by("runs");
  const shown = [app.run, ...app.runs.map((one) => one.id)].join();
  if (runs.dataset.shown === shown) return; // else a list that is open would close under the hand
  runs.dataset.shown = shown;
  runs.replaceChildren(...app.runs.map((one) => h("option", { value: one.id, selected: one.id === app.run, title: one.folder }, one.name)));
  runs.toggleAttribute("data-single", app.runs.length < 2);
  runs.tabIndex = app.runs.length < 2 ? -1 : 0;
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
window.addEventListener("hashchange", go);
go();
