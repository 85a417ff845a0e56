// Lens: the prediction of a decoder after each layer, and the norms in the residual stream.

import { post } from "../api.js";
import { Bars } from "../bars.js";
import { Chart } from "../chart.js";
import { compareChoice, Comparison } from "../compare.js";
import { html, tabs, visible } from "../dom.js";
import { cellOf } from "../fitting.js";
import { TextAndTarget } from "../form.js";
import { LensTable } from "../lenstable.js";
import { definePage } from "../page.js";
import { change } from "../state.js";

const COLOURED = [
  ["probability", "Probability"],
  ["entropy", "Entropy"],
];
const PARTS = { attention: "attention", cross: "cross-attention", feedforward: "feed-forward" };

let screen = null;

export const { draw, keys } = definePage({
  name: "lens",
  about: "The last norm and the output matrix applied after every layer. Only the last row is trained: it is the model’s output.",
  keys: [["← → ↑ ↓", "in the table: next position or layer"]],
  example: (run) => run.ambiguous,
  build,
  show,
});

async function show({ run, runs, state, text, controls }, signal) {
  screen.form.show(text, state.target);
  screen.form.hasTarget(run.kind !== "gpt");
  const by = state.by === "entropy" ? "entropy" : "probability";
  controls(tabs("Colour", COLOURED, by, (value) => change({ by: value })), compareChoice(runs, run, state.beside));
  const target = state.target || undefined;
  const table = await post("/api/lens", { run: run.name, text, target }, signal);
  screen.now = { table, rows: rowNames(table.layers), run };
  showTable(by, state);
  await screen.comparison.showLens({ run, text, target }, state.beside, signal);
}

function build() {
  screen = {
    form: new TextAndTarget({ cell: "" }),
    table: new LensTable({
      move: (layer, position) => {
        change({ cell: `${layer},${position}` }, { replace: true, quiet: true });
        near(layer, position);
      },
    }),
    top: new Bars({ name: "lens-cell" }),
    chance: new Chart({ name: "lens-next", title: "Probability of the next token", across: "layer", tall: 190 }),
    norm: new Chart({ name: "lens-norm", title: "Norm of the residual stream", across: "layer" }),
    added: new Chart({ name: "lens-added", title: "Norm of the term that each part adds", across: "layer" }),
    comparison: new Comparison(),
  };
  const { form, table, top, chance, norm, added, comparison } = screen;
  return [form.root, table.root, comparison.root, html`<div class="charts loose two">${[top.root, chance.root]}</div><details class="more norms"><summary>Norms in the residual stream</summary><div class="charts loose two">${[norm.root, added.root]}</div></details>`];
}

/** Layer 0 is the embedding, before any layer. */
function rowNames(layers) {
  const name = (layer) => (layer === 0 ? "embedding" : `layer ${layer}`);
  return Array.from({ length: layers + 1 }, (_, layer) => (layer === layers ? `${name(layer)} = output` : name(layer)));
}

function showTable(by, state) {
  const { table, rows } = screen.now;
  const values = by === "entropy" ? table.entropy : table.probabilities.map((layer) => layer.map((top) => top[0]));
  const most = by === "entropy" ? Math.max(1e-9, ...table.entropy.flat()) : 1;
  // The position at which the model is least certain.
  const output = table.entropy[table.layers];
  const open = [table.layers, output.indexOf(Math.max(...output))];
  screen.table.show(
    {
      name: "lens",
      title: `Most probable next token; colour: ${by === "entropy" ? `entropy, 0 to ${most.toFixed(2)} bits` : "its probability"}; underlined: right, orange: wrong, grey: repeats the token read`,
      insight: insight(table),
      rows,
      inputs: table.inputs,
      expected: table.expected,
      tokens: table.top.map((layer) => layer.map((top) => table.pieces[top[0]])),
      values,
      low: 0,
      high: most,
      what: by === "entropy" ? "entropy in bits" : "probability",
    },
    cellOf(state.cell, open),
  );
  near(...screen.table.at);
}

/** A token as a word; a space is a sign. @param {string} piece */
const word = (piece) => piece.trim() || visible(piece);

/** How many next tokens each layer has right, and where the model hesitates. */
function insight({ layers, top, pieces, probabilities, entropy, inputs, expected }) {
  const known = expected.flatMap((token, position) => (token === null ? [] : [position]));
  if (!known.length) return "";
  const right = top.map((row) => known.filter((position) => pieces[row[position][0]] === expected[position]).length);
  const repeats = known.filter((position) => pieces[top[0][position][0]] === inputs[position]).length > known.length / 2;
  const steps = right.map((count, layer) => (layer ? count : `${count} of ${known.length}`)).join(" → ");
  const output = entropy[layers];
  const at = output.indexOf(Math.max(...output));
  const [first, second] = top[layers][at].map((id, rank) => `“${word(pieces[id])}” (${Math.round(100 * probabilities[layers][at][rank])}\u00a0%)`);
  return `Right next tokens: ${steps}, layer by layer${repeats ? "; the embedding only repeats the token read" : ""}. Least certain is the token after “${word(inputs[at])}”: ${first} or ${second}.`;
}

/** Shows the details of a cell and its position. */
function near(layer, position) {
  const { table, rows } = screen.now;
  const after = `after “${visible(table.inputs[position])}”`;
  screen.top.show(
    table.top[layer][position].map((id, at) => ({
      label: table.pieces[id],
      values: [table.probabilities[layer][position][at]],
      strong: table.pieces[id] === table.expected[position],
    })),
    `${rows[layer]}, ${after}`,
  );
  const over = (layers) => layers.map((row, at) => [at, row[position]]);
  const mean = (layers) => layers.map((row, at) => [at, row.reduce((sum, one) => sum + one, 0) / row.length]);
  const next = table.expected[position];
  screen.chance.show(next === null ? [] : [{ name: `“${visible(next)}”`, points: over(table.wanted) }], {
    note: `Layer 0 is the embedding; ${after}.`,
  });
  screen.chance.root.hidden = next === null; // the last token has no next token
  screen.norm.show([{ name: after, points: over(table.norm) }, { name: "mean over positions", points: mean(table.norm) }]);
  const parts = Object.entries(table.added).map(([name, norms]) => ({ name: PARTS[name], points: over(norms).map(([at, one]) => [at + 1, one]) }));
  screen.added.show(parts, { note: `Norms of vectors, ${after}. Parts may cancel each other.` });
}
