// A line chart as SVG, linear or logarithmic; arrow keys move over its points.

import { LINES } from "./colour.js";
import { element, escaped, exact, shown } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

const MARGIN = { left: 62, right: 16, bottom: 42 };
const LETTER = 7; // the width of a letter
const TITLE = 18; // the width of the title of the y axis
const LINE = 18; // the height of a line of the legend

/**
 * @typedef {object} Series
 * @property {string} name @property {[number, number][]} points rising in x
 * @property {"line"|"dots"|"dashes"|"marks"} [style] marks: a dashed line with dots
 * @property {boolean} [mute] drawn, but not in the read-out
 * @property {string} [colour] @property {boolean} [faint] pale and not in the legend
 */

/**
 * Round numbers between two ends, at most about `count` of them.
 * @param {number} [least] the smallest step: 1 for integers
 */
export function ticks(low, high, count = 6, least = 0) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough));
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, at) => (first + at) * step);
}

/** Powers of ten between two ends, and their halves and fifths where they are few. */
export function logTicks(low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const parts = to - from > 3 ? [1] : [1, 2, 5];
  const all = Array.from({ length: to - from + 1 }, (_, at) => parts.map((part) => part * 10 ** (from + at))).flat();
  const inside = all.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : ticks(low, high);
}

/** Exponential moving average: s = a·s + (1 − a)·y. */
export function smooth(points, share) {
  let mean = null;
  return points.map(([x, y]) => [x, (mean = mean === null ? y : share * mean + (1 - share) * y)]);
}

export class Chart extends Figure {
  /** @param {{name: string, title: string, across?: string, tall?: number, moved?: (step: number) => void}} about `moved` is called with the step under the cursor; the titles of the axes are `across` and that of `show` */
  constructor({ name, title, across = "step", tall = 290, moved = () => {} }) {
    super("chart");
    this.moved = moved;
    this.name = name;
    this.heading.textContent = title;
    this.across = across;
    this.at = -1;
    this.steps = [];
    this.place = element("div", {
      class: "axes",
      tabindex: "0",
      role: "img",
      "aria-roledescription": "chart",
      "aria-label": `${title}: arrow keys move over the steps`,
      onkeydown: (event) => this.walk(event),
      onpointermove: (event) => this.point(event),
    });
    this.note = element("p", { class: "note on-stage" });
    this.size = { width: 560, height: tall };
    this.fill(this.place);
    this.root.append(this.note);
    new ResizeObserver(() => this.fit()).observe(this.root);
  }

  /** Adapts the width to the container, so that the font size stays the same. */
  fit() {
    const width = Math.max(280, Math.min(760, Math.floor(this.place.clientWidth)));
    if (!this.series || width === this.size.width) return;
    this.size.width = width;
    this.draw();
  }

  /** The entries of the legend, as many per line as fit. */
  legend() {
    let [x, line] = [MARGIN.left, 0];
    return this.series.filter((one) => !one.faint).map((one) => {
      const wide = 30 + LETTER * one.name.length;
      if (x + wide > this.size.width && x > MARGIN.left) [x, line] = [MARGIN.left, line + 1];
      x += wide;
      return { one, x: x - wide, line };
    });
  }

  /** Size and margins of the axes. */
  frame() {
    const lines = 1 + Math.max(0, ...this.legend().map(({ line }) => line));
    const { x, y, least } = this.ranges();
    const labels = this.ticks(x, y, least).map((axis) => axis.map((tick) => LETTER * exact(tick).length));
    const left = Math.max(MARGIN.left, 12 + Math.max(...labels[1]) + (this.up ? TITLE : 0));
    return { ...this.size, ...MARGIN, left, right: Math.max(MARGIN.right, 4 + Math.max(...labels[0]) / 2), top: 10 + LINE * lines };
  }

  /** @param {Series[]} series @param {{logX?: boolean, logY?: boolean, note?: string, up?: string, number?: (value: number) => string}} [how] `up` is the title of the y axis, `number` a value in the read-out */
  show(series, { logX = false, logY = false, note = "", up = "", number = shown } = {}) {
    this.root.hidden = false;
    const fits = ([x, y]) => (!logX || x > 0) && (!logY || y > 0);
    this.series = series.map((one, place) => ({ style: "line", colour: LINES[place % LINES.length], ...one, points: one.points.filter(fits) }));
    this.up = up;
    this.number = number;
    this.logX = logX;
    this.logY = logY;
    this.note.textContent = note;
    // A cursor at the newest step stays at the newest one; another stays at its step.
    const step = this.at < 0 || this.at === this.steps.length - 1 ? Infinity : this.steps[this.at];
    this.steps = [...new Set(this.series.filter((s) => s.style !== "dashes").flatMap((s) => s.points.map(([x]) => x)))];
    this.steps.sort((one, other) => one - other);
    this.at = this.steps.findLastIndex((one) => one <= step);
    if (this.at < 0) this.at = Math.min(0, this.steps.length - 1);
    this.draw();
  }

  draw() {
    const { width, height, inside } = this.drawing();
    const now = this.at < 0 ? "" : this.cursor();
    this.place.innerHTML = `<svg viewBox="0 0 ${width} ${height}" aria-hidden="true">${inside}${now}</svg>`;
    if (this.at < 0) {
      this.output.textContent = "No measurements yet.";
      return;
    }
    const step = this.steps[this.at];
    const readings = this.series.flatMap(({ name, points, mute }) => {
      const point = mute ? null : points.find(([x]) => x === step); // series may have different steps
      return point ? [`${name} ${this.number(point[1])}`] : [];
    });
    this.output.textContent = `${this.across} ${step}: ${readings.join(", ")}`;
  }

