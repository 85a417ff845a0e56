// Beam search as a tree: a column per step with all candidates, best first.

import { element, escaped, shown, visible } from "./dom.js";
import { Figure } from "./figure.js";

const [LABEL, NUMBER, LETTER, BOLD] = [12, 11.5, 7.2, 7.9];
const [MARGIN, TOP, GAP, WIDEST, NARROWEST] = [4, 20, 7, 126, 58];
const EARLY = 6; // steps that stage mode leaves space for from the beginning
const ROW = { height: 36, down: 41 }; // the score below the token
const LOW = 26; // the least height of a row with two lines
const FILLS = { kept: "#0072b22e", ended: "#009e7340", pruned: "none", open: "none" };
const STROKES = { kept: "#0072b2", ended: "#009e73", pruned: "#8a8f94", open: "#0072b2" };
const ROOT = -1;
const BEST = "#009e73";
const CHOSEN = "#d55e00"; // the path to the chosen token
const CUT = "#d1495b"; // between the candidates that continue and those that are dropped

/**
 * Left edges and widths of columns that fill a width. Where they do not fit, wide columns are narrowed, as long as their tokens can be read; if that is not enough, the tree scrolls and no column is narrowed.
 * @param {number[]} natural widths @param {number} room
 */
export function columnsFor(natural, room) {
  const gaps = natural.length - 1;
  const sum = (/** @type {number} */ most) => natural.reduce((all, width) => all + Math.min(width, most), 0);
  const inside = room - 2 * MARGIN;
  let most = WIDEST;
  const fits = () => sum(most) + GAP * gaps <= inside;
  while (most > NARROWEST && !fits()) most--;
  if (!fits()) most = WIDEST; // it scrolls anyway: no token needs to be cut
  const spare = Math.max(0, inside - sum(most) - GAP * gaps);
  const more = Math.min(60, (0.7 * spare) / natural.length);
  const widths = natural.map((width) => Math.min(width, most) + more);
  const gap = GAP + Math.min(40, (0.3 * spare) / Math.max(1, gaps));
  const lefts = widths.map((_, at) => MARGIN + gap * at + widths.slice(0, at).reduce((all, width) => all + width, 0));
  return { lefts, widths };
}

/**
 * @typedef {object} Candidate
 * @property {number} step from 1 @property {number} parent −1 is the root @property {number} token
 * @property {string} piece @property {number} log_probability @property {number} score
 * @property {"kept"|"ended"|"pruned"} state @property {number|null} place among the results, from 1
 */

/** From the root to a node. @param {Candidate[]} nodes @param {number} node */
export function pathTo(nodes, node) {
  const path = [];
  for (let at = node; at !== ROOT; at = nodes[at].parent) path.unshift(at);
  return path;
}

/** Greedy search takes the best token after each token: the first one, because candidates are sorted. @param {Candidate[]} nodes */
export function greedyPath(nodes) {
  const path = [];
  const after = (/** @type {number} */ parent) => nodes.findIndex((node) => node.parent === parent);
  for (let at = after(ROOT); at !== ROOT; at = after(at)) path.push(at);
  return path;
}

/** The rank of a candidate in its step, and of how many. @param {Candidate[]} nodes @param {number} at */
export function rankOf(nodes, at) {
  const column = nodes.filter((node) => node.step === nodes[at].step);
  return [column.indexOf(nodes[at]) + 1, column.length];
}

/** The number of a step, with what happens there if the column is wide enough. @param {number} step @param {string} note @param {number} width */
export const headOf = (step, note, width) => (note && LETTER * (note.length + 4) < width ? `${step}: ${note}` : String(step));

