// What a map of the forward pass shows, in one sentence computed from its numbers.

import { percent, plain, shown } from "./dom.js";
import { farthest, tellMove } from "./watchstory.js";

/**
 * Where the chosen query attends: the word that has moved, or its greatest weight.
 * @param {Matrix} matrix of weights @param {number} row
 */
export function weightStory({ rows, columns, values }, row) {
  const value = (query, key) => values[query * columns.length + key];
  const moved = rows.join(" ") === columns.join(" ") ? null : farthest(rows, columns, value); // in self-attention no word order changes
  if (moved && (moved.row === row || moved.before?.[0] === row)) return tellMove(moved, rows, columns);
  const [best] = greatest(values, row, columns.length);
  return `${said(rows[row])} attends most to ${said(columns[best])}: ${percent(value(row, best))} of its weight.`;
}

const tokens = (count) => `${count} token${count > 1 ? "s" : ""}`;
const said = (label) => `“${plain(label)}”`;
/** The columns of a row, the greatest value first. @param {ArrayLike<number>} values @returns {number[]} */
const greatest = (values, row, width) => Array.from({ length: width }, (_, at) => at).sort((one, other) => values[row * width + other] - values[row * width + one]);

/** The length of each row. @param {ArrayLike<number>} values @param {number} count of rows @returns {number[]} */
export function lengthsOf(values, count) {
  const width = values.length / count;
  return Array.from({ length: count }, (_, row) => Math.hypot(...Array.prototype.slice.call(values, row * width, (row + 1) * width)));
}

/** The softmax of some scores. @param {number[]} scores */
export function softmax(scores) {
  const most = Math.max(...scores);
  const shares = scores.map((score) => Math.exp(score - most));
  const total = shares.reduce((sum, share) => sum + share, 0);
  return shares.map((share) => share / total);
}

/** @type {Record<string, string>} */
const SOURCES = {
  self: "Queries, keys and values come from the same tokens.",
  masked: "Queries, keys and values come from the same tokens; the mask hides the later ones.",
  cross: "Queries come from the decoder, keys and values from the encoder’s output.",
  all: "Each part reads the residual stream x and adds its output to it.",
};

/**
 * What the diagram shows on stage, and what the model predicts.
 * @param {string} part a key of SOURCES @param {Next|null} next
 */
export function diagramStory(part, next) {
  return next ? `${SOURCES[part]} ${next.isMasked ? "At" : "After"} ${said(next.label)} the model predicts ${said(next.words[0])}: ${percent(next.chances[0])}.` : SOURCES[part];
}

/** @typedef {{label: string, words: string[], chances: number[], isMasked: boolean}} Next the most probable tokens at a position; `isMasked`: those of a masked language model */
/** @typedef {{rows: string[], columns: string[], values: ArrayLike<number>}} Matrix */

const WHY = " So one pass trains all positions, and none can copy its answer.";

/**
 * What a map of the forward pass shows; empty where no sentence is computed.
 * @param {{name: string, words: string[][]}} box @param {Matrix} matrix its numbers
 * @param {number[]} at the chosen cell @param {{weights?: Matrix, scaled?: number[][]|null, kind: string, of: (what: string) => ArrayLike<number>|undefined}} near
 * the weights of the same attention; the softmax of a row with √c and without; the kind of the part, and its other boxes
 */
export function boxStory({ name, words }, matrix, [row, column], near) {
  const { rows, columns, values } = matrix;
  const value = (query, key) => values[query * columns.length + key];
  const what = name.slice(name.lastIndexOf(".") + 1);
  const at = said(rows[row]);
  const scores = what === "masked" ? values : near.of("masked");
  const hidden = scores ? columns.filter((_, key) => scores[row * columns.length + key] === -Infinity).length : 0;
  if (what === "weights") return weightStory(matrix, row) + (hidden ? ` ${tokens(hidden)} that it must not see ${hidden > 1 ? "get" : "gets"} 0.` : "");
  if (what === "mask") return `${at} sees ${columns.filter((_, key) => value(row, key) === 0).length} of ${columns.length} tokens; the scores of the others become −∞.`;
  if (what === "masked" && value(row, column) === -Infinity) return `${at} must not see ${said(columns[column])}, which comes later: the score is −∞, the weight 0.${WHY}`;
  if (what === "masked" && hidden) return `${tokens(hidden)} that ${at} must not see ${hidden > 1 ? "have" : "has"} a score of −∞ (grey): the softmax gives ${hidden > 1 ? "them" : "it"} the weight 0.${WHY}`;
  if (what === "scores" || what === "masked") {
    const [best] = greatest(values, row, columns.length);
    const without = near.scaled ? ` Without √c its weight would be ${percent(near.scaled[1][best])}, not ${percent(near.scaled[0][best])}.` : "";
    const isSeen = what === "scores" && scores?.[row * columns.length + row + 1] === -Infinity && row + 1 < columns.length;
    if (isSeen) return `Before the mask ${at} also sees ${said(columns[row + 1])}, the token that it must predict: it could copy its answer.`;
    return `The query of ${at} fits the key of ${said(columns[best])} best: ${shown(value(row, best), 2)}.${without}`;
  }
  if (near.weights && /^([qkv]|mix)$/.test(what)) return partStory(what, row, near.weights);
  if (what === "hidden" && Array.prototype.every.call(values, (one) => one >= 0)) {
    const active = columns.filter((_, unit) => value(row, unit) > 0).length;
    return `Of ${columns.length} hidden units, ${active} are active at ${at}; the others are 0.`;
  }
  if (what === "distribution" && columns.length > 1) {
    const lead = (position) => value(position, 0) - value(position, 1);
    const least = rows.reduce((most, _, position) => (lead(position) < lead(most) ? position : most), 0);
    const [first, second] = words[least];
    return `Least certain after ${said(rows[least])}: ${said(first)} has ${percent(value(least, 0))}, ${said(second)} ${percent(value(least, 1))}.`;
  }
  if (what === "states" && rows.length > 1) return likestStory(rows, values);
  return /^(embedding|position|segment|input|norm|sum|output)$/.test(what) ? lengthStory(what, rows, values, row, near) : "";
}

