// Beam search as a tree: a column per step with all candidates, best first.

import { element, escaped, shown, visible } from "./dom.js";
import { Figure } from "./figure.js";

// On stage and in files: token and score in one line. Stage mode zooms by 2.5, and labels on stage have at least 28 pixels.
const WIDE = { width: 126, height: 24, across: 154, down: 30, margin: 8, top: 22 };
// On the page: the score below the token, so that all steps fit.
const NARROW = { width: 60, height: 36, across: 74, down: 41, margin: 4, top: 20 };
// Closer together, before the tree has to scroll.
const TIGHT = { width: 56, across: 60 };
const [LABEL, NUMBER, LETTER] = [12, 11.5, 7.1];
const FILLS = { kept: "#0072b22e", ended: "#009e7340", pruned: "none" };
const STROKES = { kept: "#0072b2", ended: "#009e73", pruned: "#8a8f94" };
const ROOT = -1;
const BEST = "#009e73";
const CHOSEN = "#d55e00"; // the path to the chosen token

/** The sizes of boxes for a number of steps in this width. @param {number} steps @param {number} room */
export function boxesFor(steps, room) {
  const across = Math.floor((room - 2 * NARROW.margin + 14) / (steps + 1));
  if (across >= WIDE.across) return WIDE;
  const tight = Math.floor((room - 2 * NARROW.margin - TIGHT.width) / steps);
  if (across < NARROW.across) return tight >= TIGHT.across ? { ...NARROW, ...TIGHT, across: tight } : NARROW;
  return { ...NARROW, across, width: across - 14 };
}

/**
 * @typedef {object} Candidate
 * @property {number} step from 1 @property {number} parent −1 is the root @property {number} token
 * @property {string} piece @property {number} log_probability @property {number} score
 * @property {"kept"|"ended"|"pruned"} state @property {number|null} place among the results, from 1
 */

export class Tree extends Figure {
  /** The candidates of all steps. @type {Candidate[]} */
  nodes = [];
  /** The text at the root. */
  rootPiece = "";
  /** The best results, best first. @type {string[]} */
  results = [];
  sizes = WIDE;
  /** @type {Set<number>} */
  chosen = new Set();
  /** @type {{node: number, rank: number}|null} */
  deciding = null;

  /** @param {{choose: (node: number, how?: {replace: boolean}) => void, step: (step: number) => void}} how callbacks for the chosen node and step */
  constructor({ choose, step }) {
    super("beam");
    this.choose = choose;
    this.stepped = step;
    this.plane = element("div", {
      class: "tree",
      tabindex: "0",
      role: "img",
      "aria-roledescription": "tree",
      onkeydown: (event) => this.walk(event),
      onclick: (event) => this.clicked(event),
    });
    this.frame = element("div", { class: "scroll", onscroll: () => this.fade() }, this.plane);
    this.slider = element("input", { type: "range", min: "1", oninput: () => this.slide(Number(this.slider.value)) });
    this.label = element("span");
    this.outcome = element("ol", { class: "outcome", "aria-label": "Finished hypotheses" });
    // What a click on a token does is seen next to the tree: in the line above it.
    this.about = element("div", { class: "chosen" }, this.output);
    this.fill(element("label", { class: "field wide" }, this.label, this.slider), this.about, this.frame, element("p", { class: "note" }, ...legend()), this.outcome);
    new ResizeObserver(() => this.fit()).observe(this.root);
  }

  /** Redraws the tree if its boxes have another size in this width. */
  fit() {
    if (!this.nodes.length) return;
    const before = this.sizes;
    this.sizes = this.root.classList.contains("staged") ? WIDE : boxesFor(this.last, this.frame.clientWidth);
    if (before.across === this.sizes.across && before.height === this.sizes.height) return;
    this.draw();
    this.reveal();
  }

  /**
   * @param {{name: string, title: string, rootPiece: string, nodes: Candidate[], results: string[], deciding: {node: number, rank: number}|null}} tree
   * `deciding` is the token of the best result that greedy search does not take
   * @param {{step: number, node: number}} at 0 is the last step
   */
  show({ title, ...tree }, { step, node }) {
    this.open(title);
    Object.assign(this, tree, { node: node < tree.nodes.length ? node : ROOT });
    this.last = Math.max(1, ...this.nodes.map((one) => one.step));
    this.rows = [];
    this.row = this.nodes.map((one) => (this.rows[one.step] = (this.rows[one.step] ?? -1) + 1));
    this.best = new Set(this.path(this.nodes.findIndex((one) => one.place === 1)));
    this.slider.max = String(this.last);
    this.step = step >= 1 ? Math.min(step, this.last) : this.last;
    this.slider.value = String(this.step);
    this.plane.setAttribute("aria-label", `${this.title}. Arrow keys move from token to token.`);
    this.sizes = this.root.classList.contains("staged") ? WIDE : boxesFor(this.last, this.frame.clientWidth);
    this.draw();
    this.reveal();
  }

  /** From the root to a node. */
  path(node) {
    const nodes = [];
    for (let at = node; at !== ROOT; at = this.nodes[at].parent) nodes.unshift(at);
    return nodes;
  }

