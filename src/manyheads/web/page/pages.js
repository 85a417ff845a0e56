// The pages in the order of the menu. Each is a module in pages/ with the same name, which exports
//   async function draw(place, state, signal): fills the element `place` from the state
//   next (if it has one): (by) moves to the next state in stage mode, where the page has no arrow keys
//   keys (if it has any): rows of [key, what it does] for the help
// `signal` is aborted when another page or state is drawn: timers and listeners end with it.

import { recording } from "./recording.js";

/** Translators. The kind of an imported model is unknown until it is loaded. */
const TRANSLATORS = ["seq2seq", "decoder-only-seq2seq", "rnn", "gnmt", "convs2s", "bytenet", "imported"];
const TEXTS = [...TRANSLATORS, "gpt", "bert"];

/**
 * @typedef {object} Page
 * @property {string} name of its module and in its address @property {string} title
 * @property {string} group in the menu
 * @property {string[]} [kinds] of models that it supports, in addition to the runs that list it in `can`;
 * all kinds if omitted
 * @property {string} [needed] what these models are called @property {string} [command] trains one of them
 * @property {boolean} [everywhere] in the menu of every run, because it needs none
 * @property {Record<string, string>} [opens] the state with which a run opens it
 */

/** @type {Page[]} */
const ALL = [
  { name: "runs", group: "Start", title: "Runs" },
  { name: "tour", group: "Learn", title: "Tour", kinds: ["seq2seq"], needed: "Transformers that translate", command: "manyheads demo" },
  { name: "watch", group: "Learn", title: "Watch", kinds: [...TRANSLATORS.filter((kind) => kind !== "imported"), "gpt", "vit"], needed: "runs that translate, write or name pictures", command: "manyheads demo" },
  { name: "quiz", group: "Learn", title: "Quiz", kinds: [], everywhere: true },
  { name: "flow", group: "Look inside", title: "Flow", kinds: ["seq2seq", "decoder-only-seq2seq", "gpt", "bert"], needed: "Transformers that read text", command: "manyheads demo" },
  { name: "attention", group: "Look inside", title: "Attention", kinds: TEXTS, needed: "models that read text", command: "manyheads demo" },
  { name: "lens", group: "Look inside", title: "Lens", kinds: ["gpt", "seq2seq", "decoder-only-seq2seq", "imported"], needed: "language models and decoders", command: "manyheads train language data.folder=books --out runs/books" },
  { name: "positions", group: "Look inside", title: "Positions", kinds: ["seq2seq", "decoder-only-seq2seq", "gpt", "bert", "vit"], needed: "Transformers", command: "manyheads demo", opens: { scheme: "run" } },
  { name: "tokens", group: "Look inside", title: "Tokens", kinds: TEXTS, needed: "runs that read text", command: "manyheads demo" },
  { name: "translate", group: "Use", title: "Translate", kinds: TRANSLATORS, needed: "runs that translate", command: "manyheads demo" },
  { name: "decode", group: "Use", title: "Decode", kinds: [...TRANSLATORS, "gpt"], needed: "runs that generate text", command: "manyheads demo" },
  { name: "fill", group: "Use", title: "Fill", kinds: ["imported"], needed: "masked language models", command: "manyheads train bert-mini data.folder=corpus --out runs/mini" },
  { name: "image", group: "Use", title: "Image", kinds: ["vit", "imported"], needed: "image models", command: "manyheads train images data.folder=mnist --out runs/mnist" },
  { name: "music", group: "Use", title: "Music", kinds: [], needed: "music models", command: "manyheads train jsb-chorales data.folder=jsb_chorales --out runs/chorales" },
  { name: "train", group: "Training", title: "Train" },
];

/** A static copy has some of them. */
export const PAGES = ALL.filter((page) => !recording || recording.pages.includes(page.name));

/** @param {string} name @returns {Page|undefined} */
export const pageOf = (name) => PAGES.find((page) => page.name === name);

/** Whether a page can show a run. @param {Page} page @param {import("./runs.js").Run} run */
export function fits({ name, kinds }, run) {
  return !kinds || kinds.includes(run.kind) || (run.can ?? []).includes(name);
}

/** The values of the state that another run, or another step of the tour, keeps. */
export const LASTING_KEYS = ["run", "text", "stage", "theme", "palette"];
const SHARED_KEYS = [...LASTING_KEYS, "target", "map", "layer", "head"];

/** The values of the state that a link to a page keeps; the steps of the tour have their own maps. @param {string} name @param {Record<string, string>} state */
export function sharedState(name, state) {
  const keys = name === "tour" ? LASTING_KEYS : SHARED_KEYS;
  return Object.fromEntries(keys.filter((key) => key in state).map((key) => [key, state[key]]));
}
