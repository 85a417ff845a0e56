// Flow: the forward pass of a text as boxes, each with its numbers, formula and code.

import { get, matrices, post, tensor } from "../api.js";
import { html, labelled, numbered, select, tabs } from "../dom.js";
import { describe } from "../exports.js";
import { softmax } from "../flowstory.js";
import { cellOf, coverages, firstCell, greatestHead, isPair, limited, pairAt, tellingCell } from "../fitting.js";
import { FlowBoxes } from "../flowboxes.js";
import { TextAndTarget } from "../form.js";
import { OpenBox } from "../openbox.js";
import { definePage } from "../page.js";
import { change, read } from "../state.js";

const ZOOMS = [
  ["model", "Model"],
  ["layer", "Layer"],
  ["head", "Head"],
];

/** The elements of the page, reused while text and box change. */
let screen = null;

export const { draw, keys } = definePage({
  name: "flow",
  about: "Follow the residual stream from the tokens to the next token. Open a box for its numbers; hover a cell for its sum.",
  keys: [
    ["← →", "previous box, next box (in a map: next cell)"],
    ["↑ ↓", "previous layer, next layer (in a map: next cell)"],
    ["[ ]", "previous head, next head"],
    ["+ −", "zoom in, zoom out: model, layer, head"],
    ["m", "scores without mask, with mask"],
  ],
  build,
  show,
  press: shortcuts,
});

async function show({ run, state, text, controls }, signal) {
  screen.form.show(text, state.target);
  const flow = await post("/api/flow", { run: run.name, text, target: state.target || undefined }, signal);
  screen.form.hasTarget(flow.output.kind === "text");
  const boxes = flow.columns.flatMap((column) => column.boxes.map((box) => Object.assign(box, { column })));
  const most = (what) => Math.max(...flow.columns.map((column) => column[what]));
  const heads = await headsOf({ flow, boxes }, signal);
  const sizes = { boxes, layers: most("layers"), heads: most("heads"), first: firstHead(flow, state, heads) };
  screen.given = state;
  const now = { flow, ...sizes, ...chosen(sizes, state) };
  screen.now = now;
  describe({ run: run.name, text, target: state.target, box: now.box.name, layer: now.layer + 1, head: now.head + 1 });
  controls(...controlsOf(now));
  const numbers = await numbersOf(now, signal);
  open(now, state, numbers);
  const next = nextTokens(now, screen.opened.map.at, numbers);
  screen.boxes.show(boxes, { ...now, labels: labelsOf(flow), next }, numbers, heads);
}

function build() {
  screen = {
    form: new TextAndTarget(),
    boxes: new FlowBoxes({ choose: (name, changes = {}) => openBox(name, changes) }),
    opened: new OpenBox({
      move: (row, column) => {
        const { now } = screen;
        now.pair = now.pair && pairAt(now.box.name, [row, column], now.pair);
        change({ cell: `${row},${column}`, pair: now.pair ? now.pair.join(",") : "" }, { replace: true, quiet: true });
        screen.boxes.predict(nextTokens(now, [row, column], screen.cached.numbers));
      },
      explain,
    }),
    cached: { key: "", numbers: new Map() },
    heads: { key: "", maps: new Map() },
  };
  return [screen.form.root, html`<div class="flow">${screen.boxes.root}${screen.opened.root}</div>`];
}

/** Opens a box. A box inside a layer needs an open layer. */
function openBox(name, changes = {}, how = {}) {
  const inside = screen.now.boxes.find((one) => one.name === name)?.stage === "layer";
  const opened = inside && read().zoom === "model" ? { zoom: "" } : {};
  const { layer, head, box, pair } = screen.now;
  const kept = pair && placeOf(name) === placeOf(box.name) ? pair.join(",") : "";
  change({ box: name, cell: "", pair: kept, layer: String(layer), head: String(head), ...opened, ...changes }, how);
}

/** The part of the model that a box is in: `decoder.cross`. */
const placeOf = (name) => name.slice(0, name.lastIndexOf("."));

/** The terms of a cell; requests of cells that the pointer has left are dropped. */
async function explain(row, column) {
  const { flow, box, layer, head } = screen.now;
  screen.explaining?.abort();
  screen.explaining = new AbortController();
  return get(`/api/flow/${flow.trace}/cell`, { box: box.name, layer, head, row, column }, screen.explaining.signal);
}

