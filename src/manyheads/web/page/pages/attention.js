// Attention: all heads of a model on a text, one head in detail, and the model without some heads.

import { post, tensor } from "../api.js";
import { compareChoice, Comparison } from "../compare.js";
import { button, element, html, labelled, render, select, shown, tabs } from "../dom.js";
import { describe } from "../exports.js";
import { cellOf, coverages, greatestHead, limited, tellingCell } from "../fitting.js";
import { TextAndTarget } from "../form.js";
import { HeadGrid, roleOf } from "../headgrid.js";
import { HeatMap } from "../heatmap.js";
import { Lines } from "../lines.js";
import { knockStory } from "../insights.js";
import { outputPanel } from "../output.js";
import { definePage } from "../page.js";
import { QueryKey } from "../querykey.js";
import { change, read } from "../state.js";
import { farthest, tellMove } from "../watchstory.js";

const VIEWS = [
  ["matrix", "Matrix"],
  ["lines", "Lines"],
  ["qk", "q · k"],
  ["rollout", "Rollout"],
];
const SIDE = 256; // maximum rows and columns of a map in the grid
// In a long text all weights are small, and a scale from 0 to 1 is dark.
const COLOURS = [
  ["", "0 to 1"],
  ["own", "0 to the maximum of each map"],
];
const STATISTICS = {
  entropy: "entropy (bits)",
  distance: "mean distance",
  previous: "weight on the previous token",
  first: "weight on the first token",
  coverage: "coverage of the source",
};

/** The elements of the page, reused while text and head change. */
let screen = null;

export const { draw, keys, next } = definePage({
  name: "attention",
  about: "Attention weights of each head. A weight shows what is mixed in, not why the model produces its output.",
  keys: [
    ["← → ↑ ↓", "in the grid: next head or layer; in the map: next cell"],
    ["[ ]", "previous head, next head"],
    ["x", "knock out or restore the chosen head (in the grid: Shift+click)"],
  ],
  build,
  show,
  next: nextHead,
  press: shortcuts,
});

async function show({ run, runs, state, text, controls }, signal) {
  const off = state.off ? state.off.split(" ") : [];
  screen.form.show(text, state.target);
  const request = { run: run.name, text, target: state.target || undefined };
  const trace = await post("/api/trace", { ...request, off }, signal);
  const baseline = off.length ? await post("/api/trace", request, signal) : trace;
  screen.form.hasTarget(trace.output.kind === "text");
  screen.given = state;
  screen.first = await firstHead(trace, state, signal);
  const now = { run, runs, state, trace, off, ...chosen(trace, state) };
  screen.now = now;
  describe({ run: run.name, text, target: state.target, attention: nameOf(now.map.name), layer: now.layer + 1, head: now.head + 1, "without heads": off.join(" ") });
  controls(...controlsOf(now));
  showOutputs(baseline.output, off.length ? trace.output : null, off);
  await Promise.all([allHeads(now, signal), near(now, signal)]);
  const title = `layer ${now.layer + 1}, head ${now.head + 1}`;
  await screen.comparison.show({ run, text, trace, map: now.map, which: { layer: now.layer, head: now.head }, title }, state.beside, signal);
  if (state.sweep === "1") await showSweep(request, now, signal);
  else screen.sweep.root.remove();
  if (trace.output.kind === "continuation") await showContinuation(request, off, { baseline, trace }, signal);
}

/** The map, layer and head in the state. */
function chosen({ maps }, state, first = screen.first) {
  const map = maps.find((one) => one.name === state.map) ?? maps.at(-1);
  const [layer, head] = state.layer === undefined && state.head === undefined ? first : [0, 0];
  return { map, layer: limited(state.layer, map.layers, layer), head: limited(state.head, map.heads, head) };
}

/** The first head to show. In cross-attention it is the head that covers the words of the source best: it aligns words. */
async function firstHead(trace, state, signal) {
  const { map } = chosen(trace, state, [0, 0]);
  if (map.name !== "decoder.cross") return state.first === "sharp" && map.statistics.entropy ? sharpest(map) : [0, 0];
  const bytes = await headMaps({ trace, map, state: {} }, signal); // on one scale, whatever the colours
  if (bytes.shape[3] !== map.columns.length) return [0, 0];
  map.covered = coverages(bytes, map.columns);
  return greatestHead(map.covered);
}

