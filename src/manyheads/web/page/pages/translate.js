// Translate: live hypotheses, the alignment of each token, and alternatives for a token.

import { post, tensor } from "../api.js";
import { barTable } from "../bars.js";
import { compareChoice, Comparison } from "../compare.js";
import { button, element, html, labelled, nothing, numbered, percent, render, select, shown, tabs, visible } from "../dom.js";
import { describe, saving } from "../exports.js";
import { cellOf, limited, reordered } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { HeatMap } from "../heatmap.js";
import { goldCells, orderOf } from "../insights.js";
import { definePage } from "../page.js";
import { change } from "../state.js";
import { marked } from "../tokens.js";
import { BEAMS, integer, legible, pieceButtons, textsView, tokensIn, tokensOut } from "../writers.js";

const ALTERNATIVES = 10;
const REQUESTED = 20; // some of the most probable tokens are never generated

/** The elements of the page, reused while the text changes. */
let screen = null;
// Reset for a new text, which has other tokens.
const FORGOTTEN = { prefix: "", at: "", which: "", cell: "", target: "" };

export const { draw, keys } = definePage({
  name: "translate",
  about: "Translates as you type. The map shows the source tokens that each target token attends to.",
  keys: [
    ["← →", "on the translation: previous token, next token; Enter shows alternatives"],
    ["← → ↑ ↓", "in a map: next cell"],
  ],
  build,
  show,
});

async function show({ run, runs, state, text, controls }, signal) {
  fill(screen.text, text);
  screen.panels.hidden = !text.trim();
  if (!text.trim()) {
    controls(...controlsOf({ run, runs, state, text, result: null }));
    screen.insight.textContent = "Type a sentence to translate it.";
    return;
  }
  const prefix = tokensIn(state.prefix);
  controls(...controlsOf({ run, runs, state, text, result: null }));
  const request = { run: run.name, text, prefix };
  const result = legible(await post("/api/translate", { ...request, beam: integer(state.beam), which: limited(state.which, BEAMS.length) }, signal));
  const at = state.at === undefined ? -1 : Math.min(integer(state.at) ?? -1, result.tokens.length - 1);
  const now = { run, runs, state, text, result, at, request, controls };
  screen.now = now;
  controls(...controlsOf(now));
  drawTranslation(now);
  render(hypotheses(now), screen.list);
  await Promise.all([drawAlternatives(now, signal), drawAlignment(now, null, signal)]);
  await compare(now, signal);
  // Not awaited: the look-up takes seconds, and the translation is complete without it.
  drawGold(now, signal).catch((error) => {
    if (!signal.aborted) screen.note.textContent = error.message;
  });
}

/** Another run, or a step of this one, on the same translation. */
async function compare({ run, state, text, result }, signal) {
  if (!state.beside) return screen.comparison.show({ run, text, trace: { output: {} }, map: null, which: {}, title: "" }, "", signal);
  const target = result.hypotheses[result.which].text;
  const trace = await post("/api/trace", { run: run.name, text, target: target || undefined }, signal);
  const { which, title } = chosenMap(state, result.alignment ?? { layers: 1, heads: 1 });
  await screen.comparison.show({ run, text, trace, map: trace.maps.find((one) => one.name === "decoder.cross"), which, title }, state.beside, signal);
}

async function drawGold(now, signal) {
  const gold = await post("/api/gold", { run: now.run.name, text: now.text }, signal);
  if (signal.aborted) return;
  if (gold.phrasebook) screen.examples.set(now.run.name, gold.examples);
  now.controls(...controlsOf(now));
  await drawAlignment(now, gold, signal);
}

function build() {
  const move = (row, column) => change({ cell: `${row},${column}` }, { replace: true, quiet: true });
  const made = {
    text: textArea("text", FORGOTTEN, { pause: 250 }),
    translation: element("section", { class: "panel", "aria-label": "Translation" }),
    alternatives: element("section", { class: "panel", "aria-label": "Alternatives" }),
    list: element("section", { class: "panel", "aria-label": "Hypotheses" }),
    which: element("div", { class: "controls" }),
    map: new HeatMap({ move }),
    insight: element("p", { class: "insight roomy" }),
    error: element("p", { class: "note golderror", role: "status" }),
    note: element("p", { class: "note goldnote", role: "status" }),
    /** Sentences of the phrasebook, by run. @type {Map<string, string[]>} */
    examples: new Map(),
    comparison: new Comparison(),
    panels: element("div", { class: "panels translating" }),
    save: saving(() => textsView("translations", `Translations of “${screen.now.text}”`, screen.now.result.hypotheses)),
  };
  screen = made;
  made.map.frame.before(made.which);
  made.map.frame.before(made.error); // in sight without scrolling
  made.map.root.append(made.note);
  const texts = element("div", { class: "stacked" }, made.translation, made.alternatives, made.list);
  made.panels.append(texts, element("section", { class: "stacked alignment", "aria-label": "Alignment" }, made.map.root));
  return html`${labelled("Text", made.text, "wide")}${made.insight}${made.panels}${made.comparison.root}`;
}

