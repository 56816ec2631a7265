// A line chart on a canvas. Each curve has its own points. Supports a crosshair, zoom, the keyboard, and text for screen
// readers. Data: {name: {x: [...], y: [...]}}, ascending in x.

import { colour, h } from "./dom.js";
import { number, short } from "./format.js";

const LEFT = 50;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;
const NEAREST_PX = 28;
const SMOOTH_SHARE = 0.03;
const MAX_DOTS = 120; // a curve with more points is drawn without a dot per point

/** Tick values at round steps: 1, 2 or 5 times a power of ten. */
export function ticks(low, high, wanted) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const values = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Tick values for seconds: above one second, steps that divide minutes, hours and days evenly. */
export function timeTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const step = raw <= 1 ? 0 : TIME_STEPS.find((size) => size >= raw) ?? Math.ceil(raw / 86400) * 86400;
  if (!step) return ticks(low, high, wanted);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) values.push(value);
  return values;
}

/** The index of the point nearest to x. */
function nearestIndex(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}

/** A centred moving average. The window shrinks at the ends, so the result does not lag and keeps the end points. */
function movingAverage(ys) {
  const widest = Math.max(1, Math.round(ys.length * SMOOTH_SHARE));
  const sums = [0];
  for (const y of ys) sums.push(sums[sums.length - 1] + y);
  return ys.map((_, index) => {
    const half = Math.min(widest, index, ys.length - 1 - index);
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1);
  });
}

