// One part of the forward pass: its numbers, shape, formula and code.

import { Bars } from "./bars.js";
import { afterPause, element, html, render, percent, shown, visible } from "./dom.js";
import { extent, formatted, groupOf, isStream, nameOf, shapeOf } from "./flowboxes.js";
import { HeatMap } from "./heatmap.js";
import { boxStory } from "./insights.js";
import { formulas } from "./math.js";
import { chips } from "./tokens.js";

export class OpenBox {
  /**
   * @param {{move: (row: number, column: number) => void, explain: (row: number, column: number) => Promise<any>}} how
   * called when the cursor moves, and for the terms of a cell
   */
  constructor({ move, explain }) {
    this.explain = explain;
    this.title = element("h2");
    this.insight = element("p", { class: "insight" });
    this.formula = element("p", { class: "formula" });
    this.facts = element("p", { class: "shape" });
    this.extra = element("div", { class: "controls" });
    this.map = new HeatMap({
      move: (row, column) => {
        move(row, column);
        this.likeliest(row);
        this.tellStory(row, column);
      },
      largest: 20,
      share: 0.3,
      hover: afterPause((row, column) => this.trace(row, column), 60),
    });
    this.map.root.dataset.stage = "Map";
    this.origin = element("section", { class: "origin", "aria-label": "Where the number comes from", "aria-live": "polite" });
    this.bars = new Bars({ kind: "likeliest", extra: "logit" });
    this.pieces = element("div");
    this.code = element("div", { class: "code" });
    this.root = element(
      "section",
      { class: "near openbox", "aria-label": "The opened box" },
      ...[this.title, this.insight, this.formula, this.facts, this.extra, this.pieces, this.bars.root, this.map.root, this.origin, this.code],
    );
  }

  /**
   * @param {import("./flowlayout.js").Box} box @param {{layer: number, head: number, cell: [number, number], labels: Function, isRaw: boolean}} how `isRaw`: the scores before the scale
   * @param {{numbers: any, beside: any}} of its tensor; for logits also the probabilities, and vice versa
   * @param {Record<string, {at: string, text: string}>} sources
   */
  show(box, { layer, head, cell, labels, isRaw }, { numbers, beside }, sources) {
    const { column } = box;
    const group = box.stage === "tokens" ? "Into the model" : groupOf(box, layer, column.layers);
    const inHead = box.axes.startsWith("h") ? `, head ${Math.min(head, column.heads - 1) + 1}` : "";
    const title = `${nameOf(column)}, ${group[0].toLowerCase()}${group.slice(1)}${inHead}`;
    render(html`${isRaw ? "Q Kᵀ, before the scale" : box.title} <small>${title}</small>`, this.title);
    this.formula.replaceChildren(...formulas(box.formula));
    if (box.stage === "tokens") this.map.root.hidden = true;
    this.box = box;
    this.isRaw = isRaw;
    this.insight.hidden = true;
    this.origin.hidden = true;
    this.pieces.hidden = box.stage !== "tokens";
    this.bars.root.hidden = box.words.length === 0;
    render(box.code.map((name) => sourceOf(name, sources[name])), this.code);
    if (box.stage === "tokens") {
      this.facts.textContent = `shape ${shapeOf(box)}`;
      render(chips(column.tokens, column.ids), this.pieces);
      return;
    }
    const { least, greatest, low, high } = extent(box, numbers.values);
    const topNote = box.words.length ? `; the top ${numbers.shape[1]} of ${box.shape.at(-1)} at each position` : "";
    this.facts.textContent = `shape ${shapeOf(box)}; from ${formatted(least, 5)} to ${formatted(greatest, 5)}${topNote}`;
    const [rows, columns] = [labels(box.rows, numbers.shape[0]), labels(box.columns, numbers.shape[1])];
    const isWeights = box.name.endsWith(".weights");
    const says = (row, at, value) => (isWeights ? `${row} attends to ${at}: ${value}` : box.words.length ? `at ${row}, number ${at}: ${value}` : `${row}, ${at}: ${value.replace("-Infinity", "−∞")}`);
    const name = `${box.name}-${layer + 1}-${head + 1}`;
    this.map.show({ name, title: `${box.title}: ${title}`, rows, columns, values: numbers.values, low, high, says }, cell);
    if (isStream(box)) this.map.low.textContent = `≤ ${shown(low, 2)}`;
    if (isStream(box)) this.map.high.textContent = `≥ ${shown(high, 2)}`;
    this.labels = { rows, columns };
    this.trace(...this.map.at);
    this.content = { box, rows, numbers, beside };
    this.likeliest(this.map.at[0]);
    this.tellStory(...this.map.at);
  }

  /** What there is to see at the chosen cell, in a sentence. */
  tellStory(row, column) {
    const { rows, columns } = this.labels;
    this.insight.textContent = boxStory(this.box, rows, columns, this.content.numbers.values, [row, column]);
    this.insight.hidden = this.insight.textContent === "";
  }

  /** Shows the most probable tokens at a position. */
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
    this.bars.show(bars, `Top ${count} tokens at position ${row + 1}, “${visible(rows[row])}”`);
  }

  /** Shows the terms of a cell. */
  async trace(row, column) {
    const box = this.box;
    const cell = await this.explain(row, column).catch((error) => (error.name === "AbortError" ? null : { terms: [] }));
    if (!cell || this.box !== box) return;
    this.origin.hidden = cell.total === undefined;
    if (this.origin.hidden) return;
    const { rows, columns } = this.labels;
    const where = `row “${visible(rows[row])}”, column “${visible(columns[column])}”`;
    const before = this.isRaw ? { ...cell, then: "", total: cell.sum } : cell;
    render(html`<h3>Where this number comes from<small><span>${where}</span> <span>${cell.rule}</span></small></h3>${termTable(before)}`, this.origin);
  }
}

/** The largest terms of a cell, what the others add, and the result. */
function termTable({ terms, others, added, sum, then, total }) {
  const most = Math.max(...terms.map((term) => Math.abs(term.value)), 1e-12);
  const line = (label, product, value, share) => html`<tr>
    <th scope="row" data-token=${label}>${visible(label)}</th><td>${product}</td><td>${formatted(value)}</td>
    <td class="size"><span class=${value < 0 ? "term below" : "term above"} .style=${`width: ${(100 * share).toFixed(1)}%`}></span></td>
  </tr>`;
  const rows = terms.map((term) => line(term.label, term.right === 1 ? "" : `${formatted(term.left)} × ${formatted(term.right)}`, term.value, Math.abs(term.value) / most));
  if (others.count) rows.push(line(`${others.count} others`, "", others.value, Math.min(1, Math.abs(others.value) / most)));
  for (const { label, value } of added) rows.push(line(terms.length ? `+ ${label}` : label, "", value, 0));
  const result = then ? `Σ = ${formatted(sum, 5)}, ${then} = ` : "Σ = ";
  return html`<table class="terms"><tbody>${rows}</tbody></table><p class="total">${result}<output>${formatted(total, 5)}</output></p>`;
}

/** The source of a function with its location, inserted as text, not as markup. */
function sourceOf(name, { at, text }) {
  const short = name.split(".").slice(-2).join(".");
  return html`<h3>${short} <span>${at}</span></h3><pre tabindex="0" role="region" aria-label="Code of ${short}"><code>${text}</code></pre>`;
}
