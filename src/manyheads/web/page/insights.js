// One plain sentence for a page, computed from the numbers that it shows.

import { shown } from "./dom.js";

const LEAST = 0.3; // a smaller weight aligns no words
const SPECIAL = /^<[^<>]*>$/; // </s>

/** The word that each token belongs to, −1 for none. @param {string[]} tokens @param {string[]} words */
export function wordsOf(tokens, words) {
  const text = tokens.join("");
  let [end, start] = [0, 0];
  const spans = words.map((word) => {
    const begin = Math.max(end, text.indexOf(word, end));
    return [begin, (end = begin + word.length)];
  });
  return tokens.map((token) => {
    const from = start;
    start += token.length;
    return spans.findIndex(([begin, last]) => begin < start && last > from);
  });
}

/**
 * Cells whose words the phrasebook aligns; none if the map has another translation.
 * @param {{rows: string[], columns: string[]}} pair @param {ArrayLike<number>} links of its words @returns {[number, number][]}
 */
export function goldCells(pair, links, rows, columns) {
  const [targets, sources] = [wordsOf(rows, pair.rows), wordsOf(columns, pair.columns)];
  if (pair.rows.some((_, word) => !targets.includes(word)) || squeezed(rows) !== squeezed(pair.rows)) return [];
  return targets.flatMap((target, row) =>
    sources.flatMap((source, column) => (target >= 0 && source >= 0 && links[target * pair.columns.length + source] ? [/** @type {[number, number]} */ ([row, column])] : [])),
  );
}

/** Letters and digits only, without special tokens. @param {string[]} texts */
const squeezed = (texts) => texts.filter((text) => !SPECIAL.test(text)).join("").replace(/[^\p{L}\p{N}]/gu, "");

/**
 * Where the word order changes: the two target words whose source words stand in the other order, farthest apart.
 * @param {ArrayLike<number>} values row after row @param {string[]} rows @param {string[]} columns
 */
export function orderOf(values, rows, columns) {
  const isWord = (text) => !SPECIAL.test(text) && /[\p{L}\p{N}]/u.test(text);
  const looks = rows.flatMap((text, row) => {
    const weights = Array.from({ length: columns.length }, (_, column) => values[row * columns.length + column]);
    const column = weights.indexOf(Math.max(...weights));
    return isWord(text) && isWord(columns[column]) && weights[column] > LEAST ? [{ text: text.trim(), column }] : [];
  });
  let best = { distance: 0, first: null, second: null };
  looks.forEach((first, at) => {
    for (const second of looks.slice(at + 1)) {
      const distance = first.column - second.column;
      if (distance > best.distance) best = { distance, first, second };
    }
  });
  if (looks.length < 2) return "This map does not align words: no word attends to one source word by more than 30 %.";
  if (!best.first) return "The word order stays: each word attends to the same or a later source word than the word before.";
  const of = ({ column }) => columns[column].trim();
  return `The word order changes: “${best.first.text}” comes before “${best.second.text}”, but attends to “${of(best.first)}”, which comes after “${of(best.second)}”.`;
}

/**
 * What the beam is good for, in one sentence: where greedy search drops the best result.
 * @param {{width: number, nodes: import("./tree.js").Candidate[], greedy: any[], beam: any[]}} result
 */
export function outcomeOf({ width, nodes, greedy: [greedy], beam: [best, second] }) {
  if (!best || !greedy) return "No hypothesis ended within the limit.";
  if (width === 1) return "With a beam of 1, this is greedy search: the best candidate of each step, nothing else.";
  if (best.text === greedy.text) {
    const close = second ? ` The runner-up, “${second.text}”, has score ${shown(second.score)} against ${shown(best.score)}.` : "";
    return `Greedy search finds the same text: at every step the best candidate led to the best result.${close}`;
  }
  if (best.score < greedy.score) return `Greedy search finds a better text here: score ${shown(greedy.score)}; the beam pruned it and ends with ${shown(best.score)}.`;
  let [step, rank, piece] = [0, 0, ""];
  for (let node = nodes.find((one) => one.place === 1); node; node = nodes[node.parent]) {
    const number = 1 + nodes.filter((one) => one.step === node.step && one.log_probability > node.log_probability).length;
    if (number > rank) [step, rank, piece] = [node.step, number, node.state === "ended" ? "the end" : `“${node.piece.trim()}”`];
  }
  return `Greedy search misses the best text: at step ${step} ${piece} is only candidate ${rank}. The beam keeps it and ends with score ${shown(best.score)} instead of ${shown(greedy.score)}.`;
}

