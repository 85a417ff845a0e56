// The parts of a forward pass as small boxes, one column per stack.

import { byteOf, paint } from "./colour.js";
import { element, escaped, shown, visible } from "./dom.js";
import { picture, saving } from "./exports.js";

const KINDS = { layer: "", self: "self-attention", cross: "cross-attention", feedforward: "feed-forward" };
const SMALL = 96; // pixels of a small map; wider maps are interpolated

/**
 * The range of a box and of its colour scale. The scale is finite; −∞ gets the lowest colour.
 * Weights and probabilities range from 0 to 1; a mask is 0 or −∞.
 * @param {{name: string}} box @param {ArrayLike<number>} values
 */
export function extent({ name }, values) {
  let [least, greatest, low] = [Infinity, -Infinity, Infinity];
  for (let at = 0; at < values.length; at++) {
    const value = values[at];
    least = Math.min(least, value);
    greatest = Math.max(greatest, value);
    if (Number.isFinite(value)) low = Math.min(low, value);
  }
  if (/\.(weights|distribution|router)$/.test(name)) return { least, greatest, low: 0, high: 1 };
  if (name.endsWith(".mask")) return { least, greatest, low: -1, high: 0 };
  if (low === Infinity) low = 0; // none is finite
  const high = Math.max(greatest, low);
  const below = least < low ? low - (high > low ? 0.15 * (high - low) : 1) : low;
  return { least, greatest, low: below, high };
}

/** Formats a number, including −∞. */
export function formatted(number, digits = 3) {
  return number === -Infinity ? "−∞" : shown(number, digits);
}

/** The title of a stack. */
export const nameOf = (column) => ({ encoder: "Encoder", decoder: "Decoder" })[column.name] ?? column.name;

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

export class FlowBoxes {
  /** @param {{choose: (name: string) => void}} how */
  constructor({ choose }) {
    this.choose = choose;
    this.caption = element("figcaption");
    this.columns = element("div", { class: "columns" });
    this.root = element("figure", { class: "flowboxes", hidden: true }, this.caption, this.columns, element("div", { class: "below" }, saving(() => this)));
  }

  /**
   * @param {object[]} boxes each with its `column` @param {string} chosen the name of one
   * @param {Map<string, {shape: number[], values: Float32Array}>} numbers of the layer and head
   */
  show(boxes, chosen, { layer, head, run }, numbers) {
    this.root.hidden = false;
    Object.assign(this, { boxes, run, ranges: new Map() });
    const within = this.columns.contains(document.activeElement);
    const stacks = [...new Set(boxes.map((box) => box.column))];
    this.caption.textContent = `${stacks.map(nameOf).join(" and ")}: layer ${layer + 1}, head ${head + 1}`;
    this.buttons = new Map(boxes.map((box) => [box.name, this.button(box, box.name === chosen)]));
    this.columns.replaceChildren(...stacks.map((stack) => this.column(stack, layer)));
    this.columns.style.setProperty("--across", String(stacks.length));
    this.reveal(this.buttons.get(chosen));
    if (within) this.buttons.get(chosen).focus({ preventScroll: true });
    for (const box of boxes) if (numbers.has(box.name)) this.paint(box, numbers.get(box.name));
  }

  column(stack, layer) {
    const groups = new Map();
    for (const box of this.boxes.filter((one) => one.column === stack)) {
      const title = box.stage === "tokens" ? "Into the model" : groupOf(box, layer, stack.layers);
      groups.set(title, [...(groups.get(title) ?? []), this.buttons.get(box.name)]);
    }
    const parts = [...groups].map(([title, buttons]) =>
      element("div", { class: "group", role: "group", "aria-label": `${stack.name}, ${title}` }, element("h3", {}, title), element("div", { class: "tiles" }, ...buttons)),
    );
    return element("section", { "aria-label": nameOf(stack) }, element("h2", {}, nameOf(stack)), ...parts);
  }

