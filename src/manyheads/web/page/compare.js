// Compare two runs, or two steps of a training: outputs, the same head and its difference, and the
// difference of the logit lens.

import { post, tensor } from "./api.js";
import { element, labelled, select, shown } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { fits, pageOf } from "./pages.js";
import { recording } from "./recording.js";
import { change } from "./state.js";
import { marked } from "./tokens.js";
import { nearest, positionOf, stepAt, weightsOf } from "./watchparts.js";

/** The name of a step of a run whose weights were kept; the server opens it like a run. */
const nameOf = (run, step) => `${run}@${step}`;

/**
 * A choice of another run, or of a step of this one; a static copy holds one model.
 * @param {import("./runs.js").Run[]} runs @param {import("./runs.js").Run} run @param {string} [beside]
 */
export function compareChoice(runs, run, beside, page = "attention") {
  if (recording) return "";
  const others = runs.filter((one) => one.name !== run.name && fits(pageOf(page), one)).map((one) => [one.name, one.name]);
  const steps = (run.kept ?? []).map((step) => [nameOf(run.name, step), `this run at step ${step}`]);
  if (!others.length && !steps.length) return "";
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

export class Comparison {
  constructor() {
    this.about = element("div", { class: "about" });
    this.other = new HeatMap();
    this.change = new HeatMap();
    this.lens = new HeatMap();
    this.maps = element("div", { class: "panels" }, this.other.root, this.change.root, this.lens.root);
    this.root = element("section", { class: "comparison", "aria-label": "Comparison", hidden: true });
  }

  /**
   * @param {{run: import("./runs.js").Run, text: string, trace: any, map: any, layer: number, head: number}} now
   * @param {string|undefined} beside a run, or a step of this one @param {AbortSignal} signal
   */
  async show({ run, text, trace, map, layer, head }, beside, signal) {
    this.root.hidden = !beside;
    if (!beside) return this.root.replaceChildren();
    this.root.replaceChildren(this.about, this.maps);
    // The same target for both: another translation would have other rows.
    const target = trace.output.kind === "text" ? trace.output.text : undefined;
    const other = await post("/api/trace", { run: beside, text, target }, signal);
    const its = other.maps.find((one) => one.name === map.name);
    const free = target === undefined ? null : await post("/api/trace", { run: beside, text }, signal);
    this.say(trace.output, other.output, free?.output, run.name, beside);
    for (const view of [this.other, this.change, this.lens]) view.root.hidden = true;
    await Promise.all([
      this.showHead({ run, trace, map, layer, head }, other, its, beside, signal),
      fits(pageOf("lens"), run) ? this.showLens({ run: run.name, text, target }, beside, signal) : null,
    ]);
  }

  /** The head of the other model, and the difference. */
  async showHead({ run, trace, map, layer, head }, other, its, beside, signal) {
    if (!its || layer >= its.layers || head >= its.heads) {
      return void this.about.append(element("p", { class: "note" }, `${titleOf(beside)} has no such head: choose another layer or head.`));
    }
    const [a, b] = await Promise.all([[trace, map], [other, its]].map(([one, { name }]) => tensor(one.trace, `${name}.weights`, { layer, head }, signal)));
    const place = `layer ${layer + 1}, head ${head + 1}`;
    this.other.show({ name: "compared", title: `${titleOf(beside)}: ${place}`, rows: its.rows, columns: its.columns, values: b.values, says: (r, c, v) => `${r} attends to ${c}: ${v}` });
    if (!isEqual(map.rows, its.rows) || !isEqual(map.columns, its.columns)) {
      return void this.about.append(element("p", { class: "note" }, "The two models divide the text into other tokens: there is no difference map."));
    }
    const title = `Difference: ${run.name} − ${titleOf(beside)}, ${place}`;
    this.change.show({ name: "difference", title, rows: map.rows, columns: map.columns, ...difference(a.values, b.values), says });
  }

  /** The probability of the next token after each layer, of the same target. */
  async showLens({ run, text, target }, beside, signal) {
    const [mine, its] = await Promise.all([run, beside].map((name) => post("/api/lens", { run: name, text, target }, signal)));
    if (mine.layers !== its.layers || !isEqual(mine.given, its.given)) return;
    const columns = mine.given.filter((_, at) => mine.expected[at] !== null);
    const values = (table) => table.wanted.flatMap((row) => row.filter((one) => one !== null));
    const rows = mine.wanted.map((_, layer) => (layer ? `layer ${layer}` : "embedding"));
    const title = `Probability of the next token after each layer: ${run} − ${titleOf(beside)}`;
    this.lens.show({ name: "lens-difference", title, rows, columns, ...difference(values(mine), values(its)), says: (row, column, value) => `${row}, after ${column}: difference ${value}` });
  }

  say(mine, its, free, run, beside) {
    const likelihood = ({ log_probability: sum }) => (sum === undefined ? "" : element("p", { class: "note told" }, `log P(same text) = ${shown(sum)}`));
    const panel = (name, output, text) => element("div", {}, element("h2", {}, name), text ? element("p", { class: "sentence" }, ...text) : "", likelihood(output));
    this.about.replaceChildren(
      element("h2", {}, `Compared with ${titleOf(beside)}`),
      element("div", { class: "outputs" }, panel(run, mine, free && [mine.text]), panel(titleOf(beside), its, free && marked(free.text, mine.text))),
    );
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
