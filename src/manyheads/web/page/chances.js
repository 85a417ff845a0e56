// The next token: probabilities as pairs of bars, before and after temperature, top-k and top-p.

import { LINES } from "./colour.js";
import { element, escaped, shown, visible } from "./dom.js";
import { picture, saving } from "./exports.js";

const ROW = 34;
const LEFT = 92; // for the token
const RIGHT = 70; // for the number

/** @typedef {{token: number, piece: string, before: number, after: number}} Chance */

export class Chances {
  constructor() {
    this.at = 0;
    this.caption = element("figcaption");
    this.place = element("div", {
      class: "plot",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "bars",
      onkeydown: (event) => this.walk(event),
    });
    this.output = element("output", { class: "readout", "aria-live": "polite" });
    this.remark = element("p", { class: "note" });
    const below = element("div", { class: "below" }, this.output, saving(() => this));
    this.root = element("figure", { class: "chances", hidden: true }, this.caption, this.place, this.remark, below);
    new ResizeObserver(() => this.chances && this.draw()).observe(this.root);
  }

  /** @param {{name: string, title: string, remark: string, chances: Chance[]}} what */
  show({ name, title, remark, chances }) {
    this.root.hidden = false;
    Object.assign(this, { name, title, chances });
    this.at = Math.min(this.at, chances.length - 1);
    this.caption.textContent = title;
    this.remark.textContent = remark;
    this.place.setAttribute("aria-label", `${title}. Arrow keys move from token to token.`);
    this.draw();
  }

  draw() {
    const width = Math.max(200, Math.min(720, this.place.clientWidth || 400));
    const height = this.chances.length * ROW + 26;
    this.place.innerHTML =
      `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true">` +
      `${this.inside(width, this.at)}</svg>`;
    const { piece, before, after } = this.chances[this.at];
    const sampled = after > 0 ? `${shown(after, 5)} when sampling` : "removed when sampling";
    this.output.textContent = `“${visible(piece)}”: ${shown(before, 5)} by the model, ${sampled}`;
  }

  inside(width, chosen) {
    const room = width - LEFT - RIGHT;
    const key = ["model", "sampling"].map((name, at) => {
      const x = (width < 320 ? 4 : LEFT) + 110 * at;
      return `<rect x="${x}" y="4" width="10" height="10" fill="${LINES[at]}"/><text x="${x + 15}" y="13" font-size="12">${name}</text>`;
    });
    const rows = this.chances.map(({ piece, before, after }, at) => {
      const y = 26 + at * ROW;
      const bar = (value, number) =>
        `<rect x="${LEFT}" y="${y + 2 + 14 * number}" width="${(room * value).toFixed(2)}" height="11" fill="${LINES[number]}"/>` +
        `<text x="${(LEFT + room * value + 5).toFixed(1)}" y="${y + 12 + 14 * number}" font-size="11">${number && !value ? "removed" : shown(value)}</text>`;
      const frame = at === chosen ? `<rect x="1" y="${y - 1}" width="${width - 2}" height="${ROW - 2}" rx="3" fill="none" stroke="currentColor" opacity="0.5"/>` : "";
      const label = escaped([...visible(piece)].slice(0, 11).join(""));
      return `${frame}<text x="${LEFT - 8}" y="${y + 19}" font-size="13" text-anchor="end">${label}</text>${bar(before, 0)}${bar(after, 1)}`;
    });
    return key.join("") + rows.join("");
  }

  walk(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(this.chances.length - 1, this.at + by));
    this.draw();
  }

  svg() {
    const title = `<text x="8" y="18" font-size="14">${escaped(this.title)}</text>`;
    const [width, height] = [Math.max(560, 20 + 7.5 * this.title.length), this.chances.length * ROW + 26];
    return picture(width, height + 30, `${title}<g transform="translate(0 28)">${this.inside(560, -1)}</g>`);
  }

  table() {
    return {
      columns: ["token", "subword", "model", "sampling"],
      rows: this.chances.map(({ token, piece, before, after }) => [token, piece, before, after]),
    };
  }
}
