// Numbers of patches over the picture that they were cut from: one large, with a patch that keys
// walk over, and small ones side by side to choose from.

import { byteOf, css } from "./colour.js";
import { element, escaped, shown } from "./dom.js";
import { picture, saving } from "./exports.js";

const SIZE = 448; // of the large one, in pixels of its canvas
const SMALL = 112;

/** An image as a canvas. @param {import("./api.js").Tensor} pixels height, width, channels; 0 to 1 */
export function pictureOf({ shape: [height, width, channels], values }) {
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let at = 0; at < width * height; at++) {
    for (let colour = 0; colour < 3; colour++) {
      image.data[4 * at + colour] = Math.round(255 * values[channels * at + (channels === 1 ? 0 : colour)]);
    }
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/**
 * The picture with its patches coloured: a patch's colour is value ⁄ greatest.
 * @param {HTMLCanvasElement} canvas @param {number} size @param {HTMLCanvasElement} image
 * @param {ArrayLike<number>} values of the patches, row by row @param {number} side patches in a row
 * @param {number} opacity of the colours, 0 to 1
 */
function paintOver(canvas, size, image, values, side, opacity) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, size, size);
  const most = Math.max(...values);
  const edge = (at) => Math.round((at * size) / side);
  context.globalAlpha = opacity;
  for (let at = 0; at < side * side; at++) {
    const [row, column] = [Math.floor(at / side), at % side];
    context.fillStyle = css(byteOf(values[at], 0, most), "viridis");
    context.fillRect(edge(column), edge(row), edge(column + 1) - edge(column), edge(row + 1) - edge(row));
  }
  context.globalAlpha = 1;
  return { context, edge };
}

export class Overlay {
  /** @param {{choose: (query: number) => void}} how called with the chosen patch; −1 is the class token */
  constructor({ choose }) {
    this.choose = choose;
    this.at = 0;
    this.caption = element("figcaption");
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "picture",
      onkeydown: (event) => this.walk(event),
      onpointermove: (event) => this.tell(this.under(event)),
      onpointerleave: () => this.tell(this.at),
      onclick: (event) => this.choose((this.at = this.under(event))),
    });
    this.output = element("output", { class: "readout", "aria-live": "polite" });
    this.root = element(
      "figure",
      { hidden: true },
      this.caption,
      element("div", { class: "overlay" }, this.canvas),
      element("div", { class: "below" }, this.output, saving(() => this)),
    );
  }

  /**
   * @param {{name: string, title: string, image: HTMLCanvasElement, values: ArrayLike<number>,
   *   side: number, opacity: number, query: number, what: string}} shown `query` is the patch that looks, −1 none
   */
  show(over) {
    this.root.hidden = false;
    this.over = over;
    this.at = over.query >= 0 ? over.query : Math.min(this.at, over.side ** 2 - 1);
    this.caption.textContent = over.title;
    this.canvas.setAttribute("aria-label", `${over.title}. Arrow keys walk over the patches, Enter lets one look, c the class token.`);
    this.draw();
  }

  get name() {
    return this.over.name;
  }

  get title() {
    return this.over.title;
  }

  draw() {
    const { image, values, side, opacity, query } = this.over;
    const { context, edge } = paintOver(this.canvas, SIZE, image, values, side, opacity);
    context.strokeStyle = "#8888";
    context.beginPath();
    for (let line = 1; line < side; line++) {
      context.moveTo(edge(line) + 0.5, 0);
      context.lineTo(edge(line) + 0.5, SIZE);
      context.moveTo(0, edge(line) + 0.5);
      context.lineTo(SIZE, edge(line) + 0.5);
    }
    context.stroke();
    const frame = (at, colour, width) => {
      const [row, column] = [Math.floor(at / side), at % side];
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(edge(column) + 1.5, edge(row) + 1.5, edge(column + 1) - edge(column) - 3, edge(row + 1) - edge(row) - 3);
    };
    frame(this.at, "#fff", 2);
    if (query >= 0) frame(query, "#e00", 3);
    this.tell(this.at);
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
    const to = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    if (to.every((one) => one >= 0 && one < side)) this.at = to[0] * side + to[1];
    this.draw();
  }

  tell(at) {
    const { side, values, what } = this.over;
    this.output.textContent = `row ${Math.floor(at / side) + 1}, column ${(at % side) + 1}: ${what} ${shown(values[at], 5)}`;
  }

  svg() {
    const { image, values, side, opacity, title } = this.over;
    const [size, most] = [360, Math.max(...values)];
    const cell = size / side;
    let inside = `<text x="10" y="20" font-size="14">${escaped(title)}</text>`;
    inside += `<image x="10" y="30" width="${size}" height="${size}" image-rendering="pixelated" href="${image.toDataURL()}"/>`;
    for (let at = 0; at < side * side; at++) {
      const [x, y] = [10 + cell * (at % side), 30 + cell * Math.floor(at / side)];
      inside += `<rect x="${x}" y="${y}" width="${cell}" height="${cell}" fill="${css(byteOf(values[at], 0, most), "viridis")}" fill-opacity="${opacity}"/>`;
    }
    return picture(Math.ceil(Math.max(size + 20, 20 + 7.5 * title.length)), size + 40, `<g shape-rendering="crispEdges">${inside}</g>`);
  }

  table() {
    const { side, values, what } = this.over;
    const patches = Array.from({ length: side * side }, (_, at) => [Math.floor(at / side) + 1, (at % side) + 1, values[at]]);
    return { columns: ["row", "column", what], rows: patches };
  }
}

