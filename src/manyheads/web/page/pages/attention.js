// Attention: every head of a model on a text, one head near by, and the model without some heads.

import { post, tensor } from "../api.js";
import { element, labelled, select, shown, tabs } from "../dom.js";
import { cellOf, chooseFirst, fitting, insteadOf, limited, nothingFits } from "../fitting.js";
import { TextAndTarget } from "../form.js";
import { HeadGrid } from "../headgrid.js";
import { HeatMap } from "../heatmap.js";
import { Lines } from "../lines.js";
import { outputPanel } from "../output.js";
import { QueryKey } from "../querykey.js";
import { lead, runChoice } from "../runs.js";
import { change, read } from "../state.js";

const VIEWS = [
  ["matrix", "Matrix"],
  ["lines", "Lines"],
  ["qk", "q · k"],
  ["rollout", "Rollout"],
];
const SIDE = 256; // the most rows and columns of a map in the grid
// In a long text all weights are small: from 0 to 1 its maps are dark.
const COLOURS = [
  ["", "from 0 to 1"],
  ["own", "to the greatest of each map"],
];
const STATISTICS = {
  entropy: "entropy (bits)",
  distance: "mean distance",
  previous: "share of the token before",
  first: "share of the first token",
};

export const keys = [
  ["← → ↑ ↓", "in the grid: the head and the layer beside; in the map: the cell beside"],
  ["[ ]", "the head before, the head after"],
  ["x", "knock the chosen head out, or bring it back (in the grid: Shift and a click)"],
];

/** The parts of the page, which stay while texts and heads change. */
let screen = null;

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("attention", state.run, signal);
  if (!run) return nothingFits(place, "attention");
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? run.example;
  const off = state.off ? state.off.split(" ") : [];
  screen.form.show(text, state.target);
  chooseFirst(screen.controls, runs, run, state.run, "attention");
  const asked = { run: run.name, text, target: state.target || undefined };
  const trace = await post("/api/trace", { ...asked, off }, signal);
  const whole = off.length ? await post("/api/trace", asked, signal) : trace;
  screen.form.hasTarget(trace.output.kind === "text");
  const now = { run, runs, state, trace, off, ...chosen(trace, state) };
  screen.now = now;
  screen.controls.replaceChildren(...controls(now));
  screen.output.replaceChildren(outputPanel(whole.output, off.length ? trace.output : null));
  await Promise.all([allHeads(now, signal), near(now, signal)]);
  if (trace.output.kind === "continuation") await goOn(asked, off, { whole, trace }, signal);
}

/** The map, the layer and the head that a state names. */
function chosen({ maps }, state) {
  const map = maps.find((one) => one.name === state.map) ?? maps.at(-1);
  return { map, layer: limited(state.layer, map.layers), head: limited(state.head, map.heads) };
}

/** Every head as a small map; another head of the same text asks for nothing. */
async function allHeads({ state, trace, map, layer, head, off }, signal) {
  const which = { dtype: "u8", side: SIDE, own: state.colours === "own" ? 1 : 0 };
  const key = [trace.trace, map.name, which.own].join(" ");
  if (screen.kept.key !== key) {
    screen.kept = { key, bytes: await tensor(trace.trace, `${map.name}.weights`, which, signal) };
  }
  screen.grid.show(map, screen.kept.bytes, { by: state.by in map.statistics ? state.by : "", chosen: [layer, head], off: new Set(off) });
}

/** What a language model writes after the text: asked for last, as no map hangs on it. */
async function goOn(asked, off, { whole, trace }, signal) {
  const [long, short] = await Promise.all([[], ...(off.length ? [off] : [])].map((heads) => post("/api/continue", { ...asked, off: heads }, signal)));
  screen.output.replaceChildren(outputPanel({ ...whole.output, ...long }, short ? { ...trace.output, ...short } : null));
}

function build(place) {
  const made = {
    form: new TextAndTarget(),
    controls: element("div", { class: "controls" }),
    output: element("section", { class: "output", "aria-label": "What the model gives" }),
    grid: new HeadGrid({ choose: (layer, head) => choose(layer, head), knock }),
    map: new HeatMap({ move: (row, column) => change({ cell: `${row},${column}` }, { replace: true, quiet: true }) }),
    lines: new Lines({
      choose: (row) => change({ query: row < 0 ? "" : String(row) }, { replace: true, quiet: true }),
      change: (top) => change({ top }),
    }),
    queryKey: new QueryKey(),
    about: element("div", { class: "about" }),
    near: element("div"),
    kept: { key: "", bytes: null },
  };
  made.root = element(
    "div",
    {},
    element("h1", {}, "Attention"),
    lead("Where each head looks. A weight says what is mixed in, not why the model answers as it does."),
    made.controls,
    made.form.root,
    made.output,
    element("div", { class: "split" }, made.grid.root, element("section", { class: "near", "aria-label": "One head" }, made.about, made.near)),
  );
  made.root.addEventListener("keydown", shortcuts);
  place.replaceChildren(made.root);
  return made;
}

