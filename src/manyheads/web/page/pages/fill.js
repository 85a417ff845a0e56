// Fill: mask words with a click, and see the predictions of a masked language model.

import { post } from "../api.js";
import { Bars } from "../bars.js";
import { element, html, labelled, render, shown } from "../dom.js";
import { fill, textArea } from "../form.js";
import { fillStory } from "../insights.js";
import { definePage } from "../page.js";
import { change, read } from "../state.js";

const MASK = "[MASK]";
const EXAMPLE = "The small dog sees the tree.";

let screen = null;

/** A text as words and separators: [[text, whether it is a word], …]. */
export function parts(text) {
  const pattern = /\[MASK\]|<mask>|[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*|\s+|[^\s]/giu;
  return (text.match(pattern) ?? []).map((part) => [part, /^\[MASK\]$|^<mask>$|[\p{L}\p{N}]/iu.test(part)]);
}

export const { draw, keys } = definePage({
  name: "fill",
  about: "A masked language model guesses hidden words from both sides. Click a word to hide it.",
  keys: [
    ["← →", "among the words: previous word, next word"],
    ["Enter", "on a word: mask or unmask it; a typed mask is replaced by the most probable word"],
  ],
  build,
  show,
});

async function show({ run, state }, signal) {
  const text = state.text ?? EXAMPLE;
  fill(screen.text, text);
  const words = parts(text);
  const places = words.flatMap(([, isWord], at) => (isWord ? [at] : []));
  const written = places.filter((at) => /^(\[mask\]|<mask>)$/i.test(words[at][0]));
  // Default: the masks typed in the text, or two words, as subject and object of the example.
  const two = written.length ? [] : [places[Math.floor(places.length / 3)], places.at(-1)];
  const chosen = state.mask === undefined ? two : state.mask.split(" ").map((number) => places[Number(number)]);
  const masked = new Set([...written, ...chosen.filter((at) => at !== undefined)]);
  screen.best = new Map(); // the most probable word of each mask, by position
  render(buttons(words, places, masked, written), screen.words);
  if (!masked.size) {
    screen.insight.textContent = "Hide a word, and the model guesses it from the words before and after it.";
    screen.sentence.textContent = "Click a word to mask it.";
    screen.results.replaceChildren();
    return;
  }
  const maskedText = words.map(([part], at) => (masked.has(at) ? MASK : part)).join("");
  const inOrder = [...masked].sort((one, other) => one - other);
  const hidden = inOrder.map((at) => (written.includes(at) ? "" : words[at][0]));
  const prediction = await post("/api/fill", { run: run.name, text: maskedText, hidden }, signal);
  screen.best = new Map(inOrder.map((at, number) => [at, prediction.masks[number].top[0].piece]));
  render(buttons(words, places, masked, written), screen.words);
  screen.insight.textContent = fillStory(prediction.masks, hidden);
  screen.sentence.textContent = prediction.text;
  screen.results.replaceChildren(...prediction.masks.map((one, at) => result(one, at, hidden[at])));
}

function build() {
  screen = {
    text: textArea("text", { mask: "" }),
    words: element("div", { class: "words", role: "group", "aria-label": "Words: Enter masks one", onkeydown: walk }),
    insight: element("p", { class: "insight" }),
    sentence: element("p", { class: "sentence", role: "status" }),
    results: element("div", { class: "charts loose" }),
  };
  return [labelled("Text", screen.text, "wide"), screen.insight, html`<div class="panel masking">${screen.words}${screen.sentence}</div>`, screen.results];
}

function buttons(words, places, masked, written) {
  return words.map(([part, isWord], at) => {
    if (!isWord) return part.trim() ? html`<span class="sign">${part}</span>` : null;
    const number = places.indexOf(at);
    const isMasked = masked.has(at);
    const guess = screen.best.get(at)?.trim().replace(/^##/, "") ?? "…";
    const label = `${part}, word ${number + 1}${isMasked ? `: ${MASK} ${guess}` : ""}`;
    const act = () => (written.includes(at) ? replace(at, words, masked) : toggle(number, places, masked));
    return html`<button type="button" id="word-${number}" aria-pressed=${isMasked} aria-label=${label} @click=${act}>${isMasked ? [`${MASK} `, html`<small>${guess}</small>`] : part}</button>`;
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
  const bars = new Bars({ name: `fill-${at + 1}`, relative: true });
  const { hidden } = prediction;
  const rows = prediction.top.map(({ piece, probability }) => ({ label: piece, values: [probability], strong: piece === hidden?.piece }));
  // The hidden word has a row, even if it is not among the most probable ones.
  if (hidden && hidden.rank > rows.length) rows.push({ label: hidden.piece, values: [hidden.probability], strong: true });
  let note = "The longest bar is the most probable word.";
  if (word && hidden) {
    note += hidden.rank === null
      ? ` “${word}” is not a single token among the top 1,000.`
      : ` “${word}” has rank ${hidden.rank}, with probability ${shown(hidden.probability)}.`;
  }
  bars.show(rows, `Mask ${at + 1}${word ? `, for “${word}”` : ""}`, note);
  return bars.root;
}
