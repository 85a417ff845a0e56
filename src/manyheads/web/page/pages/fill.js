// Fill: mask words with a click, and see the predictions of a masked language model.

import { post, tensor } from "../api.js";
import { Bars } from "../bars.js";
import { element, html, labelled, percent, render } from "../dom.js";
import { fill, textArea } from "../form.js";
import { attentionStory, bareWord, fillStory, mostHelped, wordsOf } from "../insights.js";
import { definePage } from "../page.js";
import { change, read } from "../state.js";

const MASK = "[MASK]";
const EXAMPLE = "Must Sophie rest near the forest in autumn?";
const MOST_MASKS = 16; // the server refuses more

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
  // The example has a mask; a typed text has only those that are typed in it.
  const numbers = state.mask ?? (state.text === undefined ? await telling(run, words, places, signal) : "");
  const chosen = numbers.split(" ").filter(Boolean).map((number) => places[Number(number)]);
  const masked = new Set([...written, ...chosen.filter((at) => at !== undefined)]);
  screen.best = new Map(); // the most probable word of each mask, by position
  render(buttons(words, places, masked, written), screen.words);
  if (!masked.size) {
    screen.insight.textContent = "Hide a word, and the model guesses it from the words before and after it.";
    screen.sentence.textContent = "Click a word to mask it.";
    screen.note.textContent = "";
    screen.results.replaceChildren();
    return;
  }
  const maskedText = words.map(([part], at) => (masked.has(at) ? MASK : part)).join("");
  const inOrder = [...masked].sort((one, other) => one - other);
  const hidden = inOrder.map((at) => (written.includes(at) ? "" : words[at][0]));
  const prediction = await post("/api/fill", { run: run.name, text: maskedText, hidden }, signal);
  const before = inOrder.length === 1 ? await fromBefore(run, words, places, inOrder[0], hidden[0], signal) : null;
  const weights = await attended(run, maskedText, words.map(([part, isWord], at) => (masked.has(at) ? MASK : isWord ? part : "")), inOrder[0], signal);
  screen.best = new Map(inOrder.map((at, number) => [at, prediction.masks[number].top[0].piece]));
  render(buttons(words, places, masked, written, weights), screen.words);
  screen.note.textContent = weights ? `Below each word: attention of ${inOrder.length > 1 ? "the first mask" : "the mask"} to it, mean over all heads of all layers; the longest bar is ${percent(Math.max(...weights.values()))}.` : "";
  screen.insight.textContent = `${fillStory(prediction.masks, hidden, before)}${weights && inOrder.length === 1 ? attentionStory(weights, inOrder[0]) : ""}`;
  screen.sentence.textContent = prediction.text;
  const full = Math.max(...[...prediction.masks, ...(before ? [before] : [])].map(({ top }) => top[0].probability)); // one scale, so that figures compare
  const results = prediction.masks.map((one, at) => result(one, hidden[at], { full, name: `fill-${at + 1}`, title: `Mask ${at + 1}${hidden[at] ? `, for “${hidden[at]}”` : ""}` }));
  if (before) results.push(result(before, hidden[0], { full, name: "fill-before", title: "The same mask, with the words after it masked too" }));
  screen.results.replaceChildren(...results);
}

/** The word, by number, whose probability from both sides differs most from that of the words before it only. @returns {Promise<string>} */
async function telling(run, words, places, signal) {
  if (screen.telling?.run === run.name) return screen.telling.number;
  const all = [];
  for (const at of places) {
    const before = await fromBefore(run, words, places, at, words[at][0], signal);
    const text = words.map(([part], one) => (one === at ? MASK : part)).join("");
    all.push([before && (await post("/api/fill", { run: run.name, text, hidden: [words[at][0]] }, signal)).masks[0], before]);
  }
  screen.telling = { run: run.name, number: String(mostHelped(all)) };
  return screen.telling.number;
}

