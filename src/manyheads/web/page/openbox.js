// One part of the forward pass: its numbers, where they come from, shape, formula and code.

import { Bars } from "./bars.js";
import { afterPause, element, html, render, percent, plain, shown } from "./dom.js";
import { extent, groupOf, isStream, nameOf, shapeOf } from "./flowboxes.js";
import { boxStory } from "./flowstory.js";
import { HeatMap } from "./heatmap.js";
import { coloured, formulas, mathml } from "./math.js";
import { chips } from "./tokens.js";

const BELOW = 268; // pixels below a map: its read-out, and where a number comes from
const SCALED = 44; // by how much two softmaxes are higher than the terms of a cell
const [WIDE, ROWS] = [960, 4]; // a window with two columns; the keys of which a softmax is shown twice

/** A number of JSON, which has no −∞. @param {number|string} value */
const number = (value) => shown(Number(value));

export class OpenBox {
  /**
   * @param {{move: (row: number, column: number) => void, explain: (row: number, column: number) => Promise<any>}} how
   * called when the cursor moves, and for the terms of a cell
   */
  constructor({ move, explain }) {
    this.explain = explain;
    this.title = element("h2");
    this.formula = element("p", { class: "formula" });
    this.facts = element("p", { class: "shape" });
    this.map = new HeatMap({
      move: (row, column) => {
        move(row, column);
        this.likeliest(row);
        this.tell(row, column);
      },
      largest: 20,
      share: 0.3,
      height: () => this.spare(),
      hover: afterPause((row, column) => this.trace(row, column), 60),
    });
    this.map.root.dataset.stage = "Map";
    this.origin = element("section", { class: "origin", "aria-label": "Where the number comes from", "aria-live": "polite" });
    this.bars = new Bars({ kind: "likeliest", extra: "logit" });
    this.scaled = new Bars({ name: "softmax-scale", kind: "scaled chances", series: ["with √c", "without √c"] });
    this.pieces = element("div");
    this.code = element("div");
    this.root = element(
      "section",
      { class: "near openbox", "aria-label": "The opened box" },
      element("div", { class: "boxhead" }, this.title, this.formula),
      ...[this.pieces, this.bars.root, this.map.root, this.origin, this.scaled.root, this.facts],
      element("details", { class: "code" }, element("summary", {}, "Code"), this.code),
    );
  }

  /** The height that the window has for the map and its labels, so that the terms of a cell are in sight below it. */
  spare() {
    const around = this.root.parentElement;
    if (innerWidth < WIDE || !around) return 0;
    const bars = this.content.softmaxes && around.closest(".live") ? SCALED : 0; // above the terms in a step of the tour
    const above = this.map.frame.getBoundingClientRect().top - this.root.getBoundingClientRect().top + this.root.scrollTop;
    return Math.max(1, innerHeight - (around.getBoundingClientRect().top + scrollY) - above - BELOW - bars);
  }

  /**
   * @param {import("./flowlayout.js").Box} box
   * @param {{layer: number, head: number, cell: [number, number], labels: Function, isRaw: boolean, softmaxes: ((row: number) => number[][])|null, scale: ArrayLike<number>|null}} how
   * `scale`: numbers whose colour scale is kept; `isRaw`: the scores before the scale; `softmaxes`: a row of scores through the softmax, with √c and without
   * @param {{numbers: any, beside: any, near: {weights?: import("./flowstory.js").Matrix, kind: string, of: (what: string) => any}}} of
   * its tensor; for logits also the probabilities, and vice versa; other boxes of the same part
   * @param {Record<string, {at: string, text: string}>} sources
   */
  show(box, { layer, head, cell, labels, isRaw, softmaxes, scale }, { numbers, beside, near }, sources) {
    const { column } = box;
    const group = box.stage === "tokens" ? "Into the model" : groupOf(box, layer, column.layers);
    const inHead = box.axes.startsWith("h") ? `, head ${Math.min(head, column.heads - 1) + 1}` : "";
    const title = `${nameOf(column)}, ${group[0].toLowerCase()}${group.slice(1)}${inHead}`;
    render(html`${isRaw ? "Q Kᵀ, before the scale" : box.title} <small>${title}</small>`, this.title);
    this.formula.replaceChildren(...formulas(box.formula));
    if (box.stage === "tokens") this.map.root.hidden = true;
    this.box = box;
    this.isRaw = isRaw;
    this.origin.hidden = true;
    this.pieces.hidden = box.stage !== "tokens";
    this.bars.root.hidden = box.words.length === 0;
    this.scaled.root.hidden = true;
    render(box.code.map((name) => sourceOf(name, sources[name])), this.code);
    this.facts.textContent = `shape ${shapeOf(box)}`;
    if (box.stage === "tokens") return void render(chips(column.tokens, column.ids), this.pieces);
    const { least, greatest } = extent(box, numbers.values);
    const { low, high } = extent(box, scale ?? numbers.values);
    const topNote = box.words.length ? `; the top ${numbers.shape[1]} of ${box.shape.at(-1)} at each position` : "";
    this.facts.textContent += `; from ${shown(least)} to ${shown(greatest)}${topNote}`;
    const [rows, columns] = [labels(box.rows, numbers.shape[0]), labels(box.columns, numbers.shape[1])];
    const isWeights = box.name.endsWith(".weights");
    this.number = /\.(weights|distribution)$/.test(box.name) ? percent : number;
    const says = (row, at, value) => (isWeights ? `${row} attends to ${at}: ${value}` : box.words.length ? `at ${row}, number ${at}: ${value}` : `${row}, ${at}: ${value}`);
    const name = `${box.name}-${layer + 1}-${head + 1}`;
    this.content = { box, rows, columns, numbers, beside, near, softmaxes };
    this.map.show({ name, title: `${box.title}: ${title}`, insight: box.words.length ? "" : this.story(...cell), rows, columns, values: numbers.values, low, high, says, number: this.number, ...this.giveaway(cell[0]) }, cell);
    if (isStream(box)) this.map.low.textContent = `≤ ${shown(low, 2)}`;
    if (isStream(box)) this.map.high.textContent = `≥ ${shown(high, 2)}`;
    this.trace(...this.map.at);
    this.likeliest(this.map.at[0]);
    this.compare(this.map.at[0]);
  }

