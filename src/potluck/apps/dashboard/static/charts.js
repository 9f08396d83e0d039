// Line charts: a few lines, an axis each way, and the values under the pointer in the legend.

import { h, keyed, s, say, set } from "./dom.js";

const HEIGHT = 190;
const ROOM = { left: 68, right: 12, top: 10, bottom: 24 };

/** Round steps for an axis from 0 or the lowest value. */
export function ticks(low, high, wanted = 4, steps = [1, 2, 5, 10]) {
  const span = high - low || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = steps.map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

export class Chart {
  #at = null; // where the pointer is, in the units of the horizontal axis

  /** ``y`` and ``x`` say values in words; ``nothing`` what it means that there are none. */
  constructor(host, { label, y, x, nothing, low = 0, high = null, backwards = false }) {
    Object.assign(this, { host, label, y, x, nothing, low, high, backwards });
    this.grid = s("g", { class: "grid-lines" });
    this.lines = s("g", { class: "curves" });
    this.cursor = s("line", { class: "cursor", y1: ROOM.top, y2: HEIGHT - ROOM.bottom, visibility: "hidden" });
    this.svg = s("svg", { role: "img", height: HEIGHT }, this.grid, this.lines, this.cursor);
    this.legend = h("ul", { class: "chart-legend" });
    this.empty = h("p", { class: "empty" });
    this.svg.addEventListener("pointermove", (event) => this.#move(event));
    this.svg.addEventListener("pointerleave", () => this.#move(null));
    host.append(this.svg, this.legend, this.empty);
    this.series = [];
  }

  /** ``series``: [{key, name, tone, points: [[x, y], …]}]; ``range``: the horizontal ends, if fixed. */
  draw(series, range = null) {
    this.series = series.filter((each) => each.points.length);
    const has = this.series.some((each) => each.points.length > 1);
    set(this.svg, { hidden: !has });
    this.svg.style.display = has ? "" : "none";
    this.legend.hidden = !has;
    this.empty.hidden = has;
    say(this.empty, has ? "" : this.nothing);
    if (!has) return;
    const width = Math.max(240, this.host.clientWidth);
    set(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}`, width });
    this.#scale(width, range);
    this.#axes(width);
    this.#curves();
    this.#values();
  }

  #scale(width, range) {
    const xs = this.series.flatMap((each) => [each.points[0][0], each.points.at(-1)[0]]);
    const ys = this.series.flatMap((each) => each.points.map((point) => point[1]));
    const [left, right] = range ?? [Math.min(...xs), Math.max(...xs)];
    const least = this.low ?? Math.min(...ys);
    const most = this.high ?? Math.max(...ys);
    const space = this.high === null ? (most - least) * 0.08 || Math.abs(most) * 0.1 || 1 : 0;
    this.ends = { left, right, least: this.low === null ? least - space : least, most: most + space };
    const { ends } = this;
    this.px = (x) => ROOM.left + ((x - left) / (right - left || 1)) * (width - ROOM.left - ROOM.right);
    this.py = (y) => HEIGHT - ROOM.bottom - ((y - ends.least) / (ends.most - ends.least || 1)) * (HEIGHT - ROOM.top - ROOM.bottom);
    this.width = width;
  }

  #axes(width) {
    const { left, right, least, most } = this.ends;
    const rows = ticks(least, most).map((value) => ({ kind: "y", value }));
    const origin = this.backwards ? right : 0; // round distances from now, or round numbers
    const steps = this.backwards ? [1, 2, 3, 6, 10] : undefined;
    const columns = ticks(left - origin, right - origin, width > 420 ? 6 : 4, steps).map((value) => ({ kind: "x", value: value + origin }));
    keyed(this.grid, [...rows, ...columns], {
      key: (tick) => `${tick.kind}${(tick.value - (tick.kind === "x" ? origin : 0)).toPrecision(6)}`,
      create: (tick) => s("g", { class: tick.kind }, s("line"), s("text")),
      update: (element, { kind, value }) => {
        const [line, text] = element.children;
        if (kind === "y") {
          const y = this.py(value);
          set(line, { x1: ROOM.left, x2: width - ROOM.right, y1: y, y2: y });
          set(text, { x: ROOM.left - 8, y: y + 4, "text-anchor": "end" });
          say(text, this.y(value));
        } else {
          const x = this.px(value);
          set(text, { x, y: HEIGHT - 6, "text-anchor": x > width - 40 ? "end" : "middle" });
          say(text, this.x(value, right));
        }
      },
    });
  }

  #curves() {
    keyed(this.lines, this.series, {
      key: (each) => each.key,
      create: () => s("path", {}),
      update: (element, { points, tone }) => {
        const first = this.ends.left;
        const shown = points.filter((point) => point[0] >= first);
        const d = shown.map(([x, y], index) => `${index ? "L" : "M"}${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`).join("");
        set(element, { d, class: `curve ${tone}` });
      },
    });
  }

  #move(event) {
    if (event === null) this.#at = null;
    else {
      const box = this.svg.getBoundingClientRect();
      const share = (event.clientX - box.left - ROOM.left) / (this.width - ROOM.left - ROOM.right);
      this.#at = this.ends.left + share * (this.ends.right - this.ends.left);
    }
    if (this.ends) this.#values();
  }

  /** The legend: the values at the pointer, or the last ones. */
  #values() {
    const at = this.#at;
    const shows = at !== null && at >= this.ends.left && at <= this.ends.right;
    set(this.cursor, { visibility: shows ? "visible" : "hidden" });
    if (shows) set(this.cursor, { x1: this.px(at), x2: this.px(at) });
    const value = (points) => {
      if (!shows) return points.at(-1)[1];
      const found = points.findLast((point) => point[0] <= at);
      return (found ?? points[0])[1];
    };
    keyed(this.legend, this.series, {
      key: (each) => each.key,
      create: () => h("li", {}, h("span"), h("b")),
      update: (element, each) => {
        set(element, { class: each.tone });
        say(element.children[0], each.name);
        say(element.children[1], this.y(value(each.points)));
      },
    });
    const words = this.series.map((each) => `${each.name} ${this.y(each.points.at(-1)[1])}`);
    set(this.svg, { "aria-label": `${this.label}. Now: ${words.join(", ")}.` });
  }
}
