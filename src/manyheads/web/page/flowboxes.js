// The forward pass as a diagram: tiles with small maps, edges, and the residual stream as a bus whose
// width is the mean norm ‖x‖. Geometry comes from flowlayout.js.

import { byteOf, css, paint, scaleFor } from "./colour.js";
import { afterPause, element, escaped, plain, shown, svgElement, visible } from "./dom.js";
import { Figure } from "./figure.js";
import { diagram, headDiagram, headOf, pathOf, sublayers } from "./flowlayout.js";
import { diagramStory, lengthsOf } from "./flowstory.js";

const KINDS = { layer: "", self: "self-attention", cross: "cross-attention", feedforward: "feed-forward" };
const LETTER = 7.5; // the width of a letter of a label
const SMALL = 64; // columns of a small map; of wider ones it shows means of several
const [BAR, BAR_WIDTH] = [170, 60]; // the colour of a bar of ‖x‖, and the columns of the longest one
const [FROM, STEP, SHINE] = [400, 320, 900]; // milliseconds of the way through an attention when it opens
const ROLES = { q: "query", k: "key", v: "value", scores: "scores", masked: "scores", weights: "weights", states: "encoder" };

/**
 * The range of a box and of its colour scale. Weights and probabilities range from 0 to 1; signed
 * values have zero in the middle. The residual stream and all that is added to it share one scale.
 * @param {import("./flowlayout.js").Box} box @param {ArrayLike<number>} values
 */
export function extent(box, values) {
  let [least, greatest, size] = [Infinity, -Infinity, 0];
  for (let at = 0; at < values.length; at++) {
    const value = values[at];
    least = Math.min(least, value);
    greatest = Math.max(greatest, value);
    if (Number.isFinite(value)) size = Math.max(size, Math.abs(value));
  }
  if (/\.(weights|distribution|router)$/.test(box.name)) return { least, greatest, low: 0, high: 1 };
  if (box.name.endsWith(".mask")) return { least, greatest, low: 0, high: 1 };
  if (isStream(box)) size = box.column.scale;
  return { least, greatest, low: -(size || 1), high: size || 1 };
}

/** Whether a box is the residual stream, or is added to it. @param {import("./flowlayout.js").Box} box */
export function isStream({ name, column }) {
  return column.stream.includes(name) || /^[^.]+\.(embedding|position|segment)$/.test(name) || /\.(sum|output)$/.test(name);
}

/** Whether a box has a vector of the residual stream's width for each token: its small picture shows their lengths. Waves of positions are a map, and so are norms, whose lengths are all the same. @param {import("./flowlayout.js").Box} box */
const isVectors = ({ axes, name, title }) => axes.endsWith(" d") && !name.endsWith(".position") && !/norm$/i.test(title);

/** A map of at most SMALL columns, each the mean of several, on a scale of its own. */
function meansOf(values, rows, columns) {
  const every = Math.ceil(columns / SMALL);
  const count = Math.ceil(columns / every);
  const means = Float32Array.from({ length: rows * count }, (_, cell) => {
    const from = Math.floor(cell / count) * columns + (cell % count) * every;
    const until = Math.min(from + every, (Math.floor(cell / count) + 1) * columns);
    let sum = 0;
    for (let at = from; at < until; at++) sum += values[at];
    return sum / (until - from);
  });
  return { columns: count, values: means, high: means.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9) };
}

/** The label of a tile: where the title of scores with a mask is too wide, what is added. @param {{box: {title: string}, width: number}} node */
const labelOf = ({ box: { title }, width }) => (LETTER * title.length > width ? title.replace(/^Scores /, "") : title);

/** The title of a stack. */
export const nameOf = (column) => ({ encoder: "Encoder", decoder: "Decoder" })[column.name] ?? column.name;

/** A text of at most `most` letters. */
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** A shape in letters and numbers: `t × d = 8 × 128`. */
export const shapeOf = (box) => `${box.axes.split(" ").join(" × ")} = ${box.shape.join(" × ")}`;

/** The heading above a box. */
export function groupOf(box, layer, layers) {
  if (box.stage === "before") return "Into the model";
  if (box.stage === "after") return "Out of the layers";
  const kind = box.name.split(".")[1];
  const number = `Layer ${Math.min(layer, layers - 1) + 1} of ${layers}`;
  return `${number}: ${KINDS[kind] || KINDS.self}`;
}

