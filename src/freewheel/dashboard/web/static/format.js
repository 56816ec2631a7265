// Short, consistent text for numbers, times and shares.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return whole.format(value);
  if (size >= 10000) return whole.format(value);
  if (size >= 100) return value.toFixed(1);
  if (size >= 0.001 || size === 0) return value.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return value.toExponential(1).replace("e-0", "e-");
}

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(Math.round(value)));

/** 12,345 → 12.3k, for axes and narrow places. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  return number(value, size < 0.1 ? 4 : 3);
}

const trim = (value) => value.toFixed(1).replace(/\.0$/, "");

export const share = (value, digits = 0) => (value === null || value === undefined ? NONE : `${(value * 100).toFixed(digits)}%`);

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let scaled = value;
  while (scaled >= 1000 && unit < units.length - 1) { scaled /= 1000; unit += 1; }
  return `${scaled >= 100 || unit === 0 ? scaled.toFixed(0) : scaled.toFixed(1)} ${units[unit]}`;
}

/** A duration with sensible precision: 8 ms, 1.4 s, 2 min 05 s, 3 h 20 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const size = Math.max(0, seconds);
  if (size === 0) return "0 s";
  if (size < 0.0005) return `${(size * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(size * 1000).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 60) return `${size.toFixed(size < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(size / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(size % 60)).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A tick label on an axis of elapsed time. */
export function elapsed(seconds) {
  const size = Math.abs(seconds);
  if (size < 1) return `${number(seconds)} s`;
  if (size >= 90 && size < 7200 && size % 60 === 0) return `${seconds / 60} min`;
  if (size < 90) return `${number(Math.round(seconds * 10) / 10)} s`;
  if (size < 5400) return `${number(Math.round(seconds / 6) / 10)} min`;
  return `${number(Math.round(seconds / 360) / 10)} h`;
}

/** A position on a timeline: 2:05, 1:02:05. The shorter the visible span, the more decimals of a second. */
export function timestamp(seconds, span) {
  const digits = span < 0.05 ? 4 : span < 0.5 ? 3 : span < 8 ? 1 : 0;
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, (seconds % 60).toFixed(digits)];
  if (seconds < 60) return `${parts[2]} s`;
  const rest = `${parts[0] ? String(parts[1]).padStart(2, "0") : parts[1]}:${parts[2].padStart(digits ? digits + 3 : 2, "0")}`;
  return parts[0] ? `${parts[0]}:${rest}` : rest;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
export const dateTime = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export function ago(seconds, now = Date.now() / 1000) {
  const passed = now - seconds;
  return passed < 5 ? "just now" : `${duration(passed).replace(/ \d\d s$/, "")} ago`;
}

/** Shorten a long name from the start, because names of runs differ at the end. */
export const truncateStart = (name, maxChars) => (name.length <= maxChars ? name : `…${name.slice(1 - maxChars)}`);

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

/** Names of spans on the page: wait_batch → wait for a batch. */
const SPANS = {
  train: "train", wait_batch: "wait for a batch", pack: "pack weights", save: "save", generate: "generate",
  wait_reward: "wait for rewards", wait_room: "held back", load_weights: "load weights", evaluate: "evaluate",
  sync: "sync", load: "load", drain: "finish running work", response: "response", score: "score", store: "store", ready: "ready",
};
export function spanName(name) {
  const [first, ...rest] = name.split(" "); // a span on its own track is followed by the track's name: load rollouter-0
  return [SPANS[first] || first.replaceAll("_", " "), ...rest].join(" ");
}

/** Each known span has its own colour in the theme; unknown spans share one. */
export function spanColour(name) {
  const [first] = name.split(" ");
  return Object.hasOwn(SPANS, first) ? `span-${first}` : "c6";
}