function controlsOf({ run, runs, state, result, text }) {
  const examples = screen.examples.get(run.name) ?? [];
  const known = examples.includes(text);
  const options = [...(known ? [] : [["", "choose one"]]), ...examples.map((one) => [one, one])];
  return [
    labelled("Beam", select(BEAMS, String(result?.width ?? state.beam ?? ""), (beam) => change({ beam, which: "", cell: "" }))),
    // It has its place before the sentences arrive.
    run.ambiguous ? labelled("Example from the phrasebook", select(options, known ? text : "", (one) => one && change({ ...FORGOTTEN, text: one })), "examples") : null,
    compareChoice(runs, run, state.beside),
    // If a forced token is unknown, there is no translation to remove it from.
    result || !state.prefix ? null : button("Remove the forced tokens", () => change(FORGOTTEN)),
  ];
}

function drawTranslation({ result, at, request }) {
  const best = result.hypotheses[result.which];
  const free = () => change({ prefix: "", at: "", which: "", cell: "" });
  const buttons = pieceButtons("Tokens of the translation", result.pieces, result.log_probabilities.map(Math.exp), {
    chosen: at,
    given: request.prefix.length,
    choose: (place) => change({ at: place === at ? "" : String(place) }),
  });
  const chose = at < 0 && screen.alternatives.contains(document.activeElement);
  render(
    html`<h2>${result.which ? `Hypothesis ${result.which + 1}` : "Translation"}</h2>
      <output class="sentence" aria-live="polite">${best.text || "(nothing)"}</output>
      ${buttons}
      <p class="note">The number below a token is its probability. Choose a token to see alternatives.</p>
      ${request.prefix.length ? button("Remove the forced tokens", free, { kind: "quiet" }) : nothing}`,
    screen.translation,
  );
  // The list of alternatives is gone after a choice: the focus moves to the chosen token.
  if (chose) screen.translation.querySelector('.written [tabindex="0"]')?.focus();
}

/** The most probable tokens at the chosen position; choosing one forces it. */
async function drawAlternatives({ result, at, request }, signal) {
  screen.alternatives.hidden = at < 0;
  if (at < 0) return;
  const before = result.tokens.slice(0, at);
  const { top } = legible(await post("/api/next", { ...request, prefix: before, count: REQUESTED }, signal));
  const rows = top
    .filter((one) => one.after > 0)
    .slice(0, ALTERNATIVES)
    .map(({ token, piece, before: chance }) => {
      const isOwn = token === result.tokens[at];
      const go = () => change({ prefix: tokensOut([...before, token]), at: "", which: "", cell: "" });
      return { label: button(visible(piece), go, { kind: "quiet", pressed: isOwn }), values: [chance] };
    });
  render(html`<h2>Position ${at + 1}: most probable tokens</h2>${barTable(rows)}<p class="note">Choose one to continue the translation from there.</p>`, screen.alternatives);
}

function hypotheses({ result }) {
  const choose = (at) => change({ which: String(at), at: "", cell: "" });
  const row = (one, at) => html`<tr>
    <td>${at + 1}</td><td>${button(at ? marked(one.text || "(nothing)", result.hypotheses[0].text) : one.text || "(nothing)", () => choose(at), { pressed: at === result.which })}</td>
    <td>${shown(one.score)}</td><td>${shown(one.log_probability)}</td>
  </tr>`;
  return html`<h2>${result.hypotheses.length > 1 ? `The ${result.hypotheses.length} best` : "The best"}</h2>
    <div class="hypotheses"><table><tbody>
      <tr>${["rank", "hypothesis", "score", "log P"].map((name) => html`<th scope="col">${name}</th>`)}</tr>
      ${result.hypotheses.map(row)}
    </tbody></table></div>
    <div class="below"><p class="note">Ranked by score: log P divided by the length penalty.</p>${screen.save}</div>`;
}