/** What the weights say about a query, a key, a value or a mix. @param {string} what @param {number} row @param {Matrix} weights */
function partStory(what, row, { rows, columns, values }) {
  const value = (query, key) => values[query * columns.length + key];
  if (what === "q" || what === "mix") {
    const [first, second] = greatest(values, row, columns.length);
    if (what === "q") return `The query of ${said(rows[row])} fits the key of ${said(columns[first])} best: that token gets ${percent(value(row, first))} of its weight.`;
    const also = second === undefined ? "" : `, ${percent(value(row, second))} of that of ${said(columns[second])}`;
    return `The mix of ${said(rows[row])} holds ${percent(value(row, first))} of the value of ${said(columns[first])}${also}.`;
  }
  const best = rows.reduce((most, _, query) => (value(query, row) > value(most, row) ? query : most), 0);
  const share = percent(value(best, row));
  if (what === "k") return `The key of ${said(columns[row])} fits the query of ${said(rows[best])} best: it gets ${share} of that query’s weight.`;
  return `The value of ${said(columns[row])} goes most to ${said(rows[best])}, with a weight of ${share}.`;
}

/** The two tokens with the most similar vectors. @param {string[]} rows @param {ArrayLike<number>} values */
function likestStory(rows, values) {
  const [lengths, width] = [lengthsOf(values, rows.length), values.length / rows.length];
  let best = { cosine: -2, first: 0, second: 1 };
  for (let first = 0; first < rows.length; first++) {
    for (let second = first + 1; second < rows.length; second++) {
      let dot = 0;
      for (let at = 0; at < width; at++) dot += values[first * width + at] * values[second * width + at];
      const cosine = dot / (lengths[first] * lengths[second] || 1);
      if (cosine > best.cosine) best = { cosine, first, second };
    }
  }
  return `${said(rows[best.first])} and ${said(rows[best.second])} have the most similar vectors: their cosine is ${shown(best.cosine, 1)}.`;
}

const CHANGES = { self: "Self-attention", cross: "Cross-attention", feedforward: "The feed-forward part" };

/** How long the vectors are, and how much a part changes them. */
function lengthStory(what, rows, values, row, near) {
  const lengths = lengthsOf(values, rows.length);
  const output = what === "sum" ? near.of("output") : undefined;
  if (output) {
    const added = lengthsOf(output, rows.length);
    const before = lengthsOf(Array.prototype.map.call(values, (value, at) => value - output[at]), rows.length);
    const most = added.reduce((best, length, at) => (length / before[at] > added[best] / before[best] ? at : best), 0);
    const now = shown(lengths[most], 1);
    return `${CHANGES[near.kind]} changes ${said(rows[most])} most: it adds a vector of length ${shown(added[most], 1)}, and ‖x‖ goes from ${shown(before[most], 1)} to ${now}.`;
  }
  const [embedding, position] = what === "input" ? ["embedding", "position"].map((part) => near.of(part)) : [];
  if (embedding && position) return `At ${said(rows[row])} the embedding has length ${shown(lengthsOf(embedding, rows.length)[row], 1)}, the position ${shown(lengthsOf(position, rows.length)[row], 1)}.`;
  const [short, long] = [Math.min(...lengths), Math.max(...lengths)];
  if (long - short < 0.02 * long) return `All vectors have length ${shown(long, 1)}.`;
  return `The longest vector is that of ${said(rows[lengths.indexOf(long)])} (${shown(long, 1)}), the shortest that of ${said(rows[lengths.indexOf(short)])} (${shown(short, 1)}).`;
}
