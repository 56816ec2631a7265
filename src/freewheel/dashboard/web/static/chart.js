// A line chart on a canvas: any number of curves, each with points of its own; crosshair, zoom, keyboard, and words for
// who does not see it. Data: {name: {x: [...], y: [...]}}, ascending in x.

import { colour, h } from "./dom.js";
import { number, short } from "./format.js";

const LEFT = 50;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;
const NEAREST_PX = 28;
const SMOOTH_SHARE = 0.03;
const MOST_DOTS = 120; // points of a curve that are marked one by one; more of them are a line

/** Round steps between ticks: 1, 2 or 5 times a power of ten. */
export function ticks(low, high, wanted) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** The same for seconds: above one, whole parts of minutes, hours and days. */
export function timeTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const step = raw <= 1 ? 0 : TIMES.find((one) => one >= raw) ?? Math.ceil(raw / 86400) * 86400;
  if (!step) return ticks(low, high, wanted);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

/** The index of the point nearest to x. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}

/** The mean of as many neighbours on either side: it does not lag, and begins and ends where the curve does. */
function smoothed(ys) {
  const most = Math.max(1, Math.round(ys.length * SMOOTH_SHARE));
  const sums = [0];
  for (const y of ys) sums.push(sums[sums.length - 1] + y);
  return ys.map((_, at) => {
    const half = Math.min(most, at, ys.length - 1 - at);
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1);
  });
}

export class LineChart {
  /**
   * curves: [{name, label, colour, smooth, points, fill, band}]; band: the name of a curve with the error of this one.
   * x, y: {format, label, low, high}; zoomed(from, to): finer data is wanted, or null for all.
   */
  constructor({ title, curves, height = 220, x = {}, y = {}, zoomed = null, legend = true }) {
    this.hasLegend = legend && curves.length > 1;
    this.title = title;
    this.curves = curves;
    this.x = { format: short, label: "step", ...x };
    this.y = { format: short, ...y };
    this.height = height;
    this.zoomed = zoomed;
    this.data = {};
    this.hiddenCurves = new Set();
    this.range = null;
    this.cross = null;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    this.said = h("span", { class: "hidden", "aria-live": "polite" });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", {}, h("div", { class: "chart" }, this.canvas, this.tip), this.said, this.legend);
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.onTheme = () => { this.drawLegend(); this.draw(); };
    document.addEventListener("theme", this.onTheme);
    this.drawLegend();
  }

  destroy() {
    this.observer.disconnect();
    document.removeEventListener("theme", this.onTheme);
  }

  set(data) {
    this.data = data || {};
    this.label();
    this.schedule();
  }

  schedule() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  shown() {
    return this.curves.filter((one) => !this.hiddenCurves.has(one.name) && this.data[one.name]?.x.length);
  }

  /** Of a curve with a band: its errors, point by point. */
  errors(one) {
    const found = this.data[one.band]?.y;
    return found?.length === this.data[one.name].x.length ? found : null;
  }

  label() {
    const told = this.curves.filter((one) => this.data[one.name]?.x.length).map((one) => {
      const { x, y } = this.data[one.name];
      return `${one.label} from ${number(y[0])} at ${this.x.format(x[0])} to ${number(y[y.length - 1])} at ${this.x.format(x[x.length - 1])}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}: ${told.join("; ") || "nothing recorded"}`);
  }

  drawLegend() {
    if (!this.hasLegend) return;
    this.legend.replaceChildren(...this.curves.map((one) => h("button", {
      type: "button", "aria-pressed": String(!this.hiddenCurves.has(one.name)),
      onclick: () => {
        if (!this.hiddenCurves.delete(one.name)) this.hiddenCurves.add(one.name);
        this.drawLegend();
        this.draw();
      },
    }, h("i", { class: "swatch", style: { background: colour(one.colour) } }), one.label)));
  }

  // -- geometry ---------------------------------------------------------------------------------------------------

  extent() {
    let [xLow, xHigh, yLow, yHigh] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const one of this.shown()) {
      const { x } = this.data[one.name];
      xLow = Math.min(xLow, x[0]);
      xHigh = Math.max(xHigh, x[x.length - 1]);
    }
    if (this.range) [xLow, xHigh] = this.range;
    for (const one of this.shown()) {
      const { x, y } = this.data[one.name];
      const error = this.errors(one);
      for (let at = 0; at < x.length; at += 1) {
        if (x[at] < xLow || x[at] > xHigh) continue;
        const by = error?.[at] || 0;
        yLow = Math.min(yLow, y[at] - by);
        yHigh = Math.max(yHigh, y[at] + by);
      }
    }
    if (this.y.low !== undefined) yLow = Math.min(yLow, this.y.low);
    if (this.y.high !== undefined) yHigh = Math.max(yHigh, this.y.high);
    if (xHigh <= xLow) { xLow -= 1; xHigh += 1; }
    if (!Number.isFinite(yLow)) { yLow = 0; yHigh = 1; }
    if (yHigh - yLow < Math.abs(yHigh) * 1e-9 + 1e-12) { yLow -= Math.abs(yLow) * 0.1 + 0.1; yHigh += Math.abs(yHigh) * 0.1 + 0.1; }
    const room = (yHigh - yLow) * 0.06;
    return { xLow, xHigh, yLow: yLow === this.y.low ? yLow : yLow - room, yHigh: yHigh === this.y.high ? yHigh : yHigh + room };
  }

