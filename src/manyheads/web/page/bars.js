// Probabilities as bars: the tokens at a position, the classes of a picture, the words for a mask.

import { LINES } from "./colour.js";
import { element, escaped, html, nothing, percent, render, shown, visible } from "./dom.js";
import { Figure } from "./figure.js";

const ROW = 20; // the height of a bar and its gap in a file

/**
 * @typedef {object} Bar
 * @property {string|import("./dom.js").Template} label @property {number[]} values one bar each, 0 to 1
 * @property {string[]} [texts] the label after each bar; its number if omitted
 * @property {number} [extra] one more number @property {boolean} [strong]
 */

/** A row for each bar, in a table. @param {Bar[]} bars @param {string} [extra] the name of the extra number @param {number} [full] the value of a bar of full length */
export function barTable(bars, extra = "", full = 1) {
  return html`<table class="bars"><tbody>${bars.map((bar) => barRow(bar, extra, full))}</tbody></table>`;
}

/** @param {Bar} bar @param {string} name @param {number} full */
function barRow({ label, values, texts = values.map(percent), extra, strong }, name, full) {
  const words = typeof label === "string" ? visible(label) : label;
  // A property, because the content security policy refuses style attributes.
  const level = (value, at) => html`<span class="level ${at ? "second" : ""}" .style=${`width: ${((100 * value) / full).toFixed(1)}%`}></span>`;
  return html`<tr data-token=${typeof label === "string" ? label : nothing}>
    <th scope="row">${strong ? html`<mark>${words}</mark>` : words}</th>
    <td class="levels" aria-hidden="true">${values.map(level)}</td>
    <td>${texts.map((text) => html`<span class="of">${text}</span>`)}</td>
    ${extra === undefined ? nothing : html`<td>${name} ${shown(extra)}</td>`}
  </tr>`;
}

/** A figure of bars. */
export class Bars extends Figure {
  /**
   * @param {{name?: string, kind?: string, series?: string[], extra?: string}} [about] names of the
   * bars of a row and of its extra number
   */
  constructor({ name = "", kind = "", series = ["probability"], extra = "" } = {}) {
    super(kind);
    this.name = name;
    this.series = series;
    this.extra = extra;
    /** @type {(Bar & {label: string})[]} */
    this.bars = [];
    this.full = 1;
    this.body = element("div", { class: "scroll" });
    this.note = element("p", { class: "note" });
    const key = series.map((one, at) => element("span", { class: `key${at ? " second" : ""}` }, one));
    this.key = element("p", { class: "note", hidden: true }, ...key);
    this.fill(this.key, this.body, this.note);
  }

  /**
   * @param {(Bar & {label: string})[]} bars greatest first @param {string} title @param {string} [note] @param {number} [full] the value of a bar of full length, shown as a scale if it is not 1
   */
  show(bars, title, note = "", full = 1) {
    this.open(title);
    this.full = full;
    this.bars = bars;
    this.note.textContent = note;
    this.key.hidden = this.shownSeries().length < 2;
    const scale = this.scale();
    render([scale && html`<p class="note">${scale}</p>`, barTable(bars, this.extra, full)], this.body);
  }

  /** What a bar of full length stands for, unless it is 1. */
  scale() {
    return this.full === 1 ? "" : `Bars from 0 to ${percent(this.full)}`;
  }

  /** The names of the bars that rows have: all, or only the first ones. */
  shownSeries() {
    return this.series.slice(0, Math.max(1, ...this.bars.map(({ values }) => values.length)));
  }

  drawing() {
    const [bars, series] = [this.bars, this.shownSeries()];
    const left = 14 + 7.4 * Math.max(4, ...bars.map(({ label }) => visible(label).length));
    const tall = ROW * series.length;
    const rows = bars.map(({ label, values, texts = values.map(percent) }, row) => {
      const y = row * (tall + 4);
      const drawn = values.map((value, at) => {
        const [top, width] = [y + ROW * at, (260 * value) / this.full];
        return `<rect x="${left}" y="${top}" width="${width.toFixed(1)}" height="${ROW - 6}" fill="${LINES[at]}"/><text x="${(left + width + 6).toFixed(1)}" y="${top + 11}">${escaped(texts[at])}</text>`;
      });
      return `<text x="${left - 8}" y="${y + tall / 2 + 2}" text-anchor="end">${escaped(visible(label))}</text>${drawn.join("")}`;
    });
    const key = series.length > 1 ? series.map((one, at) => `<rect x="${left + 120 * at}" y="${bars.length * (tall + 4)}" width="10" height="10" fill="${LINES[at]}"/><text x="${left + 120 * at + 15}" y="${bars.length * (tall + 4) + 9}">${escaped(one)}</text>`) : [];
    if (this.full !== 1) key.push(`<text x="${left}" y="${bars.length * (tall + 4) + 9}">${escaped(this.scale())}</text>`);
    return { width: left + 350, height: bars.length * (tall + 4) + (key.length ? 18 : 0), inside: rows.join("") + key.join("") };
  }

  table() {
    const more = this.extra ? [this.extra] : [];
    return { columns: ["label", ...this.shownSeries(), ...more], rows: this.bars.map(({ label, values, extra }) => [label, ...values, ...more.map(() => extra ?? "")]) };
  }
}
