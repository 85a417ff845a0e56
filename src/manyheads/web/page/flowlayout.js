// The Flow diagram as geometry: where tiles, sums, edges and the bus of the residual stream are. It
// draws nothing, so that the screen and a saved file have the same picture.

const BUS = 52; // the margin with the bus and its numbers
const WIDEST = 22; // the bus where ‖x‖ is greatest
const GAP = 10; // between tiles, and after the last one
const LABEL = 22; // the title of a group
const THIN = 32; // a closed layer, or a closed part of one
const LOW = 40; // the height of a tile where most is closed
const MOST_DETAIL = 4; // the level that closes most
const NAMES = { self: "self-attention", cross: "cross-attention", feedforward: "feed-forward" };
export const SUM = 22; // a ⊕
const NARROW = 560; // below this width the decoder is under the encoder

/**
 * @typedef {object} Box of the manifest of a flow
 * @property {string} name @property {string} title @property {string} formula @property {string} axes
 * @property {number[]} shape @property {string} stage "tokens", "before", "layer" or "after"
 * @property {string|string[]} rows @property {string|string[]} columns their labels, or the stack whose tokens they are
 * @property {string[][]} words @property {string[]} code @property {Column} column
 * @typedef {object} Column a stack of the manifest
 * @property {string} name @property {Box[]} boxes @property {number} layers @property {number} heads
 * @property {string[]} tokens @property {number[]} ids @property {string[]} stream @property {number} scale
 * @property {Record<string, number[]>} norms
 * @typedef {object} Node a box with its rectangle
 * @property {string} kind "tile", "sum", "tokens", "closed" or "next" (the next tokens) @property {Box|null} box
 * @property {number} x @property {number} y @property {number} width @property {number} height
 * @property {string} [of] @property {string} [title] @property {number} [layer] @property {Column} [column] of a closed layer
 * @typedef {{x: number, y: number, width: number, height: number, title: string, layer: number, column: Column}} Group
 * @typedef {{x: number, y: number, text: string, anchor: string, kind: string}} Text
 * @typedef {{nodes: Node[], edges: Edge[], buses: Bus[], groups: Group[], texts: Text[], width: number, height: number, encoderEnd?: {x: number, y: number, width: number, height: number}}} Diagram
 * @typedef {{x: number, wide: number, most: number, layer: number, zoom: string, gutter: number, stacked?: boolean, level?: number, chosen?: string, tall?: number, labels?: number}} How
 * @typedef {{points: number[][], kind: string, from: string, to: string}} Edge the last point has the arrow
 * @typedef {{column: Column, x: number, y: number, height: number, width: number, norm: number}} Bus
 */

/** The sub-layers of a stack, in order. @param {Column} column */
export function sublayers(column) {
  return ["self", "cross", "feedforward"].filter((kind) => column.boxes.some((box) => box.name === `${column.name}.${kind}.sum`));
}

/**
 * Lays out all columns. If they are higher than `limit`, parts close until they fit: first all sub-layers but
 * the chosen one, then all other layers, then the embeddings, then all layers if the chosen box is in none.
 * @param {Column[]} columns of the manifest
 * @param {{layer: number, zoom: string, width: number, limit?: number, chosen?: string}} how
 */
export function diagram(columns, { layer, zoom, width, limit = Infinity, chosen = "" }) {
  const stacked = columns.length > 1 && width < NARROW;
  const gutter = columns.length > 1 ? (stacked ? 16 : 34) : 0;
  const wide = stacked || columns.length === 1 ? Math.min(width - gutter - 14, 560) : (width - gutter) / 2 - GAP;
  const most = Math.max(...columns.flatMap((column) => Object.values(column.norms).flat()));
  /** @param {Diagram} into @param {number} level @returns {number} the height */
  const run = (into, level) => {
    let [top, height] = [0, 0];
    columns.forEach((column, at) => {
      const x = stacked ? gutter : columns.length === 1 ? Math.max(0, (width - wide) / 2) : at * (wide + gutter);
      const how = { x, wide, most, layer, zoom, gutter: x - gutter / 2, stacked, chosen, level };
      const bottom = new ColumnLayout(into, column, how).run(stacked ? top : 0);
      top = bottom + 24;
      height = Math.max(height, bottom + 6);
    });
    return height;
  };
  /** @returns {Diagram} */
  const empty = () => ({ nodes: [], edges: [], buses: [], groups: [], texts: [], width, height: 0 });
  let level = 0;
  while (zoom === "layer" && level < MOST_DETAIL && run(empty(), level) > limit) level++;
  const made = empty();
  made.height = run(made, level);
  return made;
}

