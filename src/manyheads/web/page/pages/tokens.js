// Tokens: the subwords of a text, and for BPE and WordPiece every merge step.

import { post } from "../api.js";
import { element, escaped, labelled, shown, visible } from "../dom.js";
import { picture, saving } from "../exports.js";
import { fitting, insteadOf, nothingFits } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { lead, runChoice } from "../runs.js";
import { change, read } from "../state.js";
import { chips } from "../tokens.js";

export const keys = [["← →", "on the slider: previous merge, next merge"]];

/** @type {{root: HTMLElement, text: HTMLTextAreaElement, controls: HTMLElement, result: HTMLElement}|null} */
let screen = null;

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("tokens", state.run, signal);
  if (!run) return nothingFits(place, "tokens");
  const beside = runs.find((one) => one.name === state.beside && one.name !== run.name);
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? run.example;
  fill(screen.text, text);
  screen.controls.replaceChildren(
    runChoice(runs, run.name),
    runChoice(runs.filter((one) => one.name !== run.name), beside?.name ?? "", "beside", "Compare with", "nothing"),
    insteadOf(state.run, run, "tokens"),
  );
  const compared = [run, beside].filter(Boolean);
  const results = await Promise.all(compared.map((one) => post("/api/tokens", { run: one.name, text }, signal)));
  screen.result.replaceChildren(...results.map((result, at) => panel(compared[at].name, text, result, at === 0)));
}

function build(place) {
  const text = textArea("text", { step: "" });
  const controls = element("div", { class: "controls" });
  const result = element("div", { class: "panels" });
  const root = element("div", {}, element("h1", {}, "Tokens"), lead("A leading space is shown as ·."), controls, labelled("Text", text, "wide"), result);
  place.replaceChildren(root);
  return { root, text, controls, result };
}

function panel(name, text, tokenized, first) {
  const characters = [...text].length;
  const per = tokenized.ids.length ? ` (${shown(characters / tokenized.ids.length, 2)} characters each)` : "";
  const about = `${tokenized.kind}, ${tokenized.vocab_size.toLocaleString("en")} tokens in the vocabulary; ${tokenized.ids.length} tokens for ${characters} characters${per}`;
  return element(
    "section",
    { class: "panel" },
    element("h2", {}, name),
    element("p", { class: "note" }, about),
    chips(tokenized.pieces, tokenized.ids),
    tokenized.steps.length ? steps(tokenized, first) : element("p", { class: "note" }, tokenized.reason),
    saving(() => viewOf(name, tokenized)),
  );
}

/** A slider over the merge steps; the step of the first panel is in the URL. */
function steps(tokenized, first) {
  const last = tokenized.steps.length - 1;
  const initial = first ? read().step : undefined;
  const place = element("div", { class: "state" });
  const show = (at) => {
    const step = tokenized.steps[at];
    const isNew = (index) => at > 0 && step.merged !== "" && step.pieces[index] === step.merged && tokenized.steps[at - 1].pieces[index] !== step.merged;
    const rank = step.rank === null ? "" : `, merge ${step.rank + 1} of the vocabulary`;
    const tried = step.tried.length ? ` (${step.tried.length} longer subwords are not in the vocabulary)` : "";
    const why = step.merged ? `“${visible(step.merged)}”${rank}${tried}` : "start";
    place.replaceChildren(
      element("output", { class: "readout", "aria-live": "polite" }, `Step ${at} of ${last}: ${why}`),
      chips(step.pieces, [], isNew),
    );
  };
  const slider = element("input", {
    type: "range",
    min: "0",
    max: String(last),
    value: initial === undefined ? String(last) : initial,
    oninput: (event) => {
      show(Number(event.target.value));
      if (first) change({ step: event.target.value }, { replace: true, quiet: true });
    },
  });
  show(Number(slider.value));
  return element("div", {}, labelled("Step", slider, "wide"), place);
}

/** The steps as an image and as a table. */
function viewOf(name, tokenized) {
  const states = tokenized.steps.length ? tokenized.steps : [{ pieces: tokenized.pieces, merged: "", rank: null }];
  const line = (step) => step.pieces.map(visible).join(" | ");
  const wide = Math.max(...states.map((step) => line(step).length));
  return {
    name: `tokens-${name.replaceAll("/", "-")}`,
    title: `Tokens of ${name}`,
    svg: () =>
      picture(
        40 + 8 * wide,
        40 + 18 * states.length,
        states.map((step, at) => `<text x="12" y="${30 + 18 * at}" font-family="monospace" xml:space="preserve">${escaped(line(step))}</text>`).join(""),
      ),
    table: () => ({
      columns: ["step", "merged", "rank", "pieces"],
      rows: states.map((step, at) => [at, step.merged, step.rank ?? "", line(step)]),
    }),
  };
}
