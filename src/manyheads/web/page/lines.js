// Attention as lines from queries (left) to keys (right): the largest weights of each query, with the
// weight as opacity. A single query can be selected.

import { LINES } from "./colour.js";
import { element, escaped, labelled, select, shown, visible } from "./dom.js";
import { picture, saving } from "./exports.js";

const ROW = 22; // the height of a token
const TOPS = ["1", "2", "3", "5", "10"];
const BETWEEN = 260; // from the left tokens to the right ones, if it fits

/** The k largest values of a row, in descending order: [[column, value], …]. */
export function strongest(values, row, columns, k) {
  const of = Array.from({ length: columns }, (_, column) => [column, values[row * columns + column]]);
  return of.sort((one, other) => other[1] - one[1]).slice(0, k);
}

export class Lines {
  /**
   * @param {{choose?: (row: number) => void, change?: (top: string) => void}} [how] called with the
   * selected query (−1 is all) and the number of lines per query
   */
  constructor({ choose = () => {}, change = () => {} } = {}) {
    this.choose = choose;
    this.change = change;
    this.row = -1;
    this.caption = element("figcaption");
    this.many = element("div");
    this.left = element("div", {
      class: "side queries",
      role: "listbox",
      tabindex: "0",
      "aria-label": "Queries: arrow keys choose one, Escape shows all",
      onkeydown: (event) => this.walk(event),
    });
    this.right = element("div", { class: "side keys" });
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.output = element("output", { class: "readout", "aria-live": "polite" });
    this.frame = element("div", { class: "scroll" }, element("div", { class: "strings" }, this.left, this.canvas, this.right));
    this.root = element(
      "figure",
      { class: "lines" },
      this.caption,
      this.many,
      this.frame,
      element("div", { class: "below" }, this.output, saving(() => this)),
    );
    new ResizeObserver(() => this.matrix && this.draw()).observe(this.root);
  }

  /** @param {import("./heatmap.js").Matrix} matrix @param {number} top lines of each query @param {number} row */
  show(matrix, top, row = -1) {
    this.matrix = matrix;
    this.top = top;
    this.row = row < matrix.rows.length ? row : -1;
    this.caption.textContent = matrix.title;
    const choice = select(TOPS.map((count) => [count, count]), String(top), this.change);
    this.many.replaceChildren(labelled("Lines per query", choice));
    const { rows, columns, values } = matrix;
    this.topKeys = rows.map((_, at) => strongest(values, at, columns.length, top));
    this.left.replaceChildren(
      ...rows.map((label, at) => element("div", { role: "option", "data-token": label, onclick: () => this.pick(at) }, visible(label))),
    );
    this.right.replaceChildren(...columns.map((label) => element("div", { "data-token": label }, visible(label))));
    this.draw();
  }

  get name() {
    return `${this.matrix.name}-lines`;
  }

  get title() {
    return `${this.matrix.title}, the ${this.top} strongest of each query`;
  }

  pick(row) {
    this.row = row === this.row ? -1 : row;
    this.draw();
    this.choose(this.row);
  }

  walk(event) {
    const last = this.matrix.rows.length - 1;
    const to = { ArrowDown: Math.min(last, this.row + 1), ArrowUp: Math.max(0, this.row - 1), Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.row = to;
    this.draw();
    this.choose(to);
  }

  /** Lines as [row, column, weight] of the chosen query, or of all. */
  chosen() {
    return this.topKeys.flatMap((keys, row) =>
      this.row === -1 || this.row === row ? keys.map(([column, weight]) => [row, column, weight]) : [],
    );
  }

  draw() {
    const { rows, columns } = this.matrix;
    const height = ROW * Math.max(rows.length, columns.length);
    const room = this.frame.clientWidth - this.left.offsetWidth - this.right.offsetWidth;
    const between = Math.max(60, Math.min(BETWEEN, room));
    const fine = Math.min(2, devicePixelRatio, 16000 / height);
    this.canvas.width = between * fine;
    this.canvas.height = height * fine;
    this.canvas.style.width = `${between}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(fine, fine);
    // From the root element: this canvas may not be in the document yet.
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--strong");
    for (const [row, column, weight] of this.chosen()) {
      context.globalAlpha = Math.min(1, Math.max(0.04, weight));
      context.lineWidth = 0.6 + 3 * weight;
      context.beginPath();
      context.moveTo(0, ROW * (row + 0.5));
      context.lineTo(between, ROW * (column + 0.5));
      context.stroke();
    }
    [...this.left.children].forEach((one, at) => one.setAttribute("aria-selected", String(at === this.row)));
    const strong = new Map(this.row === -1 ? [] : this.topKeys[this.row]);
    [...this.right.children].forEach((one, at) => one.classList.toggle("strong", strong.has(at)));
    this.output.textContent =
      this.row === -1
        ? "All queries. Choose one on the left."
        : `“${visible(rows[this.row])}” attends to ` +
          this.topKeys[this.row].map(([at, weight]) => `“${visible(columns[at])}” ${shown(weight)}`).join(", ");
  }

  table() {
    const { rows, columns } = this.matrix;
    return {
      columns: ["query", "key", "weight"],
      rows: this.chosen().map(([row, column, weight]) => [rows[row], columns[column], weight]),
    };
  }

  svg() {
    const { rows, columns } = this.matrix;
    const side = 130;
    const y = (at) => 40 + ROW * (at + 0.5);
    const text = (label, x, at, anchor) =>
      `<text x="${x}" y="${y(at) + 4}" text-anchor="${anchor}">${escaped(visible(label).slice(0, 18))}</text>`;
    const lines = this.chosen().map(
      ([row, column, weight]) =>
        `<line x1="${side}" y1="${y(row)}" x2="${side + BETWEEN}" y2="${y(column)}" stroke="${LINES[0]}" ` +
        `stroke-opacity="${Math.max(0.04, weight).toFixed(3)}" stroke-width="${(0.6 + 3 * weight).toFixed(2)}"/>`,
    );
    const labels = [
      ...rows.map((label, at) => text(label, side - 6, at, "end")),
      ...columns.map((label, at) => text(label, side + BETWEEN + 6, at, "start")),
    ];
    const height = 50 + ROW * Math.max(rows.length, columns.length);
    const title = `<text x="6" y="18" font-size="14">${escaped(this.title)}</text>`;
    const width = Math.max(2 * side + BETWEEN, 12 + 7.5 * this.title.length);
    return picture(Math.ceil(width), height, title + lines.join("") + labels.join(""));
  }
}
