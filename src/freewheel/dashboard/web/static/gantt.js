// A timeline on a canvas: lanes of parts, below them groups; wheel and drag, keys, a tip on what is under the pointer.

import { timeTicks } from "./chart.js";
import { colour, h } from "./dom.js";
import { count, duration, place, spanColour, spanName } from "./format.js";

const LABELS = 168;
const LABELS_NARROW = 92;
const NARROW = 560;
const AXIS = 26;
const LANE = 20;
const GROUP = 14;
const GAP = 4;
const HEAD = 24;
const WHEEL = 1.0015;

export class Gantt {
  /** moved(from, to): what is in view, in seconds; picked(ordinal): a group was clicked. */
  constructor({ moved, picked }) {
    this.moved = moved;
    this.picked = picked;
    this.found = null;
    this.from = 0;
    this.to = 1;
    this.hits = [];
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline" });
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    this.element = h("div", { class: "gantt-wrap" }, h("div", { class: "gantt" }, this.canvas), this.tip);
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.onTheme = () => this.draw();
    document.addEventListener("theme", this.onTheme);
  }

  destroy() {
    this.observer.disconnect();
    document.removeEventListener("theme", this.onTheme);
    clearTimeout(this.later);
  }

  set(found) {
    this.found = found;
    if (!this.held) [this.from, this.to] = [found.from_s, found.to_s];
    const told = found.lanes.map((lane) => `${lane.part} ${spanName(lane.name)} ${duration(lane.busy_s)}`).join(", ");
    this.canvas.setAttribute("aria-label", `Timeline from ${place(found.from_s, 1)} to ${place(found.to_s, 1)}: ${told}; ${count(found.groups_in_window)} groups`);
    this.draw();
  }

  // -- what is in view --------------------------------------------------------------------------------------------

