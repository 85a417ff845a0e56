// Tokens: how a text falls into pieces, and for BPE and WordPiece every state on the way.

import { post } from "../api.js";
import { element, escaped, labelled, shown, visible } from "../dom.js";
import { picture, saving } from "../exports.js";
import { fitting, insteadOf, nothingFits } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { lead, runChoice } from "../runs.js";
import { change, read } from "../state.js";
import { chips } from "../tokens.js";

export const keys = [["← →", "on the slider: one merge back, one on"]];

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
    runChoice(runs.filter((one) => one.name !== run.name), beside?.name ?? "", "beside", "Beside", "nothing"),
    insteadOf(state.run, run, "tokens"),
  );
  const asked = [run, beside].filter(Boolean);
  const found = await Promise.all(asked.map((one) => post("/api/tokens", { run: one.name, text }, signal)));
  screen.result.replaceChildren(...found.map((one, at) => panel(asked[at].name, text, one, at === 0)));
}

function build(place) {
  const text = textArea("text", { step: "" });
  const controls = element("div", { class: "controls" });
  const result = element("div", { class: "panels" });
  const root = element("div", {}, element("h1", {}, "Tokens"), lead("A space at the beginning of a piece is shown as ·."), controls, labelled("Text", text, "wide"), result);
  place.replaceChildren(root);
  return { root, text, controls, result };
}

function panel(name, text, found, first) {
  const characters = [...text].length;
  const per = found.ids.length ? ` (${shown(characters / found.ids.length, 2)} characters each)` : "";
  const about = `${found.kind}, ${found.vocab_size.toLocaleString("en")} tokens known; here ${found.ids.length} for ${characters} characters${per}`;
  return element(
    "section",
    { class: "panel" },
    element("h2", {}, name),
    element("p", { class: "note" }, about),
    chips(found.pieces, found.ids),
    found.steps.length ? steps(found, first) : element("p", { class: "note" }, found.reason),
    saving(() => viewOf(name, found)),
  );
}

/** A slider over the states; that of the first panel is in the address. */
function steps(found, first) {
  const last = found.steps.length - 1;
  const asked = first ? read().step : undefined;
  const place = element("div", { class: "state" });
  const show = (at) => {
    const step = found.steps[at];
    const isNew = (index) => at > 0 && step.merged !== "" && step.pieces[index] === step.merged && found.steps[at - 1].pieces[index] !== step.merged;
    const rank = step.rank === null ? "" : `, merge ${step.rank + 1} of the vocabulary`;
    const tried = step.tried.length ? ` (${step.tried.length} longer ones are not in the vocabulary)` : "";
    const why = step.merged ? `“${visible(step.merged)}”${rank}${tried}` : "at the beginning";
    place.replaceChildren(
      element("output", { class: "readout", "aria-live": "polite" }, `Step ${at} of ${last}: ${why}`),
      chips(step.pieces, [], isNew),
    );
  };
  const slider = element("input", {
    type: "range",
    min: "0",
    max: String(last),
    value: asked === undefined ? String(last) : asked,
    oninput: (event) => {
      show(Number(event.target.value));
      if (first) change({ step: event.target.value }, { replace: true, quiet: true });
    },
  });
  show(Number(slider.value));
  return element("div", {}, labelled("Step", slider, "wide"), place);
}

/** The states as a picture and as a table. */
function viewOf(name, found) {
  const states = found.steps.length ? found.steps : [{ pieces: found.pieces, merged: "", rank: null }];
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
