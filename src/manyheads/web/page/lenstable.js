// The logit lens as a table: a row for each layer, a column for each position, in each cell the
// likeliest token, its colour a number between two ends; keys walk over it.

import { byteOf, css, paint, rgb, weightScale } from "./colour.js";
import { element, escaped, shown, visible } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

const CELL = [74, 22]; // of a saved picture

/** Dark letters on light colours. */
function inkOn(byte, scale) {
  const [red, green, blue] = rgb(byte, scale);
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
    this.frame = element("div", { class: "scroll" }, this.body);
    this.fill(this.frame);
    this.bars = [0, 1, 2].map(() => element("canvas", { class: "bar", "aria-hidden": "true" }));
    this.most = element("span");
    this.output.after(element("div", { class: "scale" }, "right", this.bars[0], "wrong", this.bars[1], "repeated", this.bars[2], this.most));
  }

  /**
   * @param {{name: string, title: string, rows: string[], inputs: string[], expected: (string|null)[],
   *   insight: string, tokens: string[][], values: number[][], low: number, high: number, what: string}} lens
   * @param {[number, number]} at
   */
  show(lens, at) {
    this.open(lens.title, lens.insight);
    this.name = lens.name;
    this.lens = lens;
    this.cells = lens.rows.map((_row, layer) => lens.inputs.map((_column, position) => this.cell(layer, position)));
    for (const [number, scale] of [weightScale(), /** @type {const} */ ("wrong"), /** @type {const} */ ("repeated")].entries()) paint(this.bars[number], Uint8Array.from({ length: 256 }, (_, byte) => byte), 1, 256, scale);
    this.most.textContent = `${shown(lens.low)} to ${shown(lens.high, 2)}`;
    const known = lens.expected.filter((one) => one !== null).length;
    const head = (title, labels) =>
      element("tr", {}, element("th", { scope: "row" }, title), ...labels.map((label) => element("th", { scope: "col" }, label === null ? "" : visible(label))));
    this.body.replaceChildren(
      head("read", lens.inputs),
      ...lens.rows.map((label, layer) => element("tr", {}, element("th", { scope: "row" }, label, ...this.score(layer, known)), ...this.cells[layer])),
      head("next", lens.expected),
    );
    this.choose(Math.min(at[0], lens.rows.length - 1), Math.min(at[1], lens.inputs.length - 1), false);
  }

  /** How many next tokens a layer has right, as a number and a bar. */
  score(layer, known) {
    if (!known) return [];
    const { tokens, expected } = this.lens;
    const right = expected.filter((token, position) => token !== null && token === tokens[layer][position]).length;
    const made = element("span", { class: "score" }, `${right} of ${known}`);
    made.style.backgroundSize = `${(100 * right) / known}% 3px`;
    return [" ", made];
  }

  /** The colour scale of a cell: wrong tokens have their own, and those that only repeat the token read. */
  scaleOf(layer, position) {
    const { tokens, expected, inputs } = this.lens;
    const token = tokens[layer][position];
    if (expected[position] === null || token === expected[position]) return weightScale();
    return token === inputs[position] ? "repeated" : "wrong";
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
    const scale = this.scaleOf(layer, position);
    made.style.backgroundColor = css(byte, scale);
    made.style.color = inkOn(byte, scale);
    return made;
  }

  walk(event) {
    const [layer, position] = this.at;
    const steps = { ArrowUp: [layer - 1, position], ArrowDown: [layer + 1, position], ArrowLeft: [layer, position - 1], ArrowRight: [layer, position + 1], Home: [layer, 0], End: [layer, this.lens.inputs.length - 1] };
    onArrow(event, steps, ([to, along]) => this.cells[to]?.[along] && this.choose(to, along));
  }

  choose(layer, position, tell = true) {
    this.cells[this.at[0]]?.[this.at[1]]?.removeAttribute("aria-selected");
    this.at = [layer, position];
    const cell = this.cells[layer][position];
    cell.setAttribute("aria-selected", "true");
    const beyond = cell.offsetLeft + cell.offsetWidth + 8 - this.frame.clientWidth;
    if (!tell) this.frame.scrollLeft = Math.max(0, beyond);
    if (document.activeElement === this.body) cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    const { rows, inputs, tokens, values, what } = this.lens;
    this.output.textContent = `${rows[layer]}, after “${visible(inputs[position])}”: “${visible(tokens[layer][position])}”, ${what} ${shown(values[layer][position])}`;
    if (tell) this.move(layer, position);
  }

  drawing() {
    const { rows, inputs, expected, tokens, values, low, high } = this.lens;
    const [wide, tall] = CELL;
    const left = 14 + 7.2 * Math.max(...rows.map((label) => label.length)); // room for the longest label
    const text = (x, y, word, fill = "#111") => `<text x="${x}" y="${y}" fill="${fill}">${escaped(visible(word).slice(0, 10))}</text>`;
    const y = (row) => tall * (row + 1);
    let inside = "";
    inputs.forEach((word, at) => (inside += text(left + wide * at + 4, y(-1) + 15, word)));
    rows.forEach((label, row) => {
      inside += `<text x="6" y="${y(row) + 15}">${escaped(label)}</text>`;
      inputs.forEach((_, at) => {
        const byte = byteOf(values[row][at], low, high);
        inside += `<rect x="${left + wide * at}" y="${y(row)}" width="${wide - 1}" height="${tall - 1}" fill="${css(byte, this.scaleOf(row, at))}"/>`;
        inside += text(left + wide * at + 4, y(row) + 15, tokens[row][at], inkOn(byte, this.scaleOf(row, at)));
      });
    });
    inside += text(6, y(-1) + 15, "read") + text(6, y(rows.length) + 15, "next");
    // Nothing comes after the last token of a text.
    expected.forEach((word, at) => (inside += word === null ? "" : text(left + wide * at + 4, y(rows.length) + 15, word)));
    return { width: left + wide * inputs.length + 8, height: y(rows.length + 1) + 6, inside, colours: { low, high, scale: weightScale() } };
  }

  table() {
    const { rows, inputs, tokens, values, what } = this.lens;
    return {
      columns: ["layer", "position", "read", "likeliest", what],
      rows: rows.flatMap((label, row) => inputs.map((word, at) => [label, at, word, tokens[row][at], values[row][at]])),
    };
  }
}
