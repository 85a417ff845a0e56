// Decode: beam search as a tree; greedy search, beam search and sampling side by side; the next-token
// distribution before and after temperature, top-k and top-p.

import { get, post } from "../api.js";
import { Bars } from "../bars.js";
import { button, element, html, labelled, percent, render, select, shown } from "../dom.js";
import { saving } from "../exports.js";
import { numberInput } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { deciding, stepStory } from "../insights.js";
import { definePage } from "../page.js";
import { change, read } from "../state.js";
import { Tree } from "../tree.js";
import { BEAMS, integer, legible, textsView, tokensIn, tokensOut } from "../writers.js";

const LIMITS = ["8", "12", "20", "32", "64"].map((count) => [count, count]);
// Sampling settings: name, label, minimum, maximum, step, default.
const CHANCE = [
  ["temperature", "Temperature", "0", "5", "any", "1"],
  ["top_k", "Top-k (0: all)", "0", "1000", "1", "0"],
  ["top_p", "Top-p", "0.001", "1", "any", "1"],
  ["seed", "Seed", "0", "999999", "1", "0"],
];

/** The elements of the page, and the last response, reused when only step or node change. */
let screen = null;
let last = { key: "", result: null };
const FORGOTTEN = { prefix: "", node: "", step: "", target: "" };

export const { draw, keys, next } = definePage({
  name: "decode",
  about: "The candidates of beam search at every step, compared with greedy search and sampling.",
  keys: [
    ["← → ↑ ↓", "in the tree: previous token, best next token, tokens of the same step"],
    ["← →", "on the slider: previous step, next step"],
  ],
  example,
  build,
  show,
  next: nextStep,
});

/** A sentence in which greedy search misses the best translation of this model; the server searches for it. */
async function example(run, signal, controls) {
  if (!run.ambiguous) return undefined;
  controls(...controlsOf(read(), null)); // with their width, before the text arrives
  screen.insight.textContent = "Looking for a sentence in which greedy search misses the best translation …";
  return (await get("/api/missed", { run: run.name }, signal)).text ?? undefined;
}

/** The next step of the search, in stage mode; from the complete tree on to its first step. */
function nextStep(by) {
  const { last: steps } = screen.tree;
  const at = integer(read().step) ?? (by > 0 ? 0 : steps);
  change({ step: String(Math.max(1, Math.min(steps, at + by))) }, { replace: true });
}

async function show({ run, state, text, controls }, signal) {
  fill(screen.text, text);
  const chance = Object.fromEntries(CHANCE.map(([name, , , , , usual]) => [name, numberOf(state[name], usual)]));
  const base = { run: run.name, text, beam: integer(state.beam), limit: integer(state.limit) };
  controls(...controlsOf(state, null));
  render(state.prefix ? removeForced() : null, screen.ways);
  const result = await answer({ ...base, ...chance, prefix: tokensIn(state.prefix) }, signal);
  controls(...controlsOf(state, result));
  screen.now = { result, text };
  const node = state.node === undefined ? -1 : (integer(state.node) ?? -1);
  const title = `Beam search, width ${result.width}: “${text.length > 60 ? `${text.slice(0, 60)}…` : text}”`;
  screen.tree.show({ name: "beam", title, rootPiece: result.root, nodes: result.nodes, deciding: isMissed(result) ? deciding(result.nodes) : null }, { step: integer(read().step) ?? 0, node }); // the slider may have moved since
  screen.insight.textContent = stepStory(result, screen.tree.step);
  screen.how.textContent =
    `lp = ${result.penalty}; stopping: ${result.stopping}; at most ${result.limit} tokens.` +
    (result.prefix.length ? ` The first ${result.prefix.length} are forced.` : "");
  await drawChances({ result, chance, base }, screen.tree.node, signal);
}

/** Whether greedy search misses the best result. */
const isMissed = ({ greedy, beam }) => greedy[0] !== undefined && beam[0] !== undefined && beam[0].text !== greedy[0].text && beam[0].score >= greedy[0].score;

/** A number of the state, or its default. */
function numberOf(text, usual) {
  return text && Number.isFinite(Number(text)) ? Number(text) : Number(usual);
}

const removeForced = () => button("Remove the forced tokens", () => change(FORGOTTEN));

async function answer(request, signal) {
  const key = JSON.stringify(request);
  if (last.key !== key) last = { key, result: legible(await post("/api/decode", request, signal)) };
  return last.result;
}