  tokens(node) {
    return this.path(node).map((at) => this.nodes[at].token);
  }

  slide(step) {
    this.step = step;
    this.draw();
    this.follow();
    this.stepped(step);
  }

  /** Brings the column of the step into view. */
  follow() {
    this.frame.scrollLeft = this.sizes.across * this.step + this.sizes.width - this.frame.clientWidth + 20;
    this.fade();
  }

  /** Fades the edges at which the tree goes on. */
  fade() {
    const { scrollLeft, scrollWidth, clientWidth } = this.frame;
    this.frame.classList.toggle("cut-left", scrollLeft > 4);
    this.frame.classList.toggle("cut-right", scrollLeft + clientWidth < scrollWidth - 4);
  }

  draw() {
    const [width, height] = this.size();
    this.label.textContent = `Step ${this.step} of ${this.last}`;
    this.plane.innerHTML =
      `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true">` +
      `${this.inside(this.step, this.node)}</svg>`;
    this.tell();
    this.drawOutcome();
  }

  /** The results that are finished at this step; the others have their place. */
  drawOutcome() {
    const items = this.results.map((text, at) => {
      const end = this.nodes.findIndex((node) => node.place === at + 1);
      const node = this.nodes[end];
      if (!node || node.step > this.step) return null;
      const chosen = this.path(this.node).includes(end);
      const act = () => this.go(end, { replace: true });
      return element("li", {}, element("button", { type: "button", "aria-pressed": String(chosen), onclick: act }, text || "(nothing)"), element("span", { class: "note" }, `ends at step ${node.step}, log P ${shown(node.log_probability)}, score ${shown(node.score)}`));
    });
    const finished = items.filter((one) => one !== null);
    const missing = this.results.length - finished.length;
    const live = missing ? this.nodes.flatMap((node, at) => (node.step === this.step && node.state === "kept" ? [at] : [])) : [];
    this.outcome.replaceChildren(...finished, ...live.map((at) => this.prefix(at)));
  }

  /** A hypothesis that the beam extends at this step. @param {number} at */
  prefix(at) {
    const node = this.nodes[at];
    const text = this.path(at).map((one) => this.nodes[one].piece).join("").trim();
    const act = () => this.go(at, { replace: true });
    const chosen = String(this.path(this.node).includes(at));
    const score = element("span", { class: "note" }, `not finished, log P ${shown(node.log_probability)}, score ${shown(node.score)}`);
    return element("li", { class: "live" }, element("button", { type: "button", "aria-pressed": chosen, onclick: act }, `${text} …`), score);
  }

  /** The complete tree keeps its height while steps are added. */
  size() {
    const { margin, across, width, top, down } = this.sizes;
    const tallest = Math.max(1, ...this.rows.slice(1).map((row) => row + 1));
    return [2 * margin + across * this.step + width, top + tallest * down + margin];
  }

  corner(node) {
    const { margin, across, top, down } = this.sizes;
    const [step, row] = node === ROOT ? [0, 0] : [this.nodes[node].step, this.row[node]];
    return [margin + across * step, top + down * row];
  }

  inside(until, chosen) {
    const edges = [];
    const boxes = [this.box(ROOT, chosen)];
    this.chosen = new Set(this.nodes[chosen ?? ROOT] ? this.path(chosen) : []);
    for (let step = 1; step <= until; step++) {
      const x = this.sizes.margin + this.sizes.across * step;
      const isDeciding = this.nodes[this.deciding?.node ?? ROOT]?.step === step;
      const [look, words] = isDeciding ? [`fill="${BEST}" font-weight="700" data-deciding=""`, `${step}: rank ${this.deciding.rank}`] : ['opacity="0.7"', String(step)];
      boxes.push(`<text x="${x}" y="14" font-size="${NUMBER}" ${look}>${words}</text>`);
    }
    this.nodes.forEach((node, at) => {
      if (node.step > until) return;
      edges.push(this.edge(node, at));
      boxes.push(this.box(at, chosen));
    });
    return edges.join("") + boxes.join("");
  }

  edge(node, at) {
    const { width, height } = this.sizes;
    const [x, y] = this.corner(at);
    const [fromX, fromY] = this.corner(node.parent).map((value, axis) => value + (axis === 0 ? width : height / 2));
    const bend = (x - fromX) / 2;
    const [best, chosen] = [this.best.has(at), this.chosen.has(at)];
    const look = node.state === "pruned" && !chosen ? 'stroke-dasharray="3 3" opacity="0.6"' : "";
    return (
      `<path d="M${fromX} ${fromY}c${bend} 0 ${bend} ${y + height / 2 - fromY} ${x - fromX} ${y + height / 2 - fromY}" ` +
      `fill="none" stroke="${this.colour(at, node)}" stroke-width="${chosen ? 4 : best ? 3 : 1.2}" ${look}/>`
    );
  }

  /** The colour of a box and of the line that leads to it. */
  colour(at, { state }) {
    if (this.chosen.has(at)) return CHOSEN;
    return this.best.has(at) ? BEST : STROKES[state];
  }

