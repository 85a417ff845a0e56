// A matrix as a heat map: one canvas pixel per cell, with labels, a cursor moved by arrow keys,
// a read-out of the cell, and the same numbers as a table.

import { byteOf, css, NOTHING, paint, scaleFor } from "./colour.js";
import { element, escaped, exact, shown, svgElement, visible, plain } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

const LETTER = 0.6; // the width of a letter of a label, as a share of its height
const [FONT, STAGE, LARGE, ROOMY] = [12, 11.5, 14, 560]; // heights of labels, on stage 28 pixels; the width from which they are large
const TITLE = 16; // the height of the title of an axis
const [FEW, FLAT] = [4, 20]; // rows that are tall; the height of those of a wide map on stage
const LINE = 0.95; // the distance of two labels of rows, as a share of their height
const SMALL = [10, 6]; // the least heights of the labels of rows, on stage 15 pixels
const LEAST = 14; // the height of a cell whose label can be read
const MOST_RECTANGLES = 64 * 64; // in a saved picture; above that the map is one image in it
const MOST_IN_TABLE = 64 * 64;
const RING = "#d55e00"; // contrast of 3 or more with both ends of the scale of weights

/**
 * @typedef {object} Matrix
 * @property {string} name for files @property {string} title
 * @property {string[]} rows @property {string[]} columns labels
 * @property {ArrayLike<number>} values row after row
 * @property {number} [low] @property {number} [high] the ends of the colour scale
 * @property {(row: string, column: string, value: string) => string} [says] a cell in words
 * @property {(value: number) => string} [number] a value in the read-out: percent for weights
 * @property {[number, number][]|null} [rings] cells with a ring; empty keeps the place of their legend
 * @property {string} [ringed] what a ring means
 * @property {string} [down] @property {string} [across] titles of the axes
 * @property {string} [insight] what there is to see, in a sentence
 */