/** The layout of one attention over the full width, with tiles high enough for token labels. */
export function headDiagram(column, kind, { layer, width, rows, limit = Infinity }) {
  /** @type {Diagram} */
  const made = { nodes: [], edges: [], buses: [], groups: [], texts: [], width, height: 0 };
  const most = Math.max(...Object.values(column.norms).flat());
  const lines = column.boxes.some((box) => box.name === `${column.name}.${kind}.masked`) ? 3 : 2;
  const tall = Math.max(22, Math.min(Math.max(96, Math.min(230, 14 * rows)), (limit - 56) / lines - 42));
  const labels = width < NARROW ? 0 : 62;
  const drawn = new ColumnLayout(made, column, { x: 0, wide: width - 8, most, layer, zoom: "layer", gutter: 8, tall, labels });
  drawn.y = 4;
  drawn.stream.push({ y: 4, norm: drawn.entering(kind, layer) });
  drawn.attention(kind, layer);
  drawn.end = made.height = drawn.y + 4;
  drawn.drawBus();
  return made;
}

class ColumnLayout {
  /** @param {Diagram} made @param {Column} column @param {How} how */
  constructor(made, column, { x, wide, most, layer, zoom, gutter, stacked = false, level = 0, chosen = "", tall, labels = 0 }) {
    this.made = made;
    this.column = column;
    this.x = x;
    this.wide = wide;
    this.most = most;
    this.layer = layer;
    this.zoom = zoom;
    this.gutter = gutter;
    this.stacked = stacked;
    this.labels = labels;
    this.level = level;
    this.chosen = chosen;
    this.gap = GAP;
    this.thin = level === MOST_DETAIL ? 24 : THIN;
    this.left = this.x + BUS;
    this.inner = this.wide - BUS;
    this.tile = (this.inner - 3 * this.gap) / 4;
    this.isLow = level === MOST_DETAIL;
    this.tall = tall ?? Math.round(this.isLow ? LOW : Math.max(40, Math.min(64, this.tile * 0.62)));
    this.pitch = this.tall + 22 + 20; // tile, its title, the way between rows
    this.busX = this.x + 28;
    this.stream = [];
    this.y = 0;
  }

  box(what) {
    return this.column.boxes.find((box) => box.name === `${this.column.name}.${what}`);
  }

  get place() {
    return this.column.name;
  }

  /** x of the left side of a grid column. */
  gridX(at) {
    return this.left + at * (this.tile + this.gap);
  }

  run(top) {
    const { column, made } = this;
    made.texts.push({ x: this.x, y: top + 18, text: titleOf(column), anchor: "start", kind: `title ${column.name}` });
    this.y = top + 26;
    this.before();
    for (let layer = 0; layer < column.layers; layer++) {
      const isOpen = this.zoom === "layer" && (!this.isLow || this.chosen.split(".").length > 2);
      if (isOpen && layer === Math.min(this.layer, column.layers - 1)) this.open(layer);
      else if (this.level > 1) this.row("layer", layer, `Layer ${layer + 1}`);
      else this.closed(layer);
    }
    this.after();
    this.drawBus();
    return this.y;
  }

  add(box, at, y, kind = "tile", more = {}) {
    const node = { box, kind, x: this.gridX(at) + this.labels, y, width: this.tile - this.labels, height: this.tall + 22, ...more };
    this.made.nodes.push(node);
    return node;
  }

  edge(points, kind, from, to) {
    this.made.edges.push({ points, kind, from, to });
  }