export class Tree extends Figure {
  /** The candidates of all steps. @type {Candidate[]} */
  nodes = [];
  /** The text at the root. */
  rootPiece = "";
  /** @type {{lefts: number[], widths: number[], height: number, down: number}} */
  sizes = { lefts: [0], widths: [0], ...ROW };
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
      onpointerover: (event) => this.tell(numberOf(event) ?? this.node),
      onpointerleave: () => this.tell(this.node),
    });
    this.frame = element("div", { class: "scroll", onscroll: () => this.fade() }, this.plane);
    this.slider = element("input", { type: "range", min: "1", oninput: () => this.slide(Number(this.slider.value)) });
    this.label = element("span");
    // What a click on a token does is seen next to the tree: in the line above it.
    this.about = element("div", { class: "chosen" }, this.output);
    this.fill(element("label", { class: "field wide" }, this.label, this.slider), this.about, this.frame);
    this.below.prepend(element("p", { class: "note" }, ...legend()));
    new ResizeObserver(() => this.fit()).observe(this.root);
  }

  /** Redraws the tree if its boxes have another size in this window. */
  fit() {
    if (!this.nodes.length) return;
    const before = JSON.stringify(this.sizes);
    this.measure();
    if (before === JSON.stringify(this.sizes)) return;
    this.draw();
    this.reveal();
  }

  /** The sizes of boxes for the width of the page; on stage, also for the height of the window. */
  measure() {
    const isStaged = this.root.classList.contains("staged");
    const steps = isStaged ? Math.min(this.last, Math.max(this.step, EARLY)) : this.last;
    const natural = Array.from({ length: steps + 1 }, (_, step) => {
      if (!step) return 6 + LETTER * visible(this.rootPiece).length;
      // On stage the tree scrolls in any case: tokens that are dropped can be read too.
      const read = this.nodes.flatMap((node, at) => (node.step === step && (isStaged || node.state !== "pruned") ? [at] : []));
      return Math.max(40, ...read.map((at) => 6 + Math.max((this.best.has(at) ? BOLD : LETTER) * [...labelOf(this.nodes[at])].length, LETTER * scoreOf(this.nodes[at]).length)));
    });
    const rows = Math.max(1, ...this.row.map((row) => row + 1));
    const down = isStaged ? Math.max(14, Math.min(ROW.down, Math.floor((this.frame.clientHeight - TOP - MARGIN) / rows))) : ROW.down;
    this.sizes = { ...columnsFor(natural, this.frame.clientWidth), down, height: Math.min(ROW.height, down - 2) };
  }

  /**
   * @param {{name: string, title: string, rootPiece: string, nodes: Candidate[], deciding: {node: number, rank: number}|null}} tree
   * `deciding` is the token at which the best result leaves the path of greedy search
   * @param {{step: number, node: number}} at 0 is the last step
   */
  show({ title, ...tree }, { step, node }) {
    this.open(title);
    Object.assign(this, tree, { node: node < tree.nodes.length ? node : ROOT });
    this.last = Math.max(1, ...this.nodes.map((one) => one.step));
    const counts = [];
    this.row = this.nodes.map((one) => (counts[one.step] = (counts[one.step] ?? -1) + 1));
    this.best = new Set(this.path(this.nodes.findIndex((one) => one.place === 1)));
    this.greedy = new Set(greedyPath(this.nodes));
    this.slider.max = String(this.last);
    this.step = step >= 1 ? Math.min(step, this.last) : this.last;
    this.slider.value = String(this.step);
    this.plane.setAttribute("aria-label", `${this.title}. Arrow keys move from token to token.`);
    this.measure();
    this.draw();
    this.reveal();
  }

  path(node) {
    return pathTo(this.nodes, node);
  }

  tokens(node) {
    return this.path(node).map((at) => this.nodes[at].token);
  }

  slide(step) {
    this.step = step;
    this.measure();
    this.draw();
    this.follow();
    this.stepped(step);
  }

  /** Brings the column of the step into view. */
  follow() {
    const { lefts, widths } = this.sizes;
    this.frame.scrollLeft = lefts[this.step] + widths[this.step] - this.frame.clientWidth + 20;
    this.fade();
  }

  /** Fades the edges at which the tree continues. */
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
    this.tell(this.node);
  }

  /** The complete tree keeps its height while steps are added. */
  size() {
    const { lefts, widths, down } = this.sizes;
    const tallest = Math.max(1, ...this.row.map((row) => row + 1));
    return [Math.ceil(lefts[this.step] + widths[this.step]) + MARGIN, TOP + tallest * down + MARGIN];
  }

  corner(node) {
    const [step, row] = node === ROOT ? [0, 0] : [this.nodes[node].step, this.row[node]];
    return [this.sizes.lefts[step], TOP + this.sizes.down * row];
  }

  inside(until, chosen) {
    const edges = [];
    const boxes = [this.box(ROOT, chosen)];
    this.chosen = new Set(this.nodes[chosen ?? ROOT] ? this.path(chosen) : []);
    for (let step = 1; step <= until; step++) boxes.push(this.head(step), this.cut(step));
    this.nodes.forEach((node, at) => {
      if (node.step > until) return;
      edges.push(this.edge(node, at));
      boxes.push(this.box(at, chosen));
    });
    return edges.join("") + boxes.join("");
  }

  /** The number of a step, with what happens there. @param {number} step */
  head(step) {
    const [left, width] = [this.sizes.lefts[step], this.sizes.widths[step]];
    const isDeciding = this.nodes[this.deciding?.node ?? ROOT]?.step === step;
    const note = isDeciding ? `rank ${this.deciding.rank}` : step === this.last ? "stop" : "";
    const look = isDeciding ? `fill="${BEST}" font-weight="700" data-deciding=""` : 'opacity="0.7"';
    const place = step === this.last ? `x="${left + width}" text-anchor="end"` : `x="${left}"`;
    return `<text ${place} y="14" font-size="${NUMBER}" ${look}>${headOf(step, note, width)}</text>`;
  }

  /** The line below the last candidate that continues; none if one below it does. @param {number} step */
  cut(step) {
    const column = this.nodes.filter((node) => node.step === step);
    const first = column.findIndex((node) => node.state === "pruned");
    if (first < 0 || column.slice(first).some((node) => node.state !== "pruned")) return "";
    const { lefts, widths, down, height } = this.sizes;
    const y = TOP + first * down - (down - height) / 2;
    return `<path d="M${lefts[step] - 3} ${y}h${widths[step] + 6}" stroke="${CUT}" stroke-width="2" data-cut="${step}"/>`;
  }

  edge(node, at) {
    const { widths, height } = this.sizes;
    const [x, y] = this.corner(at);
    const [fromX, fromY] = this.corner(node.parent).map((value, axis) => value + (axis === 0 ? widths[node.step - 1] : height / 2));
    const bend = (x - fromX) / 2;
    const [best, chosen, greedy] = [this.best.has(at), this.chosen.has(at), this.greedy.has(at)];
    const look = node.state === "pruned" && !chosen ? 'stroke-dasharray="3 3" opacity="0.6"' : "";
    return (
      `<path d="M${fromX} ${fromY}c${bend} 0 ${bend} ${y + height / 2 - fromY} ${x - fromX} ${y + height / 2 - fromY}" ` +
      `fill="none" stroke="${this.colour(at)}" stroke-width="${chosen ? 4 : best ? 3 : greedy ? 2.4 : 1.2}" ${look}/>`
    );
  }

  /** The colour of a box and of the line that leads to it. @param {number} at */
  colour(at) {
    if (this.chosen.has(at)) return CHOSEN;
    return this.best.has(at) ? BEST : this.greedy.has(at) ? "currentColor" : STROKES[this.stateOf(at)];
  }

  /** The state of a candidate; one that is kept when the search stops is open. @param {number} at */
  stateOf(at) {
    const node = this.nodes[at];
    if (!node) return "kept";
    return node.state === "kept" && node.step === this.last ? "open" : node.state;
  }

  box(at, chosen) {
    const [x, y] = this.corner(at);
    const node = this.nodes[at] ?? { step: 0, piece: this.rootPiece, state: "kept", score: null, place: null };
    const [width, height] = [this.sizes.widths[node.step], this.sizes.height];
    const isTall = this.sizes.down >= LOW;
    const state = this.stateOf(at);
    const [label, score] = [labelOf(node), scoreOf(node)];
    const hasScore = isTall || LETTER * ([...label].length + score.length + 2) < width;
    const most = Math.floor((width - 4) / (this.best.has(at) ? BOLD : LETTER)) - (isTall || !hasScore ? 0 : score.length + 1);
    const letters = [...label];
    const cut = letters.length > most ? `${letters.slice(0, Math.max(1, most - 1)).join("")}…` : label;
    const isMarked = this.best.has(at) || this.chosen.has(at) || this.greedy.has(at);
    const wide = `stroke="${this.colour(at)}" stroke-width="${at === chosen && at !== ROOT ? 3.4 : isMarked ? 2.2 : 1}"`;
    const dash = state === "pruned" ? 'stroke-dasharray="3 3"' : "";
    const pale = state === "pruned" || state === "open" ? 'opacity="0.62"' : "";
    const middle = `x="${x + width / 2}" text-anchor="middle"`;
    const first = isTall ? `${middle} y="${y + 0.4 * height}"` : `x="${x + 4}" y="${y + height / 2 + 4}"`;
    const second = isTall ? `${middle} y="${y + 0.86 * height}"` : `x="${x + width - 4}" y="${y + height / 2 + 4}" text-anchor="end"`;
    return (
      `<g data-node="${at}" data-state="${node.state}"${at === this.here() ? ' data-here=""' : ""}><rect x="${x}" y="${y}" width="${width}" height="${height}" rx="${state === "ended" ? height / 2 : 3}" fill="${node.place === 1 ? "#009e7380" : FILLS[state]}" pointer-events="all" ${wide} ${dash}/>` +
      `<text ${first} font-size="${LABEL}" data-token="${escaped(node.piece)}"${this.best.has(at) ? ' font-weight="600"' : ""} ${pale}>${escaped(cut)}</text>` +
      `${hasScore ? `<text ${second} font-size="${NUMBER}" ${pale}>${score}</text>` : ""}</g>`
    );
  }

  /** The node that stage mode brings into view: the chosen one, or the best of the step. */
  here() {
    return this.node === ROOT ? this.nodes.findIndex((node) => node.step === this.step) : this.node;
  }

  clicked(event) {
    const node = numberOf(event);
    if (node !== null) this.go(node);
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
    const { scrollLeft, clientWidth } = this.frame;
    this.fade();
    if (this.node === ROOT) {
      this.follow();
      return;
    }
    const [left] = this.corner(this.node);
    const right = left + this.sizes.widths[this.nodes[this.node].step];
    if (left < scrollLeft || right > scrollLeft + clientWidth) this.frame.scrollLeft = left - clientWidth / 2;
  }

  /** Tells the rank of a candidate, and why it was kept or dropped. @param {number} at */
  tell(at) {
    const node = this.nodes[at];
    if (!node) {
      this.output.textContent = "Point at a token to see why it was kept or dropped. Choose one to see the predictions after it.";
      return;
    }
    const [rank, count] = rankOf(this.nodes, at);
    const going = this.nodes.filter((one) => one.step === node.step && one.state === "kept").length;
    const state = {
      kept: "kept",
      open: "not finished when the search stops",
      pruned: `dropped, because ${going ? `only ${going} continue` : "none continues"}`,
      ended: node.place ? `ended, result ${node.place}` : "ended, not among the results",
    }[this.stateOf(at)];
    const text = this.path(at).map((one) => this.nodes[one].piece).join("");
    this.output.textContent = `Step ${node.step}, “${visible(node.piece)}”, candidate ${rank} of ${count}, ${state}: log P ${shown(node.log_probability)}, score ${shown(node.score)}. ${text}`;
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

/** The candidate that a pointer is on, null for none. @param {Event} event */
function numberOf(event) {
  const box = /** @type {HTMLElement|null} */ (/** @type {Element} */ (event.target).closest("[data-node]"));
  return box ? Number(box.dataset.node) : null;
}

/** Punctuation in quotes: a comma above a number would look like its decimal point. @param {{piece: string, place?: number|null}} node */
export const labelOf = ({ piece, place }) => (place ? `${place}. ` : "") + (/^\p{P}$/u.test(piece.trim()) ? `“${piece.trim()}”` : visible(piece));

/** @param {{score: number|null}} node */
const scoreOf = ({ score }) => (score === null ? "" : score.toFixed(2).replace("-", "−"));

function legend() {
  const mark = (state, words) => element("span", { class: `key ${state}` }, words);
  return [mark("kept", "kept in the beam"), " ", mark("ended", "ended (rank)"), " ", mark("pruned", "dropped"), " ", mark("open", "unfinished"), " ", mark("greedy", "greedy search"), " Numbers: log P ⁄ lp so far. Red: the cut. Green: the best result. Orange: the chosen token."];
}