export class HeatMap extends Figure {
  /**
   * @param {{move?: (row: number, column: number, how: {replace: boolean}) => void, hover?: (row: number, column: number) => void, largest?: number, tallest?: number, share?: number, height?: () => number, square?: boolean}} [how]
   * called when the cursor moves (keys replace the last entry of the history), and when the pointer does; the largest side
   * of a cell, and of the map's height; the share of the window's height up to which cells grow, or `height`, the pixels that the map and its labels may have (0: the share); `square`: cells are as wide as tall, where they fit
   */
  constructor({ move = () => {}, hover = () => {}, largest = 34, tallest = Infinity, share = 0.42, height = () => 0, square = false } = {}) {
    super("heatmap");
    this.move = move;
    this.hover = hover;
    this.largest = largest;
    this.tallest = tallest;
    this.share = share;
    this.height = height;
    this.square = square;
    this.at = [0, 0];
    /** @type {Required<Matrix>|null} */
    this.matrix = null;
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "img",
      "aria-roledescription": "heat map",
      onkeydown: (event) => this.walk(event),
      onpointermove: (event) => this.point(...this.cellUnder(event)),
      onpointerleave: () => this.point(...this.at),
      onclick: (event) => this.choose(...this.cellUnder(event)),
    });
    this.labels = svgElement({ class: "labels", "aria-hidden": "true" });
    this.rings = svgElement({ class: "rings", "aria-hidden": "true" });
    this.cursor = element("div", { class: "cursor" });
    this.plane = element("div", { class: "plane" }, this.labels, this.canvas, this.rings, this.cursor);
    this.frame = element("div", { class: "scroll" }, this.plane);
    this.tablePlace = element("div", { class: "numbers" });
    this.toggle = element(
      "button",
      { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.toggleTable() },
      "Table",
    );
    this.bar = element("canvas", { "aria-hidden": "true", class: "bar" });
    this.low = element("span");
    this.high = element("span");
    this.ringKey = element("span", { class: "ring-key" });
    this.nothing = element("span", { class: "nothing-key" }, element("i"), "−∞");
    this.fill(this.frame);
    this.output.after(element("div", { class: "scale" }, this.ringKey, this.nothing, this.low, this.bar, this.high));
    this.tools.prepend(this.toggle);
    this.root.append(this.tablePlace);
    new ResizeObserver(() => this.matrix && this.place()).observe(this.root);
  }

  /** @param {Matrix} matrix @param {number[]} [at] the cell to stand on */
  show(matrix, at = this.at) {
    this.open(matrix.title, matrix.insight);
    this.name = matrix.name;
    this.matrix = { low: 0, high: 1, rings: null, ringed: "gold alignment", number: shown, down: "", across: "", says: (r, c, v) => `${r} → ${c}: ${v}`, insight: "", ...matrix };
    const { rows, columns, values, low, high } = this.matrix;
    const bytes = new Uint16Array(values.length);
    this.scale = scaleFor(low, high);
    for (let cell = 0; cell < bytes.length; cell++) bytes[cell] = byteOf(values[cell], low, high);
    paint(this.canvas, bytes, rows.length, columns.length, this.scale);
    paint(this.bar, Uint8Array.from({ length: 256 }, (_, byte) => byte), 1, 256, this.scale);
    const size = `${rows.length} rows, ${columns.length} columns`;
    this.canvas.setAttribute("aria-label", `${matrix.title}: ${size}. Arrow keys walk over the cells.`);
    const { rings } = this.matrix;
    this.ringKey.textContent = this.matrix.ringed;
    this.ringKey.hidden = rings === null;
    this.ringKey.classList.toggle("reserved", !rings?.length);
    this.nothing.hidden = !Array.prototype.includes.call(values, -Infinity);
    this.nothing.querySelector("i").style.background = css(NOTHING, this.scale);
    this.low.textContent = shown(low);
    this.high.textContent = shown(high);
    this.at = [Math.max(0, Math.min(at[0], rows.length - 1)), Math.max(0, Math.min(at[1], columns.length - 1))];
    this.place();
    this.tell(...this.at);
    if (this.tablePlace.hasChildNodes()) this.drawTable();
  }

  /** The value of a cell. */
  value(row, column) {
    return this.matrix.values[row * this.matrix.columns.length + column];
  }

  /** Sizes of cells and margins for the available width; maps with few rows get taller cells. */
  layout(room) {
    const { rows, columns } = this.matrix;
    const longest = (labels) => Math.max(1, ...labels.map((label) => visible(label).length));
    const few = rows.length <= 32 && columns.length <= 32; // words: cells may be wider than tall
    const staged = this.root.classList.contains("staged"); // as large as the window allows
    const font = few && room >= ROOMY ? LARGE : staged ? STAGE : FONT;
    const small = SMALL[Number(staged)];
    const letter = LETTER * font;
    const left = Math.min(150, 12 + letter * longest(rows)) + (this.matrix.down ? TITLE : 0);
    const corner = this.matrix.across && LETTER * FONT * (this.matrix.across.length + 2) <= left; // above the labels of the rows it takes no height
    const top = Math.min(110, 14 + letter * 0.75 * longest(columns)) + (this.matrix.across && !corner ? TITLE : 0);
    // Slanted labels of the last columns extend beyond the map.
    const right = Math.min(100, 14 + letter * 0.65 * longest(columns));
    const free = (room - left - right) / columns.length;
    const fit = free < 1 ? Math.max(0.25, free) : Math.floor(free); // a wide map is drawn narrower than its pixels
    // A map grows with its card, as long as it fits the window.
    const spare = this.height();
    const largest = staged
      ? Math.max(1, Math.floor((10 * (this.root.clientHeight - this.heading.offsetHeight - this.insight.offsetHeight - this.below.offsetHeight - top - 27)) / rows.length) / 10)
      : spare
        ? Math.max(LEAST, Math.min(this.square ? 80 : 60, Math.floor((spare - top) / rows.length)))
        : grown(this.largest, Math.floor((this.share * innerHeight) / rows.length));
    if (this.square) {
      const tall = Math.max(0.5, staged ? largest : Math.min(largest, Math.floor((10 * this.tallest) / rows.length) / 10));
      const cell = Math.max(0.5, Math.min(tall, Math.floor((10 * (room - left - right)) / columns.length) / 10));
      return { left, top, right, cell, tall: rows.length === columns.length ? cell : tall, font, small, corner };
    }
    const cell = Math.max(columns.length > 64 ? 0.25 : 3, Math.min(staged ? 3 * largest : few ? (spare ? 3 : 2) * largest : largest, fit));
    const flat = rows.length <= 10 || columns.length > 4 * rows.length;
    const tall = staged && flat && !few ? Math.min(FLAT, largest) : staged || (few && cell > largest) ? Math.min(cell, largest) : flat ? Math.max(cell, Math.min(rows.length <= FEW ? 40 : 20, largest, Math.floor(400 / rows.length))) : spare && few ? Math.max(cell, Math.min(20, largest)) : cell;
    const most = staged ? Infinity : Math.max(2, Math.floor(this.tallest / rows.length));
    return { left, top, right, cell, tall: Math.min(tall, most), font, small, corner };
  }

  place() {
    const { rows, columns } = this.matrix;
    const { left, top, right, cell, tall } = (this.sizes = this.layout(this.frame.clientWidth || 600));
    const [width, height] = [cell * columns.length, tall * rows.length];
    assign(this.plane, { width: left + width + right, height: top + height + 4 });
    assign(this.canvas, { left, top, width, height });
    for (const layer of [this.labels, this.rings]) {
      layer.setAttribute("width", String(left + width + right));
      layer.setAttribute("height", String(top + height + 4));
    }
    this.labels.innerHTML = labelText(this.matrix, this.sizes);
    this.rings.innerHTML = ringsOf(this.matrix, this.sizes);
    this.mark(...this.at);
  }

  /** Other cells with a ring. @param {[number, number][]} [rings] */
  ring(rings) {
    if (!rings) return;
    this.matrix.rings = rings;
    this.rings.innerHTML = ringsOf(this.matrix, this.sizes);
  }

  /** Reports the cell under the pointer, once. */
  point(row, column) {
    if (this.pointed === `${row},${column}`) return;
    this.pointed = `${row},${column}`;
    this.mark(row, column);
    this.tell(row, column);
    this.hover(row, column);
  }

  cellUnder(event) {
    const box = this.canvas.getBoundingClientRect();
    const { rows, columns } = this.matrix;
    const clamp = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
    return [
      clamp((event.clientY - box.top) / box.height, rows.length),
      clamp((event.clientX - box.left) / box.width, columns.length),
    ];
  }

  walk(event) {
    const [row, column] = this.at;
    const last = [this.matrix.rows.length - 1, this.matrix.columns.length - 1];
    const steps = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], Home: [row, 0], End: last };
    onArrow(event, steps, (to) => this.choose(Math.max(0, Math.min(last[0], to[0])), Math.max(0, Math.min(last[1], to[1])), true));
  }

  choose(row, column, replace = false) {
    this.at = [row, column];
    this.mark(row, column);
    this.tell(row, column);
    this.hover(row, column);
    this.move(row, column, { replace });
  }

  mark(row, column) {
    const { left, top, cell, tall } = this.sizes;
    const [width, height] = [Math.max(cell, 5), Math.max(tall, 5)];
    assign(this.cursor, { left: left + column * cell, top: top + row * tall, width, height });
    for (const label of this.labels.children) label.classList.toggle("here", [`row ${row}`, `column ${column}`].includes(/** @type {SVGElement} */ (label).dataset.at ?? ""));
  }

  tell(row, column) {
    const { rows, columns, says, number } = this.matrix;
    this.output.textContent = says(`“${plain(rows[row])}”`, `“${plain(columns[column])}”`, number(this.value(row, column)));
  }

  toggleTable() {
    const open = this.tablePlace.hasChildNodes();
    this.toggle.setAttribute("aria-pressed", String(!open));
    if (open) this.tablePlace.replaceChildren();
    else this.drawTable();
  }

  drawTable() {
    const { rows, columns } = this.matrix;
    if (rows.length * columns.length > MOST_IN_TABLE) {
      this.tablePlace.textContent = "Too many cells for a table on screen: save them as CSV.";
      return;
    }
    const head = element("tr", {}, element("td"), ...columns.map((c) => element("th", { scope: "col" }, visible(c))));
    const lines = rows.map((label, row) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, visible(label)),
        ...columns.map((_, column) => element("td", {}, exact(this.value(row, column)))),
      ),
    );
    this.tablePlace.replaceChildren(element("table", {}, head, ...lines));
  }

  table() {
    const { rows, columns } = this.matrix;
    return {
      columns: ["", ...columns],
      rows: rows.map((label, row) => [label, ...columns.map((_, column) => this.value(row, column))]),
    };
  }

  drawing() {
    const { rows, columns, low, high } = this.matrix;
    const sizes = this.layout(760);
    const { left, top, cell, tall } = sizes;
    const [width, height] = [cell * columns.length, tall * rows.length];
    let cells = "";
    if (rows.length * columns.length > MOST_RECTANGLES) {
      const place = `x="${left}" y="${top}" width="${width}" height="${height}"`;
      cells = `<image ${place} image-rendering="pixelated" href="${this.canvas.toDataURL()}"/>`;
    } else {
      rows.forEach((_row, row) =>
        columns.forEach((_column, column) => {
          const fill = css(byteOf(this.value(row, column), low, high), this.scale);
          // Half a pixel of overlap: no white seams at any zoom.
          cells += `<rect x="${left + column * cell}" y="${top + row * tall}" width="${cell + (column < columns.length - 1 ? 0.5 : 0)}" height="${tall + (row < rows.length - 1 ? 0.5 : 0)}" fill="${fill}"/>`;
        }),
      );
    }
    return {
      width: left + width + sizes.right,
      height: top + height + 8,
      inside: `<g shape-rendering="crispEdges">${cells}</g>${labelText(this.matrix, sizes)}${ringsOf(this.matrix, sizes)}`,
      colours: { low, high, scale: this.scale },
    };
  }
}