  /** A ⊕ on the bus; from here on the stream has this norm. */
  sum(what, y, norm) {
    const box = this.box(what);
    const node = { box, kind: "sum", x: this.busX - SUM / 2, y: y - SUM / 2, width: SUM, height: SUM };
    if (box) this.made.nodes.push(node);
    this.stream.push({ y, norm });
    return node;
  }

  before() {
    const { inner, left } = this;
    const lines = Math.ceil((this.column.tokens.join("").length * 6.9 + this.column.tokens.length * 5 + 14) / inner);
    const height = 8 + 19 * Math.min(this.isLow ? 1 : 3, Math.max(1, lines));
    const tokens = { box: this.column.boxes[0], kind: "tokens", x: left, y: this.y, width: inner, height };
    this.made.nodes.push(tokens);
    this.y += height + (this.level > 2 ? 12 : 18);
    if (this.level > 2 && !["embedding", "position", "segment", "input"].some((what) => this.box(what)?.name === this.chosen)) {
      this.edge([[middle(tokens), tokens.y + height], [middle(tokens), this.y]], "stream", "tokens", "embedding");
      return this.row("input", 0, "Embedding and position");
    }
    const parts = ["embedding", "position", "segment"].filter((what) => this.box(what));
    const nodes = parts.map((what, at) => this.add(this.box(what), at, this.y));
    this.edge([[middle(nodes[0]), tokens.y + height], [middle(nodes[0]), this.y]], "stream", "tokens", "embedding");
    const y = this.y + this.tall + 22 + 16;
    nodes.forEach((node) => this.edge([[middle(node), node.y + node.height], [middle(node), y], [this.toward(SUM / 2), y]], "stream", node.box.name, "input"));
    this.sum("input", y, this.column.norms[`${this.place}.input`][0]);
    this.y = y + 20;
  }

  /** x next to the bus, on the side of the tiles. */
  toward(distance) {
    return this.busX + distance;
  }

  normOf(kind, layer) {
    const name = this.column.stream.find((one) => one.startsWith(`${this.place}.${kind}.`));
    return this.column.norms[name][layer];
  }

  /** ‖x‖ before a sub-layer. */
  entering(kind, layer) {
    const kinds = sublayers(this.column);
    const at = kinds.indexOf(kind);
    if (at > 0) return this.normOf(kinds[at - 1], layer);
    return layer > 0 ? this.normOf(kinds.at(-1), layer - 1) : this.column.norms[`${this.place}.input`][0];
  }

  closed(layer) {
    const first = this.y;
    this.y += LABEL;
    for (const kind of sublayers(this.column)) this.row(kind, layer);
    this.group(first, this.y - 2, `Layer ${layer + 1}`, layer);
    this.y += 8;
  }

  /** One line for a closed layer, a part of one, or the embeddings. @param {string} of @param {string} [title] */
  row(of, layer, title) {
    const kinds = { input: [], layer: sublayers(this.column) }[of] ?? [of];
    const node = { box: null, kind: "closed", of, title, layer, column: this.column, x: this.left, y: this.y, width: this.inner, height: this.thin };
    this.made.nodes.push(node);
    const [side, enter, leave] = [node.x, this.y + 7, this.y + this.thin - 7];
    if (of !== "input") this.edge([[this.busX, enter], [side, enter]], "stream", "bus", of);
    this.edge([[side, leave], [this.toward(7), leave]], "stream", of, "bus");
    if (kinds.includes("cross")) this.fromEncoder([[node.x, this.y + this.thin / 2]], layer);
    this.made.texts.push({ x: this.busX, y: leave + 4, text: "+", anchor: "middle", kind: "plus" });
    if (of === "input") this.stream.push({ y: leave, norm: this.column.norms[`${this.place}.input`][0] });
    kinds.forEach((kind, at) => this.stream.push({ y: enter + ((leave - enter) * (at + 1)) / kinds.length, norm: this.normOf(kind, layer) }));
    this.y += this.thin + 8;
  }

