// Fill: words of a text masked by a click, and what a masked language model puts in their place.

import { get, post } from "../api.js";
import { Bars } from "../bars.js";
import { afterPause, element, labelled, shown } from "../dom.js";
import { fitting, fittingRun, insteadOf, nothingFits } from "../fitting.js";
import { lead, runChoice, usableRuns } from "../runs.js";
import { change, read } from "../state.js";

const MASK = "[MASK]";
const NEEDED = "masked language models";
const EXAMPLE = "The small dog sees the tree.";

export const keys = [
  ["← →", "among the words: the word beside"],
  ["Enter", "on a word: mask it, or bring it back"],
];

let screen = null;

/** A text as words and what is between them: [[what, whether it is a word], …]. */
export function parts(text) {
  const pattern = /\[MASK\]|<mask>|[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*|\s+|[^\s]/giu;
  return (text.match(pattern) ?? []).map((part) => [part, /^\[MASK\]$|^<mask>$|[\p{L}\p{N}]/iu.test(part)]);
}

export async function draw(place, state, signal) {
  const { runs: names } = await get("/api/fill", {}, signal);
  const runs = fitting(await usableRuns(signal), { names });
  const run = fittingRun(runs, state.run);
  if (!run) return nothingFits(place, "Fill", NEEDED, "manyheads train bert-mini data.folder=corpus --out runs/mini");
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const text = state.text ?? EXAMPLE;
  if (document.activeElement !== screen.text) screen.text.value = text;
  screen.controls.replaceChildren(runChoice(runs, run.name));
  screen.instead.replaceChildren(insteadOf(state.run, run, NEEDED) ?? "");
  const words = parts(text);
  const places = words.flatMap(([, isWord], at) => (isWord ? [at] : []));
  const written = places.filter((at) => /^(\[mask\]|<mask>)$/i.test(words[at][0]));
  // Unless the address says which words are masked, those that are written so, or the middle one.
  const middle = written.length || !places.length ? [] : [places[Math.floor(places.length / 2)]];
  const chosen = state.mask === undefined ? middle : state.mask.split(" ").map((number) => places[Number(number)]);
  const masked = new Set([...written, ...chosen.filter((at) => at !== undefined)]);
  screen.words.replaceChildren(...buttons(words, places, masked));
  if (!masked.size) {
    screen.sentence.textContent = "Click a word to mask it.";
    screen.results.replaceChildren();
    return;
  }
  const asked = words.map(([part], at) => (masked.has(at) ? MASK : part)).join("");
  const hidden = [...masked].sort((one, other) => one - other).map((at) => (written.includes(at) ? "" : words[at][0]));
  const found = await post("/api/fill", { run: run.name, text: asked, hidden }, signal);
  screen.sentence.textContent = found.text;
  screen.results.replaceChildren(...found.masks.map((one, at) => result(one, at, hidden[at])));
}

function build(place) {
  const typed = afterPause((text) => change({ text, mask: "" }, { replace: true }));
  const made = {
    text: element("textarea", { rows: "2", oninput: (event) => typed(event.target.value), spellcheck: "false" }),
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
    lead("Click words to mask them. A mask is one token: a word that the vocabulary has in pieces cannot come back whole."),
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

function buttons(words, places, masked) {
  return words.flatMap(([part, isWord], at) => {
    if (!isWord) return part.trim() ? [element("span", { class: "sign" }, part)] : [];
    const number = places.indexOf(at);
    const isMasked = masked.has(at);
    const label = `${part}, word ${number + 1}${isMasked ? ", masked" : ""}`;
    const made = element("button", { type: "button", id: `word-${number}`, "aria-pressed": String(isMasked), "aria-label": label }, isMasked ? MASK : part);
    made.addEventListener("click", () => toggle(number, places, masked));
    return [made];
  });
}

function toggle(number, places, masked) {
  const numbers = new Set([...masked].map((at) => places.indexOf(at)));
  if (!numbers.delete(number)) numbers.add(number);
  // A text without a mask is a state too: "none" names no word.
  change({ mask: [...numbers].sort((one, other) => one - other).join(" ") || "none", text: read().text ?? EXAMPLE });
}

function walk(event) {
  const all = [...screen.words.querySelectorAll("button")];
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const to = all[all.indexOf(document.activeElement) + by];
  if (!to) return;
  event.preventDefault();
  to.focus();
}

function result(found, at, word) {
  const bars = new Bars({ name: `fill-${at + 1}`, title: `Mask ${at + 1}${word ? `, for “${word}”` : ""}` });
  const rows = found.top.map(({ piece, probability }) => ({ label: piece, value: probability, strong: piece.trim() === word }));
  let note = "";
  if (word && found.hidden) {
    note = found.hidden.rank === null
      ? `“${word}” is not one token among the first thousand.`
      : `“${word}” is number ${found.hidden.rank}, with probability ${shown(found.hidden.probability)}.`;
  }
  bars.show(rows, { note });
  return bars.root;
}