/** @typedef {import("./flowlayout.js").Box} Box */

export class FlowBoxes extends Figure {
  /** @param {{choose: (name: string, changes?: object) => void}} how */
  constructor({ choose }) {
    super("flowboxes");
    this.choose = choose;
    this.shineLater = afterPause(() => this.shine(), FROM); // when the layout has settled
    this.plane = element("div", { class: "diagram", role: "group", "aria-label": "Diagram of the forward pass" });
    this.frame = element("div", { class: "columns" }, this.plane);
    const legend = element(
      "p",
      { class: "note legend" },
      ...["query", "key", "value", "encoder"].flatMap((kind) => [element("span", { class: `sample ${kind}` }), `${kind === "encoder" ? "encoder output" : kind}  `]),
      element("span", { class: "sample stream" }),
      "residual stream: ‖x‖  bars: ‖x‖ of a token",
    );
    this.root.dataset.stage = "Diagram";
    this.fill(this.frame);
    this.output.replaceWith(legend);
    new ResizeObserver(() => this.boxes && `${this.room()} ${this.limit()}` !== this.fitted && this.draw()).observe(this.frame);
  }

  /**
   * @param {Box[]} boxes @param {{box: Box, layer: number, head: number, zoom: string, labels: Function, next: import("./flowstory.js").Next|null}} how
   * @param {Map<string, {shape: number[], values: Float32Array}>} numbers of the layer and head
   * @param {Map<string, import("./api.js").Tensor>} heads the weights of all layers and heads, u8
   */
  show(boxes, how, numbers, heads) {
    this.boxes = boxes;
    this.numbers = numbers;
    this.heads = heads;
    this.box = how.box;
    this.layer = how.layer;
    this.zoom = how.zoom;
    this.labels = how.labels;
    this.next = how.next;
    /** @type {Map<string, number[]>} */
    this.ranges = new Map();
    this.columns = [...new Set(boxes.map((box) => box.column))];
    this.lengths = new Map(boxes.filter(isVectors).flatMap((box) => (numbers.has(box.name) ? [[box.name, lengthsOf(numbers.get(box.name).values, numbers.get(box.name).shape[0])]] : [])));
    this.longest = Math.max(1e-9, ...boxes.filter(isStream).flatMap((box) => this.lengths.get(box.name) ?? []));
    this.where = { model: "all layers", layer: `layer ${how.layer + 1}, head ${how.head + 1}`, head: `layer ${how.layer + 1}, head ${how.head + 1}` }[how.zoom];
    this.name = "flow";
    this.draw();
    this.shineLater();
  }