  group(top, bottom, title, layer) {
    this.made.groups.push({ x: this.left - 6, y: top, width: this.inner + 12, height: bottom - top, title, layer, column: this.column });
  }

  open(layer) {
    const kinds = sublayers(this.column);
    const [stack, part] = this.chosen.split(".");
    const shown = stack === this.place && kinds.includes(part) ? part : kinds.includes("cross") ? "cross" : "self";
    for (const kind of kinds) {
      if (this.level > 0 && kind !== shown) this.row(kind, layer, `Layer ${layer + 1}, ${NAMES[kind]}`);
      else if (kind === "feedforward") this.feedforward(layer);
      else this.attention(kind, layer);
      if (this.level === 0 || kind === shown) this.y += 10;
    }
  }

  /** An edge from the encoder's output along the gutter to some points at one height. */
  fromEncoder(targets, layer) {
    const source = this.made.nodes.find((node) => node.box?.name === "encoder.states") ?? this.made.encoderEnd;
    if (!source) return;
    const out = this.stacked ? [[middle(source), source.y + source.height], [middle(source), source.y + source.height + 10], [this.gutter, source.y + source.height + 10]] : [[source.x + source.width, source.y + this.tall / 2], [this.gutter, source.y + this.tall / 2]];
    for (const [x, y, below] of targets) {
      const end = below === undefined ? [[this.gutter, y], [x, y]] : [[this.gutter, y], [x, y], [x, below]];
      this.edge([...out, ...end], "encoder", "encoder.states", `decoder.cross.${layer}`);
    }
  }

  /** The encoder's output as a word above K and V, where the diagram has no encoder. */
  stub(targets, end, to) {
    const [x, rail] = targets.at(-1);
    this.made.texts.push({ x: end, y: rail - 7, text: "Encoder output", anchor: "end", kind: "stub encoder" });
    for (const [over, , below] of targets) this.edge([[x, rail - 3], [x, rail], [over, rail], [over, below]], "encoder", "encoder.states", to);
  }