/** The head that attends to the fewest tokens. */
const sharpest = (map) => greatestHead(map.statistics.entropy.map((layer) => layer.map((bits) => -bits)));

/** The maps of all heads, small; cached for the same text. */
async function headMaps({ state, trace, map }, signal) {
  const which = { dtype: "u8", side: SIDE, own: state.colours === "own" ? 1 : 0 };
  const key = [trace.trace, map.name, which.own].join(" ");
  if (screen.cached.key !== key) {
    screen.cached = { key, bytes: await tensor(trace.trace, `${map.name}.weights`, which, signal) };
  }
  return screen.cached.bytes;
}

/** All heads as small maps. */
async function allHeads(now, signal) {
  const { state, map, layer, head, off } = now;
  screen.grid.show(map, await headMaps(now, signal), { by: state.by in map.statistics ? state.by : "", chosen: [layer, head], off: new Set(off) });
}

/** How much log P of the same target falls without each head: heads by layers of all attentions. */
async function showSweep(request, { trace, map, layer, head }, signal) {
  const key = JSON.stringify(request);
  if (screen.swept.key !== key) screen.swept = { key, result: await post("/api/sweep", request, signal) };
  const { log_probability: full, heads } = screen.swept.result;
  const most = Math.max(...trace.maps.map((one) => one.heads));
  const rows = trace.maps.flatMap((one) => Array.from({ length: one.layers }, (_, number) => [one, number]));
  const changeOf = ([one, number], at) => (at < one.heads ? (heads[`${one.name}.${number}.${at}`] ?? NaN) - full : NaN);
  const values = Float32Array.from(rows.flatMap((row) => Array.from({ length: most }, (_, at) => changeOf(row, at))));
  const size = values.reduce((largest, value) => (Number.isNaN(value) ? largest : Math.max(largest, Math.abs(value))), 1e-6);
  const missing = Object.keys(heads).length < trace.maps.reduce((sum, one) => sum + one.layers * one.heads, 0);
  const isNew = !screen.sweep.root.isConnected;
  screen.left.append(screen.sweep.root);
  const worst = values.reduce((least, value, at) => (value < values[least] || Number.isNaN(values[least]) ? at : least), 0);
  const [kind, depth] = rows[Math.floor(worst / most)];
  screen.sweep.show(
    {
      name: "head-importance",
      insight: `${nameOf(kind.name)}, head ${depth + 1}·${(worst % most) + 1} matters most: without it log P falls by ${shown(-values[worst], 2)}.`,
      title: `Change of log P(same target) = ${shown(full)} without each head${missing ? "; the sweep stopped at its time limit" : ""}`,
      rows: rows.map(([one, number]) => `${nameOf(one.name)} ${number + 1}`),
      columns: Array.from({ length: most }, (_, at) => `head ${at + 1}`),
      values,
      low: -size,
      high: size,
      says: (row, column, value) => `Without ${column} of ${row}: log P changes by ${value}`,
    },
    [rows.findIndex(([one, at]) => one === map && at === layer), head],
  );
  if (isNew) screen.sweep.root.scrollIntoView({ block: "nearest" });
}

/** The continuation of a language model, requested last because no map depends on it. */
async function showContinuation(request, off, { baseline, trace }, signal) {
  const [long, short] = await Promise.all([[], ...(off.length ? [off] : [])].map((heads) => post("/api/continue", { ...request, off: heads }, signal)));
  showOutputs({ ...baseline.output, ...long }, short ? { ...trace.output, ...short } : null, off);
}

/** The output above the maps; without some heads what has changed stands below and above the map, so that nothing moves. */
function showOutputs(full, without, off) {
  render(outputPanel(full, without ? "Complete model" : "Output"), screen.output);
  render(without ? outputPanel(without, "Without these heads", full) : null, screen.without);
  screen.story = without && full.kind === "text" ? knockStory(full, without, off) : "";
}

