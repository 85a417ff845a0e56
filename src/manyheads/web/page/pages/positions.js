// Positions: the tables of each position scheme, single channels, and curves over the distance.

import { get, tensor } from "../api.js";
import { Chart } from "../chart.js";
import { Dials, handsOf } from "../dials.js";
import { button, checkbox, element, html, labelled, numbered, select, shown } from "../dom.js";
import { describe } from "../exports.js";
import { cellOf, limited, numberInput } from "../fitting.js";
import { HeatMap } from "../heatmap.js";
import { positionStory } from "../insights.js";
import { formulas } from "../math.js";
import { definePage } from "../page.js";
import { change } from "../state.js";

const SCHEMES = [
  ["sinusoidal", "sinusoidal"],
  ["learned", "learned (at initialisation)"],
  ["rotary", "rotary"],
  ["shaw", "Shaw"],
  ["t5", "T5 buckets"],
  ["alibi", "ALiBi"],
  ["relative", "relative (skew)"],
  ["sinusoidal-2d", "sinusoidal 2D (rows and columns)"],
];
const TABLES = {
  added: "added to the embedding of each position",
  turned: "a vector of ones, rotated by its position",
  scores: "added to the scores, for the same query at every position",
};
const STEPS = [
  "1. Q Eᵀ: each query with the vector of each distance",
  "2. padded with a column of zeros",
  "3. the same numbers, reshaped to rows that are one shorter",
  "4. the first columns: S_rel, query by key",
];
const WITHOUT_HEADS = ["sinusoidal", "learned", "sinusoidal-2d"];
const TALLEST = 340; // pixels of a map next to a chart
const WAVES = 5;
const ROUGH = 0.25; // a channel whose neighbours differ by more than this share of its range is drawn as points

let screen = null;

export const { draw, keys } = definePage({
  name: "positions",
  about: "How a model encodes the position of a token. Click a channel to plot it, a position to compare it with all others.",
  keys: [["← → ↑ ↓", "in a map: next cell; in a chart: next point"]],
  withoutRun: true,
  build,
  show,
});

async function show({ run, state, choice, controls }, signal) {
  const scheme = state.scheme ?? "sinusoidal";
  describe({ scheme, run: scheme === "run" ? run?.name : "" });
  const query = { scheme, length: state.length ?? "64" };
  for (const name of ["trained", "dim", "heads", "base", "causal"]) if (state[name]) query[name] = state[name];
  if (scheme === "run") query.run = run.name;
  if (scheme === "run" && state.stack) query.stack = state.stack;
  if (scheme === "run" && state.layer) query.layer = limited(state.layer, 2 ** 20);
  controls(...controlsOf(state, scheme, choice, null));
  const info = await get("/api/positions", query, signal);
  controls(...controlsOf(state, scheme, choice, info));
  screen.formula.replaceChildren(...formulas(info.formula));
  screen.note.textContent = `${info.length} positions shown, ${info.trained} trained. ${info.note}`;
  await showTables(info, state, signal);
}

function build() {
  const moved = (key) => (row, column) => {
    change({ [key]: `${row},${column}` }, { replace: true, quiet: true });
    if (key === "at") showFrom();
    if (key === "cell") showWaves(column);
  };
  screen = {
    formula: element("p", { class: "formula" }),
    insight: element("p", { class: "insight" }),
    note: element("p", { class: "note", role: "status" }),
    table: new HeatMap({ move: moved("cell"), square: true, tallest: TALLEST }),
    cosines: new HeatMap({ move: moved("at"), square: true, tallest: TALLEST }),
    grid: new HeatMap({ square: true }),
    dials: new Dials(),
    waves: new Chart({ name: "waves", title: "Single channels over the positions", across: "position" }),
    distance: new Chart({ name: "distance", title: "Over the distance", across: "distance" }),
    steps: STEPS.map(() => new HeatMap()),
    figures: element("div", { class: "charts loose pairs" }),
    skew: element("div", { class: "charts" }),
  };
  // On stage in the order of the page: first the matrix, or its dials.
  for (const figure of [screen.table, screen.cosines, screen.grid, screen.dials, screen.waves, screen.distance]) figure.root.dataset.stage = "Positions";
  return [html`<div class="scheme">${screen.formula}${screen.note}</div>`, screen.insight, screen.figures];
}

