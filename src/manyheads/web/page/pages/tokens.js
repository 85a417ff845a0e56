// Tokens: the subwords of a text, and for BPE and WordPiece every merge step.

import { post } from "../api.js";
import { element, escaped, html, labelled, render, visible } from "../dom.js";
import { saving } from "../exports.js";
import { fill, textArea } from "../form.js";
import { lengthGain, tokenStory } from "../insights.js";
import { definePage } from "../page.js";
import { runChoice } from "../runs.js";
import { change, read } from "../state.js";
import { chips, mergeTree, treeView } from "../tokens.js";

const PAUSE = 350; // milliseconds of a merge when it plays
const area = textArea("text", { step: "" });
const panels = element("div", { class: "panels" });
/** Goes to another step of the first panel. @type {((by: number) => void)|null} */
let walk = null;

export const { draw, keys, next } = definePage({
  name: "tokens",
  about: "From bytes to subwords: the merges that training has learned, one at a time. A leading space is shown as ·.",
  keys: [["← →", "on the slider: previous merge, next merge"]],
  example: (run) => run.example && `Unbelievable! ${run.example}`, // a rare word is divided
  next: (by) => walk?.(by),
  build: () => [labelled("Text", area, "wide"), panels],
  show,
});

async function show({ run, runs, state, text, controls }, signal) {
  const beside = runs.find((one) => one.name === state.beside && one.name !== run.name);
  fill(area, text);
  controls(runChoice(runs.filter((one) => one.name !== run.name), beside?.name ?? "", "beside", "Compare with", "nothing"));
  const compared = [run, beside].filter(Boolean);
  const results = await Promise.all(compared.map((one) => post("/api/tokens", { run: one.name, text }, signal)));
  render(results.map((result, at) => panel(compared[at].name, text, result, at === 0)), panels);
}

function panel(name, text, tokenized, first) {
  const about = `${tokenized.kind}, ${tokenized.vocab_size.toLocaleString("en")} tokens in the vocabulary`;
  const sentence = `${tokenStory(text, tokenized.pieces)} ${lengthGain([...text].length, tokenized.ids.length)}`.trim();
  return html`<figure class="panel tokens">
    <figcaption><h2>${name}</h2></figcaption>
    <p class="note">${about}</p>
    ${sentence && html`<p class="insight">${sentence}</p>`}
    ${chips(tokenized.pieces, tokenized.ids)}
    ${tokenized.steps.length ? steps(tokenized, first) : html`<p class="note">${tokenized.reason}</p>`}
    ${saving(() => viewOf(name, tokenized))}
  </figure>`;
}

/** A slider over the merge steps, which starts with the first half of the text merged and plays; the step of the first panel is in the URL. */
function steps(tokenized, first) {
  const last = tokenized.steps.length - 1;
  const initial = first ? read().step : undefined;
  const state = element("div", { class: "state" });
  const ranked = tokenized.steps.some((step) => step.rank !== null);
  const readout = element("output", { class: "readout" });
  const tree = mergeTree(tokenized.steps.map((step) => step.pieces));
  let timer = 0;
  const showStep = (at) => {
    const step = tokenized.steps[at];
    const isNew = (index) => at > 0 && step.merged !== "" && step.pieces[index] === step.merged && tokenized.steps[at - 1].pieces[index] !== step.merged;
    const rank = step.rank === null ? "" : `, merge ${(step.rank + 1).toLocaleString("en")} of training`;
    const tried = step.tried.length ? ` (${step.tried.length} longer subwords are not in the vocabulary)` : "";
    const place = at > 0 ? step.pieces.findIndex((_, index) => isNew(index)) : -1;
    const [left, right] = place < 0 ? [] : tokenized.steps[at - 1].pieces.slice(place);
    const from = left !== undefined && left + right === step.merged ? `“${visible(left)}” + “${visible(right)}” → ` : "";
    const why = step.merged ? `${from}“${visible(step.merged)}”${rank}${tried}` : "start";
    readout.textContent = `Step ${at} of ${last}: ${why}`;
    render(tree ? treeView(tree, at) : chips(step.pieces, [], isNew), state);
    if (read().stage) state.querySelector(".strong")?.scrollIntoView({ block: "end" });
  };
  const stop = () => {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "Play";
    readout.setAttribute("aria-live", "polite"); // a screen reader does not read every merge of the film
  };
  const tick = () => {
    const at = Number(slider.value) + 1;
    if (at > last || !slider.isConnected) return stop();
    slider.value = String(at);
    showStep(at);
    timer = setTimeout(tick, PAUSE);
  };
  const start = () => {
    if (timer) return stop();
    if (Number(slider.value) === last) slider.value = "0";
    showStep(Number(slider.value));
    play.textContent = "Pause";
    readout.setAttribute("aria-live", "off");
    timer = setTimeout(tick, PAUSE);
  };
  const play = element("button", { type: "button", class: "primary", onclick: start }, "Play");
  const go = (value) => {
    stop();
    slider.value = String(value);
    showStep(Number(slider.value));
    if (first) change({ step: slider.value }, { replace: true, quiet: true });
  };
  const slider = element("input", { type: "range", min: "0", max: String(last), value: initial ?? String(last >> 1), oninput: () => go(slider.value) });
  if (first) walk = (by) => go(Number(slider.value) + by);
  showStep(Number(slider.value));
  stop();
  if (initial === undefined && !matchMedia("(prefers-reduced-motion: reduce)").matches) start();
  return html`<div><div class="player">${play}${labelled("Step", slider)}</div>${readout}${state}${ranked ? html`<p class="note">A low number is a pair that training found early, because it is frequent. Words are merged one after another, so numbers fall where a word begins.</p>` : ""}</div>`;
}

/** The steps as an image and as a table. */
function viewOf(name, tokenized) {
  const states = tokenized.steps.length ? tokenized.steps : [{ pieces: tokenized.pieces, merged: "", rank: null }];
  const line = (step) => step.pieces.map(visible).join(" | ");
  const wide = Math.max(...states.map((step) => line(step).length));
  return {
    name: "tokens",
    title: `Tokens of ${name}`,
    drawing: () => ({
      width: 40 + 8 * wide,
      height: 6 + 18 * states.length,
      inside: states.map((step, at) => `<text x="12" y="${14 + 18 * at}" font-family="monospace" xml:space="preserve">${escaped(line(step))}</text>`).join(""),
    }),
    table: () => ({
      columns: ["step", "merged", "rank", "pieces"],
      rows: states.map((step, at) => [at, step.merged, step.rank ?? "", line(step)]),
    }),
  };
}