/** The prediction for a mask from the words before it only: those after it are masked too. Null without such words. */
async function fromBefore(run, words, places, mask, word, signal) {
  const after = places.filter((at) => at > mask);
  if (!after.length || after.length >= MOST_MASKS) return null;
  const text = words.map(([part], at) => (at === mask || after.includes(at) ? MASK : part)).join("");
  return (await post("/api/fill", { run: run.name, text, hidden: [word] }, signal)).masks[0];
}

/**
 * The attention of a mask to each other word, mean over all heads of all layers; null if the tokens do not spell the words.
 * @param {string} text with its masks @param {string[]} words of the text, empty for parts that are none @param {number} mask its part @returns {Promise<Map<number, number>|null>} by part
 */
async function attended(run, text, words, mask, signal) {
  const { trace, maps: [{ name, columns }] } = await post("/api/trace", { run: run.name, text }, signal);
  const { shape: [layers, heads, rows, across], values } = await tensor(trace, `${name}.weights`, {}, signal);
  const isMask = (token) => /^(\[mask\]|<mask>)$/i.test(token.trim());
  const tokens = columns.map((token) => (isMask(token) ? MASK : token.replace(/^##/, "").toLowerCase()));
  const ofToken = wordsOf(tokens, words.map((word) => (word === MASK ? MASK : word.toLowerCase())));
  const row = ofToken.indexOf(mask);
  const weights = new Map();
  ofToken.forEach((word, column) => {
    if (row < 0 || !words[word] || words[word] === MASK) return;
    let sum = 0;
    for (let map = 0; map < layers * heads; map++) sum += values[(map * rows + row) * across + column];
    weights.set(word, (weights.get(word) ?? 0) + sum / (layers * heads));
  });
  return weights.size ? weights : null;
}

function build() {
  screen = {
    text: textArea("text", { mask: "" }),
    note: element("p", { class: "note" }),
    words: element("div", { class: "words", role: "group", "aria-label": "Words: Enter masks one", onkeydown: walk }),
    insight: element("p", { class: "insight" }),
    sentence: element("p", { class: "sentence", role: "status" }),
    results: element("div", { class: "charts loose two" }),
  };
  return [labelled("Text", screen.text, "wide"), screen.insight, html`<div class="panel masking">${screen.words}${screen.note}${screen.sentence}</div>`, screen.results];
}

function buttons(words, places, masked, written, weights = null) {
  const most = weights ? Math.max(...weights.values()) : 1;
  return words.map(([part, isWord], at) => {
    if (!isWord) return part.trim() ? html`<span class="sign">${part}</span>` : null;
    const number = places.indexOf(at);
    const isMasked = masked.has(at);
    const guess = bareWord(screen.best.get(at) ?? "…");
    const weight = weights?.get(at);
    const label = weight === undefined ? `${part}, word ${number + 1}${isMasked ? `: ${MASK} ${guess}` : ""}` : `${part} ${percent(weight)} of the attention, word ${number + 1}`;
    const act = () => (written.includes(at) ? replace(at, words, masked) : toggle(number, places, masked));
    return html`<button type="button" id="word-${number}" aria-pressed=${isMasked} aria-label=${label} @click=${act} .style=${`--share: ${(weight ?? 0) / most}`}>${isMasked ? [`${MASK} `, html`<small>${guess}</small>`] : [`${part} `, weight === undefined ? "" : html`<span class="id">${percent(weight)}</span>`]}</button>`;
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

/** The most probable words for a mask, as bars. */
function result(prediction, word, { name, title, full }) {
  const bars = new Bars({ name });
  const { hidden } = prediction;
  const row = (label, value, strong) => ({ label: bareWord(label), values: [value], strong });
  const rows = prediction.top.map(({ piece, probability }) => row(piece, probability, piece === hidden?.piece));
  // The hidden word has a row, even if it is not among the most probable ones.
  if (hidden && hidden.rank > rows.length) rows.push(row(hidden.piece, hidden.probability, true));
  const rank = hidden?.rank === null ? "is not a single token among the top 1,000" : `has rank ${hidden?.rank}`;
  bars.show(rows, title, word && hidden ? `“${word}” ${rank}.` : "", full);
  return bars.root;
}
