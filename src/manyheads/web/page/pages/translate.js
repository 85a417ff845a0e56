// Translate: live hypotheses, the alignment of each token, and alternatives for a token.

import { post, tensor } from "../api.js";
import { barTable } from "../bars.js";
import { element, labelled, select, shown, tabs, visible } from "../dom.js";
import { describe, saving } from "../exports.js";
import { cellOf, limited, reordered } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { HeatMap } from "../heatmap.js";
import { definePage } from "../page.js";
import { change } from "../state.js";
import { BEAMS, integer, legible, pieceButtons, textsView, tokensIn, tokensOut } from "../writers.js";

const ALTERNATIVES = 10;
const REQUESTED = 20; // some of the most probable tokens are never generated

/** The elements of the page, reused while the text changes. */
let screen = null;
// Reset for a new text, which has other tokens.
const FORGOTTEN = { prefix: "", at: "", which: "", cell: "", target: "" };

export const { draw, keys } = definePage({
  name: "translate",
  about: "Translates as you type. The map shows the attention of each target token to the source. It shows what is mixed in, not why a token is chosen.",
  keys: [
    ["← →", "on the translation: previous token, next token; Enter shows alternatives"],
    ["← → ↑ ↓", "in a map: next cell"],
  ],
  build,
  show,
});

async function show({ run, state, text, controls }, signal) {
  fill(screen.text, text);
  const prefix = tokensIn(state.prefix);
  controls(...controlsOf({ state, text, result: null }, []));
  const request = { run: run.name, text, prefix };
  const result = legible(await post("/api/translate", { ...request, beam: integer(state.beam), which: limited(state.which, BEAMS.length) }, signal));
  const at = state.at === undefined ? -1 : Math.min(integer(state.at) ?? -1, result.tokens.length - 1);
  const now = { run, state, text, result, at, request, controls };
  controls(...controlsOf(now, []));
  drawTranslation(now);
  screen.list.replaceChildren(...hypotheses(now));
  await Promise.all([drawAlternatives(now, signal), drawAlignment(now, null, signal)]);
  // Not awaited: the look-up takes seconds, and the translation is complete without it.
  drawGold(now, signal).catch((error) => {
    if (!signal.aborted) screen.note.textContent = error.message;
  });
}

async function drawGold(now, signal) {
  const gold = await post("/api/gold", { run: now.run.name, text: now.text }, signal);
  if (signal.aborted) return;
  now.controls(...controlsOf(now, gold.examples));
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
    gold: new HeatMap(),
    note: element("p", { class: "note", role: "status" }),
  };
  screen = made;
  return [
    labelled("Text", made.text, "wide"),
    element(
      "div",
      { class: "panels" },
      element("div", { class: "stacked" }, made.translation, made.alternatives, made.list),
      element("section", { class: "stacked alignment", "aria-label": "Alignment" }, element("div", {}, made.which, made.note), made.map.root, made.gold.root),
    ),
  ];
}

function controlsOf({ state, result, text }, examples) {
  const options = [["", examples.includes(text) ? text : "choose one"], ...examples.filter((one) => one !== text).map((one) => [one, one])];
  return [
    labelled("Beam", select(BEAMS, String(result?.width ?? state.beam ?? ""), (beam) => change({ beam, which: "", cell: "" }))),
    ...(examples.length ? [labelled("Example from the phrasebook", select(options, "", (one) => one && change({ ...FORGOTTEN, text: one })))] : []),
    // If a forced token is unknown, there is no translation to remove it from.
    ...(result || !state.prefix ? [] : [element("button", { type: "button", onclick: () => change(FORGOTTEN) }, "Remove the forced tokens")]),
  ];
}

function drawTranslation({ result, at, request }) {
  const best = result.hypotheses[result.which];
  const free = element("button", { type: "button", class: "quiet", onclick: () => change({ prefix: "", at: "", which: "", cell: "" }) }, "Remove the forced tokens");
  const buttons = pieceButtons("Tokens of the translation", result.pieces, result.log_probabilities.map(Math.exp), {
    chosen: at,
    given: request.prefix.length,
    choose: (place) => change({ at: place === at ? "" : String(place) }),
  });
  // Keep the focus in the translation after an alternative was chosen.
  const on = document.activeElement;
  const within = screen.translation.contains(on) || (at < 0 && screen.alternatives.contains(on));
  screen.translation.replaceChildren(
    element("h2", {}, result.which ? `Hypothesis ${result.which + 1}` : "Translation"),
    element("output", { class: "sentence", "aria-live": "polite" }, best.text || "(nothing)"),
    buttons,
    element("p", { class: "note" }, "The number below a token is its probability. Choose a token to see alternatives."),
    request.prefix.length ? free : "",
  );
  if (within) /** @type {HTMLElement|null} */ (buttons.querySelector('[tabindex="0"]'))?.focus();
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
      const label = element("button", { type: "button", class: "quiet", "aria-pressed": String(isOwn), onclick: go }, visible(piece));
      return { label, values: [chance] };
    });
  screen.alternatives.replaceChildren(
    element("h2", {}, `Position ${at + 1}: most probable tokens`),
    barTable(rows),
    element("p", { class: "note" }, "Choose one to continue the translation from there."),
  );
}