function controlsOf(state, scheme, choice, info) {
  const set = (key) => (value) => change({ [key]: value, cell: "", at: "" });
  const schemes = [...SCHEMES, ...(choice ? [["run", "from a run, trained"]] : [])];
  const number = (label, key, value, most) => labelled(label, numberInput(value, 1, most, set(key)));
  const made = [
    labelled("Scheme", select(schemes, scheme, (value) => change({ scheme: value, cell: "", at: "", head: "", stack: "", layer: "" }))),
    number("Positions", "length", state.length ?? 64, 512),
  ];
  if (scheme === "run") {
    made.push(choice);
    if (info && info.stacks.length > 1) made.push(labelled("Stack", select(info.stacks.map((one) => [one, one]), state.stack ?? info.stacks[0], set("stack"))));
    if (info && info.layers > 1) made.push(labelled("Layer", counted(info.layers, state.layer, set("layer"))));
    // Without an answer the layer or the stack may be the reason.
    if (!info && (state.layer || state.stack)) made.push(button("First layer", () => change({ layer: "", stack: "" })));
  } else {
    if (scheme !== "sinusoidal-2d") made.push(number("Training length", "trained", state.trained ?? 64, 512));
    made.push(number("Width d", "dim", state.dim ?? 64, 512));
    if (!WITHOUT_HEADS.includes(scheme)) made.push(number("Heads", "heads", state.heads ?? 4, 16));
    if (["sinusoidal", "rotary", "sinusoidal-2d"].includes(scheme)) {
      made.push(labelled("Base", numberInput(state.base ?? 10000, 1.5, 1e9, set("base"), "any")));
    }
    if (["t5", "relative"].includes(scheme)) {
      made.push(checkbox("causal", state.causal === "1", (on) => change({ causal: on ? "1" : "" })));
    }
  }
  if (info && !info.tensors.includes("scores")) {
    const plot = (event) => change({ channels: event.target.value.trim() });
    made.push(labelled("Channels to plot", html`<input .value=${state.channels ?? ""} placeholder="0 1 8" @change=${plot} />`));
  }
  if (info?.tensors.includes("scores")) made.push(labelled("Head", counted(info.heads, state.head, (head) => change({ head }))));
  return made;
}

const counted = (count, chosen, set) =>
  select(numbered(count), String(limited(chosen, count)), set);

async function showTables(info, state, signal) {
  const of = (name, which = {}) => tensor(info.trace, name, which, signal);
  const has = (name) => info.tensors.includes(name);
  const head = limited(state.head, info.heads);
  const name = ["added", "turned", "scores"].find(has);
  const figures = [];
  const waves = name === "added" || name === "turned";
  const middle = Math.floor(info.length / 2);
  [screen.channels, screen.turns] = [null, []];
  if (name) {
    const table = await of(name, name === "scores" ? { layer: head } : {});
    matrix(screen.table, `${info.scheme}-${name}`, `${info.scheme}: ${TABLES[name]}${name === "scores" ? `, head ${head + 1}${info.causal ? "; grey: later keys, −∞" : ""}` : ""}`, table, cellOf(state.cell), waves ? "channel" : "key");
    const hands = name === "turned" ? handsOf(table, info.layout) : [];
    if (hands.length) screen.dials.show(hands);
    screen.turns = hands;
    figures.push(hands.length ? screen.dials.root : screen.table.root);
    screen.channels = waves ? { table, state } : null;
    showWaves(state.cell ? cellOf(state.cell)[1] : -1);
    if (waves) figures.push(screen.waves.root);
  }
  screen.now = { info, cosines: has("cosines") ? await of("cosines") : null };
  if (screen.now.cosines) {
    matrix(screen.cosines, `${info.scheme}-cosines`, `${info.scheme}: cosine of two positions`, screen.now.cosines, cellOf(state.at, [middle, middle]), "position");
    figures.push(screen.cosines.root);
  }
  screen.insight.textContent = positionStory(info, screen.now.cosines?.values ?? null, { base: info.base, isTrained: state.scheme === "run", hands: screen.turns });
  // The picture of a grid shows most: it comes first.
  if (info.grid && screen.now.cosines) figures.splice(0, Infinity, screen.grid.root, screen.cosines.root, screen.table.root, screen.waves.root);
  else if (info.curves.length) figures.push(screen.distance.root);
  showFrom();
  if (has("skew.1")) {
    screen.skew.replaceChildren(...(await skew(info, head, of)));
    figures.push(screen.skew);
  }
  screen.figures.replaceChildren(...figures);
}

/** The curves of the channels, with the chosen one last and on top. @param {number} chosen −1 is none */
function showWaves(chosen) {
  if (!screen.channels) return;
  const { table, state } = screen.channels;
  screen.waves.show(series(table, state, chosen));
}

