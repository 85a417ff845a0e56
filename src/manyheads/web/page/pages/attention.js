// Attention: all heads of a model on a text, one head in detail, and the model without some heads.

import { post, tensor } from "../api.js";
import { compareChoice, Comparison } from "../compare.js";
import { button, element, html, labelled, percent, render, select, shown, tabs } from "../dom.js";
import { describe } from "../exports.js";
import { cellOf, coverages, greatestHead, limited, tellingCell } from "../fitting.js";
import { TextAndTarget } from "../form.js";
import { weightStory } from "../flowstory.js";
import { HeadGrid, offsetsOf, roleOf } from "../headgrid.js";
import { HeatMap } from "../heatmap.js";
import { Lines } from "../lines.js";
import { knockStory } from "../insights.js";
import { outputPanel } from "../output.js";
import { definePage } from "../page.js";
import { QueryKey } from "../querykey.js";
import { change, read } from "../state.js";

const VIEWS = [
  ["matrix", "Matrix"],
  ["lines", "Lines"],
  ["qk", "q · k"],
  ["rollout", "Rollout"],
];
const [WIDE, BELOW] = [960, 92]; // a window with two columns; pixels below the map
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
  coverage: "coverage of the source words",
};
const SHARES = new Set(["previous", "first", "coverage"]); // statistics that are written in percent

/** The elements of the page, reused while text and head change. */
let screen = null;