function build() {
  const made = {
    form: new TextAndTarget(),
    output: element("section", { class: "output", "aria-label": "Model output" }),
    grid: new HeadGrid({ choose, knock }),
    map: new HeatMap({ move: (row, column) => change({ cell: `${row},${column}` }, { replace: true, quiet: true }), share: 0.36 }),
    lines: new Lines({
      choose: (row) => change({ query: row < 0 ? "" : String(row) }, { replace: true, quiet: true }),
      change: (top) => change({ top }),
    }),
    queryKey: new QueryKey(),
    about: element("div", { class: "controls about" }),
    facts: element("dl", { class: "facts" }),
    near: element("div"),
    story: "", // what the model loses without the heads that are knocked out
    without: element("div"),
    comparison: new Comparison(),
    sweep: new HeatMap({ move: goTo, largest: 44 }),
    first: [0, 0],
    swept: { key: "", result: null },
    left: element("div", { class: "stacked" }),
    cached: { key: "", bytes: null },
  };
  made.left.append(made.grid.root, made.facts);
  for (const view of [made.map, made.lines]) view.root.dataset.stage = "One head";
  screen = made;
  return html`${made.form.root}${made.output}
    <div class="split">${made.left}<section class="near" aria-label="One head">${made.about}${made.near}${made.without}</section></div>
    ${made.comparison.root}`;
}

function controlsOf({ run, runs, state, trace, map }) {
  const kinds = trace.maps.map((one) => [one.name, nameOf(one.name)]);
  const by = [["", "layer and head"], ...Object.keys(map.statistics).map((name) => [name, STATISTICS[name]])];
  const display = [
    labelled("Sort by", select(by, state.by in map.statistics ? state.by : "", (value) => change({ by: value }))),
    labelled("Palette", select([["", "white to ink"], ["viridis", "viridis"]], state.palette ?? "", (value) => change({ palette: value }))),
    labelled("Colours", select(COLOURS, state.colours === "own" ? "own" : "", (value) => change({ colours: value }))),
  ];
  const sweeps = state.sweep === "1";
  return [
    tabs("Which attention", kinds, map.name, (value) => change({ map: value, cell: "", query: "" })),
    html`<details class="more"><summary>Display</summary><div class="controls">${display}</div></details>`,
    compareChoice(runs, run, state.beside),
    ["text", "continuation"].includes(trace.output.kind)
      ? button("Sweep all heads", () => change({ sweep: sweeps ? "" : "1" }), { pressed: sweeps })
      : null,
  ];
}

/** The title of a kind of attention. */
export function nameOf(name) {
  return { "encoder.self": "Encoder", "decoder.self": "Decoder", "decoder.cross": "Cross" }[name] ?? name;
}

/** One head in detail: statistics, the knock-out button and the chosen view. */
async function near({ state, trace, map, layer, head, off }, signal) {
  const place = `${map.name}.${layer}.${head}`;
  const isOff = off.includes(place);
  const view = state.view === "rollout" && !map.rollout ? "matrix" : (state.view ?? "matrix");
  const views = VIEWS.filter(([name]) => name !== "rollout" || map.rollout);
  const parts = [
    tabs("View", views, view, (value) => change({ view: value })),
    button(isOff ? "Restore this head" : "Knock out this head", () => knock(layer, head), { id: "knock", pressed: isOff }),
    off.length ? button("Restore all heads", () => change({ off: "" }), { kind: "quiet" }) : null,
  ];
  render(parts, screen.about);
  render(Object.entries(map.statistics).map(([name, values]) => html`<dt>${STATISTICS[name]}</dt><dd>${shown(values[layer][head])}</dd>`), screen.facts);
  await drawView(view, { state, trace, map, layer, head, isOff }, signal);
}

async function drawView(view, { state, trace, map, layer, head, isOff }, signal) {
  const title = `${nameOf(map.name)}, layer ${layer + 1}, head ${head + 1}${isOff ? " (knocked out)" : ""}`;
  const at = cellOf(state.cell);
  const says = (row, column, value) => `${row} attends to ${column}: ${value}`;
  const matrix = { name: `${map.name}-${layer + 1}-${head + 1}`, title, rows: map.rows, columns: map.columns, says };
  const of = (what, which) => tensor(trace.trace, `${map.name}.${what}`, which, signal);
  const high = (values) => (state.colours === "own" ? values.reduce((most, one) => Math.max(most, one), 0) || 1 : 1);
  let shownPart;
  if (view === "rollout") {
    const { values } = await of("rollout", { layer });
    const rolled = `Rollout over layers 1 to ${layer + 1} (all heads, ½ residual)`;
    screen.map.show({ ...matrix, name: `${map.name}-rollout-${layer + 1}`, title: rolled, values, insight: screen.story, high: high(values), says: (r, c, v) => `${r} has ${v} of ${c}` }, at);
    shownPart = screen.map;
  } else if (view === "lines") {
    const { values } = await of("weights", { layer, head });
    screen.lines.show({ ...matrix, values, insight: insight(map, layer, head, values) }, limited(state.top ?? "3", 101) || 3, state.query === undefined ? -1 : limited(state.query, map.rows.length));
    shownPart = screen.lines;
  } else if (view === "qk") {
    const [weights, queries, keyRows] = await Promise.all([
      of("weights", { layer, head }),
      of("q", { layer, head }),
      keysOf(map, layer, head, of),
    ]);
    screen.queryKey.show({ ...matrix, weights, queries, keys: keyRows }, cellOf(state.cell, tellingCell(map.rows, map.columns, weights.values)));
    shownPart = screen.queryKey;
  } else {
    const { values } = await of("weights", { layer, head });
    const first = tellingCell(map.rows, map.columns, values);
    screen.map.show({ ...matrix, values, high: high(values), insight: insight(map, layer, head, values) }, cellOf(state.cell, first));
    shownPart = screen.map;
  }
  if (screen.near.firstChild !== shownPart.root) screen.near.replaceChildren(shownPart.root);
}

