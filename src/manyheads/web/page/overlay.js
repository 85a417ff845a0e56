// Numbers of patches over the picture that they were cut from: one large, with a patch that keys
// walk over, and small ones side by side to choose from.

import { byteOf, css, paint, weightScale } from "./colour.js";
import { context2d, element, escaped, percent, shown } from "./dom.js";
import { Figure, onArrow } from "./figure.js";

const SIZE = 448; // of the large one, in pixels of its canvas
const SMALL = 112;

const DIM = 0.55; // white below the colours; black stays black
const QUERY = "#0077c8";

/**
 * An image as a canvas. @param {import("./api.js").Tensor} pixels height, width, channels; 0 to 1
 * @param {boolean} [dim] in dark greys, so that colours over it are seen
 */
export function pictureOf({ shape: [height, width, channels], values }, dim = false) {
  const canvas = element("canvas", { width, height });
  const context = context2d(canvas);
  const image = context.createImageData(width, height);
  for (let at = 0; at < width * height; at++) {
    const colours = [0, 1, 2].map((colour) => values[channels * at + (channels === 1 ? 0 : colour)]);
    const grey = DIM * (0.299 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]);
    colours.forEach((value, colour) => (image.data[4 * at + colour] = Math.round(255 * (dim ? grey : value))));
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The scale over pictures: heat, or viridis by `palette=viridis` in the URL. */
const scaleOver = () => (weightScale() === "viridis" ? "viridis" : "heat");

/**
 * The picture with its patches coloured by value ⁄ greatest: heat is as opaque as the value is large, viridis equally opaque.
 * @param {HTMLCanvasElement} canvas @param {number} size @param {HTMLCanvasElement} image
 * @param {Float32Array} values of the patches, row by row @param {number} side patches in a row
 * @param {number} opacity of the colours, 0 to 1
 */
function paintOver(canvas, size, image, values, side, opacity) {
  canvas.width = canvas.height = size;
  const context = context2d(canvas);
  context.imageSmoothingEnabled = false;
  context.fillStyle = "#000"; // where the heat scale begins
  context.fillRect(0, 0, size, size);
  context.drawImage(image, 0, 0, size, size);
  const most = Math.max(...values);
  const edge = (at) => Math.round((at * size) / side);
  const scale = scaleOver();
  for (let at = 0; at < side * side; at++) {
    const [row, column] = [Math.floor(at / side), at % side];
    const byte = byteOf(values[at], 0, most);
    context.globalAlpha = scale === "heat" ? (opacity * byte) / 255 : opacity;
    context.fillStyle = css(scale === "heat" ? 255 : byte, scale);
    context.fillRect(edge(column), edge(row), edge(column + 1) - edge(column), edge(row + 1) - edge(row));
  }
  context.globalAlpha = 1;
  return { context, edge };
}

export class Overlay extends Figure {
  /** @param {{choose: (query: number) => void}} how called with the chosen patch; −1 is the class token */
  constructor({ choose }) {
    super("");
    this.choose = choose;
    this.at = 0;
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "img",
      "aria-roledescription": "picture",
      onkeydown: (event) => this.walk(event),
      onpointermove: (event) => this.tell(this.under(event)),
      onpointerleave: () => this.tell(this.at),
      onclick: (event) => this.choose((this.at = this.under(event))),
    });
    this.bar = element("canvas", { class: "bar", "aria-hidden": "true" });
    this.high = element("span");
    this.fill(element("div", { class: "overlay" }, this.canvas));
    this.output.after(element("div", { class: "scale" }, "0", this.bar, this.high));
  }

  /**
   * @param {{name: string, title: string, image: HTMLCanvasElement, values: Float32Array,
   *   side: number, opacity: number, query: number, what: string}} over `query` is the patch that looks, −1 none
   */
  show(over) {
    this.open(over.title);
    this.name = over.name;
    this.over = over;
    this.best = bestOf(over.values, over.what === "cosine" ? over.query : -1);
    this.at = over.query >= 0 ? over.query : this.best;
    this.high.textContent = over.what === "cosine" ? shown(Math.max(...over.values)) : percent(Math.max(...over.values));
    paint(this.bar, Uint8Array.from({ length: 256 }, (_, byte) => byte), 1, 256, scaleOver());
    this.canvas.setAttribute("aria-label", `${over.title}. Arrow keys walk over the patches, Enter lets one look, Home goes to the first one, c lets the class token look.`);
    this.draw();
  }

  draw() {
    const frame = this.paint(this.canvas);
    frame(this.at, "#fff", 2);
    if (this.over.query >= 0) frame(this.over.query, QUERY, 3);
    this.tell(this.at);
  }

  /** The picture, the grid of its patches, and an arrow from the patch that looks to where it looks most. @param {HTMLCanvasElement} canvas */
  paint(canvas) {
    const { image, values, side, opacity, query } = this.over;
    const { context, edge } = paintOver(canvas, SIZE, image, values, side, opacity);
    context.strokeStyle = "#8888";
    context.lineWidth = Math.max(1, Math.ceil(SIZE / (this.canvas.clientWidth || SIZE))); // a thinner line may vanish where the canvas is scaled down
    context.beginPath();
    for (let line = 1; line < side; line++) {
      context.moveTo(edge(line) + 0.5, 0);
      context.lineTo(edge(line) + 0.5, SIZE);
      context.moveTo(0, edge(line) + 0.5);
      context.lineTo(SIZE, edge(line) + 0.5);
    }
    context.stroke();
    const middle = (/** @type {number} */ at) => [(at % side) + 0.5, Math.floor(at / side) + 0.5].map((one) => (one * SIZE) / side);
    if (query >= 0 && this.best !== query) drawArrow(context, middle(query), middle(this.best), SIZE / side / 3);
    return (/** @type {number} */ at, /** @type {string} */ colour, /** @type {number} */ width) => {
      const [row, column] = [Math.floor(at / side), at % side];
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(edge(column) + 1.5, edge(row) + 1.5, edge(column + 1) - edge(column) - 3, edge(row + 1) - edge(row) - 3);
    };
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const { side } = this.over;
    const clamp = (share) => Math.max(0, Math.min(side - 1, Math.floor(share * side)));
    return clamp((event.clientY - box.top) / box.height) * side + clamp((event.clientX - box.left) / box.width);
  }

  walk(event) {
    const { side } = this.over;
    if (event.key === "Enter") return void this.choose(this.at);
    if (event.key === "c") return void this.choose(-1);
    const [row, column] = [Math.floor(this.at / side), this.at % side];
    onArrow(event, { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], Home: [0, 0] }, (to) => {
      if (to.every((one) => one >= 0 && one < side)) this.at = to[0] * side + to[1];
      this.draw();
    });
  }

  tell(at) {
    const { side, values, what } = this.over;
    this.output.textContent = `row ${Math.floor(at / side) + 1}, column ${(at % side) + 1}: ${what} ${what === "cosine" ? shown(values[at]) : percent(values[at])}`;
  }

  /** @returns {import("./exports.js").Drawing} */
  drawing() {
    const { values, query } = this.over;
    const canvas = element("canvas");
    const frame = this.paint(canvas);
    if (query >= 0) frame(query, QUERY, 3);
    const inside = `<image x="10" width="${SIZE}" height="${SIZE}" image-rendering="pixelated" href="${canvas.toDataURL()}"/>`;
    return { width: SIZE + 20, height: SIZE + 6, inside, colours: { low: 0, high: Math.max(...values), scale: scaleOver() } };
  }

  table() {
    const { side, values, what } = this.over;
    const patches = Array.from({ length: side * side }, (_, at) => [Math.floor(at / side) + 1, (at % side) + 1, values[at]]);
    return { columns: ["row", "column", what], rows: patches };
  }
}