function build() {
  screen = {
    text: textArea("text", FORGOTTEN, { pause: 250 }),
    insight: element("p", { class: "insight", role: "status" }),
    outputs: element("section", { class: "ways", "aria-label": "Decoding methods" }),
    save: saving(() => saved(screen.now)),
    tree: new Tree({
      choose: (node, how) => change({ node: node < 0 ? "" : String(node) }, how),
      step: (step) => {
        screen.insight.textContent = stepStory(screen.now.result, step);
        change({ step: String(step) }, { replace: true, quiet: true });
      },
    }),
    how: element("p", { class: "note" }),
    ways: element("div", { class: "controls" }),
    chances: new Bars({ name: "next-token", kind: "chances", series: ["model", "sampling"] }),
  };
  screen.tree.about.append(screen.ways);
  return [labelled("Text", screen.text, "wide"), screen.insight, screen.tree.root, screen.how, html`<div class="panels">${screen.chances.root}${screen.outputs}</div>`];
}

function controlsOf(state, result) {
  const limit = labelled("Tokens to generate", select(LIMITS, String(integer(state.limit) ?? 20), (value) => change({ ...FORGOTTEN, limit: value })));
  const chance = CHANCE.map(([name, label, min, max, step, usual]) => {
    const act = (value) => change({ [name]: value === usual ? "" : value }, { replace: true });
    return labelled(label, numberInput(numberOf(state[name], usual), min, max, act, step));
  });
  return [
    labelled("Beam", select(BEAMS, String(result?.width ?? state.beam ?? ""), (beam) => change({ ...FORGOTTEN, beam }))),
    ...((result ? result.continues : state.limit) ? [limit] : []),
    ...chance,
  ];
}

/** The texts of greedy search, beam search and sampling: name, meaning and texts. */
const methods = (result) => [
  ["Greedy", ": the most probable token at each step", result.greedy],
  [`Beam ${result.width}`, ": the best score of complete texts", result.beam],
  ["Sampling", ": each token sampled", result.sampling],
];

function outputs(result) {
  const line = ({ text, log_probability: log, score }) => html`<li><span class="sentence">${text || "(nothing)"}</span><span class="note">log P ${shown(log)}, score ${shown(score)}</span></li>`;
  const panel = ([way, how, texts]) => html`<div><h2>${way + how}</h2><ol class="texts">${texts.map(line)}</ol></div>`;
  return html`<div class="outputs">${methods(result).map(panel)}</div>${screen.save}`;
}

function saved({ result, text }) {
  const all = methods(result).flatMap(([way, , texts]) => texts.map((one) => ({ ...one, way })));
  return textsView("ways-of-writing", `Greedy, beam and sampling: “${text}”`, all);
}

/** Predictions after the chosen node; for an end token, the predictions at its own position. */
async function drawChances({ result, chance, base }, node, signal) {
  const ended = result.nodes[node]?.state === "ended";
  const at = ended ? result.nodes[node].parent : node;
  const before = at < 0 ? result.prefix : screen.tree.tokens(at);
  const go = () => change({ prefix: tokensOut(screen.tree.tokens(node)), node: "", step: "" });
  render([node >= 0 && !ended ? button("Continue from this token", go) : null, result.prefix.length ? removeForced() : null], screen.ways);
  const answered = legible(await post("/api/next", { ...base, ...chance, prefix: before }, signal));
  render(outputs(result), screen.outputs); // together with the bars next to it
  const where = before.length === 0 ? "at the start" : `after “${answered.text.trim()}”`;
  const [entropy, left] = answered.bits.map((bits) => shown(bits));
  if (answered.top.every(({ before: model, after }) => percent(model) === percent(after))) {
    screen.chances.show(
      answered.top.map(({ piece, before: model }) => ({ label: piece, values: [model] })),
      `The next token ${where}`,
      `Entropy ${entropy} bits. Sampling uses these probabilities: change temperature, top-k or top-p to compare.`,
    );
    return;
  }
  screen.chances.show(
    answered.top.map(({ piece, before: model, after }) => ({ label: piece, values: [model, after], texts: [percent(model), after > 0 ? percent(after) : "removed"] })),
    `The next token ${where}`,
    `${answered.left.toLocaleString("en")} of ${answered.tokens.toLocaleString("en")} tokens can be sampled; the model gives them ${percent(answered.mass)}. ` +
      `Entropy ${entropy} bits by the model, ${left} bits when sampling.`,
  );
}