/** What the model loses without heads; else the word that the head finds at another position, or what it does. */
function insight(map, layer, head, values) {
  if (screen.story) return screen.story;
  const word = map.name === "decoder.cross" ? farthest(map.rows, map.columns, (row, column) => values[row * map.columns.length + column]) : null;
  return word ? tellMove(word, map.rows, map.columns) : `${roleOf(map, layer, head).sentence} ${contrast(map, layer, head)}`;
}

/** The head that differs most in how many tokens it attends to. */
function contrast(map, layer, head) {
  const { entropy } = map.statistics;
  if (!entropy || map.name === "decoder.cross" || map.layers * map.heads < 2) return "";
  const away = (bits) => Math.abs(bits - entropy[layer][head]);
  const [other, number] = greatestHead(entropy.map((bits) => bits.map(away)));
  const tokens = (bits) => Math.max(1, Math.round(2 ** bits));
  const [here, there] = [tokens(entropy[layer][head]), tokens(entropy[other][number])];
  return here === there ? "" : `Head ${other + 1}·${number + 1} differs most: about ${there} token${there > 1 ? "s" : ""} instead of ${here}.`;
}

/** The keys of a head; in grouped-query attention those of its group. */
async function keysOf(map, layer, head, of) {
  const all = await of("k", { layer });
  const [groups, rows, channels] = all.shape;
  const group = Math.floor((head * groups) / map.heads);
  const size = rows * channels;
  return { shape: [rows, channels], values: all.values.subarray(group * size, (group + 1) * size) };
}

/** Opens the head of a cell of the sweep. */
function goTo(row, head, how) {
  const rows = screen.now.trace.maps.flatMap((one) => Array.from({ length: one.layers }, (_, layer) => [one, layer]));
  const [map, layer] = rows[row];
  change({ map: map.name, layer: String(layer), head: String(Math.min(head, map.heads - 1)), cell: "" }, how);
}

/** The state of the URL, merged over the state of a step of the tour. */
const current = () => ({ ...screen.given, ...read() });

/** The next head, after the last one the first. */
function nextHead(by) {
  const { map, layer, head } = chosen(screen.now.trace, current());
  const count = map.layers * map.heads;
  const to = (layer * map.heads + head + by + count) % count;
  choose(Math.floor(to / map.heads), to % map.heads, { replace: true });
}

/** Chooses a head; keys replace the last entry of the history. */
function choose(layer, head, how = {}) {
  change({ layer: String(layer), head: String(head) }, how);
}

/** Knocks out a head, or restores it. */
function knock(layer, head) {
  const place = `${chosen(screen.now.trace, current()).map.name}.${layer}.${head}`;
  const off = new Set((read().off ?? "").split(" ").filter(Boolean));
  if (!off.delete(place)) off.add(place);
  change({ off: [...off].join(" "), layer: String(layer), head: String(head) });
}

/** Steps from the state in the URL: a key may be pressed again before the page is redrawn. */
function shortcuts(event) {
  if (!screen.now) return;
  const { layer, head } = chosen(screen.now.trace, current());
  const by = { "[": -1, "]": 1 }[event.key];
  if (by) nextHead(by);
  if (event.key === "x" && !event.target.closest(".heads")) knock(layer, head);
}
