// The texts of a page: what a model reads and, for one that writes, the target that it is given.

import { afterPause, element, labelled } from "./dom.js";
import { change } from "./state.js";

const pending = new WeakSet(); // areas whose text is not in the address yet

/** What a person is just writing is left alone; else an area shows the state. */
export function fill(area, text) {
  if (!pending.has(area) && area.value !== text) area.value = text;
}

/**
 * A place to write in. Another text replaces the one in the address, together with what these
 * values said of the last one. @param {string} key its name in the address
 * @param {Record<string, string>} [forgotten] @param {{rows?: number, pause?: number}} [how]
 */
export function textArea(key, forgotten = {}, { rows = 2, pause = 350 } = {}) {
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

/** Text and target side by side. */
export class TextAndTarget {
  /** @param {Record<string, string>} [forgotten] */
  constructor(forgotten = {}) {
    this.text = textArea("text", forgotten, { rows: 1 });
    this.target = textArea("target", forgotten, { rows: 1 });
    this.targetLabel = labelled("Target (empty: what the model writes itself)", this.target, "wide");
    this.root = element("div", { class: "pair" }, labelled("Text", this.text, "wide"), this.targetLabel);
  }

  show(text, target = "") {
    fill(this.text, text);
    fill(this.target, target);
  }

  /** Only a model that reads one text and writes another is given a target. */
  hasTarget(has) {
    this.targetLabel.hidden = !has;
  }
}