  view(from, to) {
    const whole = this.found?.length_s ?? 1;
    const width = Math.min(Math.max(to - from, 0.001), whole);
    this.from = Math.min(Math.max(0, from), whole - width);
    this.to = this.from + width;
    this.held = true;
    this.draw();
    clearTimeout(this.later);
    this.later = setTimeout(() => { this.held = false; this.moved(this.from, this.to); }, 140);
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.view(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = (this.to - this.from) * share;
    this.view(this.from + by, this.to + by);
  }

  all() { this.view(0, this.found?.length_s ?? 1); }

  // -- drawing ----------------------------------------------------------------------------------------------------

  get left() { return this.width < NARROW ? LABELS_NARROW : LABELS; }

  toX(s) { return this.left + ((s - this.from) / (this.to - this.from)) * (this.width - this.left - 8); }

  fromX(px) { return this.from + ((px - this.left) / (this.width - this.left - 8)) * (this.to - this.from); }

  draw() {
    const { found } = this;
    const width = this.element.clientWidth;
    if (!found || !width) return;
    this.width = width;
    const parts = new Set(found.lanes.map((lane) => lane.part)).size;
    const height = AXIS + parts * HEAD + found.lanes.length * (LANE + GAP) + (found.groups.length ? HEAD + found.groups.length * (GROUP + 3) : 0) + 10;
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const family = getComputedStyle(document.body).fontFamily;
    this.font = (size, weight = 400) => { pen.font = `${weight} ${size}px ${family}`; };
    this.hits = [];
    this.axis(pen, height);
    let y = AXIS;
    let before = null;
    for (const lane of found.lanes) {
      if (lane.part !== before) { y = this.head(pen, y, lane.part); before = lane.part; }
      this.row(pen, y, LANE, spanName(lane.name), duration(lane.busy_s), lane.bars, { part: lane.part });
      y += LANE + GAP;
    }
    if (found.groups.length) y = this.head(pen, y, "groups");
    for (const group of found.groups) {
      this.row(pen, y, GROUP, `#${count(group.ordinal)}`, "", group.bars, { ordinal: group.ordinal });
      y += GROUP + 3;
    }
  }

  axis(pen, height) {
    this.font(11);
    pen.textBaseline = "alphabetic";
    for (const s of timeTicks(this.from, this.to, Math.max(2, (this.width - this.left) / 110))) {
      const x = Math.round(this.toX(s)) + 0.5;
      if (x < this.left) continue;
      pen.strokeStyle = colour("line");
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillStyle = colour("muted");
      pen.textAlign = x > this.width - 40 ? "right" : "center";
      pen.fillText(place(s, this.to - this.from), x, 12);
    }
  }

  head(pen, y, words) {
    this.font(12, 600);
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillStyle = colour("text");
    pen.fillText(words, 0, y + HEAD / 2 + 2);
    return y + HEAD;
  }

  row(pen, y, height, label, right, bars, about) {
    const { left } = this;
    this.font(11.5);
    pen.textBaseline = "middle";
    pen.fillStyle = colour("muted");
    pen.textAlign = "left";
    pen.fillText(label, 10, y + height / 2, left - 24);
    if (right && left === LABELS) {
      pen.textAlign = "right";
      pen.fillStyle = colour("faint");
      pen.fillText(right, left - 10, y + height / 2);
    }
    pen.fillStyle = colour("sunken");
    pen.globalAlpha = 0.6;
    pen.fillRect(left, y, this.width - left - 8, height);
    pen.globalAlpha = 1;
    for (const bar of bars) {
      const start = Math.max(left, this.toX(bar.start_s));
      const end = Math.min(this.width - 8, this.toX(bar.end_s));
      if (end < left || start > this.width - 8) continue;
      const wide = Math.max(1, end - start);
      const inset = about.ordinal !== undefined && (bar.name === "response" || bar.name === "score") ? height / 3 : 0;
      pen.fillStyle = colour(spanColour(bar.name));
      pen.globalAlpha = inset ? 0.75 : 1;
      pen.fillRect(start, y + inset, wide, height - 2 * inset);
      pen.globalAlpha = 1;
      this.hits.push({ x: start, y, w: Math.max(3, wide), h: height, bar, about });
    }
  }

  // -- hands ------------------------------------------------------------------------------------------------------

  listen() {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaY) > Math.abs(event.deltaX) && !event.shiftKey && !this.focused()) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / this.width);
      else this.zoom(WHEEL ** event.deltaY, this.fromX(place(event)[0]));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = place(event);
      this.drag = { x, y, from: this.from, to: this.to, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (!this.drag) { this.show(x, y); return; }
      const by = ((x - this.drag.x) / (this.width - this.left)) * (this.drag.to - this.drag.from);
      if (Math.abs(x - this.drag.x) > 3) this.drag.moved = true;
      if (this.drag.moved) this.view(this.drag.from - by, this.drag.to - by);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const [x, y] = place(event);
      const hit = this.drag && !this.drag.moved ? this.hit(x, y) : null;
      this.drag = null;
      if (hit?.about.ordinal !== undefined) this.picked(hit.about.ordinal);
    });
    this.canvas.addEventListener("pointerleave", () => this.tip.classList.remove("on"));
    this.canvas.addEventListener("dblclick", () => this.all());
  }

  focused() { return document.activeElement === this.canvas; }

  hit(x, y) {
    for (let at = this.hits.length - 1; at >= 0; at -= 1) {
      const one = this.hits[at];
      if (x >= one.x - 1 && x <= one.x + one.w + 1 && y >= one.y && y <= one.y + one.h) return one;
    }
    return null;
  }

  show(x, y) {
    const hit = this.hit(x, y);
    this.tip.classList.toggle("on", Boolean(hit));
    this.canvas.style.cursor = hit?.about.ordinal !== undefined ? "pointer" : "";
    if (!hit) return;
    const { bar, about } = hit;
    const facts = Object.entries(bar.about ?? {}).filter(([, value]) => value !== null);
    this.tip.replaceChildren(
      h("b", {}, `${about.part ?? `group #${about.ordinal}`}: ${spanName(bar.name)}`),
      h("div", {}, h("span", {}, bar.count > 1 ? `${count(bar.count)} together` : "took"), h("span", {}, duration(bar.end_s - bar.start_s))),
      h("div", {}, h("span", {}, "from"), h("span", {}, place(bar.start_s, 1))),
      ...facts.map(([name, value]) => h("div", {}, h("span", {}, name), h("span", {}, String(value)))));
    const scroll = this.canvas.parentElement.scrollTop;
    const over = x + this.tip.offsetWidth + 24 > this.width;
    this.tip.style.transform = `translate(${over ? Math.max(0, x - this.tip.offsetWidth - 14) : x + 14}px, ${y - scroll + 16}px)`;
  }
}