/** The weights of all heads, small, by name; cached for the same text. */
async function headsOf({ flow, boxes }, signal) {
  if (screen.heads.key !== flow.trace) {
    const names = boxes.filter((box) => box.name.endsWith(".weights")).map((box) => box.name);
    const maps = await Promise.all(names.map((name) => tensor(flow.trace, name, { dtype: "u8", side: 32 }, signal)));
    screen.heads = { key: flow.trace, maps: new Map(names.map((name, at) => [name, maps[at]])) };
  }
  return screen.heads.maps;
}

function controlsOf({ boxes, layers, heads, layer, head, box, zoom }) {
  const masked = box.name.replace(/\.(scores|masked)$/, "");
  const mask = tabs("Mask", [["scores", "Without mask"], ["masked", "With mask"]], box.name.split(".").at(-1), (what) => change({ box: `${masked}.${what}` }));
  return [
    tabs("Zoom", ZOOMS, zoom, (value) => change({ zoom: value === "layer" ? "" : value })),
    labelled("Layer", select(numbered(layers), String(layer), (value) => change({ layer: value, ...(zoom === "model" ? { zoom: "" } : {}) }))),
    labelled("Head", select(numbered(heads), String(head), (value) => change({ head: value }))),
    masked === box.name || !boxes.some((one) => one.name === `${masked}.masked`) ? null : mask,
  ];
}

/** The numbers of all boxes in the chosen layer and head, by name; cached. */
async function numbersOf({ flow, boxes, layer, head }, signal) {
  const key = `${flow.trace} ${layer} ${head}`;
  if (screen.cached.key !== key) {
    const values = await matrices(`/api/flow/${flow.trace}/boxes`, { layer, head }, signal);
    const names = boxes.filter((box) => box.stage !== "tokens").map((box) => box.name);
    screen.cached = { key, numbers: new Map(names.map((name, at) => [name, values[at]])) };
  }
  return screen.cached.numbers;
}

/** The layer and head to begin with: those of the head of cross-attention that covers the source best. */
function firstHead(flow, state, heads) {
  const cross = heads.get("decoder.cross.weights");
  const source = flow.columns[0].tokens;
  return state.box === undefined && cross?.shape[3] === source.length ? greatestHead(coverages(cross, source)) : [0, 0];
}

/** Shows the chosen box in detail. The boxes of an attention show the same query and key, at first where word orders differ. */
function open(now, state, numbers) {
  const { flow, boxes, box, layer, head } = now;
  const labels = labelsOf(flow);
  const weights = boxes.find((one) => one.name === `${placeOf(box.name)}.weights`);
  now.pair = undefined;
  if (weights) {
    const { values, shape } = numbers.get(weights.name);
    const chosenPair = isPair(box.name) ? (state.cell ?? state.pair) : state.pair;
    const pair = cellOf(chosenPair, tellingCell(labels(weights.rows, shape[0]), labels(weights.columns, shape[1]), values));
    now.pair = pair.map((one, side) => Math.min(one, shape[side] - 1));
  }
  // The tour shows scores without the scale, and then with it in the same colours.
  const products = state.scale && box.name.endsWith(".scores") ? dotProducts(now, numbers) : null;
  const isRaw = state.scale === "no";
  const shownNumbers = (isRaw && products) || numbers.get(box.name);
  const cell = cellOf(state.cell, firstCell(box.name, shownNumbers, now.pair));
  const how = { layer, head, cell, labels, isRaw: shownNumbers !== numbers.get(box.name), softmaxes: isRaw ? null : softmaxesOf(now, numbers), scale: products?.values ?? null };
  const near = {
    weights: weights && { rows: labels(weights.rows, numbers.get(weights.name).shape[0]), columns: labels(weights.columns, numbers.get(weights.name).shape[1]), values: numbers.get(weights.name).values },
    kind: box.name.split(".")[1],
    of: (what) => numbers.get(`${placeOf(box.name)}.${what}`)?.values,
  };
  screen.opened.show(box, how, { numbers: shownNumbers, beside: numbers.get(besideOf(box.name)), near }, flow.code);
}

/**
 * The most probable tokens at the chosen position of the last stack; where another stack is open, at the position that is least certain.
 * @param {{flow: any, boxes: any, box: any, pair?: number[]}} now @param {number[]} at the chosen cell @param {Map<string, any>} numbers
 * @returns {import("../flowstory.js").Next|null} null without a distribution
 */