  attention(kind, layer) {
    const first = this.y;
    const place = `${this.place}.${kind}`;
    const has = (what) => this.box(`${kind}.${what}`);
    const [norm, post] = [has("norm"), this.column.stream.includes(`${place}.norm`)];
    const row = (number) => first + LABEL + 10 + number * this.pitch;
    const at = {};
    const put = (what, column, number) => {
      if (has(what)) at[what] = this.add(has(what), column, row(number));
    };
    if (norm && !post) put("norm", 0, 0);
    put("q", 1, 0), put("k", 2, 0), put("v", 3, 0);
    let last = 1;
    put("scores", 1, 1);
    if (has("masked")) {
      put(has("mask") ? "mask" : "bias", 2, 1);
      last = has("mask") && has("bias") ? 3 : 2;
      if (last === 3) put("bias", 2, 2);
      put("masked", 1, 2);
    }
    put("weights", 2, last), put("mix", 3, last), put("output", 0, last);
    if (has("spread")) put("spread", 3, last - 1 || 1);
    // Into the sub-layer.
    const rail = row(0) - 9;
    const from = at.norm ? [middle(at.norm), row(0)] : [this.busX, rail];
    if (at.norm) this.edge([[this.busX, row(0) + this.tall / 2], [this.side(at.norm), row(0) + this.tall / 2]], "stream", "bus", `${place}.norm`);
    const into = kind === "cross" ? ["q"] : ["q", "k", "v"];
    for (const what of into) {
      const points = [from, [from[0], rail], [middle(at[what]), rail], [middle(at[what]), row(0)]];
      this.edge(points, { q: "query", k: "key", v: "value" }[what], at.norm ? `${place}.norm` : "bus", `${place}.${what}`);
    }
    if (kind === "cross") {
      const targets = ["k", "v"].map((what) => [middle(at[what]), rail, row(0)]);
      if (this.made.nodes.some((node) => node.box?.column.name === "encoder") || this.made.encoderEnd) this.fromEncoder(targets, layer);
      else this.stub(targets, at.v.x + at.v.width, `${this.place}.${kind}.${layer}`);
    }
    // Q · Kᵀ → scores → softmax → · V
    const down = (one, other, color) => this.edge([[middle(at[one]), bottom(at[one])], [middle(at[one]), at[other].y]], color, `${place}.${one}`, `${place}.${other}`);
    const across = (one, other, color = "stream") => {
      const y = at[other].y + this.tall / 2;
      this.edge([[this.side(at[one], true), y], [this.side(at[other]), y]], color, `${place}.${one}`, `${place}.${other}`);
    };
    if (at.scores) {
      down("q", "scores", "query");
      const y = bottom(at.k) + 8;
      this.edge([[middle(at.k), bottom(at.k)], [middle(at.k), y], [middle(at.scores) + 14, y], [middle(at.scores) + 14, at.scores.y]], "key", `${place}.k`, `${place}.scores`);
    }
    if (at.masked) {
      down("scores", "masked", "stream");
      for (const what of ["bias", "mask"].filter((one) => at[one])) {
        if (at[what].y === at.masked.y) continue;
        const y = bottom(at[what]) + 8;
        this.edge([[middle(at[what]), bottom(at[what])], [middle(at[what]), y], [middle(at.masked) + 14, y], [middle(at.masked) + 14, at.masked.y]], "stream", `${place}.${what}`, `${place}.masked`);
      }
    }
    const scored = at.masked ?? at.scores;
    if (scored && scored.y === at.weights.y) across(at.masked ? "masked" : "scores", "weights");
    else if (scored) this.edge([[middle(scored), bottom(scored)], [middle(scored), at.weights.y + this.tall / 2], [this.side(at.weights), at.weights.y + this.tall / 2]], "stream", scored.box.name, `${place}.weights`);
    if (at.mix) {
      across("weights", "mix");
      down("v", "mix", "value");
    }
    // Back to the stream.
    if (at.output && at.mix) {
      const y = bottom(at.mix) + 7;
      this.edge([[middle(at.mix), bottom(at.mix)], [middle(at.mix), y], [middle(at.output), y], [middle(at.output), bottom(at.output)]], "stream", `${place}.mix`, `${place}.output`);
    }
    const end = row(last) + this.tall / 2;
    if (at.output) this.edge([[this.side(at.output), end], [this.toward(SUM / 2), end]], "stream", `${place}.output`, `${place}.sum`);
    this.sum(`${kind}.sum`, end, this.normOf(kind, layer));
    this.y = row(last) + this.tall + 22 + 12;
    if (norm && post) this.postNorm(kind);
    this.group(first, this.y, `Layer ${layer + 1}, ${NAMES[kind]}`, layer);
  }

  /** The norm after a sum: from the bus and back to it. */
  postNorm(kind) {
    const node = this.add(this.box(`${kind}.norm`), 0, this.y + 2);
    const y = node.y + this.tall / 2;
    this.edge([[this.busX, y - 8], [this.side(node), y - 8]], "stream", "bus", node.box.name);
    this.edge([[this.side(node), y + 8], [this.toward(12), y + 8]], "stream", node.box.name, "bus");
    this.y += this.tall + 22 + 8;
  }

  feedforward(layer) {
    const first = this.y;
    const kind = "feedforward";
    const has = (what) => this.box(`${kind}.${what}`);
    const post = this.column.stream.includes(`${this.place}.${kind}.norm`);
    const names = [post ? null : "norm", has("hidden") ? "hidden" : has("router") ? "router" : null, "output"].filter((what) => what && has(what));
    const y = first + LABEL + 6;
    const nodes = names.map((what, at) => this.add(has(what), at, y));
    const center = y + this.tall / 2;
    this.edge([[this.busX, center], [this.side(nodes[0]), center]], "stream", "bus", nodes[0].box.name);
    nodes.slice(1).forEach((node, at) => this.edge([[this.side(nodes[at], true), center], [this.side(node), center]], "stream", nodes[at].box.name, node.box.name));
    const output = nodes.at(-1);
    const end = bottom(output) + 10;
    this.edge([[middle(output), bottom(output)], [middle(output), end], [this.toward(SUM / 2), end]], "stream", output.box.name, `${this.place}.${kind}.sum`);
    this.sum(`${kind}.sum`, end, this.normOf(kind, layer));
    this.y = end + 14;
    if (post) this.postNorm(kind);
    this.group(first, this.y, `Layer ${layer + 1}, feed-forward`, layer);
  }