export class SmallOverlays {
  /** @param {{choose: (number: number) => void}} how */
  constructor({ choose }) {
    this.choose = choose;
    this.caption = element("figcaption");
    this.cells = element("div", { class: "small-overlays" });
    this.root = element("figure", { hidden: true }, this.caption, this.cells, element("div", { class: "below" }, saving(() => this)));
  }

  /** @param {{name: string, title: string, image: HTMLCanvasElement, side: number, opacity: number}} about
   *  @param {{label: string, values: ArrayLike<number>}[]} all @param {number} chosen */
  show(about, all, chosen) {
    this.root.hidden = false;
    Object.assign(this, { about, all });
    this.caption.textContent = about.title;
    this.buttons = all.map(({ label, values }, at) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      paintOver(canvas, SMALL, about.image, values, about.side, about.opacity);
      return element("button", { type: "button", "aria-pressed": String(at === chosen), onclick: () => this.choose(at) }, canvas, element("span", {}, label));
    });
    this.cells.replaceChildren(...this.buttons);
  }

  get name() {
    return this.about.name;
  }

  get title() {
    return this.about.title;
  }

  svg() {
    const across = Math.min(4, this.all.length);
    const inside = this.all.map(({ label }, at) => {
      const [x, y] = [10 + (at % across) * (SMALL + 10), 34 + Math.floor(at / across) * (SMALL + 24)];
      const href = this.buttons[at].querySelector("canvas").toDataURL();
      return `<image x="${x}" y="${y}" width="${SMALL}" height="${SMALL}" href="${href}"/><text x="${x}" y="${y + SMALL + 14}">${escaped(label)}</text>`;
    });
    const title = `<text x="10" y="20" font-size="14">${escaped(this.title)}</text>`;
    const width = Math.max(20 + across * (SMALL + 10), 20 + 7.5 * this.title.length);
    return picture(Math.ceil(width), 44 + Math.ceil(this.all.length / across) * (SMALL + 24), title + inside.join(""));
  }

  table() {
    const { side } = this.about;
    const rows = this.all.flatMap(({ label, values }) => Array.from(values, (value, at) => [label, Math.floor(at / side) + 1, (at % side) + 1, value]));
    return { columns: ["head", "row", "column", "weight"], rows };
  }
}
