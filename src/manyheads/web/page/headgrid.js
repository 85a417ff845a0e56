// All heads of a kind of attention as small maps, to be compared, chosen and knocked out.

import { byteOf, css, paint, scaleFor, weightScale } from "./colour.js";
import { element, escaped, shown } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

/**
 * @typedef {object} AttentionMap of the manifest of a trace
 * @property {string} name @property {number} layers @property {number} heads @property {string[]} rows
 * @property {string[]} columns @property {Record<string, number[][]>} statistics @property {boolean} [rollout]
 * @property {number[][]} [covered] in cross-attention the share of the source's words that each head covers
 * @property {Map<number, number>[][]} [offsets] in self-attention the mean weight on the token at some distances
 */

const [MOST, MUCH] = [0.5, 0.3]; // of the weight: from which a head rests on the first token, or has a distance
/** Distances that have a name, and what a head does there. @type {[number, string, string][]} */
const DISTANCES = [[-1, "1 back", "looks one token back"], [-2, "2 back", "looks two tokens back"], [0, "itself", "lets each token attend to itself"], [1, "1 ahead", "looks one token ahead"]];

/**
 * The mean weight of each head on the tokens at the distances that have a name.
 * @param {import("./api.js").Tensor} bytes layers, heads, queries, keys @returns {Map<number, number>[][]}
 */
export function offsetsOf({ shape: [layers, heads, rows, columns], values }) {
  const mean = (map, offset) => {
    let [sum, count] = [0, 0];
    for (let row = Math.max(0, -offset); row < rows && row + offset < columns; row++, count++) sum += values[(map * rows + row) * columns + row + offset];
    return sum / 255 / (count || 1);
  };
  return Array.from({ length: layers }, (_, layer) => Array.from({ length: heads }, (__, head) => new Map(DISTANCES.map(([offset]) => [offset, mean(layer * heads + head, offset)]))));
}

/**
 * What a head does, from its statistics: a short name, and in words.
 * @param {AttentionMap} map @param {number} layer @param {number} head @returns {{name: string, does: string}}
 */
export function roleOf({ statistics, covered, offsets }, layer, head) {
  const of = (name) => statistics[name]?.[layer][head] ?? NaN;
  const percent = (name) => `${Math.round(100 * of(name))}\u00a0%`;
  const among = 2 ** of("entropy");
  if (covered) {
    const share = `${Math.round(100 * covered[layer][head])}\u00a0%`;
    return { name: `covers ${share}`, does: `covers the source words: each gets ${share} of the weight of some token, on average` };
  }
  if (of("first") >= MOST) return { name: "first token", does: `rests on the first token: ${percent("first")} of its weight` };
  const near = offsets?.[layer][head] ?? new Map();
  const [offset, name, does] = DISTANCES.reduce((best, one) => (near.get(one[0]) > near.get(best[0]) ? one : best));
  if (near.get(offset) >= MUCH) {
    const share = `${Math.round(100 * near.get(offset))}\u00a0%`;
    return { name: `${name} ${share}`, does: `${does}: ${share} of its weight` };
  }
  return { name: `${Math.round(among)} tokens`, does: `spreads its weight over about ${Math.round(among)} tokens` };
}

const COVERS = "covers: the greatest weight that a source word gets, on average over the words";

export class HeadGrid extends Figure {
  /** What is shown. @type {AttentionMap} */
  map;
  /** The statistic that sorts the heads, or empty. */
  by = "";
  /** Heads that are knocked out. @type {Set<string>} */
  off = new Set();

  /** @param {{choose: (layer: number, head: number, how?: {replace: boolean}) => void, knock: (layer: number, head: number) => void}} how */
  constructor({ choose, knock }) {
    super("headgrid");
    this.choose = choose;
    this.knock = knock;
    this.cells = element("div", { class: "heads", role: "group", onkeydown: (event) => this.walk(event) });
    this.fill(this.cells);
  }

