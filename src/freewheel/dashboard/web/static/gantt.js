// A timeline on a canvas: lanes of components, and below them one row per group. Supports the mouse wheel, dragging, and a
// tooltip for the span under the pointer.

import { timeTicks } from "./chart.js";
import { colour, h } from "./dom.js";
import { count, duration, spanColour, spanName, timestamp } from "./format.js";

const LABEL_WIDTH = 168;
const LABEL_WIDTH_NARROW = 92;
const NARROW = 560; // below this width, labels are narrow
const AXIS = 26;
const LANE = 20;
const GROUP = 14;
const LANE_GAP = 4;
const GROUP_GAP = 3;
const HEADING = 24;
const WHEEL_ZOOM = 1.0015; // zoom factor per pixel of wheel movement

export class Gantt {
  /** `onMove(from, to)` receives the visible range in seconds, `onPick(ordinal)` the group that was clicked. */
  constructor({ onMove, onPick }) {
    this.onMove = onMove;
    this.onPick = onPick;
    this.data = null;
    this.from = 0;
    this.to = 1;
    this.hits = [];
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline" });
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    this.element = h("div", { class: "gantt-wrap" }, h("div", { class: "gantt" }, this.canvas), this.tip);
    this.addListeners();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.onTheme = () => this.draw();
    document.addEventListener("theme", this.onTheme);
  }

  destroy() {
    this.observer.disconnect();
    document.removeEventListener("theme", this.onTheme);
    clearTimeout(this.moveTimer);
  }

  setData(data) {
    this.data = data;
    if (!this.moving) [this.from, this.to] = [data.from_s, data.to_s];
    const description = data.lanes.map((lane) => `${lane.part} ${spanName(lane.name)} ${duration(lane.busy_s)}`).join(", ");
    this.canvas.setAttribute("aria-label", `Timeline from ${timestamp(data.from_s, 1)} to ${timestamp(data.to_s, 1)}: ${description}; ${count(data.groups_in_window)} groups`);
    this.draw();
  }

  // -- visible range --------------------------------------------------------------------------------------------

