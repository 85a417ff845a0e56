// Probabilities as bars, each with its words: tokens after a mask, classes of a picture.

import { LINES } from "./colour.js";
import { element, escaped, shown, visible } from "./dom.js";
import { picture, saving } from "./exports.js";

const ROW = 22;

export class Bars {
  /** @param {{name: string, title: string}} about */
  constructor({ name, title }) {
    this.name = name;
    this.title = title;
    this.rows = [];
    this.caption = element("figcaption", {}, title);
    this.body = element("table", { class: "bars" });
    this.note = element("p", { class: "note" });
    this.root = element("figure", { hidden: true }, this.caption, this.body, this.note, element("div", { class: "below" }, saving(() => this)));
  }

  /**
   * @param {{label: string, value: number, strong?: boolean}[]} rows greatest first
   * @param {{title?: string, note?: string}} [about]
   */
  show(rows, { title = this.title, note = "" } = {}) {
    this.root.hidden = false;
    this.rows = rows;
    this.title = this.caption.textContent = title;
    this.note.textContent = note;
    this.body.replaceChildren(
      ...rows.map(({ label, value, strong }) =>
        element(
          "tr",
          {},
          element("th", { scope: "row" }, strong ? element("mark", {}, visible(label)) : visible(label)),
          element("td", {}, element("meter", { min: "0", max: "1", value: String(value), "aria-hidden": "true" })),
          element("td", {}, shown(value)),
        ),
      ),
    );
  }

  svg() {
    const left = 20 + 7.5 * Math.max(4, ...this.rows.map(({ label }) => visible(label).length));
    const bars = this.rows.map(({ label, value }, at) => {
      const y = 36 + ROW * at;
      return (
        `<text x="${left - 8}" y="${y + 13}" text-anchor="end">${escaped(visible(label))}</text>` +
        `<rect x="${left}" y="${y}" width="${(240 * value).toFixed(1)}" height="${ROW - 6}" fill="${LINES[0]}"/>` +
        `<text x="${left + 240 * value + 6}" y="${y + 13}">${shown(value)}</text>`
      );
    });
    const wide = Math.max(left + 320, 12 + 7.5 * this.title.length);
    return picture(Math.ceil(wide), 46 + ROW * this.rows.length, `<text x="6" y="18" font-size="14">${escaped(this.title)}</text>${bars.join("")}`);
  }

  table() {
    return { columns: ["label", "probability"], rows: this.rows.map(({ label, value }) => [label, value]) };
  }
}