/** The chosen map: one head, the mean of a layer, or the mean of all heads. */
function chosenMap(state, { layers, heads }) {
  const layer = state.layer === "all" ? -1 : Math.min(integer(state.layer) ?? layers - 1, layers - 1);
  const head = layer < 0 || state.head === undefined || state.head === "mean" ? -1 : Math.min(integer(state.head) ?? 0, heads - 1);
  const kind = layer < 0 ? "all" : head < 0 ? "mean" : "weights";
  const which = { all: {}, mean: { layer }, weights: { layer, head } }[kind];
  const title = { all: "mean of all heads", mean: `layer ${layer + 1}, mean of its heads`, weights: `layer ${layer + 1}, head ${head + 1}` }[kind];
  return { layer, head, kind, which, title };
}

async function drawAlignment({ run, state, text, result }, gold, signal) {
  const { alignment } = result;
  if (alignment === null) {
    screen.map.root.hidden = true;
    screen.insight.textContent = "Cannot show attention maps whose shape differs between layers.";
    return;
  }
  const pair = gold?.pair ?? null;
  const map = chosenMap(state, alignment);
  const byWords = state.unit === "words" && Boolean(pair?.errors);
  render(mapControls(run, alignment, map, byWords, Boolean(pair?.errors)), screen.which);
  const says = (row, column, value) => `${row} attends to ${column}: ${value}`;
  const kind = alignment.joined ? "Attention of the target to the source" : "Cross-attention";
  const [source, rows, columns] = byWords ? [pair.trace, pair.rows, pair.columns] : [result.trace, result.pieces, alignment.columns];
  const [{ values }, links] = await Promise.all([
    tensor(source, `${byWords ? "words" : "alignment"}.${map.kind}`, map.which, signal),
    pair ? tensor(pair.trace, "gold", {}, signal) : null,
  ]);
  const story = `${byWords ? "In the reference: " : ""}${orderOf(values, rows, columns)}`;
  const { text: translation } = result.hypotheses[result.which];
  describe({ run: run.name, text, translation, map: map.title });
  // Empty until the look-up has ended: the legend has its place before.
  const rings = links ? goldCells(pair, links.values, rows, columns) : run.ambiguous ? [] : null;
  screen.map.show({ name: `alignment-${map.title.replace(/\W+/g, "-")}`, title: byWords ? `Reference: “${pair.target}” (${kind.toLowerCase()}, ${map.title})` : `${kind}, ${map.title}`, insight: `“${translation}” ${story}`, rows, columns, values, says, number: percent, rings }, state.cell ? cellOf(state.cell) : reordered(values, columns.length));
  const isOther = pair !== null && translation !== pair.target;
  screen.insight.textContent = `${isOther ? "Not the reference. " : ""}${story}`;
  screen.note.textContent = goldNote(gold, result);
  screen.error.textContent = pair?.errors ? `Alignment error rate (AER) of this map: ${percent(errorOf(pair.errors, map))}.` : "";
}

/** The choice of a map. Words of the phrasebook pair have their place before they arrive. */
function mapControls(run, { layers, heads }, map, byWords, hasWords) {
  const layerChoice = select([["all", "mean of all"], ...numbered(layers)], map.layer < 0 ? "all" : String(map.layer), (layer) => change({ layer }));
  const headChoice = select([["mean", "mean"], ...numbered(heads)], map.head < 0 ? "mean" : String(map.head), (head) => change({ head, layer: String(map.layer) }));
  const units = [["tokens", "Tokens"], ["words", "Phrasebook words"]];
  return [
    labelled("Layer", layerChoice),
    map.layer < 0 ? null : labelled("Head", headChoice),
    run.ambiguous ? html`<div class=${hasWords ? "" : "reserved"}>${tabs("Unit", units, byWords ? "words" : "tokens", (unit) => change({ unit, cell: "" }))}</div>` : null,
  ];
}

/** What the phrasebook says about the sentence, after the look-up. */
function goldNote(gold, result) {
  if (gold === null || !gold.phrasebook) return "";
  if (gold.pair === null) return "No gold alignment for this sentence. Try an example.";
  const { target } = gold.pair;
  return result.hypotheses[result.which].text === target ? "The phrasebook has the same translation." : `Phrasebook translation: ${target}`;
}

/** The alignment error of a map. */
const errorOf = (errors, map) => ({ all: () => errors.all, mean: () => errors.mean[map.layer], weights: () => errors.weights[map.layer][map.head] })[map.kind]();
