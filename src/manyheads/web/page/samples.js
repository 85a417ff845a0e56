// What a model gave for a held-out example at each validation, from the probes of its training.

import { element, html, labelled, nothing, render, select, shown } from "./dom.js";
import { marked } from "./tokens.js";
import { kindOf } from "./watchparts.js";
import { pictureText } from "./watchpictures.js";
import { compared } from "./watchstory.js";

const MOST = 12; // rows

/** The name of an example. */
export function exampleName(example, number) {
  if (example.label !== undefined) return `${number + 1}: ${example.label}`;
  const text = example.source.trim();
  return text.length > 60 ? `${text.slice(0, 57)}…` : text;
}

/** The output of an example at a probe, in words. @param {import("./watchparts.js").Story} story */
export function outputAt(story, at, sentence) {
  if (kindOf(story) === "images") return pictureText(story, { at, sentence });
  return story.probes[at].sentences[sentence].text || "(nothing)";
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

/**
 * The last probe at or before each of these steps, the newest first.
 * @param {import("./watchparts.js").Story} story @param {number[]} steps @returns {number[]}
 */
export function probesAt(story, steps) {
  const positions = steps.map((step) => story.probes.findLastIndex((probe) => probe.step <= step));
  return [...new Set(positions.filter((at) => at >= 0))].sort((a, b) => b - a).slice(0, MOST);
}

export class Samples {
  constructor() {
    this.sentence = 0;
    this.root = element("section", { class: "panel samples", "aria-label": "Samples", hidden: true });
  }

  /** Marks the rows of the saved step nearest to a step of the curves. @param {number} step */
  highlight(step) {
    const rows = /** @type {HTMLElement[]} */ ([...this.root.querySelectorAll("tr[data-step]")]);
    const away = rows.map((one) => Math.abs(Number(one.dataset.step) - step));
    rows.forEach((one, at) => one.classList.toggle("near", away[at] === Math.min(...away)));
  }

  /** @param {{name: string, colour: string, source: import("./watchparts.js").Story, validated: number[]}[]} runs the first is the main one */
  show(runs) {
    this.runs = runs;
    const [main] = runs;
    this.root.hidden = !main.source.probes.length;
    if (this.root.hidden) return;
    const { sentences } = main.source;
    this.sentence = Math.min(this.sentence, sentences.length - 1);
    const names = sentences.map((example, number) => [String(number), exampleName(example, number)]);
    const example = sentences[this.sentence];
    const rows = runs.flatMap((run) => {
      // Another run has its own examples: only the same one can be compared.
      const sentence = run.source.sentences.findIndex((other) => (other.source ?? other.label) === (example.source ?? example.label));
      if (sentence < 0) return [];
      return probesAt(run.source, run.validated).map((at) => row(run, at, sentence, example));
    });
    const choice = select(names, String(this.sentence), (value) => this.choose(Number(value)));
    render(
      html`<h2>Output at saved steps</h2>
        <div class="choice">${labelled("Example", choice)}</div>
        <div class="scroll"><table>
          <thead><tr>${["step", "output", "log P(ref)"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
          <tbody>${rows}<tr class="reference"><th scope="row">reference</th><td>${example.target ?? example.label}</td><td></td></tr></tbody>
        </table></div>
        <p class="note">${kindOf(main.source) === "translation" ? "Marked words are not in the reference. " : nothing}A step of the curve marks its nearest row. The bar is the mean probability of a token of the reference.</p>`,
      this.root,
    );
  }

  choose(sentence) {
    this.sentence = sentence;
    this.show(this.runs);
  }
}

/**
 * A row of the table. Words of a translation that are not in the reference are marked.
 * @param {{name: string, colour: string, source: import("./watchparts.js").Story}} run
 * @param {number} at @param {number} sentence @param {import("./watchparts.js").Example} example
 */
function row({ name, colour, source }, at, sentence, { target }) {
  const { step, sentences } = source.probes[at];
  const output = outputAt(source, at, sentence);
  const { reference_log_probs: logProbs } = sentences[sentence];
  const isTranslation = kindOf(source) === "translation";
  const missing = isTranslation ? compared(output.split(" "), (target ?? "").split(" ")).flatMap(([word, isThere]) => (isThere ? [] : [word])) : [];
  const share = Math.exp(sum(logProbs) / logProbs.length);
  return html`<tr data-step=${step}>
    <th scope="row" title=${name}><span class="dot" .style=${`background: ${colour}`}></span>${step}</th>
    <td>${isTranslation ? marked(output, target ?? "") : output}${missing.length ? html`<small>missing: ${missing.join(" ")}</small>` : nothing}</td>
    <td><span class="share" .style=${`--share: ${share.toFixed(3)}`}>${shown(sum(logProbs))}</span></td>
  </tr>`;
}
