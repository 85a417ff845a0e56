// Lens: what a decoder would say after each layer, and who adds how much to the residual stream.

import { post } from "../api.js";
import { Bars } from "../bars.js";
import { Chart } from "../chart.js";
import { element, tabs, visible } from "../dom.js";
import { cellOf, fitting, insteadOf, nothingFits } from "../fitting.js";
import { TextAndTarget } from "../form.js";
import { LensTable } from "../lenstable.js";
import { lead, runChoice } from "../runs.js";
import { change } from "../state.js";

const COLOURED = [
  ["probability", "Probability"],
  ["entropy", "Entropy"],
];
const PARTS = { attention: "attention", cross: "cross-attention", feedforward: "feed-forward" };

export const keys = [["← → ↑ ↓", "in the table: the position and the layer beside"]];

let screen = null;

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("lens", state.run, signal);
  if (!run) return nothingFits(place, "lens");
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? run.example;
  screen.form.show(text, state.target);
  screen.form.hasTarget(run.kind !== "gpt");
  const by = state.by === "entropy" ? "entropy" : "probability";
  screen.controls.replaceChildren(runChoice(runs, run.name), tabs("Colour", COLOURED, by, (value) => change({ by: value })));
  screen.instead.replaceChildren(insteadOf(state.run, run, "lens"));
  const found = await post("/api/lens", { run: run.name, text, target: state.target || undefined }, signal);
  screen.now = { found, rows: rowNames(found.layers), run };
  show(by, state);
}

function build(place) {
  const made = {
    form: new TextAndTarget({ cell: "" }),
    controls: element("div", { class: "controls" }),
    instead: element("div"),
    table: new LensTable({
      move: (layer, position) => {
        change({ cell: `${layer},${position}` }, { replace: true, quiet: true });
        near(layer, position);
      },
    }),
    top: new Bars({ name: "lens-cell", title: "Likeliest tokens" }),
    chance: new Chart({ name: "lens-next", title: "Probability of the token that comes", across: "layer" }),
    norm: new Chart({ name: "lens-norm", title: "Length of the residual stream", across: "layer" }),
    added: new Chart({ name: "lens-added", title: "Length of what each part adds", across: "layer" }),
  };
  made.root = element(
    "div",
    {},
    element("h1", {}, "Lens"),
    lead("The last norm and the output matrix on the state after every layer. The last row is what the model says; the others it was never trained to say."),
    made.controls,
    made.instead,
    made.form.root,
    made.table.root,
    element("div", { class: "charts loose" }, made.top.root, made.chance.root, made.norm.root, made.added.root),
  );
  place.replaceChildren(made.root);
  return made;
}

/** Layer 0 is the embedding, before any layer. */
function rowNames(layers) {
  const name = (layer) => (layer === 0 ? "embedding" : `layer ${layer}`);
  return Array.from({ length: layers + 1 }, (_, layer) => (layer === layers ? `${name(layer)} = output` : name(layer)));
}

function show(by, state) {
  const { found, rows } = screen.now;
  const values = by === "entropy" ? found.entropy : found.probabilities.map((layer) => layer.map((top) => top[0]));
  const most = by === "entropy" ? Math.max(1e-9, ...found.entropy.flat()) : 1;
  const last = [found.layers, found.given.length - 1];
  screen.table.show(
    {
      name: "lens",
      title: `Likeliest next token, colour = ${by === "entropy" ? `entropy, 0 to ${most.toFixed(2)} bits` : "its probability, 0 to 1"}; underlined: the one that comes`,
      rows,
      given: found.given,
      expected: found.expected,
      tokens: found.top.map((layer) => layer.map((top) => found.pieces[top[0]])),
      values,
      low: 0,
      high: most,
      what: by === "entropy" ? "entropy in bits" : "probability",
    },
    cellOf(state.cell, last),
  );
  near(...screen.table.at);
}

/** What there is to say of a cell and of its position. */
function near(layer, position) {
  const { found, rows } = screen.now;
  const after = `after “${visible(found.given[position])}”`;
  screen.top.show(
    found.top[layer][position].map((id, at) => ({
      label: found.pieces[id],
      value: found.probabilities[layer][position][at],
      strong: found.pieces[id] === found.expected[position],
    })),
    { title: `${rows[layer]}, ${after}` },
  );
  const over = (table) => table.map((row, at) => [at, row[position]]);
  const mean = (table) => table.map((row, at) => [at, row.reduce((sum, one) => sum + one, 0) / row.length]);
  const next = found.expected[position];
  screen.chance.show(next === null ? [] : [{ name: `“${visible(next)}”`, points: over(found.wanted) }], {
    note: `Layer 0 is the embedding; ${after}.`,
  });
  screen.chance.root.hidden = next === null; // nothing comes after the last token of a text
  screen.norm.show([{ name: after, points: over(found.norm) }, { name: "mean over positions", points: mean(found.norm) }]);
  const parts = Object.entries(found.added).map(([name, table]) => ({ name: PARTS[name], points: over(table).map(([at, one]) => [at + 1, one]) }));
  screen.added.show(parts, { note: `Lengths of vectors, ${after}: parts may point against each other.` });
}