/** Cosines of the chosen position: over the distance, or over the grid of patches. */
function showFrom() {
  const { info, cosines } = screen.now;
  const [row] = screen.cosines.at ?? [0];
  if (info.grid && cosines) {
    const { columns, before } = info.grid;
    const wide = cosines.shape[1];
    const values = cosines.values.subarray(row * wide + before, (row + 1) * wide);
    const places = Array.from({ length: columns }, (_, at) => String(at));
    const [low, high] = ends(values);
    screen.grid.show({ name: "grid-cosines", title: `Cosine of position ${row} with every patch, row by column`, rows: places, columns: places, values, low, high, down: "row of patches", across: "column", says: (r, c, value) => `row ${r}, column ${c}: ${value}`.replace(/[“”]/g, "") }, place(row - before, columns));
    return;
  }
  if (!info.curves.length) return;
  const curves = [...info.curves];
  if (cosines) {
    const count = cosines.shape[0];
    const points = Array.from({ length: count }, (_, at) => [at - row, cosines.values[row * count + at]]);
    curves.push({ name: `from position ${row}`, points });
  }
  const all = ends(curves.flatMap((curve) => curve.points.map(([, y]) => y)));
  // A frame around the distances seen in training, if there are others.
  const [reach, xs] = [info.trained - 1, curves.flatMap((curve) => curve.points.map(([x]) => x))];
  const [from, to] = [Math.max(-reach, Math.min(...xs)), Math.min(reach, Math.max(...xs))];
  const frame = [[from, all[0]], [from, all[1]], [to, all[1]], [to, all[0]]];
  const marks = reach < info.length - 1 ? [{ name: "trained distances", style: "dashes", mute: true, points: frame }] : [];
  const what = cosines ? "cosine" : "added to the score";
  screen.distance.show([...curves, ...marks], { note: `${what[0].toUpperCase()}${what.slice(1)}; a distance is key − query.` });
}

/** Row and column of a patch; the first one for a position before the patches. */
const place = (patch, columns) => (patch < 0 ? [0, 0] : [Math.floor(patch / columns), patch % columns]);

async function skew(info, head, of) {
  const tables = await Promise.all(STEPS.map((_, at) => of(`skew.${at + 1}`, { layer: head })));
  const [low, high] = ends(tables.flatMap((table) => [...table.values]));
  return tables.map((table, at) => {
    const [rows, columns] = table.shape;
    const far = rows - 1;
    // Only in the last step a column is a key; before it is a distance or an index.
    const named = [(c) => shown(c - far), (c) => (c ? shown(c - 1 - far) : "0s"), (c) => `c${c + 1}`, (c) => `k${c}`][at];
    screen.steps[at].show({
      name: `skew-${at + 1}`,
      title: `Skew, head ${head + 1}, ${STEPS[at]}${at === 3 && info.causal ? "; values above the diagonal are masked" : ""}`,
      rows: Array.from({ length: rows }, (_, r) => `q${r}`),
      columns: Array.from({ length: columns }, (_, c) => named(c)),
      values: table.values,
      low,
      high,
    });
    return screen.steps[at].root;
  });
}

function matrix(map, name, title, table, at, across) {
  const [rows, columns] = table.shape;
  const count = (size) => Array.from({ length: size }, (_, number) => String(number));
  const [low, high] = ends(table.values);
  const says = (row, column, value) => `position ${row}, ${across} ${column}: ${value}`.replace(/[“”]/g, "");
  map.show({ name, title, rows: count(rows), columns: count(columns), values: table.values, low, high, says, down: across === "key" ? "query" : "position", across }, at);
}

/** The channels to plot: those of the state, or some from high to low frequency, and one that was added. */
function series({ shape, values }, state, added) {
  const [rows, columns] = shape;
  const listed = (state.channels ?? "").split(" ").filter((text) => text !== "").map(Number).filter((one) => one >= 0 && one < columns);
  const chosen = listed.length ? listed : [...new Set([0, 0.125, 0.25, 0.375, 0.5].map((at) => Math.floor(at * columns)))].slice(0, WAVES);
  const all = added < 0 ? chosen : [...chosen.filter((channel) => channel !== added), added];
  return all
    .filter((channel) => channel < columns)
    .map((channel) => {
      const points = Array.from({ length: rows }, (_, row) => /** @type {[number, number]} */ ([row, values[row * columns + channel]]));
      return { name: `channel ${channel}`, style: isRough(points) ? "dots" : "line", points };
    });
}

/** Whether lines between the points would show a curve that is not there. @param {[number, number][]} points */
function isRough(points) {
  const all = points.map(([, value]) => value);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  return all.some((value, at) => at > 0 && Math.abs(value - all[at - 1]) > ROUGH * (high - low));
}

function ends(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === -Infinity) continue; // masked
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low < 0 && high > 0) low = -(high = Math.max(-low, high)); // signed colours have zero in the middle
  return low < high ? [low, high] : [low - 1, high + 1];
}
