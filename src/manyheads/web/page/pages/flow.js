// Flow: the forward pass of a text as boxes, each with its numbers, formula and code.

import { matrices, post } from "../api.js";
import { element, labelled, select, tabs } from "../dom.js";
import { cellOf, chooseFirst, fitting, insteadOf, limited, nothingFits } from "../fitting.js";
import { FlowBoxes } from "../flowboxes.js";
import { TextAndTarget } from "../form.js";
import { OpenBox } from "../openbox.js";
import { lead, runChoice } from "../runs.js";
import { change, read } from "../state.js";

export const keys = [
  ["← →", "previous box, next box (in a map: next cell)"],
  ["↑ ↓", "previous layer, next layer (in a map: next cell)"],
  ["[ ]", "previous head, next head"],
  ["m", "scores without mask, with mask"],
];

/** The elements of the page, reused while text and box change. */
let screen = null;

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("flow", state.run, signal);
  if (!run) return nothingFits(place, "flow");
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? run.example;
  screen.form.show(text, state.target);
  chooseFirst(screen.controls, runs, run, state.run, "flow");
  const flow = await post("/api/flow", { run: run.name, text, target: state.target || undefined }, signal);
  screen.form.hasTarget(flow.output.kind === "text");
  const boxes = flow.columns.flatMap((column) => column.boxes.map((box) => ({ ...box, column })));
  const most = (what) => Math.max(...flow.columns.map((column) => column[what]));
  const sizes = { boxes, layers: most("layers"), heads: most("heads") };
  const now = { flow, ...sizes, ...chosen(sizes, state) };
  screen.now = now;
  screen.controls.replaceChildren(runChoice(runs, run.name), ...controls(now), insteadOf(state.run, run, "flow"));
  const numbers = await numbersOf(now, signal);
  open(now, state, numbers);
  screen.boxes.show(boxes, now.box.name, { ...now, run: run.name }, numbers);
}

function build(place) {
  const made = {
    form: new TextAndTarget(),
    controls: element("div", { class: "controls" }),
    boxes: new FlowBoxes({ choose: (name) => change({ box: name, cell: "" }) }),
    opened: new OpenBox({ move: (row, column) => change({ cell: `${row},${column}` }, { replace: true, quiet: true }) }),
    cached: { key: "", numbers: new Map() },
  };
  made.root = element(
    "div",
    {},
    element("h1", {}, "Flow"),
    lead("Every intermediate tensor of the forward pass. Open a box for its numbers, formula and code."),
    made.controls,
    made.form.root,
    element("div", { class: "flow" }, made.boxes.root, made.opened.root),
  );
  place.replaceChildren(made.root);
  return made;
}

function controls({ layers, heads, layer, head, box }) {
  const numbered = (count) => Array.from({ length: count }, (_, at) => [String(at), String(at + 1)]);
  const masked = box.name.replace(/\.(scores|masked)$/, "");
  const mask = tabs("Mask", [["scores", "Without mask"], ["masked", "With mask"]], box.name.split(".").at(-1), (what) => change({ box: `${masked}.${what}` }));
  return [
    labelled("Layer", select(numbered(layers), String(layer), (value) => change({ layer: value }))),
    labelled("Head", select(numbered(heads), String(head), (value) => change({ head: value }))),
    masked === box.name ? null : mask,
  ].filter(Boolean);
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

/** Shows the chosen box in detail. */
function open({ flow, box, layer, head }, state, numbers) {
  const labels = (source, count) => {
    const known = Array.isArray(source) ? source : (flow.columns.find((column) => column.name === source)?.tokens ?? []);
    return known.length === count ? known : Array.from({ length: count }, (_, number) => String(number + 1));
  };
  screen.opened.show(box, { layer, head, cell: cellOf(state.cell), labels }, { numbers: numbers.get(box.name), beside: numbers.get(besideOf(box.name)) }, flow.code);
}

/** Logits and probabilities are shown together. */
function besideOf(name) {
  const [place, what] = [name.slice(0, name.lastIndexOf(".")), name.split(".").at(-1)];
  const other = { logits: "distribution", distribution: "logits" }[what];
  return other && `${place}.${other}`;
}

/** The box, layer and head in the state. */
function chosen({ boxes, layers, heads }, state) {
  const box = boxes.find((one) => one.name === state.box) ?? boxes[0];
  return { box, layer: limited(state.layer, layers), head: limited(state.head, heads) };
}

/** Steps from the state in the URL: a key may be pressed again before the page is redrawn. */
function shortcuts(event) {
  const elsewhere = event.target.closest("input, textarea, select, pre, dialog, header");
  if (elsewhere || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!screen?.root.isConnected || !screen.now) return;
  const { boxes, layers, heads } = screen.now;
  const { box, layer, head } = chosen(screen.now, read());
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const way = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const side = { "[": -1, "]": 1 }[event.key];
  const next = step && boxes[boxes.indexOf(box) + step];
  if (step || way) event.preventDefault();
  if (next) change({ box: next.name, cell: "" }, { replace: true });
  if (way && layer + way >= 0 && layer + way < layers) change({ layer: String(layer + way) }, { replace: true });
  if (side && head + side >= 0 && head + side < heads) change({ head: String(head + side) }, { replace: true });
  if (event.key === "m" && /\.(scores|masked)$/.test(box.name)) {
    const what = box.name.endsWith(".scores") ? "masked" : "scores";
    change({ box: box.name.replace(/[^.]*$/, what) }, { replace: true });
  }
}

document.addEventListener("keydown", shortcuts);
