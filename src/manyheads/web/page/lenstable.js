// The logit lens as a table: a row for each layer, a column for each position, in each cell the
// likeliest token, its colour a number between two ends; keys walk over it.

import { byteOf, css, rgb, weightScale } from "./colour.js";
import { element, escaped, shown, visible } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

const CELL = [74, 22]; // of a saved picture

/** Dark letters on light colours. */
function inkOn(byte) {
  const [red, green, blue] = rgb(byte);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
}

export class LensTable extends Figure {
  /** @param {{move: (layer: number, position: number) => void}} how called when the cursor moves */
  constructor({ move }) {
    super("lens");
    this.move = move;
    this.at = [0, 0];
    this.body = element("table", {
      role: "grid",
      tabindex: "0",
      "aria-label": "Likeliest token after each layer: arrow keys move over the cells",
      onkeydown: (event) => this.walk(event),
    });
    this.fill(element("div", { class: "scroll" }, this.body));
  }

  /**
   * @param {{name: string, title: string, rows: string[], given: string[], expected: (string|null)[],
   *   insight: string, tokens: string[][], values: number[][], low: number, high: number, what: string}} lens
   * @param {[number, number]} at
   */
  show(lens, at) {
    this.open(lens.title, lens.insight);
    this.name = lens.name;
    this.lens = lens;
    this.cells = lens.rows.map((_row, layer) => lens.given.map((_column, position) => this.cell(layer, position)));
    const head = (title, labels) =>
      element("tr", {}, element("th", { scope: "row" }, title), ...labels.map((label) => element("th", { scope: "col" }, label === null ? "" : visible(label))));
    this.body.replaceChildren(
      head("read", lens.given),
      ...lens.rows.map((label, layer) => element("tr", {}, element("th", { scope: "row" }, label), ...this.cells[layer])),
      head("next", lens.expected),
    );
    this.choose(Math.min(at[0], lens.rows.length - 1), Math.min(at[1], lens.given.length - 1), false);
  }

  cell(layer, position) {
    const { tokens, values, low, high, expected } = this.lens;
    const byte = byteOf(values[layer][position], low, high);
    const token = tokens[layer][position];
    const made = element(
      "td",
      { role: "gridcell", class: token === expected[position] ? "right" : "", onclick: () => this.choose(layer, position) },
      visible(token),
    );
    made.style.backgroundColor = css(byte);
    made.style.color = inkOn(byte);
    return made;
  }

  walk(event) {
    const [layer, position] = this.at;
    const steps = { ArrowUp: [layer - 1, position], ArrowDown: [layer + 1, position], ArrowLeft: [layer, position - 1], ArrowRight: [layer, position + 1], Home: [layer, 0], End: [layer, this.lens.given.length - 1] };
    onArrow(event, steps, ([to, along]) => this.cells[to]?.[along] && this.choose(to, along));
  }

  choose(layer, position, tell = true) {
    this.cells[this.at[0]]?.[this.at[1]]?.removeAttribute("aria-selected");
    this.at = [layer, position];
    const cell = this.cells[layer][position];
    cell.setAttribute("aria-selected", "true");
    if (document.activeElement === this.body) cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    const { rows, given, tokens, values, what } = this.lens;
    this.output.textContent = `${rows[layer]}, after “${visible(given[position])}”: “${visible(tokens[layer][position])}”, ${what} ${shown(values[layer][position])}`;
    if (tell) this.move(layer, position);
  }

  drawing() {
    const { rows, given, expected, tokens, values, low, high } = this.lens;
    const [wide, tall] = CELL;
    const left = 14 + 7.2 * Math.max(...rows.map((label) => label.length)); // room for the longest label
    const text = (x, y, word, fill = "#111") => `<text x="${x}" y="${y}" fill="${fill}">${escaped(visible(word).slice(0, 10))}</text>`;
    const y = (row) => tall * (row + 1);
    let inside = "";
    given.forEach((word, at) => (inside += text(left + wide * at + 4, y(-1) + 15, word)));
    rows.forEach((label, row) => {
      inside += `<text x="6" y="${y(row) + 15}">${escaped(label)}</text>`;
      given.forEach((_, at) => {
        const byte = byteOf(values[row][at], low, high);
        inside += `<rect x="${left + wide * at}" y="${y(row)}" width="${wide - 1}" height="${tall - 1}" fill="${css(byte)}"/>`;
        inside += text(left + wide * at + 4, y(row) + 15, tokens[row][at], inkOn(byte));
      });
    });
    inside += text(6, y(-1) + 15, "read") + text(6, y(rows.length) + 15, "next");
    // Nothing comes after the last token of a text.
    expected.forEach((word, at) => (inside += word === null ? "" : text(left + wide * at + 4, y(rows.length) + 15, word)));
    return { width: left + wide * given.length + 8, height: y(rows.length + 1) + 6, inside, colours: { low, high, scale: weightScale() } };
  }

  table() {
    const { rows, given, tokens, values, what } = this.lens;
    return {
      columns: ["layer", "position", "read", "likeliest", what],
      rows: rows.flatMap((label, row) => given.map((word, at) => [label, at, word, tokens[row][at], values[row][at]])),
    };
  }
}