/**
 * Where a training stands, from its losses.
 * @param {Record<string, any>[]} records of metrics.jsonl
 */
export function lossStory(records) {
  const measured = (split) => records.filter((record) => record.split === split && Number.isFinite(record.loss));
  const [train, valid] = [measured("train"), measured("valid")];
  if (!train.length) return "No measurements yet.";
  const number = (value) => shown(value, 2);
  const fell = `Training loss went from ${number(train[0].loss)} to ${number(train.at(-1).loss)}`;
  if (!valid.length) return `${fell}. No validation yet: it shows what carries over to texts that the model has not seen.`;
  const best = valid.reduce((least, record) => (record.loss < least.loss ? record : least));
  const last = valid.at(-1);
  const before = valid.at(-2);
  if (best !== last && last.loss > 1.02 * best.loss) {
    const falls = train.at(-1).loss < train.findLast((record) => record.step <= best.step)?.loss;
    return `Validation loss is lowest at step ${best.step} (${number(best.loss)}) and rises to ${number(last.loss)}${falls ? " while training loss still falls: the model overfits" : ""}.`;
  }
  const trend = !before ? "" : before.loss - last.loss > 0.02 * before.loss ? " and still falls" : " and has levelled off";
  const same = train.findLast((record) => record.step <= last.step) ?? train[0];
  const gap = last.loss > 1.1 * same.loss ? "it is above training loss, so some of what is learned does not carry over" : "what the model learns carries over to unseen examples";
  return `${fell}; validation loss is ${number(last.loss)}${trend}: ${gap}.`;
}

/** The number of patches that hold half of the attention. @param {ArrayLike<number>} weights */
export function halfOf(weights) {
  const sorted = Array.from(weights).sort((a, b) => b - a);
  const total = sorted.reduce((a, b) => a + b, 0);
  let [sum, count] = [0, 0];
  while (count < sorted.length && sum < total / 2) sum += sorted[count++];
  return count;
}

/**
 * What the model makes of a picture, and how narrowly the map on screen looks.
 * @param {{label: string, probability: number}[]} classes likeliest first @param {string|undefined} label the true class
 * @param {string} who looks @param {ArrayLike<number>} weights
 */
export function pictureStory(classes, label, who, weights) {
  const [best] = classes;
  const half = halfOf(weights);
  const look = `${who} puts half of its attention on ${half} of ${weights.length} patches.`;
  if (!best) return look;
  const judged = label === undefined ? "" : best.label === label ? ", which is right" : `, but it is “${label}”`;
  return `The model takes the picture for “${best.label}” (${shown(100 * best.probability, 2)} %)${judged}. ${look}`;
}

/**
 * The share of the attention to earlier events that stays in the voice of each event, on average.
 * @param {(event: number) => ArrayLike<number>} rowOf weights of an event: the beginning, then one for each event
 * @param {number} events @param {number} voices events of a time step
 */
export function ownVoice(rowOf, events, voices) {
  let [own, all] = [0, 0];
  for (let at = voices; at < events; at++) {
    const weights = rowOf(at);
    for (let key = 0; key < at; key++) {
      all += weights[key + 1];
      if (key % voices === at % voices) own += weights[key + 1];
    }
  }
  return own / (all || 1);
}

/**
 * What a head of a music model prefers: its own voice, or a distance back.
 * @param {string} who looks @param {ArrayLike<number>} distances mean weight by distance back, from 0
 * @param {number} voices events of a time step, 0 if events have no grid @param {number} own share of the own voice
 */
export function musicStory(who, distances, voices, own) {
  const percent = (share) => `${Math.round(100 * share)} %`;
  if (voices) {
    const usual = 1 / voices;
    const means = own > 1.15 * usual ? "it follows the melody of each voice" : own < 0.87 * usual ? "it looks at the other voices, the harmony" : "it does not prefer a voice";
    return `${who} puts ${percent(own)} of its attention to earlier events on the same voice (${percent(usual)} by chance): ${means}.`;
  }
  const back = Array.from(distances).reduce((best, weight, at) => (at > 0 && (best === 0 || weight > distances[best]) ? at : best), 0);
  return back ? `${who} looks most at the event ${back} back: ${shown(100 * distances[back], 2)} % of its weight on average.` : `${who} has no earlier event to look at.`;
}

