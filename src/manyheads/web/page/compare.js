// Compare two runs, or two steps of a training, on the same text and target: both outputs, and the
// attention or the logit lens of the other with the difference.

import { post, tensor } from "./api.js";
import { element, html, labelled, nothing, render, select, shown } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { recording } from "./recording.js";
import { change } from "./state.js";
import { marked } from "./tokens.js";
import { nearest, positionOf, stepAt, weightsOf } from "./watchparts.js";

/** The name of a step of a run whose weights were kept; the server opens it like a run. */
const nameOf = (run, step) => `${run}@${step}`;

/**
 * A choice of another run, or of a step of this one; a static copy holds one model.
 * @param {import("./runs.js").Run[]} runs that the page supports @param {import("./runs.js").Run} run @param {string} [beside]
 */
export function compareChoice(runs, run, beside) {
  if (recording) return null;
  const others = runs.filter((one) => one.name !== run.name).map((one) => [one.name, one.name]);
  const steps = (run.kept ?? []).map((step) => [nameOf(run.name, step), `this run at step ${step}`]);
  if (!others.length && !steps.length) return null;
  return labelled("Compare with", select([["", "nothing"], ...others, ...steps], beside ?? "", (value) => change({ beside: value })));
}

/** demo@174 → "demo at step 174". */
const titleOf = (name) => name.replace(/@(\d+)$/, " at step $1");

const isEqual = (one, other) => one.length === other.length && one.every((text, at) => text === other[at]);

/** a − b, on a scale around zero. */
function difference(a, b) {
  const values = Float32Array.from(a, (value, cell) => value - b[cell]);
  const high = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-6);
  return { values, low: -high, high };
}

const says = (row, column, value) => `${row} attends to ${column}: difference ${value}`;

/** The mean of matrices [..., rows, columns] over all but the last two axes. */
function meanMap({ shape, values }) {
  const size = shape.at(-2) * shape.at(-1);
  const count = values.length / size;
  const sum = (cell) => Array.from({ length: count }, (_, at) => values[at * size + cell]).reduce((a, b) => a + b, 0);
  return Float32Array.from({ length: size }, (_, cell) => sum(cell) / count);
}

export class Comparison {
  constructor() {
    this.about = element("div", { class: "about" });
    this.other = new HeatMap();
    this.change = new HeatMap();
    this.maps = element("div", { class: "panels" }, this.other.root, this.change.root);
    this.root = element("section", { class: "comparison", "aria-label": "Comparison", hidden: true });
  }

  /**
   * Requests the other model's output for the same target; null if there is nothing to compare with.
   * @param {{run: string, text: string, output: any}} mine @param {string|undefined} beside @param {AbortSignal} signal
   */
  async begin({ run, text, output }, beside, signal) {
    this.root.hidden = !beside;
    this.root.replaceChildren(...(beside ? [this.about, this.maps] : []));
    for (const map of [this.other, this.change]) map.root.hidden = true;
    if (!beside) return null;
    // The same target for both: another translation would have other rows.
    const target = output.kind === "text" ? output.text : undefined;
    const its = await post("/api/trace", { run: beside, text, target }, signal);
    const free = target === undefined ? null : (await post("/api/trace", { run: beside, text }, signal)).output;
    this.texts = { names: [run, titleOf(beside)], outputs: [output, its.output], free };
    this.say();
    return { its, target };
  }

  /** Both outputs, and a note. */
  say(note = "") {
    const { names, outputs, free } = this.texts;
    const words = free ? [[outputs[0].text], marked(free.text, outputs[0].text)] : [];
    const panel = (name, at) => html`<div>
      <h2>${name}</h2>
      ${words[at] ? html`<p class="sentence">${words[at]}</p>` : nothing}
      ${outputs[at].log_probability === undefined ? nothing : html`<p class="note on-stage">log P(same text) = ${shown(outputs[at].log_probability)}</p>`}
    </div>`;
    render(html`<h2>Compared with ${names[1]}</h2><div class="outputs">${names.map(panel)}</div>${note ? html`<p class="note">${note}</p>` : nothing}`, this.about);
  }