function controls({ run, runs, state, trace, map }) {
  const kinds = trace.maps.map((one) => [one.name, nameOf(one.name)]);
  const by = [["", "layer and head"], ...Object.keys(map.statistics).map((name) => [name, STATISTICS[name]])];
  return [
    runChoice(runs, run.name),
    tabs("Which attention", kinds, map.name, (value) => change({ map: value, cell: "", query: "" })),
    labelled("Sort by", select(by, state.by in map.statistics ? state.by : "", (value) => change({ by: value }))),
    labelled("Colours", select(COLOURS, state.colours === "own" ? "own" : "", (value) => change({ colours: value }))),
    insteadOf(state.run, run, "attention"),
  ];
}

/** What a kind of attention is called, by the model that it is in. */
export function nameOf(name) {
  return { "encoder.self": "Encoder", "decoder.self": "Decoder", "decoder.cross": "Cross" }[name] ?? name;
}

/** One head near by: its numbers, the switch that takes it out, and the chosen view of it. */
async function near({ state, trace, map, layer, head, off }, signal) {
  const place = `${map.name}.${layer}.${head}`;
  const isOff = off.includes(place);
  const view = state.view === "rollout" && !map.rollout ? "matrix" : (state.view ?? "matrix");
  const views = VIEWS.filter(([name]) => name !== "rollout" || map.rollout);
  const facts = Object.entries(map.statistics).flatMap(([name, values]) => [
    element("dt", {}, STATISTICS[name]),
    element("dd", {}, shown(values[layer][head])),
  ]);
  const button = element(
    "button",
    { type: "button", id: "knock", "aria-pressed": String(isOff), onclick: () => knock(layer, head) },
    isOff ? "Bring this head back" : "Knock this head out",
  );
  const all = element("button", { type: "button", class: "quiet", onclick: () => change({ off: "" }) }, "Bring all back");
  screen.about.replaceChildren(
    element("h2", {}, `${nameOf(map.name)}, layer ${layer + 1}, head ${head + 1}${isOff ? " (knocked out)" : ""}`),
    element("dl", { class: "facts" }, ...facts),
    element("div", { class: "controls" }, tabs("View", views, view, (value) => change({ view: value })), button, off.length ? all : null),
  );
  await drawView(view, { state, trace, map, layer, head }, signal);
}

async function drawView(view, { state, trace, map, layer, head }, signal) {
  const title = `${nameOf(map.name)}, layer ${layer + 1}, head ${head + 1}`;
  const at = cellOf(state.cell);
  const says = (row, column, value) => `${row} looks at ${column}: ${value}`;
  const matrix = { name: `${map.name}-${layer + 1}-${head + 1}`, title, rows: map.rows, columns: map.columns, says };
  const of = (what, which) => tensor(trace.trace, `${map.name}.${what}`, which, signal);
  const high = (values) => (state.colours === "own" ? values.reduce((most, one) => Math.max(most, one), 0) || 1 : 1);
  let shownPart;
  if (view === "rollout") {
    const { values } = await of("rollout", { layer });
    const rolled = `Rollout over layers 1 to ${layer + 1} (all heads, ½ residual)`;
    screen.map.show({ ...matrix, name: `${map.name}-rollout-${layer + 1}`, title: rolled, values, high: high(values), says: (r, c, v) => `${r} has ${v} of ${c}` }, at);
    shownPart = screen.map;
  } else if (view === "lines") {
    const { values } = await of("weights", { layer, head });
    screen.lines.show({ ...matrix, values }, limited(state.top ?? "3", 101) || 3, state.query === undefined ? -1 : limited(state.query, map.rows.length));
    shownPart = screen.lines;
  } else if (view === "qk") {
    const [weights, queries, keyRows] = await Promise.all([
      of("weights", { layer, head }),
      of("q", { layer, head }),
      keysOf(map, layer, head, of),
    ]);
    screen.queryKey.show({ ...matrix, weights, queries, keys: keyRows }, at);
    shownPart = screen.queryKey;
  } else {
    const { values } = await of("weights", { layer, head });
    screen.map.show({ ...matrix, values, high: high(values) }, at);
    shownPart = screen.map;
  }
  if (screen.near.firstChild !== shownPart.root) screen.near.replaceChildren(shownPart.root);
}

/** The keys of a head; heads that share keys have those of their group. */
async function keysOf(map, layer, head, of) {
  const all = await of("k", { layer });
  const [groups, rows, channels] = all.shape;
  const group = Math.floor((head * groups) / map.heads);
  const size = rows * channels;
  return { shape: [rows, channels], values: all.values.subarray(group * size, (group + 1) * size) };
}

function choose(layer, head) {
  change({ layer: String(layer), head: String(head) }, { replace: true });
}

/** Takes a head out, or brings it back. */
function knock(layer, head) {
  const place = `${chosen(screen.now.trace, read()).map.name}.${layer}.${head}`;
  const off = new Set((read().off ?? "").split(" ").filter(Boolean));
  if (!off.delete(place)) off.add(place);
  change({ off: [...off].join(" "), layer: String(layer), head: String(head) });
}

/** Steps from where the address is: a key may be pressed again before the page is drawn. */
function shortcuts(event) {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!screen.now) return;
  const { map, layer, head } = chosen(screen.now.trace, read());
  const at = layer * map.heads + head;
  const to = { "[": at - 1, "]": at + 1 }[event.key];
  if (to >= 0 && to < map.layers * map.heads) choose(Math.floor(to / map.heads), to % map.heads);
  if (event.key === "x" && !event.target.closest(".heads")) knock(layer, head);
}