/** The largest side of a cell in a map that grows with the window. */
const grown = (largest, fitting) => Math.max(Math.min(largest, Math.max(18, fitting)), Math.min(60, fitting));

/** Sets sizes and positions via CSSOM: the Content-Security-Policy forbids style attributes. */
function assign(one, pixels) {
  for (const [key, value] of Object.entries(pixels)) one.style[key] = `${value}px`;
}

/** A ring around some cells, as SVG. */
function ringsOf({ rings }, { left, top, cell, tall }) {
  const ring = ([row, column]) => `<rect data-ring="${row},${column}" x="${left + column * cell + 2.5}" y="${top + row * tall + 2.5}" width="${cell - 5}" height="${tall - 5}" rx="${Math.min(cell, tall) / 2 - 2.5}" fill="none" stroke="${RING}" stroke-width="2.5"/>`;
  return (rings ?? []).map(ring).join("");
}

/** Labels of rows and columns as SVG; those of rows are smaller before they are thinned out. */
function labelText({ rows, columns, down, across }, { left, top, cell, tall, font, small, corner }) {
  const letter = LETTER * font;
  const every = (size, count, wide) => {
    const least = (wide * letter) / size;
    return least <= 1 ? 1 : ([2, 5, 10, 20, 50, 100].find((step) => step >= least) ?? count);
  };
  const numbers = (/** @type {string[]} */ labels) => (/^\d\d/.test(labels.at(-1) ?? "") ? 2.6 : 0); // every fifth number will do
  const text = (label) => escaped(visible(label).slice(0, 18));
  let inside = "";
  if (corner) inside += `<text x="${left - 8}" y="${top - 8}" text-anchor="end">${escaped(across)} →</text>`;
  else if (across) inside += `<text x="${left + (cell * columns.length) / 2}" y="12" text-anchor="middle">${escaped(across)}</text>`;
  if (down) inside += `<text transform="translate(12 ${top + (tall * rows.length) / 2}) rotate(-90)" text-anchor="middle">${escaped(down)}</text>`;
  const fitting = Math.min(font, tall / LINE);
  const [lower, step] = numbers(rows) || fitting < small ? [font, every(tall, rows.length, numbers(rows) || 1.27)] : [fitting, 1];
  for (let row = 0; row < rows.length; row += step) {
    const y = top + row * tall + tall / 2 + lower / 3;
    inside += `<text x="${left - 5}" y="${y}" font-size="${lower}" text-anchor="end" data-at="row ${row}" data-token="${escaped(rows[row])}">${text(rows[row])}</text>`;
  }
  for (let column = 0; column < columns.length; column += every(cell, columns.length, numbers(columns) || 1.65)) {
    const x = left + column * cell + cell / 2 + font / 3;
    inside += `<text transform="translate(${x} ${top - 5}) rotate(-50)" font-size="${font}" data-at="column ${column}" data-token="${escaped(columns[column])}">${text(columns[column])}</text>`;
  }
  return inside;
}
