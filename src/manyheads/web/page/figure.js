// The frame of every figure: a heading, the picture, a read-out and one Save menu.

import { element } from "./dom.js";
import { saving } from "./exports.js";

/**
 * A subclass has `name` (of its files), `drawing()` (its picture as SVG) and `table()` (its numbers). A
 * figure is hidden until it is shown for the first time: before that there is nothing to save.
 */
export class Figure {
  /** @param {string} kind a class for CSS */
  constructor(kind) {
    this.name = "";
    this.heading = element("h2");
    this.insight = element("p", { class: "insight", hidden: true });
    this.output = element("output", { class: "readout", "aria-live": "polite" });
    this.tools = element("div", { class: "tools" }, saving(() => this));
    this.below = element("div", { class: "below" }, this.output, this.tools);
    this.root = element("figure", { class: kind, hidden: true }, element("figcaption", {}, this.heading), this.insight, this.below);
  }

  /** Puts elements between the heading and the read-out. @param {...Node} parts */
  fill(...parts) {
    this.below.before(...parts);
  }

  /** Shows the figure under this heading. @param {string} title @param {string} [insight] what there is to see, in a sentence */
  open(title, insight = "") {
    this.root.hidden = false;
    this.heading.textContent = title;
    this.insight.textContent = insight;
    this.insight.hidden = insight === "";
  }

  get title() {
    return this.heading.textContent ?? "";
  }

  /** @returns {import("./exports.js").Drawing} */
  drawing() {
    throw new Error("a figure draws itself");
  }

  /** @returns {import("./exports.js").Table} */
  table() {
    throw new Error("a figure has numbers");
  }
}

/** Calls `act` with the step of an arrow key, and keeps the page from scrolling. @template T @param {KeyboardEvent} event @param {Record<string, T>} steps @param {(step: T) => void} act */
export function onArrow(event, steps, act) {
  const step = steps[event.key];
  if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act(step);
}