  showRange(from, to) {
    const whole = this.data?.length_s ?? 1;
    const width = Math.min(Math.max(to - from, 0.001), whole);
    this.from = Math.min(Math.max(0, from), whole - width);
    this.to = this.from + width;
    this.moving = true;
    this.draw();
    clearTimeout(this.moveTimer);
    this.moveTimer = setTimeout(() => { this.moving = false; this.onMove(this.from, this.to); }, 140);
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.showRange(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = (this.to - this.from) * share;
    this.showRange(this.from + by, this.to + by);
  }

  showAll() { this.showRange(0, this.data?.length_s ?? 1); }

  // -- drawing ----------------------------------------------------------------------------------------------------

  get left() { return this.width < NARROW ? LABEL_WIDTH_NARROW : LABEL_WIDTH; }

  toX(s) { return this.left + ((s - this.from) / (this.to - this.from)) * (this.width - this.left - 8); }

  fromX(px) { return this.from + ((px - this.left) / (this.width - this.left - 8)) * (this.to - this.from); }

  draw() {
    const { data } = this;
    const width = this.element.clientWidth;
    if (!data || !width) return;
    this.width = width;
    const parts = new Set(data.lanes.map((lane) => lane.part)).size;
    const height = AXIS + parts * HEADING + data.lanes.length * (LANE + LANE_GAP) + (data.groups.length ? HEADING + data.groups.length * (GROUP + GROUP_GAP) : 0) + 10;
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const family = getComputedStyle(document.body).fontFamily;
    this.font = (size, weight = 400) => { context.font = `${weight} ${size}px ${family}`; };
    this.hits = [];
    this.drawAxis(context, height);
    let y = AXIS;
    let previousPart = null;
    for (const lane of data.lanes) {
      if (lane.part !== previousPart) { y = this.drawHeading(context, y, lane.part); previousPart = lane.part; }
      this.drawRow(context, y, LANE, spanName(lane.name), duration(lane.busy_s), lane.bars, { part: lane.part });
      y += LANE + LANE_GAP;
    }
    if (data.groups.length) y = this.drawHeading(context, y, "groups");
    for (const group of data.groups) {
      this.drawRow(context, y, GROUP, `#${count(group.ordinal)}`, "", group.bars, { ordinal: group.ordinal });
      y += GROUP + GROUP_GAP;
    }
  }

  drawAxis(context, height) {
    this.font(11);
    context.textBaseline = "alphabetic";
    for (const s of timeTicks(this.from, this.to, Math.max(2, (this.width - this.left) / 110))) {
      const x = Math.round(this.toX(s)) + 0.5;
      if (x < this.left) continue;
      context.strokeStyle = colour("line");
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
      context.stroke();
      context.fillStyle = colour("muted");
      context.textAlign = x > this.width - 40 ? "right" : "center";
      context.fillText(timestamp(s, this.to - this.from), x, 12);
    }
  }

  drawHeading(context, y, text) {
    this.font(12, 600);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = colour("text");
    context.fillText(text, 0, y + HEADING / 2 + 2);
    return y + HEADING;
  }

  drawRow(context, y, height, label, rightLabel, bars, target) {
    const { left } = this;
    this.font(11.5);
    context.textBaseline = "middle";
    context.fillStyle = colour("muted");
    context.textAlign = "left";
    context.fillText(label, 10, y + height / 2, left - 24);
    if (rightLabel && left === LABEL_WIDTH) {
      context.textAlign = "right";
      context.fillStyle = colour("faint");
      context.fillText(rightLabel, left - 10, y + height / 2);
    }
    context.fillStyle = colour("sunken");
    context.globalAlpha = 0.6;
    context.fillRect(left, y, this.width - left - 8, height);
    context.globalAlpha = 1;
    for (const bar of bars) {
      const start = Math.max(left, this.toX(bar.start_s));
      const end = Math.min(this.width - 8, this.toX(bar.end_s));
      if (end < left || start > this.width - 8) continue;
      const wide = Math.max(1, end - start);
      const inset = target.ordinal !== undefined && (bar.name === "response" || bar.name === "score") ? height / 3 : 0;
      context.fillStyle = colour(spanColour(bar.name));
      context.globalAlpha = inset ? 0.75 : 1;
      context.fillRect(start, y + inset, wide, height - 2 * inset);
      context.globalAlpha = 1;
      this.hits.push({ x: start, y, w: Math.max(3, wide), h: height, bar, target });
    }
  }

  // -- input ------------------------------------------------------------------------------------------------------

  addListeners() {
    const position = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaY) > Math.abs(event.deltaX) && !event.shiftKey && !this.isFocused()) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / this.width);
      else this.zoom(WHEEL_ZOOM ** event.deltaY, this.fromX(position(event)[0]));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = position(event);
      this.drag = { x, y, from: this.from, to: this.to, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = position(event);
      if (!this.drag) { this.updateTip(x, y); return; }
      const by = ((x - this.drag.x) / (this.width - this.left)) * (this.drag.to - this.drag.from);
      if (Math.abs(x - this.drag.x) > 3) this.drag.moved = true;
      if (this.drag.moved) this.showRange(this.drag.from - by, this.drag.to - by);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const [x, y] = position(event);
      const hit = this.drag && !this.drag.moved ? this.findHit(x, y) : null;
      this.drag = null;
      if (hit?.target.ordinal !== undefined) this.onPick(hit.target.ordinal);
    });
    this.canvas.addEventListener("pointerleave", () => this.tip.classList.remove("on"));
    this.canvas.addEventListener("dblclick", () => this.showAll());
  }

  isFocused() { return document.activeElement === this.canvas; }

  findHit(x, y) {
    for (let index = this.hits.length - 1; index >= 0; index -= 1) {
      const hit = this.hits[index];
      if (x >= hit.x - 1 && x <= hit.x + hit.w + 1 && y >= hit.y && y <= hit.y + hit.h) return hit;
    }
    return null;
  }

  updateTip(x, y) {
    const hit = this.findHit(x, y);
    this.tip.classList.toggle("on", Boolean(hit));
    this.canvas.style.cursor = hit?.target.ordinal !== undefined ? "pointer" : "";
    if (!hit) return;
    const { bar, target } = hit;
    const facts = Object.entries(bar.about ?? {}).filter(([, value]) => value !== null);
    this.tip.replaceChildren(
      h("b", {}, `${target.part ?? `group #${target.ordinal}`}: ${spanName(bar.name)}`),
      h("div", {}, h("span", {}, bar.count > 1 ? `${count(bar.count)} spans` : "duration"), h("span", {}, duration(bar.end_s - bar.start_s))),
      h("div", {}, h("span", {}, "start"), h("span", {}, timestamp(bar.start_s, 1))),
      ...facts.map(([name, value]) => h("div", {}, h("span", {}, name), h("span", {}, String(value)))));
    const scroll = this.canvas.parentElement.scrollTop;
    const overflows = x + this.tip.offsetWidth + 24 > this.width;
    this.tip.style.transform = `translate(${overflows ? Math.max(0, x - this.tip.offsetWidth - 14) : x + 14}px, ${y - scroll + 16}px)`;
  }
}