function hypotheses({ result, text }) {
  const rows = result.hypotheses.map((one, at) =>
    element(
      "tr",
      {},
      element("td", {}, String(at + 1)),
      element("td", {}, element("button", { type: "button", "aria-pressed": String(at === result.which), onclick: () => change({ which: String(at), at: "", cell: "" }) }, one.text || "(nothing)")),
      element("td", {}, shown(one.score)),
      element("td", {}, shown(one.log_probability)),
    ),
  );
  const head = ["rank", "hypothesis", "score", "log P"].map((name) => element("th", { scope: "col" }, name));
  return [
    element("h2", {}, result.hypotheses.length > 1 ? `The ${result.hypotheses.length} best` : "The best"),
    element("div", { class: "hypotheses" }, element("table", {}, element("tr", {}, ...head), ...rows)),
    element("div", { class: "below" }, element("p", { class: "note" }, "Ranked by score: log P divided by the length penalty."), saving(() => textsView("translations", `Translations of “${text}”`, result.hypotheses))),
  ];
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
  const pair = gold?.pair ?? null;
  if (pair === null) screen.gold.root.hidden = true;
  if (alignment === null) {
    screen.map.root.hidden = true;
    screen.note.textContent = "Cannot show attention maps whose shape differs between layers.";
    return;
  }
  const map = chosenMap(state, alignment);
  describe({ run: run.name, text, translation: result.hypotheses[result.which].text, map: map.title });
  const numbers = (count, none) => [none, ...Array.from({ length: count }, (_, at) => [String(at), String(at + 1)])];
  const byWords = pair?.errors && (state.unit ?? "words") === "words";
  screen.which.replaceChildren(
    labelled("Layer", select(numbers(alignment.layers, ["all", "mean of all"]), map.layer < 0 ? "all" : String(map.layer), (layer) => change({ layer }))),
    ...(map.layer < 0 ? [] : [labelled("Head", select(numbers(alignment.heads, ["mean", "mean"]), map.head < 0 ? "mean" : String(map.head), (head) => change({ head, layer: String(map.layer) })))]),
    ...(pair?.errors ? [tabs("Unit", [["words", "Words of the phrasebook pair"], ["tokens", "Tokens of the translation"]], byWords ? "words" : "tokens", (unit) => change({ unit, cell: "" }))] : []),
  );
  const says = (row, column, value) => `${row} attends to ${column}: ${value}`;
  const kind = alignment.joined ? "Attention of the target to the source" : "Cross-attention";
  const [source, rows, columns] = byWords ? [pair.trace, pair.rows, pair.columns] : [result.trace, result.pieces, alignment.columns];
  const { values } = await tensor(source, `${byWords ? "words" : "alignment"}.${map.kind}`, map.which, signal);
  screen.map.show({ name: `alignment-${map.title.replace(/\W+/g, "-")}`, title: `${kind}, ${map.title}`, rows, columns, values, says }, state.cell ? cellOf(state.cell) : reordered(values, columns.length));
  screen.note.textContent = goldNote(gold, map, result);
  if (!pair) return;
  const links = await tensor(pair.trace, "gold", {}, signal);
  screen.gold.show({ name: "gold-alignment", title: "Gold alignment of the phrasebook", rows: pair.rows, columns: pair.columns, values: links.values, says: (row, column, value) => `${row} is ${value === "1" ? "" : "not "}aligned with ${column}` });
}

/** A note about the gold alignment. */
function goldNote(gold, map, result) {
  if (gold === null || !gold.phrasebook) return "";
  if (gold.pair === null) return "No gold alignment for this sentence. Try an example.";
  const { target, errors } = gold.pair;
  const same = result.hypotheses[result.which].text === target ? "The phrasebook has the same translation." : `Phrasebook translation: ${target}`;
  if (errors === null) return same;
  const error = { all: () => errors.all, mean: () => errors.mean[map.layer], weights: () => errors.weights[map.layer][map.head] }[map.kind]();
  return `${same} Alignment error rate (AER) of this map: ${shown(100 * error)} %.`;
}