  walk(event) {
    if (this.at < 0) return;
    onArrow(event, { ArrowLeft: -1, ArrowRight: 1, Home: -this.steps.length, End: this.steps.length }, (by) => {
      this.at = Math.max(0, Math.min(this.steps.length - 1, this.at + by));
      this.draw();
      this.moved(this.steps[this.at]);
    });
  }

  point(event) {
    if (this.at < 0) return;
    const box = this.place.firstElementChild.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.size.width;
    const { toX } = this.scales();
    const away = this.steps.map((step) => Math.abs(toX(step) - x));
    const nearest = away.indexOf(Math.min(...away));
    if (nearest !== this.at) {
      this.at = nearest;
      this.draw();
      this.moved(this.steps[nearest]);
    }
  }

  /** The numbers at both axes. */
  ticks(x, y, least) {
    return [
      this.logX ? logTicks(x[0], x[1]) : ticks(x[0], x[1], this.size.width / 80, least),
      this.logY ? logTicks(y[0], y[1]) : ticks(y[0], y[1]),
    ];
  }

  /** The ends of both axes. */
  ranges() {
    const points = this.series.flatMap((one) => one.points);
    const [x, y] = [0, 1].map((axis) => ends(points.map((point) => point[axis])));
    const integers = points.every(([at]) => Number.isInteger(at));
    // Centre a single integer point between its neighbours.
    if (integers && points.length && !this.logX && !Number.isInteger(x[0])) [x[0], x[1]] = [points[0][0] - 1, points[0][0] + 1];
    if (!this.logY) y[0] = Math.min(y[0], y[0] > 0 && y[0] < y[1] / 3 ? 0 : y[0]);
    return { x, y, least: integers ? 1 : 0 };
  }

  /** Functions from values to pixels. */
  scales() {
    const { x, y, least } = this.ranges();
    const { width, height, left, right, top, bottom } = this.frame();
    const along = (/** @type {number[]} */ [low, high], log) => (value) =>
      log ? Math.log(value / low) / Math.log(high / low || 2) : (value - low) / (high - low || 1);
    const [shareX, shareY] = [along(x, this.logX), along(y, this.logY)];
    return {
      x,
      y,
      least,
      toX: (value) => left + (width - left - right) * shareX(value),
      toY: (value) => height - bottom - (height - top - bottom) * shareY(value),
    };
  }

  /** The line at the chosen step. */
  cursor() {
    const { top, height, bottom } = this.frame();
    return `<path class="now" stroke="currentColor" stroke-dasharray="2 3" stroke-opacity="0.7" d="M${this.scales().toX(this.steps[this.at])} ${top}V${height - bottom}"/>`;
  }

  drawing() {
    const { width, height, left, right, top, bottom } = this.frame();
    const { x, y, least, toX, toY } = this.scales();
    const parts = [];
    const [across, up] = this.ticks(x, y, least);
    for (const tick of across) {
      parts.push(`<path class="grid" stroke="#8884" d="M${toX(tick)} ${top}V${height - bottom}"/>`);
      parts.push(`<text x="${toX(tick)}" y="${height - bottom + 16}" text-anchor="middle">${exact(tick)}</text>`);
    }
    for (const tick of up) {
      parts.push(`<path class="grid" stroke="#8884" d="M${left} ${toY(tick)}H${width - right}"/>`);
      parts.push(`<text x="${left - 6}" y="${toY(tick) + 4}" text-anchor="end">${exact(tick)}</text>`);
    }
    parts.push(`<text x="${(left + width - right) / 2}" y="${height - 6}" text-anchor="middle">${escaped(this.across)}</text>`);
    if (this.up) parts.push(`<text transform="translate(12 ${(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">${escaped(this.up)}</text>`);
    this.series.forEach(({ points, style, colour, faint }) => {
      const places = points.map(([a, b]) => [toX(a).toFixed(1), toY(b).toFixed(1)]);
      if (style === "dots" || places.length === 1) {
        parts.push(...places.map(([a, b]) => `<circle cx="${a}" cy="${b}" r="2.8" fill="${colour}"/>`));
      } else if (places.length) {
        if (style === "marks") parts.push(...places.map(([a, b]) => `<circle cx="${a}" cy="${b}" r="3" fill="${colour}"/>`));
        const dash = style === "dashes" || style === "marks" ? ' stroke-dasharray="6 4"' : "";
        const path = places.map((place) => place.join(" ")).join("L");
        parts.push(`<path d="M${path}" fill="none" stroke="${colour}" stroke-width="${faint ? 1 : 1.8}"${faint ? ' stroke-opacity="0.35"' : ""}${dash}/>`);
      }
    });
    this.legend().forEach(({ one: { name, colour, style }, x: at, line }) => {
      const base = 14 + LINE * line;
      const dash = style === "dashes" || style === "marks" ? ' stroke-dasharray="4 2"' : "";
      if (style !== "dots") parts.push(`<path d="M${at} ${base - 4}h12" stroke="${colour}" stroke-width="2.5"${dash}/>`);
      if (style === "dots" || style === "marks") parts.push(`<circle cx="${at + 6}" cy="${base - 4}" r="3.5" fill="${colour}"/>`);
      parts.push(`<text x="${at + 15}" y="${base}">${escaped(name)}</text>`);
    });
    return { width, height, inside: parts.join("") };
  }

  table() {
    return {
      columns: ["series", this.across, "value"],
      rows: this.series.flatMap(({ name, points }) => points.map(([x, y]) => [name, x, y])),
    };
  }
}

function ends(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const number of numbers) {
    low = Math.min(low, number);
    high = Math.max(high, number);
  }
  if (low > high) return [0.1, 1];
  return low === high ? [low - Math.abs(low) * 0.1 - 1e-9, high + Math.abs(high) * 0.1 + 1e-9] : [low, high];
}