/** The patch of the greatest value, other than one. @param {ArrayLike<number>} values @param {number} except */
export function bestOf(values, except = -1) {
  return Array.from(values).reduce((best, value, at) => (at !== except && (best < 0 || value > values[best]) ? at : best), -1);
}

/** An arrow with a light edge, so that it is seen on any colour. @param {CanvasRenderingContext2D} context @param {number[]} from @param {number[]} to @param {number} size of its head */
function drawArrow(context, [x, y], [toX, toY], size) {
  const angle = Math.atan2(toY - y, toX - x);
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  for (const side of [-0.5, 0.5]) {
    context.moveTo(toX, toY);
    context.lineTo(toX - size * Math.cos(angle + side), toY - size * Math.sin(angle + side));
  }
  for (const [colour, width] of /** @type {[string, number][]} */ ([["#fff", 7], [QUERY, 4]])) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }
}

export class SmallOverlays extends Figure {
  /** @param {{choose: (number: number) => void}} how */
  constructor({ choose }) {
    super("");
    this.choose = choose;
    this.cells = element("div", { class: "small-overlays" });
    this.fill(this.cells);
  }

  /** @param {{name: string, title: string, image: HTMLCanvasElement, side: number, opacity: number, across: number}} about `across`: in a row
   *  @param {{label: string, name?: string, values: Float32Array}[]} all @param {number} chosen */
  show(about, all, chosen) {
    this.open(about.title);
    this.about = about;
    this.all = all;
    this.name = about.name;
    this.buttons = all.map(({ label, name, values }, at) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      paintOver(canvas, SMALL, about.image, values, about.side, about.opacity);
      return element("button", { type: "button", "aria-pressed": String(at === chosen), "aria-label": name, onclick: () => this.choose(at) }, canvas, element("span", {}, label));
    });
    this.cells.style.setProperty("--across", String(about.across));
    this.cells.replaceChildren(...this.buttons);
  }

  drawing() {
    const { across } = this.about;
    const inside = this.all.map(({ label }, at) => {
      const [x, y] = [10 + (at % across) * (SMALL + 10), Math.floor(at / across) * (SMALL + 24)];
      const href = this.buttons[at].querySelector("canvas").toDataURL();
      return `<image x="${x}" y="${y}" width="${SMALL}" height="${SMALL}" href="${href}"/><text x="${x}" y="${y + SMALL + 14}">${escaped(label)}</text>`;
    });
    return { width: 20 + across * (SMALL + 10), height: Math.ceil(this.all.length / across) * (SMALL + 24), inside: inside.join("") };
  }

  table() {
    const { side } = this.about;
    const rows = this.all.flatMap(({ label, name, values }) => Array.from(values, (value, at) => [name ?? label, Math.floor(at / side) + 1, (at % side) + 1, value]));
    return { columns: ["head", "row", "column", "weight"], rows };
  }
}