  box(at, chosen) {
    const [x, y] = this.corner(at);
    const { width, height } = this.sizes;
    const twoLines = height > WIDE.height;
    const node = this.nodes[at] ?? { piece: this.rootPiece, state: "kept", score: null, place: null };
    const most = Math.floor((width - 9 - (twoLines ? 0 : 42)) / LETTER) - (node.place ? 2 : 0);
    const letters = [...visible(node.piece)];
    const cut = letters.length > most ? `${letters.slice(0, Math.max(1, most - 1)).join("")}…` : letters.join("");
    const label = (node.place ? `${node.place}. ` : "") + cut;
    const score = node.score === null ? "" : node.score.toFixed(2).replace("-", "−");
    const round = node.state === "ended" ? height / 2 : 3;
    const best = this.best.has(at);
    const wide = at === chosen ? 'stroke="currentColor" stroke-width="3"' : `stroke="${this.colour(at, node)}" stroke-width="${best || this.chosen.has(at) ? 2.4 : 1}"`;
    const dash = node.state === "pruned" ? 'stroke-dasharray="3 3"' : "";
    const pale = node.state === "pruned" ? 'opacity="0.62"' : "";
    const [labelX, anchor] = round > 3 ? [x + width / 2, "middle"] : [x + 5, "start"];
    const number = twoLines ? `x="${labelX}" y="${y + 30}" text-anchor="${anchor}"` : `x="${x + width - 5}" y="${y + 16}" text-anchor="end"`;
    return (
      `<g data-node="${at}" data-state="${node.state}"${at === this.here() ? ' data-here=""' : ""}><rect x="${x}" y="${y}" width="${width}" height="${height}" rx="${round}" fill="${node.place === 1 ? "#009e7380" : FILLS[node.state]}" pointer-events="all" ${wide} ${dash}/>` +
      `<text x="${twoLines ? labelX : x + 6}" y="${y + (twoLines ? 15 : 16)}" font-size="${LABEL}" data-token="${escaped(node.piece)}"${twoLines ? ` text-anchor="${anchor}"` : ""}${best ? ' font-weight="600"' : ""} ${pale}>${escaped(label)}</text>` +
      `<text ${number} font-size="${NUMBER}" ${pale}>${score}</text></g>`
    );
  }

  /** The node that stage mode brings into view: the chosen one, or the best of the step. */
  here() {
    return this.node === ROOT ? this.nodes.findIndex((node) => node.step === this.step) : this.node;
  }

  clicked(event) {
    const box = event.target.closest("[data-node]");
    if (box) this.go(Number(box.dataset.node));
  }

  go(node, how = undefined) {
    this.node = node;
    this.draw();
    this.choose(node, how);
  }

  walk(event) {
    const seen = this.nodes.map((_, at) => at).filter((at) => this.nodes[at].step <= this.step);
    const here = this.nodes[this.node];
    const beside = seen.filter((at) => this.nodes[at].step === here?.step);
    const to = {
      ArrowLeft: here?.parent,
      ArrowRight: seen.find((at) => this.nodes[at].parent === this.node),
      ArrowUp: beside[beside.indexOf(this.node) - 1],
      ArrowDown: beside[beside.indexOf(this.node) + 1],
      Home: ROOT,
    }[event.key];
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home"].includes(event.key)) return;
    event.preventDefault();
    if (to === undefined || to === this.node) return;
    this.go(to, { replace: true });
    this.reveal();
  }

  /** Brings the chosen node into view. */
  reveal() {
    const [left, right] = [0, this.sizes.width].map((wide) => this.corner(this.node)[0] + wide);
    const { scrollLeft, clientWidth } = this.frame;
    this.fade();
    if (this.node === ROOT) {
      this.follow();
      return;
    }
    if (left < scrollLeft || right > scrollLeft + clientWidth) this.frame.scrollLeft = left - clientWidth / 2;
  }

  tell() {
    const node = this.nodes[this.node];
    if (!node) {
      this.output.textContent = "Start of the text. Choose a token to see the predictions after it.";
      return;
    }
    const state = { kept: "kept", pruned: "pruned", ended: node.place ? `ended, result ${node.place}` : "ended, not among the results" }[node.state];
    const text = this.path(this.node).map((at) => this.nodes[at].piece).join("");
    this.output.textContent = `Step ${node.step}, “${visible(node.piece)}”, ${state}: log P ${shown(node.log_probability)}, score ${shown(node.score)}. ${text}`;
  }

  drawing() {
    const [width, height] = this.size();
    return { width, height, inside: this.inside(this.step, null) };
  }

  table() {
    return {
      columns: ["node", "step", "parent", "token", "piece", "log P", "score", "state", "place"],
      rows: this.nodes.map((node, at) => [at, node.step, node.parent, node.token, node.piece, node.log_probability, node.score, node.state, node.place ?? ""]),
    };
  }
}

function legend() {
  const mark = (state, words) => element("span", { class: `key ${state}` }, words);
  return [mark("kept", "kept in the beam"), " ", mark("ended", "ended (with its rank)"), " ", mark("pruned", "pruned"), " Numbers: score log P ⁄ lp so far. Green line: to the best result. Orange: to the chosen token."];
}