/**
 * The share of positions that are most similar to a neighbour, by the cosine.
 * @param {ArrayLike<number>} dots of all pairs, row after row @param {number} count
 * @param {{columns: number, before: number}|null} [grid] of patches after `before` other positions: neighbours are those around a patch
 */
export function nearShare(dots, count, grid = null) {
  const first = grid ? grid.before : 0;
  const placeOf = (at) => (grid ? [Math.floor((at - first) / grid.columns), (at - first) % grid.columns] : [at, 0]);
  const similarity = (row, other) => dots[row * count + other] / Math.sqrt(Math.abs(dots[other * count + other]) || 1);
  let near = 0;
  for (let row = first; row < count; row++) {
    let best = -1;
    for (let other = first; other < count; other++) {
      if (other !== row && (best < 0 || similarity(row, other) > similarity(row, best))) best = other;
    }
    const [one, two] = [placeOf(row), placeOf(best)];
    near += Number(Math.abs(one[0] - two[0]) <= 1 && Math.abs(one[1] - two[1]) <= 1);
  }
  return near / (count - first);
}

/**
 * What a position scheme tells a model.
 * @param {{scheme: string, length: number, dim: number, grid: {columns: number, before: number}|null, curves: {name: string, points: [number, number][]}[]}} info
 * @param {ArrayLike<number>|null} dots of all pairs of positions @param {{base: number, isTrained: boolean}} how
 */
export function positionStory({ scheme, length, dim, grid, curves }, dots, { base, isTrained }) {
  if (dots) {
    const share = nearShare(dots, length, grid);
    const near = `${share === 1 ? `Every ${grid ? "patch" : "position"} is` : `${Math.round(100 * share)} % of the ${grid ? "patches" : "positions"} are`} most similar to ${grid ? "one around it" : "a neighbour"}`;
    if (scheme === "sinusoidal" && !isTrained) return `The first channel repeats every ${shown(2 * Math.PI, 1)} positions, the last every ${Math.round(2 * Math.PI * base ** ((dim - 2) / dim)).toLocaleString("en")}, like the digits of a number. ${near}.`;
    if (scheme === "learned" && !isTrained) return `${near}: before training, the table does not know which positions are close.`;
    return `${near}: ${share > 0.5 ? "the table tells near from far" : "the table hardly tells near from far"}.`;
  }
  const spans = curves.map(({ name, points }) => {
    const values = points.map(([, value]) => value);
    return { name, span: Math.max(...values) - Math.min(...values) };
  });
  if (spans.length > 1) {
    const [most, least] = [spans.reduce((a, b) => (b.span > a.span ? b : a)), spans.reduce((a, b) => (b.span < a.span ? b : a))];
    const known = scheme === "alibi" || isTrained ? "" : " At initialisation their shape is random.";
    return `Distance changes the score by up to ${shown(most.span, 2)} in ${most.name} and ${shown(least.span, 2)} in ${least.name}: ${most.span > 2 * least.span ? `${least.name} can look farther away` : "all heads can look about equally far"}.${known}`;
  }
  return "";
}

/**
 * Whether a masked language model puts back the words under its masks.
 * @param {{top: {piece: string, probability: number}[], hidden: {piece: string|null, rank: number|null}|null}[]} masks
 * @param {string[]} words under the masks, empty for a mask that hides none
 */
export function fillStory(masks, words) {
  const first = (mask) => `“${mask.top[0].piece.replace(/^##/, "").trim()}” (${shown(100 * mask.top[0].probability, 1)} %)`;
  const hiding = words.flatMap((word, at) => (word && masks[at].hidden ? [{ word, mask: masks[at], rank: masks[at].hidden.rank }] : []));
  if (!hiding.length) return `The model would write ${masks.map(first).join(" and ")}.`;
  const right = hiding.filter(({ rank }) => rank === 1).length;
  const each = hiding.map(({ word, mask, rank }) => {
    if (rank === 1) return `“${word}” is its first choice (${shown(100 * mask.top[0].probability, 2)} %)`;
    return rank === null ? `“${word}” is not among its 1,000 best tokens, which begin with ${first(mask)}` : `“${word}” is number ${rank}, after ${first(mask)}`;
  });
  return `The model puts back ${right} of ${hiding.length} word${hiding.length > 1 ? "s" : ""}: ${each.join("; ")}.`;
}