  toX(x) { return LEFT + ((x - this.box.xLow) / (this.box.xHigh - this.box.xLow)) * (this.width - LEFT - RIGHT); }

  toY(y) { return this.height - BOTTOM - ((y - this.box.yLow) / (this.box.yHigh - this.box.yLow)) * (this.height - TOP - BOTTOM); }

  fromX(px) { return this.box.xLow + ((px - LEFT) / (this.width - LEFT - RIGHT)) * (this.box.xHigh - this.box.xLow); }

  // -- drawing ----------------------------------------------------------------------------------------------------

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.canvas.style.height = `${this.height}px`;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(this.height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, this.height);
    this.box = this.extent();
    this.drawAxes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 2, width - LEFT - RIGHT, this.height - TOP - BOTTOM + 4);
    pen.clip();
    for (const one of this.shown()) this.drawCurve(pen, one);
    pen.restore();
    if (this.dragged) {
      pen.fillStyle = colour("accent-soft");
      pen.fillRect(Math.min(...this.dragged), TOP, Math.abs(this.dragged[1] - this.dragged[0]), this.height - TOP - BOTTOM);
    }
    this.drawCross(pen);
  }

  drawAxes(pen) {
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.lineWidth = 1;
    pen.fillStyle = colour("muted");
    pen.strokeStyle = colour("line");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const y of ticks(this.box.yLow, this.box.yHigh, Math.max(2, this.height / 48))) {
      const at = Math.round(this.toY(y)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, at);
      pen.lineTo(this.width - RIGHT, at);
      pen.stroke();
      pen.fillText(this.y.format(y), LEFT - 8, at);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    const wanted = Math.max(2, (this.width - LEFT) / 72);
    const places = this.x.label === "time" ? timeTicks : ticks;
    for (const x of places(this.box.xLow, this.box.xHigh, wanted)) {
      if (this.x.label === "step" && !Number.isInteger(x)) continue;
      const at = this.toX(x);
      if (at < LEFT - 1 || at > this.width - RIGHT + 1) continue;
      pen.textAlign = at > this.width - RIGHT - 16 ? "right" : at < LEFT + 10 ? "left" : "center";
      pen.fillText(this.x.format(x), at, this.height - 6);
    }
  }

  drawCurve(pen, one) {
    const { x, y } = this.data[one.name];
    const ink = colour(one.colour);
    const many = x.length > MOST_DOTS;
    const error = many ? null : this.errors(one);
    const trace = (ys) => {
      pen.beginPath();
      for (let at = 0; at < x.length; at += 1) pen[at ? "lineTo" : "moveTo"](this.toX(x[at]), this.toY(ys[at]));
    };
    if (error) {
      pen.beginPath();
      x.forEach((at, index) => pen[index ? "lineTo" : "moveTo"](this.toX(at), this.toY(y[index] + (error[index] || 0))));
      for (let index = x.length - 1; index >= 0; index -= 1) pen.lineTo(this.toX(x[index]), this.toY(y[index] - (error[index] || 0)));
      pen.globalAlpha = 0.14;
      pen.fillStyle = ink;
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.lineJoin = "round";
    pen.strokeStyle = ink;
    const smooth = one.smooth && x.length > 12;
    if (one.fill && !smooth) {
      trace(y);
      pen.lineTo(this.toX(x[x.length - 1]), this.height - BOTTOM);
      pen.lineTo(this.toX(x[0]), this.height - BOTTOM);
      pen.globalAlpha = 0.09;
      pen.fillStyle = ink;
      pen.fill();
      pen.globalAlpha = 1;
    }
    if (smooth) {
      pen.globalAlpha = many ? 0.16 : 0.28;
      pen.lineWidth = 1;
      trace(y);
      pen.stroke();
      pen.globalAlpha = 1;
    }
    pen.lineWidth = one.thin ? 1.2 : 1.75;
    trace(smooth ? smoothed(y) : y);
    pen.stroke();
    if ((one.points && !many) || x.length === 1) {
      pen.fillStyle = ink;
      for (let at = 0; at < x.length; at += 1) {
        pen.beginPath();
        pen.arc(this.toX(x[at]), this.toY(y[at]), 2.6, 0, 7);
        pen.fill();
      }
    }
  }

  drawCross(pen) {
    const told = this.cross === null ? [] : this.at(this.cross);
    this.tip.classList.toggle("on", told.length > 0);
    if (!told.length) return;
    const px = this.toX(told[0].x);
    pen.strokeStyle = colour("line-strong");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(px) + 0.5, TOP);
    pen.lineTo(Math.round(px) + 0.5, this.height - BOTTOM);
    pen.stroke();
    for (const { curve, x, y } of told) {
      pen.beginPath();
      pen.arc(this.toX(x), this.toY(y), 3.5, 0, 7);
      pen.fillStyle = colour(curve.colour);
      pen.fill();
      pen.strokeStyle = colour("panel");
      pen.lineWidth = 1.5;
      pen.stroke();
    }
    const head = this.x.label === "step" ? `step ${this.x.format(told[0].x)}` : this.x.format(told[0].x);
    this.tip.replaceChildren(h("b", {}, head), ...told.map(({ curve, y, error }) => h("div", {},
      h("i", { class: "swatch", style: { background: colour(curve.colour) } }), h("span", {}, curve.label),
      h("span", {}, number(y) + (error ? ` ± ${number(error)}` : "")))));
    const over = px + this.tip.offsetWidth + 24 > this.width;
    this.tip.style.transform = `translate(${over ? px - this.tip.offsetWidth - 12 : px + 12}px, ${TOP + 4}px)`;
  }

  /** Of each curve, its point near x; those that have none there are left out. */
  at(x) {
    const found = [];
    for (const curve of this.shown()) {
      const { x: xs, y: ys } = this.data[curve.name];
      const index = nearest(xs, x);
      if (this.box && Math.abs(this.toX(xs[index]) - this.toX(x)) > NEAREST_PX && curve !== this.leading()) continue;
      found.push({ curve, x: xs[index], y: ys[index], error: this.errors(curve)?.[index] });
    }
    return found;
  }

  /** The curve with the most points: the crosshair goes by it. */
  leading() {
    return this.shown().reduce((best, one) => (!best || this.data[one.name].x.length > this.data[best.name].x.length ? one : best), null);
  }

  // -- hands ------------------------------------------------------------------------------------------------------

  listen() {
    const place = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.box || !this.shown().length) return;
      const px = place(event);
      if (this.pressed !== undefined && Math.abs(px - this.pressed) > 4) this.dragged = [this.pressed, px];
      this.cross = this.fromX(Math.min(Math.max(px, LEFT), this.width - RIGHT));
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => { this.cross = null; if (this.pressed === undefined) this.draw(); });
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0 || !this.box) return;
      this.pressed = place(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => {
      const dragged = this.dragged;
      this.pressed = undefined;
      this.dragged = null;
      if (dragged && Math.abs(dragged[1] - dragged[0]) > 8) this.zoom(this.fromX(Math.min(...dragged)), this.fromX(Math.max(...dragged)));
      else this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.zoom(null));
    this.canvas.addEventListener("blur", () => { this.cross = null; this.draw(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const leading = this.leading();
    if (!leading) return;
    const { x } = this.data[leading.name];
    const last = x.length - 1;
    const at = this.cross === null ? last : nearest(x, this.cross);
    const next = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.zoom(null);
    else if (next === undefined) return;
    else this.cross = x[next];
    event.preventDefault();
    event.stopPropagation();
    this.draw();
    if (this.cross !== null) this.said.textContent = `${this.x.label} ${this.x.format(this.cross)}: ${this.at(this.cross).map((one) => `${one.curve.label} ${number(one.y)}`).join(", ")}`;
  }

  zoom(from, to) {
    this.range = from === null ? null : [from, to];
    if (this.zoomed) this.zoomed(from, to);
    this.draw();
  }
}