  /**
   * The same head, or mean of heads, of the other model and the difference.
   * @param {{run: import("./runs.js").Run, text: string, trace: any, map: any, which: {layer?: number, head?: number}, title: string}} now
   * @param {string|undefined} beside a run, or a step of this one @param {AbortSignal} signal
   */
  async show({ run, text, trace, map, which, title }, beside, signal) {
    const begun = await this.begin({ run: run.name, text, output: trace.output }, beside, signal);
    if (!begun) return;
    const { its } = begun;
    const other = its.maps.find((one) => one.name === map?.name);
    if (!other || which.layer >= other.layers || which.head >= other.heads) return this.say(`${titleOf(beside)} has no such head: choose another layer or head.`);
    const [a, b] = await Promise.all([trace, its].map(async (one) => meanMap(await tensor(one.trace, `${map.name}.weights`, which, signal))));
    this.other.show({ name: "compared", title: `${titleOf(beside)}: ${title}`, rows: other.rows, columns: other.columns, values: b, says: (row, column, value) => `${row} attends to ${column}: ${value}` });
    if (!isEqual(map.rows, other.rows) || !isEqual(map.columns, other.columns)) return this.say("The two models divide the text into other tokens: there is no difference map.");
    this.change.show({ name: "difference", title: `Difference: ${run.name} − ${titleOf(beside)}, ${title}`, rows: map.rows, columns: map.columns, ...difference(a, b), says });
  }

  /**
   * Compares the probability of the next token after each layer.
   * @param {{run: import("./runs.js").Run, text: string, target?: string}} now
   */
  async showLens({ run, text, target }, beside, signal) {
    const mine = beside ? await post("/api/trace", { run: run.name, text, target }, signal) : { output: {} };
    const begun = await this.begin({ run: run.name, text, output: mine.output }, beside, signal);
    if (!begun) return;
    const [a, b] = await Promise.all([run.name, beside].map((name) => post("/api/lens", { run: name, text, target: begun.target }, signal)));
    if (a.layers !== b.layers || !isEqual(a.inputs, b.inputs)) return this.say("The two models have other tokens or other layers: there is no difference map.");
    const columns = a.inputs.filter((_, at) => a.expected[at] !== null);
    const values = (table) => Float32Array.from(table.wanted.flatMap((row) => row.filter((one) => one !== null)));
    const rows = a.wanted.map((_, layer) => (layer ? `layer ${layer}` : "embedding"));
    const title = "Probability of the next token after each layer";
    this.other.show({ name: "lens-compared", title: `${titleOf(beside)}: ${title.toLowerCase()}`, rows, columns, values: values(b), says: (row, column, value) => `${row}, after ${column}: ${value}` });
    this.change.show({ name: "lens-difference", title: `${title}: ${run.name} − ${titleOf(beside)}`, rows, columns, ...difference(values(a), values(b)), says: (row, column, value) => `${row}, after ${column}: difference ${value}` });
  }
}

/** Attention at one step of a training minus that at another, from the probes. */
export class StepDifference {
  constructor() {
    this.map = new HeatMap();
    this.root = element("section", { class: "comparison", "aria-label": "Comparison", hidden: true }, this.map.root);
  }

  /**
   * The mean of the heads that are shown. @param {import("./watchparts.js").Story} story
   * @param {import("./watchparts.js").Moment} moment @param {number|null} step to compare with
   */
  show(story, moment, step) {
    this.root.hidden = step === null;
    if (step === null) return;
    const { source_tokens: source, target_tokens: target, kind } = story.sentences[moment.sentence];
    const [rows, columns] = kind === "language" ? [[...source, ...target], [...source, ...target]] : [target, source];
    const before = { ...moment, at: positionOf(story, step) };
    const [, count] = nearest(story, moment).sentences[moment.sentence].shape;
    const heads = Array.from({ length: count }, (_, head) => head).filter((head) => !moment.hidden.has(head));
    const mean = (at) => {
      const weights = heads.map((head) => weightsOf(story, at, head));
      return rows.flatMap((_row, row) => columns.map((_column, column) => weights.reduce((sum, weight) => sum + weight(row, column), 0) / (heads.length || 1)));
    };
    const title = `Attention at step ${stepAt(story, moment.at)} − step ${stepAt(story, before.at)}, layer ${moment.layer + 1}, mean of ${heads.length} heads`;
    this.map.show({ name: "difference", title, rows, columns, ...difference(mean(moment), mean(before)), says });
  }
}