  /** A ring around the score of the token that a row must predict, which the mask hides. @param {number} row */
  giveaway(row) {
    const { columns, near } = this.content;
    const masked = /\.(scores|masked)$/.test(this.box.name) && near.of("masked");
    if (!masked || masked[row * columns.length + row + 1] !== -Infinity || row + 1 === columns.length) return {};
    return { rings: /** @type {[number, number][]} */ ([[row, row + 1]]), ringed: "the token to predict" };
  }

  /** What there is to see at a cell, in a sentence. */
  story(row, column) {
    const { box, rows, columns, numbers, near, softmaxes } = this.content;
    const [at, key] = [Math.min(row, rows.length - 1), Math.min(column, columns.length - 1)];
    return boxStory(box, { rows, columns, values: numbers.values }, [at, key], { ...near, scaled: softmaxes?.(at) });
  }

  /** Tells about the chosen cell. */
  tell(row, column) {
    const place = this.content.box.words.length ? this.bars : this.map;
    place.insight.textContent = this.story(row, column);
    this.map.ring(this.giveaway(row).rings);
    this.compare(row);
  }

  /** The most probable tokens at a position. */
  likeliest(row) {
    const { box, rows, numbers, beside } = this.content;
    if (!box.words.length) return;
    const count = numbers.shape[1];
    const [chances, scores] = box.name.endsWith(".logits") ? [beside, numbers] : [numbers, beside];
    const bars = box.words[row].map((label, rank) => {
      const chance = chances.values[row * count + rank];
      return { label, values: [chance], texts: [percent(chance)], extra: scores.values[row * count + rank] };
    });
    this.bars.name = `${box.name}-position-${row + 1}`;
    this.bars.show(bars, `Top ${count} tokens at position ${row + 1}, “${plain(rows[row])}”`);
    this.bars.open(this.bars.title, this.story(row, 0));
  }

  /** The softmax of a row of scores with and without √c, side by side: the keys with most weight. */
  compare(row) {
    const { rows, columns, softmaxes } = this.content;
    if (!softmaxes) return;
    const [scaled, raw] = softmaxes(row);
    const bars = columns.map((label, at) => ({ label, values: [scaled[at], raw[at]] }));
    this.scaled.show(bars.sort((one, other) => other.values[0] - one.values[0]).slice(0, ROWS), `Softmax of the row “${plain(rows[row])}”`);
  }

  /** Shows the terms of a cell. */
  async trace(row, column) {
    const box = this.box;
    const cell = await this.explain(row, column).catch((error) => (error.name === "AbortError" ? null : { terms: [] }));
    if (!cell || this.box !== box) return;
    this.origin.hidden = cell.total === undefined;
    if (this.origin.hidden) return;
    const { rows, columns } = this.content;
    const where = `row “${plain(rows[row])}”, column “${plain(columns[column])}”`;
    const before = this.isRaw ? { ...cell, then: "", total: cell.sum } : cell;
    const { then, sum, total } = before;
    const result = html`<p class="total">${then ? `Σ = ${number(sum)}, ${then} = ` : "Σ = "}<output>${this.number(Number(total))}</output></p>`;
    const heading = html`<h3>Where this number comes from <small><span>${where}</span></small></h3>`;
    render(html`${heading}<div><small>${cell.rule.split(/ (?=[·+])/).map((part) => [coloured(mathml(part)), " "])}</small>${result}</div>${termTable(before, box.name.endsWith(".weights"))}`, this.origin);
  }
}

/** The largest terms of a cell, and what the others add; bars of weights have no sign. */
function termTable({ terms, others, added }, isWeights) {
  const most = Math.max(...[...terms, others, ...added].map(({ value }) => Math.abs(Number(value))).filter(Number.isFinite), 1e-12);
  const kind = (value) => (isWeights ? "term" : value < 0 ? "term below" : "term above");
  const line = (label, product, value) => html`<tr>
    <th scope="row" data-token=${label}>${plain(label)}</th><td>${product}</td><td>${number(value)}</td>
    <td class="size"><span class=${kind(value)} .style=${`width: ${Math.min(100, (100 * Math.abs(Number(value))) / most || 0).toFixed(1)}%`}></span></td>
  </tr>`;
  const rows = terms.map(({ label, left, right, value }) => line(label, right === 1 ? "" : `${number(left)} × ${number(right)}`, value));
  if (others.count) rows.push(line(`${others.count} others`, "", others.value));
  for (const { label, value } of added) rows.push(line(terms.length ? `+ ${label}` : label, "", value));
  return html`<table class="terms"><tbody>${rows}</tbody></table>`;
}

/** The source of a function with its location, inserted as text, not as markup. */
function sourceOf(name, { at, text }) {
  const short = name.split(".").slice(-2).join(".");
  return html`<h3>${short} <span>${at}</span></h3><pre tabindex="0" role="region" aria-label="Code of ${short}"><code>${text}</code></pre>`;
}