  /** Once for each attention that opens: the way from query and key over the weights to the output lights up. */
  shine() {
    const place = `${this.box.column.name}.${this.attention()}`;
    if (this.shone === place || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    this.shone = place;
    [["q", "k"], ["scores"], ["masked"], ["weights"], ["v", "mix"], ["output"], ["sum"]]
      .map((step) => step.map((what) => `${place}.${what}`).filter((name) => this.buttons.has(name)))
      .filter((step) => step.length)
      .forEach((step, at) => {
        const how = { duration: SHINE, delay: STEP * at, easing: "ease-out" };
        for (const name of step) {
          this.buttons.get(name).animate({ boxShadow: ["0 0 0 0 transparent", "0 0 0 5px var(--strong)", "0 0 0 9px transparent"] }, how);
          for (const edge of this.plane.querySelectorAll(`.edge[data-to="${name}"] path`)) edge.animate({ strokeWidth: ["1.6px", "6px", "1.6px"] }, how);
        }
      });
  }

  room() {
    return Math.max(280, (this.frame.clientWidth || 640) - 2);
  }

  isStaged() {
    return this.root.classList.contains("staged");
  }

  /** The height that the window, or the stage, has for the diagram; a phone scrolls. */
  limit() {
    if (this.isStaged()) return this.root.clientHeight - this.insight.offsetHeight - 48;
    if (innerWidth < 960) return 0;
    const top = this.frame.getBoundingClientRect().top + scrollY;
    return Math.max(380, innerHeight - top - 66);
  }

  /** The attention that the zoom “head” shows. */
  attention() {
    const kind = this.box.name.split(".")[1];
    const known = sublayers(this.box.column);
    return known.includes(kind) && kind !== "feedforward" ? kind : "self";
  }

  draw() {
    const within = this.plane.contains(document.activeElement);
    const width = (this.drawn = this.room());
    const column = this.box.column;
    this.isHead = this.zoom === "head" || (this.isStaged() && this.box.name.startsWith(`${column.name}.${this.attention()}.`));
    // A step of the tour has room for one column.
    const columns = width < 560 && this.root.closest(".live") ? [column] : this.columns;
    this.open(`${(this.isHead ? [column] : columns).map(nameOf).join(" and ")}: ${this.where}`, this.story());
    const limit = this.limit();
    this.fitted = `${width} ${limit}`;
    this.made = this.isHead
      ? headDiagram(column, this.attention(), { layer: Math.min(this.layer, column.layers - 1), width, rows: column.tokens.length, limit })
      : diagram(columns, { layer: this.layer, zoom: this.zoom, width, limit, chosen: this.box.name });
    const { nodes, height } = this.made;
    const svg = svgElement({ width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    svg.innerHTML = this.lines((kind) => `var(--${kind})`);
    this.buttons = new Map();
    const parts = nodes.map((node) => this.part(node));
    this.plane.replaceChildren(svg, ...parts);
    this.plane.style.height = `${height}px`;
    for (const node of nodes) if (node.kind === "tile" || node.kind === "sum") this.paint(node);
    const chosen = this.buttons.get(this.box.name);
    if (!chosen) return;
    this.reveal(chosen);
    if (within) chosen.focus({ preventScroll: true });
  }

  /** What the stage says below the heading. */
  story() {
    const part = this.isHead ? this.attention() : "all";
    const isLast = !this.isHead || this.box.column === this.columns.at(-1); // an encoder predicts nothing
    return diagramStory(part === "self" && this.numbers.has(`${this.box.column.name}.self.masked`) ? "masked" : part, isLast ? this.next : null);
  }

  /** Shows the most probable tokens at another position. @param {import("./flowstory.js").Next|null} next */
  predict(next) {
    this.next = next;
    this.insight.textContent = this.story();
    const place = this.plane.querySelector(".next");
    if (place) place.replaceChildren(...this.likeliest());
  }

  /** The rows of the next tokens. */
  likeliest() {
    const { label, words, chances, isMasked } = this.next;
    const row = (word, at) => {
      const made = element("span", { class: "row", "data-token": word }, element("span", {}, visible(word)), chances[at] < 0.005 ? "<1 %" : `${Math.round(100 * chances[at])} %`);
      made.style.setProperty("--share", String(chances[at]));
      return made;
    };
    return [...words.slice(0, 3).map(row), element("strong", {}, `${isMasked ? "at" : "after"} ${plain(label)}`)];
  }

  /** Groups, buses, edges and texts as SVG. @param {(kind: string) => string} colour of a role */
  lines(colour) {
    const { groups, buses, edges, texts, nodes } = this.made;
    const small = this.isStaged() ? 11.5 : 12; // 28 pixels on stage
    let inside = "";
    for (const { x, y, width, height, title } of groups) {
      inside += `<rect class="group" x="${x}" y="${y}" width="${width}" height="${height}" rx="8" fill="${colour("back")}" stroke="${colour("edge")}"/>`;
      inside += `<text x="${x + 8}" y="${y + 15}" font-size="12" font-weight="600" fill="${colour("quiet")}">${escaped(title)}</text>`;
    }
    for (const { column, x, y, height, width, norm } of buses) {
      inside += `<rect class="bus" data-norm="${norm}" x="${x - width / 2}" y="${y}" width="${width}" height="${height}" fill="${colour(column.name)}" fill-opacity="0.45"><title>mean ‖x‖ = ${shown(norm)}</title></rect>`;
    }
    for (const { points, kind, from, to } of edges) {
      const on = from === this.box.name || to === this.box.name;
      inside += `<g class="edge ${kind}${on ? " on" : ""}" data-from="${from}" data-to="${to}"><path d="${pathOf(points)}" fill="none" stroke="${colour(kind)}" stroke-width="${on ? 3 : 1.6}"/><path d="${headOf(points)}" fill="${colour(kind)}"/></g>`;
    }
    const named = new Set(); // stacks whose numbers have a name
    for (const { column, x, y, height, norm } of buses) {
      if (height < 26) continue;
      const number = (text, at) => `<text x="${x - 12}" y="${at}" font-size="${small}" text-anchor="end" fill="${colour("quiet")}">${text}</text>`;
      const at = y + Math.min(height / 2, 34);
      inside += number(shown(norm, 1), named.has(column) ? at : at + 2);
      if (!named.has(column)) inside += `<text x="${x - 12}" y="${at - small}" font-size="${small}" text-anchor="end" fill="${colour("quiet")}">‖x‖</text>`;
      named.add(column);
    }
    for (const { x, y, text, anchor, kind } of texts) {
      const [title, name] = kind.split(" ");
      const look = title === "stub" ? `font-size="12" font-weight="600" fill="${colour(name)}"` : title === "title" ? `font-size="15" font-weight="700" fill="${colour(name)}"` : `font-size="13" font-weight="700" fill="${colour("text")}"`;
      inside += `<text x="${x}" y="${y}" text-anchor="${anchor}" ${look}>${escaped(text)}</text>`;
    }
    for (const node of nodes) if (node.kind === "tile" && this.isHead) inside += this.rowLabels(node, colour);
    return inside;
  }

  /** Token labels on the rows of a tile. */
  rowLabels({ box, x, y }, colour) {
    const numbers = this.numbers.get(box.name);
    if (!numbers || this.drawn < 560) return "";
    const rows = this.labels(box.rows, numbers.shape[0]);
    const tall = this.made.nodes[0].height - 22;
    const font = this.isStaged() ? 11.5 : 12;
    const step = Math.ceil((1.1 * font * rows.length) / tall); // as many as fit
    return rows
      .map((row, at) => (at % step ? "" : `<text class="row" data-token="${escaped(row)}" x="${x - 4}" y="${y + ((at + 0.5) * tall) / rows.length + 3.5}" font-size="${font}" text-anchor="end" fill="${colour("text")}">${escaped(cut(visible(row), 9))}</text>`))
      .join("");
  }

  part(node) {
    const made = node.kind === "closed" ? this.closed(node) : this.button(node);
    Object.assign(made.style, { left: `${node.x}px`, top: `${node.y}px`, width: `${node.width}px`, height: `${node.height}px` });
    return made;
  }

  button(node) {
    const { box, kind } = node;
    if (kind === "next") return element("button", { type: "button", class: kind, tabindex: "-1", title: "The most probable tokens", onclick: () => this.choose(box.name) }, ...this.likeliest());
    const chosen = box.name === this.box.name;
    const role = ROLES[box.name.split(".").at(-1)];
    const inside = {
      tokens: () => box.column.tokens.map((token) => element("span", { class: "token", "data-token": token }, visible(token))),
      sum: () => ["+"],
      tile: () => [element("canvas", { "aria-hidden": "true" }), element("strong", {}, labelOf(node))],
    }[kind]();
    const made = element(
      "button",
      {
        type: "button",
        id: `box-${box.name}`,
        class: kind,
        "data-role": role,
        tabindex: chosen ? "0" : "-1",
        "aria-pressed": String(chosen),
        // The tokens name themselves.
        "aria-label": kind === "tokens" ? null : `${box.title}, ${box.name.split(".").slice(0, -1).join(" ")}, ${shapeOf(box)}`,
        title: `${box.title}: ${box.formula}`,
        onclick: () => this.choose(box.name),
      },
      ...inside,
    );
    this.buttons.set(box.name, made);
    return made;
  }

  /** A closed layer, or a part of one, with a small map of each head. */
  closed({ of, layer, column, title }) {
    const parts = sublayers(column);
    const attention = of !== "layer" ? of : parts.includes("cross") ? "cross" : "self";
    const open = (what, head) => () => this.choose(`${column.name}.${what}`, { layer: String(layer), zoom: "layer", ...(head === undefined ? {} : { head: String(head) }) });
    const first = { feedforward: "feedforward.hidden", input: "input" }[of] ?? `${attention}.weights`;
    const label = title ? `Open ${title} of the ${column.name}` : `Open layer ${layer + 1} of the ${column.name}: ${KINDS[of]}`;
    const words = element("button", { type: "button", class: "quiet", "aria-label": label, onclick: open(first) }, title ?? KINDS[of]);
    const maps = this.heads.get(`${column.name}.${attention}.weights`);
    return element("div", { class: "closed" }, words, ...(maps ? this.thumbnails(maps, layer, (head) => open(`${attention}.weights`, head)) : []));
  }

  thumbnails({ shape, values }, layer, open) {
    const [, heads, rows, columns] = shape;
    return Array.from({ length: Math.min(heads, 8) }, (_, head) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      const from = (layer * heads + head) * rows * columns;
      paint(canvas, values.subarray(from, from + rows * columns), rows, columns);
      return element("button", { type: "button", class: "thumb", tabindex: "-1", title: `head ${head + 1}`, "aria-label": `layer ${layer + 1}, head ${head + 1}`, onclick: open(head) }, canvas);
    });
  }

  /** Scrolls the chosen box into view without scrolling the page. */
  reveal(button) {
    const [top, bottom] = [button.offsetTop - 60, button.offsetTop + button.offsetHeight + 60];
    const { scrollTop, clientHeight } = this.frame;
    if (top < scrollTop) this.frame.scrollTop = top;
    else if (bottom > scrollTop + clientHeight) this.frame.scrollTop = bottom - clientHeight;
  }

  paint({ box, kind }) {
    const numbers = this.numbers.get(box.name);
    if (!numbers) return;
    const [rows, columns] = numbers.shape;
    const { least, greatest, low, high } = extent(box, numbers.values);
    this.ranges.set(box.name, [least, greatest]);
    if (kind === "sum") return;
    const canvas = this.buttons.get(box.name).querySelector("canvas");
    canvas.classList.toggle("smooth", rows > SMALL);
    if (isVectors(box)) {
      const lengths = this.lengths.get(box.name);
      const longest = isStream(box) ? this.longest : Math.max(...lengths); // a norm has a scale of its own
      const bars = lengths.flatMap((length) => Array.from({ length: BAR_WIDTH }, (_, at) => (at < (BAR_WIDTH * length) / longest ? BAR : 0)));
      return paint(canvas, bars, rows, BAR_WIDTH);
    }
    const small = columns > SMALL ? meansOf(numbers.values, rows, columns) : { columns, values: numbers.values, high };
    paint(canvas, Uint16Array.from(small.values, (value) => byteOf(value, low && -small.high, small.high)), rows, small.columns, scaleFor(low, high));
  }

  drawing() {
    const style = getComputedStyle(document.documentElement);
    const fixed = { back: "#f6f7f8", edge: "#c8ccd0", quiet: "#555a60", text: "#111" };
    const colour = (kind) => fixed[kind] ?? style.getPropertyValue(`--${kind}`).trim();
    let inside = this.lines(colour);
    for (const { kind, box, x, y, width, height, ...node } of this.made.nodes) {
      const label = (text, at) => `<text x="${x + width / 2}" y="${at}" text-anchor="middle" font-size="11">${escaped(text)}</text>`;
      if (kind === "tile") {
        const image = this.buttons.get(box.name).querySelector("canvas").toDataURL();
        inside += `<image x="${x}" y="${y}" width="${width}" height="${height - 22}" preserveAspectRatio="none" image-rendering="pixelated" href="${image}"/><rect x="${x}" y="${y}" width="${width}" height="${height - 22}" fill="none" stroke="#777"/>${label(labelOf({ box, width }), y + height - 8)}`;
      } else if (kind === "next") inside += this.likeliest().map((row, at) => label(row.textContent ?? "", y + 12 + 15 * at)).join("");
      else if (kind === "sum") inside += `<circle cx="${x + width / 2}" cy="${y + height / 2}" r="${width / 2}" fill="#fff" stroke="#111"/>${label("+", y + height / 2 + 4)}`;
      else if (kind === "tokens") inside += label(box.column.tokens.map(visible).join(" ").slice(0, width / 6), y + 18);
      else inside += `<rect x="${x}" y="${y}" width="${width}" height="${height}" rx="5" fill="${css(0)}" stroke="#999"/>${label(node.title ?? KINDS[node.of], y + height / 2 + 4)}`;
    }
    const { width, height } = this.made;
    return { width: width + 20, height: height + 10, inside: `<g transform="translate(10 0)">${inside}</g>` };
  }

  table() {
    const range = (box) => this.ranges.get(box.name) ?? ["", ""];
    return {
      columns: ["box", "title", "shape", "formula", "least", "greatest"],
      rows: this.boxes.map((box) => [box.name, box.title, shapeOf(box), box.formula, ...range(box)]),
    };
  }
}
