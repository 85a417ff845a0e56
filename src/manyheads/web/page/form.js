// Text areas: the source text and, for translators, the target.

import { afterPause, element } from "./dom.js";
import { change } from "./state.js";

const pending = new WeakSet(); // areas with text that is not in the URL yet

/** Sets the text of an area, unless the user is typing in it. */
export function fill(area, text) {
  if (!pending.has(area) && area.value !== text) area.value = text;
}

/**
 * A text area. New text replaces the old one in the URL and resets the values in `forgotten`.
 * @param {string} key its name in the URL
 * @param {Record<string, string>} [forgotten] @param {{rows?: number, pause?: number}} [how]
 */
export function textArea(key, forgotten = {}, { rows = 1, pause = 350 } = {}) {
  const typed = afterPause((area) => {
    pending.delete(area);
    change({ ...forgotten, [key]: area.value }, { replace: true });
  }, pause);
  const oninput = (event) => {
    pending.add(event.target);
    typed(event.target);
  };
  return element("textarea", { rows: String(rows), oninput, spellcheck: "false" });
}

/** A text area with its label. @param {string} label @param {HTMLTextAreaElement} area */
const field = (label, area) => element("label", { class: "field wide" }, element("span", {}, label), area);

/** Text and target side by side. */
export class TextAndTarget {
  /** @param {Record<string, string>} [forgotten] */
  constructor(forgotten = {}) {
    this.text = textArea("text", forgotten);
    this.target = textArea("target", forgotten);
    this.targetLabel = field("Target (optional)", this.target);
    this.target.placeholder = "the model’s output";
    this.root = element("div", { class: "pair" }, field("Text", this.text), this.targetLabel);
  }

  show(text, target = "") {
    fill(this.text, text);
    fill(this.target, target);
  }

  /** Shows the target only for translators. */
  hasTarget(has) {
    this.targetLabel.hidden = !has;
  }
}