  /**
   * @param {AttentionMap} map @param {import("./api.js").Tensor} bytes all maps, u8
   * @param {{by: string, chosen: [number, number], off: Set<string>}} how `by` sorts by a statistic
   */
  show(map, bytes, { by, chosen, off }) {
    const within = this.cells.contains(document.activeElement);
    Object.assign(this, { map, by, off, name: `${map.name}-heads` });
    const [, , tall, wide] = bytes.shape;
    const smaller = tall < map.rows.length || wide < map.columns.length ? ", made smaller: each cell is the greatest of several" : "";
    this.open(`${map.layers} layers × ${map.heads} heads of ${map.name.replace(".", " ")}-attention${smaller}`);
    /** @type {[number, number][]} */
    const all = Array.from({ length: map.layers * map.heads }, (_, n) => [Math.floor(n / map.heads), n % map.heads]);
    const figure = (/** @type {[number, number]} */ [layer, head]) => map.statistics[by][layer][head];
    this.order = by ? all.sort((one, other) => figure(other) - figure(one)) : all;
    // Sorted ones have a number beside their name, which needs room.
    const room = Math.max(2, Math.floor((this.root.clientWidth || 600) / 76));
    this.across = by ? Math.min(8, all.length, room) : map.heads;
    this.cells.style.setProperty("--across", String(this.across));
    this.cells.style.setProperty("--down", String(Math.ceil(this.order.length / this.across)));
    this.buttons = this.order.map(([layer, head]) => this.cell(bytes, layer, head, chosen));
    this.cells.replaceChildren(...this.buttons);
    this.output.textContent = map.covered && !by ? COVERS : "";
    if (within) this.buttons.find((button) => button.tabIndex === 0)?.focus();
  }

  /** Shows below each head how log P of the same target changes without it. @param {number[][]} changes layers, heads @param {number} size the largest of all attentions */
  tint(changes, size) {
    const scale = scaleFor(-size, size);
    this.buttons.forEach((button, at) => {
      const [layer, head] = this.order[at];
      const change = changes[layer][head];
      if (Number.isNaN(change)) return; // the sweep did not reach it
      const line = element("span", { class: "change" }, `${change > 0 ? "+" : ""}${shown(change, 2)}`);
      line.style.background = css(byteOf(change, -size, size), scale);
      line.style.color = Math.abs(change) > size / 2 ? "#fff" : "#111";
      button.append(" ", line);
      button.setAttribute("aria-label", `${button.getAttribute("aria-label")} ${line.textContent}`);
    });
    this.output.textContent = `Coloured numbers: change of log P(same target) without this head. ${this.map.covered && !this.by ? COVERS : ""}`.trim();
  }

  cell(bytes, layer, head, chosen) {
    const [, , rows, columns] = bytes.shape;
    const canvas = element("canvas", { "aria-hidden": "true" });
    const from = (layer * this.map.heads + head) * rows * columns;
    paint(canvas, bytes.values.subarray(from, from + rows * columns), rows, columns);
    const isChosen = chosen[0] === layer && chosen[1] === head;
    const isOff = this.off.has(`${this.map.name}.${layer}.${head}`);
    const name = `${layer + 1}·${head + 1}${this.by ? ` ${shown(this.map.statistics[this.by][layer][head], 2)}` : ""}`;
    const role = this.by ? "" : roleOf(this.map, layer, head).name;
    return element(
      "button",
      {
        type: "button",
        class: isOff ? "off" : "",
        tabindex: isChosen ? "0" : "-1",
        "aria-pressed": String(isChosen),
        "aria-label": `layer ${layer + 1}, head ${head + 1}${isOff ? ", knocked out" : ""}: ${name} ${role}`.trim(),
        onclick: (event) => (event.shiftKey ? this.knock : this.choose)(layer, head),
      },
      canvas,
      element("span", {}, name),
      " ",
      role ? element("span", { class: "role" }, role) : null,
    );
  }

  walk(event) {
    const at = this.buttons.indexOf(/** @type {HTMLButtonElement} */ (document.activeElement));
    if (at < 0) return;
    if (event.key === "x") return void this.knock(...this.order[at]);
    onArrow(event, { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.across, ArrowDown: this.across }, (by) => {
      const to = this.order[at + by];
      if (to) this.choose(...to, { replace: true });
    });
  }

  drawing() {
    const [size, gap] = [110, 24];
    const inside = this.order.map((_, at) => {
      const [x, y] = [10 + (at % this.across) * (size + 10), Math.floor(at / this.across) * (size + gap)];
      const image = this.buttons[at].querySelector("canvas").toDataURL();
      return (
        `<image x="${x}" y="${y}" width="${size}" height="${size}" preserveAspectRatio="none" ` +
        `image-rendering="pixelated" href="${image}"/>` +
        `<text x="${x}" y="${y + size + 14}">${escaped(this.buttons[at].querySelector("span").textContent)}</text>`
      );
    });
    const down = Math.ceil(this.order.length / this.across);
    return { width: 20 + this.across * (size + 10), height: down * (size + gap), inside: inside.join(""), colours: { low: 0, high: 1, scale: weightScale() } };
  }

  table() {
    const names = Object.keys(this.map.statistics);
    return {
      columns: ["layer", "head", ...names],
      rows: this.order.map(([l, h]) => [l + 1, h + 1, ...names.map((name) => this.map.statistics[name][l][h])]),
    };
  }
}

