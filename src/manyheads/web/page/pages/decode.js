// Decode: beam search as a tree, step by step; greedy, beam and chance side by side; and what may
// come at a place, before and after temperature, top-k and top-p.

import { post } from "../api.js";
import { Chances } from "../chances.js";
import { element, labelled, select, shown } from "../dom.js";
import { saving } from "../exports.js";
import { chooseFirst, fitting, insteadOf, nothingFits, numberInput } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { lead, runChoice } from "../runs.js";
import { change } from "../state.js";
import { Tree } from "../tree.js";
import { BEAMS, legible, textsView, tokensIn, tokensOut, integer } from "../writers.js";

const LIMITS = ["8", "12", "20", "32", "64"].map((count) => [count, count]);
// Settings of chance: name, label, least, most, step, usual value.
const CHANCE = [
  ["temperature", "Temperature", "0", "5", "any", "1"],
  ["top_k", "Top-k (0: all)", "0", "1000", "1", "0"],
  ["top_p", "Top-p", "0.001", "1", "any", "1"],
  ["seed", "Seed", "0", "999999", "1", "0"],
];

export const keys = [
  ["← → ↑ ↓", "in the tree: the token before, the best after it, those beside it"],
  ["← →", "on the slider: one step back, one on"],
  ["↑ ↓", "in the bars: the token above, below"],
];

/** The parts of the page, which stay; and the last answer, which a step or a node does not change. */
let screen = null;
let last = { asked: "", found: null };
const FORGOTTEN = { prefix: "", node: "", step: "" };

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("decode", state.run, signal);
  if (!run) return nothingFits(place, "decode");
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? run.example;
  fill(screen.text, text);
  chooseFirst(screen.controls, runs, run, state.run, "decode");
  const chance = Object.fromEntries(CHANCE.map(([name, , , , , usual]) => [name, Number(state[name] ?? usual)]));
  const base = { run: run.name, text, beam: integer(state.beam), limit: integer(state.limit) };
  const found = await answer({ ...base, ...chance, prefix: tokensIn(state.prefix) }, signal);
  const now = { run, runs, state, found, chance, base };
  screen.controls.replaceChildren(...controls(now));
  screen.outputs.replaceChildren(...outputs(found, text));
  const node = state.node === undefined ? -1 : (integer(state.node) ?? -1);
  const title = `Beam search, width ${found.width}: “${text.length > 60 ? `${text.slice(0, 60)}…` : text}”`;
  screen.tree.show({ name: "beam", title, rootPiece: found.root, nodes: found.nodes }, { step: integer(state.step) ?? 0, node });
  screen.how.textContent =
    `lp = ${found.penalty}; stops by “${found.stopping}”; at most ${found.limit} tokens.` +
    (found.prefix.length ? ` The first ${found.prefix.length} are given.` : "");
  await drawChances(now, screen.tree.node, signal);
}

async function answer(asked, signal) {
  const key = JSON.stringify(asked);
  if (last.asked !== key) last = { asked: key, found: legible(await post("/api/decode", asked, signal)) };
  return last.found;
}

function build(place) {
  const made = {
    text: textArea("text", FORGOTTEN, { pause: 250 }),
    controls: element("div", { class: "controls" }),
    outputs: element("section", { class: "ways", "aria-label": "Ways of writing" }),
    tree: new Tree({
      choose: (node) => change({ node: node < 0 ? "" : String(node) }, { replace: true }),
      step: (step) => change({ step: String(step) }, { replace: true, quiet: true }),
    }),
    how: element("p", { class: "note" }),
    ways: element("div", { class: "controls" }),
    chances: new Chances(),
  };
  made.root = element(
    "div",
    {},
    element("h1", {}, "Decode"),
    lead("What beam search weighed at every step, and what greedy choice and chance write instead."),
    made.controls,
    labelled("Text", made.text, "wide"),
    made.outputs,
    made.tree.root,
    made.how,
    made.ways,
    made.chances.root,
  );
  place.replaceChildren(made.root);
  return made;
}

function controls({ run, runs, state, found }) {
  const limit = labelled("Tokens to write", select(LIMITS, String(integer(state.limit) ?? 20), (value) => change({ ...FORGOTTEN, limit: value })));
  const chance = CHANCE.map(([name, label, min, max, step, usual]) => {
    const act = (value) => change({ [name]: value === usual ? "" : value }, { replace: true });
    return labelled(label, numberInput(state[name] ?? usual, min, max, act, step));
  });
  return [
    runChoice(runs, run.name),
    labelled("Beam", select(BEAMS, String(found.width), (beam) => change({ ...FORGOTTEN, beam }))),
    ...(found.continues ? [limit] : []),
    ...chance,
    insteadOf(state.run, run, "decode"),
  ];
}

/** Greedy, beam and chance, each with what it wrote. */
function outputs(found, text) {
  const kinds = [
    ["Greedy", ": the likeliest token at each step", found.greedy],
    [`Beam ${found.width}`, ": the best score of integer texts", found.beam],
    ["Sampling", ": each token by chance", found.sampling],
  ];
  const all = kinds.flatMap(([way, , texts]) => texts.map((one) => ({ ...one, way })));
  const panel = ([way, how, texts]) => element("div", {}, element("h3", {}, way + how), element("ol", { class: "texts" }, ...texts.map(line)));
  const panels = element("div", { class: "outputs" }, ...kinds.map(panel));
  return [panels, saving(() => textsView("ways-of-writing", `Greedy, beam and sampling: “${text}”`, all))];
}

function line({ text, log_probability: log, score }) {
  return element("li", {}, element("span", { class: "sentence" }, text || "(nothing)"), element("span", { class: "note" }, `log P ${shown(log)}, score ${shown(score)}`));
}

/** What may come after the chosen node; after one that has ended, what could have come there. */
async function drawChances({ found, chance, base }, node, signal) {
  const ended = found.nodes[node]?.state === "ended";
  const at = ended ? found.nodes[node].parent : node;
  const before = screen.tree.tokens(at);
  const go = element("button", { type: "button", onclick: () => change({ prefix: tokensOut(screen.tree.tokens(node)), node: "", step: "" }) }, "Search on from this token");
  const free = element("button", { type: "button", onclick: () => change(FORGOTTEN) }, "Search freely again");
  screen.ways.replaceChildren(...(node >= 0 && !ended ? [go] : []), ...(found.prefix.length ? [free] : []));
  const told = legible(await post("/api/next", { ...base, ...chance, prefix: before }, signal));
  const where = at < 0 ? "at the beginning" : `after “${told.text.trim()}”`;
  const percent = shown(100 * told.mass, 3);
  screen.chances.show({
    name: "next-token",
    title: `The next token ${where}`,
    remark:
      `${told.left.toLocaleString("en")} of ${told.tokens.toLocaleString("en")} tokens are left to be drawn; the model gives them ${percent} %. ` +
      `Entropy ${shown(told.bits[0])} bits by the model, ${shown(told.bits[1])} as it is drawn.`,
    chances: told.top,
  });
}