export class LineChart {
  /**
   * `curves`: a list of {name, label, colour, smooth, points, fill, thin, band}; `band` names the data with the curve's errors.
   * `x`, `y`: {format, label, low, high}. `onZoom(from, to)` is called to fetch finer data; `from` is null after a reset.
   */
  constructor({ title, curves, height = 220, x = {}, y = {}, onZoom = null, legend = true }) {
    this.hasLegend = legend && curves.length > 1;
    this.title = title;
    this.curves = curves;
    this.x = { format: short, label: "step", ...x };
    this.y = { format: short, ...y };
    this.height = height;
    this.onZoom = onZoom;
    this.data = {};
    this.hiddenCurves = new Set();
    this.range = null;
    this.crosshair = null;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    this.announcement = h("span", { class: "hidden", "aria-live": "polite" });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", {}, h("div", { class: "chart" }, this.canvas, this.tip), this.announcement, this.legend);
    this.addListeners();
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

  setData(data) {
    this.data = data || {};
    this.updateLabel();
    this.scheduleDraw();
  }

  scheduleDraw() {
    if (this.drawScheduled) return;
    this.drawScheduled = true;
    requestAnimationFrame(() => { this.drawScheduled = false; this.draw(); });
  }

  visibleCurves() {
    return this.curves.filter((curve) => !this.hiddenCurves.has(curve.name) && this.data[curve.name]?.x.length);
  }

  /** The error of each point, for a curve with a band. */
  errorsOf(curve) {
    const errors = this.data[curve.band]?.y;
    return errors?.length === this.data[curve.name].x.length ? errors : null;
  }

  updateLabel() {
    const descriptions = this.curves.filter((curve) => this.data[curve.name]?.x.length).map((curve) => {
      const { x, y } = this.data[curve.name];
      return `${curve.label} from ${number(y[0])} at ${this.x.format(x[0])} to ${number(y[y.length - 1])} at ${this.x.format(x[x.length - 1])}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}: ${descriptions.join("; ") || "no data"}`);
  }

  drawLegend() {
    if (!this.hasLegend) return;
    this.legend.replaceChildren(...this.curves.map((curve) => h("button", {
      type: "button", "aria-pressed": String(!this.hiddenCurves.has(curve.name)),
      onclick: () => {
        if (!this.hiddenCurves.delete(curve.name)) this.hiddenCurves.add(curve.name);
        this.drawLegend();
        this.draw();
      },
    }, h("i", { class: "swatch", style: { background: colour(curve.colour) } }), curve.label)));
  }

  // -- geometry ---------------------------------------------------------------------------------------------------

  extent() {
    let [xLow, xHigh, yLow, yHigh] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const curve of this.visibleCurves()) {
      const { x } = this.data[curve.name];
      xLow = Math.min(xLow, x[0]);
      xHigh = Math.max(xHigh, x[x.length - 1]);
    }
    if (this.range) [xLow, xHigh] = this.range;
    for (const curve of this.visibleCurves()) {
      const { x, y } = this.data[curve.name];
      const errors = this.errorsOf(curve);
      for (let index = 0; index < x.length; index += 1) {
        if (x[index] < xLow || x[index] > xHigh) continue;
        const error = errors?.[index] || 0;
        yLow = Math.min(yLow, y[index] - error);
        yHigh = Math.max(yHigh, y[index] + error);
      }
    }
    if (this.y.low !== undefined) yLow = Math.min(yLow, this.y.low);
    if (this.y.high !== undefined) yHigh = Math.max(yHigh, this.y.high);
    if (xHigh <= xLow) { xLow -= 1; xHigh += 1; }
    if (!Number.isFinite(yLow)) { yLow = 0; yHigh = 1; }
    if (yHigh - yLow < Math.abs(yHigh) * 1e-9 + 1e-12) { yLow -= Math.abs(yLow) * 0.1 + 0.1; yHigh += Math.abs(yHigh) * 0.1 + 0.1; }
    const margin = (yHigh - yLow) * 0.06;
    return { xLow, xHigh, yLow: yLow === this.y.low ? yLow : yLow - margin, yHigh: yHigh === this.y.high ? yHigh : yHigh + margin };
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
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, this.height);
    this.box = this.extent();
    this.drawAxes(context);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 2, width - LEFT - RIGHT, this.height - TOP - BOTTOM + 4);
    context.clip();
    for (const curve of this.visibleCurves()) this.drawCurve(context, curve);
    context.restore();
    if (this.dragRange) {
      context.fillStyle = colour("accent-soft");
      context.fillRect(Math.min(...this.dragRange), TOP, Math.abs(this.dragRange[1] - this.dragRange[0]), this.height - TOP - BOTTOM);
    }
    this.drawCrosshair(context);
  }

  drawAxes(context) {
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.lineWidth = 1;
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const y of ticks(this.box.yLow, this.box.yHigh, Math.max(2, this.height / 48))) {
      const at = Math.round(this.toY(y)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(this.width - RIGHT, at);
      context.stroke();
      context.fillText(this.y.format(y), LEFT - 8, at);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    const wanted = Math.max(2, (this.width - LEFT) / 72);
    const buildTicks = this.x.label === "time" ? timeTicks : ticks;
    for (const x of buildTicks(this.box.xLow, this.box.xHigh, wanted)) {
      if (this.x.label === "step" && !Number.isInteger(x)) continue;
      const at = this.toX(x);
      if (at < LEFT - 1 || at > this.width - RIGHT + 1) continue;
      context.textAlign = at > this.width - RIGHT - 16 ? "right" : at < LEFT + 10 ? "left" : "center";
      context.fillText(this.x.format(x), at, this.height - 6);
    }
  }

  drawCurve(context, curve) {
    const { x, y } = this.data[curve.name];
    const lineColour = colour(curve.colour);
    const many = x.length > MAX_DOTS;
    const errors = many ? null : this.errorsOf(curve);
    const trace = (ys) => {
      context.beginPath();
      for (let index = 0; index < x.length; index += 1) context[index ? "lineTo" : "moveTo"](this.toX(x[index]), this.toY(ys[index]));
    };
    if (errors) {
      context.beginPath();
      x.forEach((value, index) => context[index ? "lineTo" : "moveTo"](this.toX(value), this.toY(y[index] + (errors[index] || 0))));
      for (let index = x.length - 1; index >= 0; index -= 1) context.lineTo(this.toX(x[index]), this.toY(y[index] - (errors[index] || 0)));
      context.globalAlpha = 0.14;
      context.fillStyle = lineColour;
      context.fill();
      context.globalAlpha = 1;
    }
    context.lineJoin = "round";
    context.strokeStyle = lineColour;
    const smooth = curve.smooth && x.length > 12;
    if (curve.fill && !smooth) {
      trace(y);
      context.lineTo(this.toX(x[x.length - 1]), this.height - BOTTOM);
      context.lineTo(this.toX(x[0]), this.height - BOTTOM);
      context.globalAlpha = 0.09;
      context.fillStyle = lineColour;
      context.fill();
      context.globalAlpha = 1;
    }
    if (smooth) {
      context.globalAlpha = many ? 0.16 : 0.28;
      context.lineWidth = 1;
      trace(y);
      context.stroke();
      context.globalAlpha = 1;
    }
    context.lineWidth = curve.thin ? 1.2 : 1.75;
    trace(smooth ? movingAverage(y) : y);
    context.stroke();
    if ((curve.points && !many) || x.length === 1) {
      context.fillStyle = lineColour;
      for (let index = 0; index < x.length; index += 1) {
        context.beginPath();
        context.arc(this.toX(x[index]), this.toY(y[index]), 2.6, 0, 7);
        context.fill();
      }
    }
  }

  drawCrosshair(context) {
    const points = this.crosshair === null ? [] : this.pointsNear(this.crosshair);
    this.tip.classList.toggle("on", points.length > 0);
    if (!points.length) return;
    const px = this.toX(points[0].x);
    context.strokeStyle = colour("line-strong");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(px) + 0.5, TOP);
    context.lineTo(Math.round(px) + 0.5, this.height - BOTTOM);
    context.stroke();
    for (const { curve, x, y } of points) {
      context.beginPath();
      context.arc(this.toX(x), this.toY(y), 3.5, 0, 7);
      context.fillStyle = colour(curve.colour);
      context.fill();
      context.strokeStyle = colour("panel");
      context.lineWidth = 1.5;
      context.stroke();
    }
    const head = this.x.label === "step" ? `step ${this.x.format(points[0].x)}` : this.x.format(points[0].x);
    this.tip.replaceChildren(h("b", {}, head), ...points.map(({ curve, y, error }) => h("div", {},
      h("i", { class: "swatch", style: { background: colour(curve.colour) } }), h("span", {}, curve.label),
      h("span", {}, number(y) + (error ? ` ± ${number(error)}` : "")))));
    const overflows = px + this.tip.offsetWidth + 24 > this.width;
    this.tip.style.transform = `translate(${overflows ? px - this.tip.offsetWidth - 12 : px + 12}px, ${TOP + 4}px)`;
  }

  /** The point of each curve near x. Curves without a point nearby are left out. */
  pointsNear(x) {
    const points = [];
    for (const curve of this.visibleCurves()) {
      const { x: xs, y: ys } = this.data[curve.name];
      const index = nearestIndex(xs, x);
      if (this.box && Math.abs(this.toX(xs[index]) - this.toX(x)) > NEAREST_PX && curve !== this.densestCurve()) continue;
      points.push({ curve, x: xs[index], y: ys[index], error: this.errorsOf(curve)?.[index] });
    }
    return points;
  }

  /** The curve with the most points. The crosshair follows its points. */
  densestCurve() {
    return this.visibleCurves().reduce((best, curve) => (!best || this.data[curve.name].x.length > this.data[best.name].x.length ? curve : best), null);
  }

  // -- input ------------------------------------------------------------------------------------------------------

  addListeners() {
    const offset = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.box || !this.visibleCurves().length) return;
      const px = offset(event);
      if (this.pressedAt !== undefined && Math.abs(px - this.pressedAt) > 4) this.dragRange = [this.pressedAt, px];
      this.crosshair = this.fromX(Math.min(Math.max(px, LEFT), this.width - RIGHT));
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => { this.crosshair = null; if (this.pressedAt === undefined) this.draw(); });
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0 || !this.box) return;
      this.pressedAt = offset(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => {
      const range = this.dragRange;
      this.pressedAt = undefined;
      this.dragRange = null;
      if (range && Math.abs(range[1] - range[0]) > 8) this.zoom(this.fromX(Math.min(...range)), this.fromX(Math.max(...range)));
      else this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.zoom(null));
    this.canvas.addEventListener("blur", () => { this.crosshair = null; this.draw(); });
    this.canvas.addEventListener("keydown", (event) => this.handleKey(event));
  }

  handleKey(event) {
    const densest = this.densestCurve();
    if (!densest) return;
    const { x } = this.data[densest.name];
    const last = x.length - 1;
    const index = this.crosshair === null ? last : nearestIndex(x, this.crosshair);
    const next = { ArrowLeft: Math.max(0, index - 1), ArrowRight: Math.min(last, index + 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.zoom(null);
    else if (next === undefined) return;
    else this.crosshair = x[next];
    event.preventDefault();
    event.stopPropagation();
    this.draw();
    if (this.crosshair !== null) this.announcement.textContent = `${this.x.label} ${this.x.format(this.crosshair)}: ${this.pointsNear(this.crosshair).map((point) => `${point.curve.label} ${number(point.y)}`).join(", ")}`;
  }

  zoom(from, to) {
    this.range = from === null ? null : [from, to];
    if (this.onZoom) this.onZoom(from, to);
    this.draw();
  }
}