function nextTokens({ flow, boxes, box, pair }, [row], numbers) {
  const distribution = boxes.find((part) => part.name.endsWith(".distribution"));
  if (!distribution) return null;
  const { shape: [, count], values } = numbers.get(distribution.name);
  const [column, isMasked] = [distribution.column, distribution.column.name === "encoder"];
  const at = box.rows === column.name || box === distribution ? row : box.column === column && pair ? pair[0] : firstCell(distribution.name, numbers.get(distribution.name))[0];
  const label = labelsOf(flow)(distribution.rows, distribution.words.length)[at];
  return { label, words: distribution.words[at], chances: [...values.subarray(at * count, (at + 1) * count)], isMasked };
}

/** Q Kᵀ, the scores before the scale; null if the score is no dot product, or if heads share keys. */
function dotProducts({ boxes, box }, numbers) {
  const [q, k] = ["q", "k"].map((what) => boxes.find((one) => one.name === `${placeOf(box.name)}.${what}`));
  if (!q || !k || q.shape[0] !== k.shape[0] || !box.formula.includes("√")) return null;
  const [{ values: queries, shape: [rows, channels] }, { values: known, shape: [columns] }] = [numbers.get(q.name), numbers.get(k.name)];
  const dot = (row, column) => {
    let sum = 0;
    for (let at = 0; at < channels; at++) sum += queries[row * channels + at] * known[column * channels + at];
    return sum;
  };
  const values = Float32Array.from({ length: rows * columns }, (_, cell) => dot(Math.floor(cell / columns), cell % columns));
  return { shape: [rows, columns], values };
}

/** The softmax of a row of scores with and without √c; null where a mask or a bias comes between, or where there is no √c. */
function softmaxesOf({ boxes, box }, numbers) {
  const isLast = box.name.endsWith(".scores") && box.formula.includes("√c") && !boxes.some((one) => one.name === `${placeOf(box.name)}.masked`);
  if (!isLast) return null;
  const [{ shape, values }, channels] = [numbers.get(box.name), numbers.get(`${placeOf(box.name)}.q`).shape[1]];
  return (row) => {
    const scores = Array.from(values.subarray(row * shape[1], (row + 1) * shape[1]));
    return [softmax(scores), softmax(scores.map((score) => score * Math.sqrt(channels)))];
  };
}

/** Labels of rows and columns: the tokens of a stack, given labels, or numbers. */
const labelsOf = (flow) => (source, count) => {
  const known = Array.isArray(source) ? source : (flow.columns.find((column) => column.name === source)?.tokens ?? []);
  return known.length === count ? known : Array.from({ length: count }, (_, number) => String(number + 1));
};

/** Logits and probabilities are shown together. */
function besideOf(name) {
  const [place, what] = [name.slice(0, name.lastIndexOf(".")), name.split(".").at(-1)];
  const other = { logits: "distribution", distribution: "logits" }[what];
  return other && `${place}.${other}`;
}

/** The box, layer and head in the state. The first box is the weights of cross-attention, where word orders meet. */
function chosen({ boxes, layers, heads, first }, state) {
  const named = (ending) => boxes.find((one) => one.name.endsWith(ending));
  const box = boxes.find((one) => one.name === state.box) ?? named("cross.weights") ?? named(".weights") ?? boxes[0];
  const zoom = ["model", "head"].includes(state.zoom) ? state.zoom : "layer";
  return { box, zoom, layer: limited(state.layer, layers, first[0]), head: limited(state.head, heads, first[1]) };
}

/** Steps from the state of the URL, merged over that of a step of the tour: a key may be pressed again before the page is redrawn. */
function shortcuts(event) {
  if (!screen.now) return;
  const { boxes, layers, heads } = screen.now;
  const { box, layer, head } = chosen(screen.now, { ...screen.given, ...read() });
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const way = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const side = { "[": -1, "]": 1 }[event.key];
  const next = step && boxes[boxes.indexOf(box) + step];
  if (step || way) event.preventDefault();
  if (next) openBox(next.name, {}, { replace: true });
  if (way && layer + way >= 0 && layer + way < layers) change({ layer: String(layer + way) }, { replace: true });
  if (side && head + side >= 0 && head + side < heads) change({ head: String(head + side) }, { replace: true });
  const nearer = { "+": 1, "=": 1, "-": -1 }[event.key];
  const to = nearer && ZOOMS[ZOOMS.findIndex(([name]) => name === (read().zoom || "layer")) + nearer];
  if (to) change({ zoom: to[0] === "layer" ? "" : to[0] }, { replace: true });
  if (event.key === "m" && /\.(scores|masked)$/.test(box.name)) {
    const what = box.name.endsWith(".scores") ? "masked" : "scores";
    const name = box.name.replace(/[^.]*$/, what);
    if (boxes.some((one) => one.name === name)) change({ box: name }, { replace: true });
  }
}
