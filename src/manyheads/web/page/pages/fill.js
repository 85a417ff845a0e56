// Fill: mask words with a click, and see the predictions of a masked language model.

import { post } from "../api.js";
import { Bars } from "../bars.js";
import { element, labelled, shown } from "../dom.js";
import { fitting, insteadOf, nothingFits } from "../fitting.js";
import { fill, textArea } from "../form.js";
import { lead, runChoice } from "../runs.js";
import { change, read } from "../state.js";

const MASK = "[MASK]";
const EXAMPLE = "The small dog sees the tree.";

export const keys = [
  ["← →", "among the words: previous word, next word"],
  ["Enter", "on a word: mask or unmask it; a typed mask is replaced by the most probable word"],
];

let screen = null;

/** A text as words and separators: [[text, whether it is a word], …]. */
export function parts(text) {
  const pattern = /\[MASK\]|<mask>|[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*|\s+|[^\s]/giu;
  return (text.match(pattern) ?? []).map((part) => [part, /^\[MASK\]$|^<mask>$|[\p{L}\p{N}]/iu.test(part)]);
}

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("fill", state.run, signal);
  if (!run) return nothingFits(place, "fill");
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? EXAMPLE;
  fill(screen.text, text);
  screen.controls.replaceChildren(runChoice(runs, run.name));
  screen.instead.replaceChildren(insteadOf(state.run, run, "fill"));
  const words = parts(text);
  const places = words.flatMap(([, isWord], at) => (isWord ? [at] : []));
  const written = places.filter((at) => /^(\[mask\]|<mask>)$/i.test(words[at][0]));
  // Default: the masks typed in the text, or the middle word.
  const middle = written.length || !places.length ? [] : [places[Math.floor(places.length / 2)]];
  const chosen = state.mask === undefined ? middle : state.mask.split(" ").map((number) => places[Number(number)]);
  const masked = new Set([...written, ...chosen.filter((at) => at !== undefined)]);
  screen.words.replaceChildren(...buttons(words, places, masked, written));
  screen.best = new Map(); // the most probable word of each mask, by position
  if (!masked.size) {
    screen.sentence.textContent = "Click a word to mask it.";
    screen.results.replaceChildren();
    return;
  }
  const maskedText = words.map(([part], at) => (masked.has(at) ? MASK : part)).join("");
  const inOrder = [...masked].sort((one, other) => one - other);
  const hidden = inOrder.map((at) => (written.includes(at) ? "" : words[at][0]));
  const prediction = await post("/api/fill", { run: run.name, text: maskedText, hidden }, signal);
  screen.best = new Map(inOrder.map((at, number) => [at, prediction.masks[number].top[0].piece]));
  screen.sentence.textContent = prediction.text;
  screen.results.replaceChildren(...prediction.masks.map((one, at) => result(one, at, hidden[at])));
}

function build(place) {
  const made = {
    text: textArea("text", { mask: "" }),
    controls: element("div", { class: "controls" }),
    instead: element("div"),
    words: element("div", { class: "words", role: "group", "aria-label": "Words: Enter masks one", onkeydown: walk }),
    sentence: element("p", { class: "sentence", role: "status" }),
    results: element("div", { class: "charts loose" }),
  };
  made.root = element(
    "div",
    {},
    element("h1", {}, "Fill"),
    lead("Click words to mask them. A mask stands for one token, so words of several subwords cannot be predicted."),
    made.controls,
    made.instead,
    labelled("Text", made.text, "wide"),
    made.words,
    made.sentence,
    made.results,
  );
  place.replaceChildren(made.root);
  return made;
}

function buttons(words, places, masked, written) {
  return words.flatMap(([part, isWord], at) => {
    if (!isWord) return part.trim() ? [element("span", { class: "sign" }, part)] : [];
    const number = places.indexOf(at);
    const isMasked = masked.has(at);
    const label = `${part}, word ${number + 1}${isMasked ? ", masked" : ""}`;
    const made = element("button", { type: "button", id: `word-${number}`, "aria-pressed": String(isMasked), "aria-label": label }, isMasked ? MASK : part);
    made.addEventListener("click", () => (written.includes(at) ? replace(at, words, masked) : toggle(number, places, masked)));
    return [made];
  });
}

function toggle(number, places, masked) {
  const numbers = new Set([...masked].map((at) => places.indexOf(at)));
  if (!numbers.delete(number)) numbers.add(number);
  change({ mask: namesOf(numbers), text: read().text ?? EXAMPLE });
}

/** "none" is the state without masks. */
const namesOf = (numbers) => [...numbers].sort((one, other) => one - other).join(" ") || "none";

/** Replaces a typed mask by the most probable word, and renumbers the masks after it. */
function replace(at, words, masked) {
  const piece = screen.best.get(at)?.trim().replace(/^##/, "");
  if (!piece) return;
  const made = words.map(([part], one) => (one === at ? piece : part));
  const wordsBefore = (one) => parts(made.slice(0, one).join("")).filter(([, isWord]) => isWord).length;
  change({ mask: namesOf([...masked].filter((one) => one !== at).map(wordsBefore)), text: made.join("") });
}

function walk(event) {
  const all = [...screen.words.querySelectorAll("button")];
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const to = all[all.indexOf(document.activeElement) + by];
  if (!to) return;
  event.preventDefault();
  to.focus();
}

function result(prediction, at, word) {
  const bars = new Bars({ name: `fill-${at + 1}`, title: `Mask ${at + 1}${word ? `, for “${word}”` : ""}` });
  const rows = prediction.top.map(({ piece, probability }) => ({ label: piece, value: probability, strong: piece === prediction.hidden?.piece }));
  let note = "";
  if (word && prediction.hidden) {
    note = prediction.hidden.rank === null
      ? `“${word}” is not a single token among the top 1,000.`
      : `“${word}” has rank ${prediction.hidden.rank}, with probability ${shown(prediction.hidden.probability)}.`;
  }
  bars.show(rows, { note });
  return bars.root;
}
