// Attention as lines from queries (left) to keys (right): the largest weights of each query, with the
// weight as width and opacity. A single query can be selected.

import { LINES } from "./colour.js";
import { element, escaped, labelled, render, select, percent, svgElement, visible, plain } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

const ROW = 22; // the height of a token
const TOPS = ["1", "2", "3", "5", "10"];
const WIDEST = 9; // a line of weight 1
const BETWEEN = 320; // from the left tokens to the right ones, if it fits

/** The k largest values of a row, in descending order: [[column, value], …]. @returns {[number, number][]} */
export function strongest(values, row, columns, k) {
  /** @type {[number, number][]} */
  const of = Array.from({ length: columns }, (_, column) => [column, values[row * columns + column]]);
  return of.sort((one, other) => other[1] - one[1]).slice(0, k);
}

export class Lines extends Figure {
  /**
   * @param {{choose?: (row: number) => void, change?: (top: string) => void}} [how] called with the
   * selected query (−1 is all) and the number of lines per query
   */
  constructor({ choose = () => {}, change = () => {} } = {}) {
    super("lines");
    this.choose = choose;
    this.change = change;
    this.row = -1;
    /** @type {import("./heatmap.js").Matrix|null} */
    this.matrix = null;
    this.many = element("div");
    this.left = element("div", {
      class: "side queries",
      role: "listbox",
      tabindex: "0",
      "aria-label": "Queries: arrow keys choose one, Escape shows all",
      onkeydown: (event) => this.walk(event),
    });
    this.right = element("div", { class: "side keys" });
    this.strings = svgElement({ "aria-hidden": "true" });
    this.frame = element("div", { class: "scroll" }, element("div", { class: "strings" }, this.left, this.strings, this.right));
    this.fill(this.many, this.frame);
    new ResizeObserver(() => this.matrix && this.draw()).observe(this.root);
  }

  /** @param {import("./heatmap.js").Matrix} matrix @param {number} top lines of each query @param {number} row */
  show(matrix, top, row = -1) {
    this.matrix = matrix;
    this.top = top;
    this.row = row < matrix.rows.length ? row : -1;
    this.open(matrix.title, matrix.insight);
    this.name = `${matrix.name}-lines`;
    const choice = select(TOPS.map((count) => [count, count]), String(top), this.change);
    render(labelled("Lines per query", choice), this.many);
    const { rows, columns, values } = matrix;
    this.topKeys = rows.map((_, at) => strongest(values, at, columns.length, top));
    this.left.replaceChildren(
      ...rows.map((label, at) => element("div", { role: "option", "data-token": label, onclick: () => this.pick(at) }, visible(label))),
    );
    this.right.replaceChildren(...columns.map((label) => element("div", { "data-token": label }, visible(label))));
    this.draw();
  }

  pick(row) {
    this.row = row === this.row ? -1 : row;
    this.draw();
    this.choose(this.row);
  }

  walk(event) {
    const last = this.matrix.rows.length - 1;
    onArrow(event, { ArrowDown: Math.min(last, this.row + 1), ArrowUp: Math.max(0, this.row - 1), Escape: -1 }, (to) => {
      this.row = to;
      this.draw();
      this.choose(to);
    });
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
    this.strings.setAttribute("width", String(between));
    this.strings.setAttribute("height", String(height));
    this.strings.innerHTML = this.inside(0, between, "var(--strong)");
    [...this.left.children].forEach((one, at) => one.setAttribute("aria-selected", String(at === this.row)));
    const strong = new Map(this.row === -1 ? [] : this.topKeys[this.row]);
    /** @type {HTMLElement[]} */ ([...this.right.children]).forEach((one, at) => {
      const weight = strong.get(at) ?? 0; // a weak link is a faint mark
      one.style.background = weight ? `color-mix(in srgb, var(--strong) ${Math.round(45 * weight)}%, transparent)` : "";
      one.style.fontWeight = weight > 0.5 ? "700" : "";
    });
    this.output.textContent =
      this.row === -1
        ? "All queries. Choose one on the left."
        : `“${plain(rows[this.row])}” attends to ` +
          this.topKeys[this.row].map(([at, weight]) => `“${plain(columns[at])}” ${percent(weight)}`).join(", ");
  }

  /** One line for each weight. @param {number} left @param {number} right @param {string} colour */
  inside(left, right, colour) {
    const middle = (left + right) / 2;
    const line = ([row, column, weight]) =>
      `<path d="M${left} ${ROW * (row + 0.5)}C${middle} ${ROW * (row + 0.5)} ${middle} ${ROW * (column + 0.5)} ${right} ${ROW * (column + 0.5)}" fill="none" stroke="${colour}" ` +
      `stroke-opacity="${(0.08 + 0.8 * weight).toFixed(3)}" stroke-width="${Math.max(0.4, WIDEST * weight).toFixed(2)}"/>`;
    return this.chosen().map(line).join("");
  }

  table() {
    const { rows, columns } = this.matrix;
    return {
      columns: ["query", "key", "weight"],
      rows: this.chosen().map(([row, column, weight]) => [rows[row], columns[column], weight]),
    };
  }

  drawing() {
    const { rows, columns } = this.matrix;
    const side = 130;
    const text = (label, x, at, anchor) => `<text x="${x}" y="${ROW * (at + 0.5) + 4}" text-anchor="${anchor}">${escaped(visible(label).slice(0, 18))}</text>`;
    const labels = [...rows.map((label, at) => text(label, side - 6, at, "end")), ...columns.map((label, at) => text(label, side + BETWEEN + 6, at, "start"))];
    const height = ROW * Math.max(rows.length, columns.length);
    return { width: 2 * side + BETWEEN, height, inside: this.inside(side, side + BETWEEN, LINES[0]) + labels.join("") };
  }
}