export const { draw, keys, next } = definePage({
  name: "attention",
  about: "Attention weights of each head. A weight shows what is mixed in, not why the model produces its output.",
  keys: [
    ["← → ↑ ↓", "in the grid: next head or layer; in the map: next cell"],
    ["[ ]", "previous head, next head in the order of the grid; after the last the first"],
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
  describeHeads(now.map, await headMaps(now, 0, signal));
  describe({ run: run.name, text, target: state.target, attention: nameOf(now.map.name), layer: now.layer + 1, head: now.head + 1, "without heads": off.join(" ") });
  controls(...controlsOf(now));
  showOutputs(baseline.output, off.length ? trace.output : null, off);
  await Promise.all([allHeads(now, signal), near(now, signal)]);
  const title = `layer ${now.layer + 1}, head ${now.head + 1}`;
  await screen.comparison.show({ run, text, trace, map: now.map, which: { layer: now.layer, head: now.head }, title }, state.beside, signal);
  screen.facts.hidden = state.sweep === "1"; // the sweep has their place
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
  const bytes = await headMaps({ trace, map }, 0, signal);
  return bytes.shape[3] === map.columns.length ? greatestHead(coverages(bytes, map.columns)) : [0, 0];
}

/** Adds to a map what each of its heads does; a text that is too long for its small maps has no such names. */
function describeHeads(map, bytes) {
  if (bytes.shape[3] !== map.columns.length) return;
  if (map.name === "decoder.cross") map.statistics.coverage = map.covered = coverages(bytes, map.columns);
  else map.offsets = offsetsOf(bytes);
}

/** The head that attends to the fewest tokens. */
const sharpest = (map) => greatestHead(map.statistics.entropy.map((layer) => layer.map((bits) => -bits)));

/** The maps of all heads, small, on one scale or each (`normalize`) on its own; cached for the same text. */
async function headMaps({ trace, map }, normalize, signal) {
  const key = [trace.trace, map.name, normalize].join(" ");
  if (!screen.cached.has(key)) {
    const bytes = await tensor(trace.trace, `${map.name}.weights`, { dtype: "u8", side: SIDE, normalize }, signal);
    if (screen.cached.size > 3) screen.cached.clear();
    screen.cached.set(key, bytes);
  }
  return screen.cached.get(key);
}

/** All heads as small maps. */
async function allHeads(now, signal) {
  const { state, map, layer, head, off } = now;
  screen.grid.show(map, await headMaps(now, state.colours === "own" ? 1 : 0, signal), { by: state.by in map.statistics ? state.by : "", chosen: [layer, head], off: new Set(off) });
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
  screen.grid.tint(Array.from({ length: map.layers }, (_, number) => Array.from({ length: map.heads }, (__, at) => changeOf([map, number], at))), size);
  const missing = Object.keys(heads).length < trace.maps.reduce((sum, one) => sum + one.layers * one.heads, 0);
  screen.left.append(screen.sweep.root);
  const worst = values.reduce((least, value, at) => (value < values[least] || Number.isNaN(values[least]) ? at : least), 0);
  const [kind, depth] = rows[Math.floor(worst / most)];
  if (screen.opens) {
    screen.opens = false;
    return goTo(Math.floor(worst / most), worst % most, { replace: true });
  }
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
    map: new HeatMap({
      move: (row, column) => {
        change({ cell: `${row},${column}` }, { replace: true, quiet: true });
        if (screen.tell) screen.map.insight.textContent = screen.tell(row);
      },
      share: 0.36,
      square: true,
      height: () => (innerWidth < WIDE ? 0 : Math.max(1, innerHeight - made.map.frame.getBoundingClientRect().top - scrollY - BELOW)),
    }),
    /** What the map shows at a row, if that depends on the row. @type {((row: number) => string)|null} */
    tell: null,
    lines: new Lines({
      choose: (row) => {
        change({ query: row < 0 ? "" : String(row) }, { replace: true, quiet: true });
        screen.lines.insight.textContent = screen.tell(row);
      },
      change: (top) => change({ top }),
    }),
    queryKey: new QueryKey(),
    about: element("div", { class: "controls about" }),
    facts: element("dl", { class: "facts" }),
    near: element("div"),
    story: "", // what the model loses without the heads that are knocked out
    without: element("div"),
    comparison: new Comparison(),
    sweep: new HeatMap({ move: goTo, largest: 20, share: 0.12 }),
    first: [0, 0],
    swept: { key: "", result: null },
    opens: false, // the head that matters most, when the sweep arrives
    left: element("div", { class: "stacked" }),
    cached: new Map(),
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
  const options = [
    compareChoice(runs, run, state.beside),
    labelled("Sort by", select(by, state.by in map.statistics ? state.by : "", (value) => change({ by: value }))),
    labelled("Palette", select([["", "white to ink"], ["viridis", "viridis"]], state.palette ?? "", (value) => change({ palette: value }))),
    labelled("Colours", select(COLOURS, state.colours === "own" ? "own" : "", (value) => change({ colours: value }))),
  ];
  const leave = ({ relatedTarget: to, currentTarget: menu }) => to && !menu.contains(to) && (menu.open = false);
  return [
    tabs("Which attention", kinds, map.name, (value) => change({ map: value, cell: "", query: "" })),
    html`<details class="more" @focusout=${leave}><summary>Options</summary><div class="controls">${options}</div></details>`,
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
  const sweeps = state.sweep === "1";
  const view = state.view === "rollout" && !map.rollout ? "matrix" : (state.view ?? "matrix");
  const views = VIEWS.filter(([name]) => name !== "rollout" || map.rollout);
  const parts = [
    tabs("View", views, view, (value) => change({ view: value })),
    button(isOff ? "Restore this head" : "Knock out this head", () => knock(layer, head), { id: "knock", pressed: isOff }),
    off.length ? button("Restore all heads", () => change({ off: "" }), { kind: "quiet" }) : null,
    ["text", "continuation"].includes(trace.output.kind) ? button("Sweep all heads", () => sweep(!sweeps), { id: "sweep", pressed: sweeps }) : null,
  ];
  render(parts, screen.about);
  const written = (name, value) => (SHARES.has(name) ? percent(value) : shown(value));
  render(Object.entries(map.statistics).map(([name, values]) => html`<dt>${STATISTICS[name]}</dt><dd>${written(name, values[layer][head])}</dd>`), screen.facts);
  await drawView(view, { state, trace, map, layer, head, isOff }, signal);
}

async function drawView(view, { state, trace, map, layer, head, isOff }, signal) {
  const title = `${nameOf(map.name)}, layer ${layer + 1}, head ${head + 1}${isOff ? " (knocked out)" : ""}`;
  const at = cellOf(state.cell);
  const says = (row, column, value) => `${row} attends to ${column}: ${value}`;
  const matrix = { name: `${map.name}-${layer + 1}-${head + 1}`, title, rows: map.rows, columns: map.columns, down: "query position", across: "key position", says, number: percent };
  const of = (what, which) => tensor(trace.trace, `${map.name}.${what}`, which, signal);
  const high = (values) => (state.colours === "own" ? values.reduce((most, one) => Math.max(most, one), 0) || 1 : 1);
  let shownPart;
  screen.tell = null;
  if (view === "rollout") {
    const { values } = await of("rollout", { layer });
    const rolled = `Rollout over layers 1 to ${layer + 1} (all heads, ½ residual)`;
    screen.map.show({ ...matrix, name: `${map.name}-rollout-${layer + 1}`, title: rolled, values, insight: screen.story, high: high(values), says: (r, c, v) => `${r} has ${v} of ${c}` }, at);
    shownPart = screen.map;
  } else if (view === "lines") {
    const { values } = await of("weights", { layer, head });
    const query = limited(state.query, map.rows.length, -1);
    const all = map.name === "decoder.cross" ? tellingCell(map.rows, map.columns, values)[0] : -1;
    screen.tell = (row) => (screen.story || Math.max(row, all) < 0 ? insight(map, layer, head) : weightStory({ ...matrix, values }, row < 0 ? all : row));
    screen.lines.show({ ...matrix, values, insight: screen.tell(query) }, limited(state.top ?? "3", 101) || 3, query);
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
    const cell = cellOf(state.cell, firstCellOf(map, values, state.query));
    if (map.name === "decoder.cross" && !screen.story) screen.tell = (row) => weightStory({ ...matrix, values }, row);
    screen.map.show({ ...matrix, values, high: high(values), insight: screen.tell?.(cell[0]) ?? insight(map, layer, head) }, cell);
    shownPart = screen.map;
  }
  if (screen.near.firstChild !== shownPart.root) screen.near.replaceChildren(shownPart.root);
}

/** The first cell: the greatest weight of the query that stays from head to head; at first the word that has moved farthest. */
function firstCellOf({ rows, columns }, values, query) {
  if (query === undefined) return tellingCell(rows, columns, values);
  const row = limited(query, rows.length);
  const weights = values.subarray(row * columns.length, (row + 1) * columns.length);
  return [row, weights.indexOf(Math.max(...weights))];
}

/** What the model loses without heads; else what the head does, and the one that does something else. */
const insight = (map, layer, head) => screen.story || `Head ${layer + 1}·${head + 1} ${roleOf(map, layer, head).does}. ${contrast(map, layer, head)}`;

/** The head that differs most in how many tokens it attends to. */
function contrast(map, layer, head) {
  const { entropy } = map.statistics;
  if (!entropy || map.name === "decoder.cross" || map.layers * map.heads < 2) return "";
  const away = (bits) => Math.abs(bits - entropy[layer][head]);
  const [other, number] = greatestHead(entropy.map((bits) => bits.map(away)));
  const { does } = roleOf(map, other, number);
  return does === roleOf(map, layer, head).does ? "" : `Head ${other + 1}·${number + 1} differs most: it ${does}.`;
}

/** The keys of a head; in grouped-query attention those of its group. */
async function keysOf(map, layer, head, of) {
  const all = await of("k", { layer });
  const [groups, rows, channels] = all.shape;
  const group = Math.floor((head * groups) / map.heads);
  const size = rows * channels;
  return { shape: [rows, channels], values: all.values.subarray(group * size, (group + 1) * size) };
}

/** Starts the sweep, which then opens the head that matters most, or hides it. @param {boolean} on */
function sweep(on) {
  screen.opens = on;
  change({ sweep: on ? "1" : "" });
}

/** Opens the head of a cell of the sweep. */
function goTo(row, head, how) {
  const rows = screen.now.trace.maps.flatMap((one) => Array.from({ length: one.layers }, (_, layer) => [one, layer]));
  const [map, layer] = rows[row];
  change({ map: map.name, layer: String(layer), head: String(Math.min(head, map.heads - 1)), cell: "", query: "" }, how);
}

/** The state of the URL, merged over the state of a step of the tour. */
const current = () => ({ ...screen.given, ...read() });

/** The next head in the order of the grid; after the last one the first. */
function nextHead(by) {
  const { layer, head } = chosen(screen.now.trace, current());
  const { order } = screen.grid;
  const at = order.findIndex((place) => place[0] === layer && place[1] === head);
  choose(...order.at((at + by) % order.length), { replace: true });
}

/** Chooses a head, with the same query; keys replace the last entry of the history. */
function choose(layer, head, how = {}) {
  change({ layer: String(layer), head: String(head), ...sameQuery() }, how);
}

/** The query of the map: it stays when another head is shown. */
const sameQuery = () => (screen.near.firstChild === screen.map.root ? { query: String(screen.map.at[0]), cell: "" } : {});

/** Knocks out a head, or restores it. */
function knock(layer, head) {
  const place = `${chosen(screen.now.trace, current()).map.name}.${layer}.${head}`;
  const off = new Set((read().off ?? "").split(" ").filter(Boolean));
  if (!off.delete(place)) off.add(place);
  change({ off: [...off].join(" "), layer: String(layer), head: String(head), ...sameQuery() });
}

/** Steps from the state in the URL: a key may be pressed again before the page is redrawn. */
function shortcuts(event) {
  if (!screen.now) return;
  const { layer, head } = chosen(screen.now.trace, current());
  const by = { "[": -1, "]": 1 }[event.key];
  if (by) nextHead(by);
  if (event.key === "x" && !event.target.closest(".heads")) knock(layer, head);
}