  /** Scrolls the chosen box into view without scrolling the page. */
  reveal(button) {
    const [top, bottom] = [button.offsetTop - 40, button.offsetTop + button.offsetHeight + 8];
    const { scrollTop, clientHeight } = this.columns;
    if (top < scrollTop) this.columns.scrollTop = top;
    else if (bottom > scrollTop + clientHeight) this.columns.scrollTop = bottom - clientHeight;
  }

  button(box, chosen) {
    const picture = box.stage === "tokens" ? element("span", { class: "pieces" }, box.column.tokens.map(visible).join(" ")) : element("canvas", { "aria-hidden": "true" });
    return element(
      "button",
      {
        type: "button",
        id: `box-${box.name}`,
        class: "tile",
        tabindex: chosen ? "0" : "-1",
        "aria-pressed": String(chosen),
        onclick: () => this.choose(box.name),
      },
      picture,
      element("strong", {}, box.title),
      element("span", {}, box.shape.join(" × ")),
      element("span", { class: "range" }, box.stage === "tokens" ? "ids" : "…"),
    );
  }

  paint(box, { shape, values }) {
    const button = this.buttons.get(box.name);
    const [rows, columns] = shape;
    const { least, greatest, low, high } = extent(box, values);
    const canvas = button.querySelector("canvas");
    canvas.classList.toggle("smooth", columns > SMALL || rows > SMALL);
    paint(canvas, Uint8Array.from(values, (value) => byteOf(value, low, high)), rows, columns);
    button.querySelector(".range").textContent = `${formatted(least, 1)} … ${formatted(greatest, 1)}`;
    this.ranges.set(box.name, [least, greatest]);
  }

  get name() {
    return `${this.run.replaceAll("/", "-")}-flow`;
  }

  get title() {
    return this.caption.textContent;
  }

  svg() {
    const [wide, tall, across] = [150, 92, 3];
    let inside = `<text x="10" y="20" font-size="14">${escaped(this.title)}</text>`;
    let most = 0;
    [...this.columns.children].forEach((section, column) => {
      const left = 10 + column * (across * wide + 30);
      let y = 48;
      inside += `<text x="${left}" y="${y - 4}" font-weight="bold">${escaped(section.getAttribute("aria-label"))}</text>`;
      for (const group of section.querySelectorAll(".group")) {
        inside += `<text x="${left}" y="${(y += 18) - 4}">${escaped(group.firstChild.textContent)}</text>`;
        const tiles = [...group.querySelectorAll("button")];
        tiles.forEach((tile, at) => (inside += drawn(tile, left + (at % across) * wide, y + Math.floor(at / across) * tall, wide)));
        y += Math.ceil(tiles.length / across) * tall + 6;
      }
      most = Math.max(most, y);
    });
    return picture(20 + this.columns.children.length * (across * wide + 30), most + 10, inside);
  }

  table() {
    const range = (box) => this.ranges.get(box.name) ?? ["", ""];
    return {
      columns: ["box", "title", "shape", "formula", "least", "greatest"],
      rows: this.boxes.map((box) => [box.name, box.title, shapeOf(box), box.formula, ...range(box)]),
    };
  }
}

/** A box in a saved picture. */
function drawn(tile, x, y, wide) {
  const [title, ...lines] = [...tile.children].slice(1).map((one) => one.textContent);
  const canvas = tile.querySelector("canvas");
  const place = `x="${x}" y="${y}" width="${wide - 12}" height="44"`;
  const map = canvas
    ? `<image ${place} preserveAspectRatio="none" image-rendering="pixelated" href="${canvas.toDataURL()}"/>`
    : `<text x="${x}" y="${y + 24}">${escaped(tile.firstChild.textContent.slice(0, 20))}</text>`;
  return `${map}<text x="${x}" y="${y + 57}" font-weight="bold">${escaped(title)}</text><text x="${x}" y="${y + 71}">${escaped(lines.join(": "))}</text>`;
}