  after() {
    const parts = this.column.boxes.filter((box) => box.stage === "after");
    this.y += 4;
    this.end = parts.length ? this.y + this.tall / 2 : this.y;
    const nodes = parts.map((box, at) => this.add(box, at, this.y));
    const center = this.y + this.tall / 2;
    nodes.forEach((node, at) => {
      const from = at ? this.side(nodes[at - 1], true) : this.busX;
      this.edge([[from, center], [this.side(node), center]], "stream", at ? nodes[at - 1].box.name : "bus", node.box.name);
    });
    const last = nodes.at(-1);
    if (last?.box.name.endsWith(".distribution") && parts.length < 4) {
      const next = this.add(last.box, parts.length, this.y, "next");
      next.width += this.gap;
      this.edge([[this.side(last, true), center], [this.side(next), center]], "stream", last.box.name, "next");
    }
    if (this.column.name === "encoder" && !nodes.some((node) => node.box.name === "encoder.states")) {
      this.made.encoderEnd = { x: this.busX, y: this.y - this.tall / 2, width: 0, height: this.tall / 2 };
    }
    this.y += (parts.length ? this.tall + 22 : 0) + 8;
  }

  drawBus() {
    this.stream.forEach(({ y, norm }, at) => {
      const to = this.stream[at + 1]?.y ?? this.end;
      const width = (WIDEST * norm) / this.most;
      this.made.buses.push({ column: this.column, x: this.busX, y, height: Math.max(1, to - y), width, norm });
    });
  }

  /** The side of a node that faces the bus, or the other one. */
  side(node, far = false) {
    return far ? node.x + node.width : node.x - this.labels;
  }
}

const middle = (node) => node.x + node.width / 2;
const bottom = (node) => node.y + node.height;
const titleOf = (column) => ({ encoder: "Encoder", decoder: "Decoder" })[column.name] ?? column.name;

/** A path with round corners through points. @param {number[][]} points */
export function pathOf(points, radius = 6) {
  const clean = points.filter((one, at) => at === 0 || one[0] !== points[at - 1][0] || one[1] !== points[at - 1][1]);
  let path = `M${r(clean[0][0])} ${r(clean[0][1])}`;
  for (let at = 1; at < clean.length; at++) {
    const [here, next] = [clean[at], clean[at + 1]];
    if (!next) {
      path += `L${r(here[0])} ${r(here[1])}`;
      continue;
    }
    const before = toward(here, clean[at - 1], radius);
    const after = toward(here, next, radius);
    path += `L${r(before[0])} ${r(before[1])}Q${r(here[0])} ${r(here[1])} ${r(after[0])} ${r(after[1])}`;
  }
  return path;
}

/** The arrow head at the end of a path. */
export function headOf(points, size = 4.5) {
  const [x, y] = points.at(-1);
  const before = [...points].reverse().find((one) => one[0] !== x || one[1] !== y) ?? [x - 1, y];
  const length = Math.hypot(x - before[0], y - before[1]);
  const [dx, dy] = [(x - before[0]) / length, (y - before[1]) / length];
  const corner = (side) => `${r(x - dx * 1.7 * size - side * dy * size)} ${r(y - dy * 1.7 * size + side * dx * size)}`;
  return `M${r(x)} ${r(y)}L${corner(1)}L${corner(-1)}Z`;
}

const r = (number) => Math.round(10 * number) / 10;

function toward(from, to, distance) {
  const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
  const share = Math.min(0.5, distance / length);
  return [from[0] + (to[0] - from[0]) * share, from[1] + (to[1] - from[1]) * share];
}
