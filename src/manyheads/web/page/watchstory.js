// What Watch says about a moment: a caption in words, the milestones of the training, and the pace at
// which it plays. A saved HTML file contains this module.

import { alignmentOf, kindOf, lossOf, nearest, weightsOf } from "./watchparts.js";

const CLEAR = 0.4; // weight from which a token counts as attending to a word
const MOVED = 1.5; // positions from which a word has moved
const EVEN = 0.35; // share of the playing time that is the same between all probes

/** Two lists of words with what differs marked: [word, whether it is in both] of the second. */
export function compared(before, after) {
  // The longest common subsequence, from its table of lengths.
  const length = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
  for (let i = before.length - 1; i >= 0; i--) {
    for (let j = after.length - 1; j >= 0; j--) {
      length[i][j] =
        before[i] === after[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const words = [];
  for (let i = 0, j = 0; j < after.length; ) {
    if (i < before.length && before[i] === after[j]) {
      words.push([after[j], true]);
      i++, j++;
    } else if (i < before.length && length[i + 1][j] >= length[i][j + 1]) i++;
    else words.push([after[j++], false]);
  }
  return words;
}

const isEnd = (token) => /^[<[].+[>\]]$/.test(token);
export const isWord = (token) => /\p{L}/u.test(token) && !isEnd(token);

/** The tokens that a model wrote without the end token, each with whether the reference has it. @returns {[string, boolean][]} */
export function checked(story, at, sentence) {
  const written = story.probes[at].sentences[sentence].tokens.filter((token) => !isEnd(token));
  return compared(story.sentences[sentence].target_tokens, written);
}

/** How many tokens of the reference the model writes, and how many there are. @returns {[number, number]} */
export function rightOf(story, at, sentence) {
  const count = story.sentences[sentence].target_tokens.filter((token) => !isEnd(token)).length;
  return [checked(story, at, sentence).filter(([, same]) => same).length, count];
}

/** Whether the output is the reference. */
function isRight(story, at, sentence) {
  const [right, count] = rightOf(story, at, sentence);
  return right === count && checked(story, at, sentence).length === count;
}

/**
 * The word that has moved farthest: a row that clearly attends to a column far from its own position, words both.
 * A word that ends its clause is preferred. Null if word orders are the same.
 * @param {string[]} rows @param {string[]} columns tokens @param {(row: number, column: number) => number} weight
 * @returns {{row: number, column: number, last: boolean, distance: number, before: [number, number][]}|null} `last`: it ends its
 * clause; `before`: the words directly before it that stand behind a later word of the source, each with its column
 */
export function farthest(rows, columns, weight) {
  let best = null;
  for (let row = 0; row < rows.length; row++) {
    for (let column = 0; isWord(rows[row]) && column < columns.length; column++) {
      if (!isWord(columns[column]) || weight(row, column) < CLEAR) continue;
      const distance = Math.abs(row - (column * rows.length) / columns.length);
      const last = row + 1 === rows.length || !isWord(rows[row + 1]);
      // Words that end a clause come first: they are verbs that another language has earlier.
      if (distance <= MOVED || (best?.last && !last) || (best?.last === last && best.distance >= distance)) continue;
      best = { row, column, last, distance, before: [] };
    }
  }
  if (best?.last) best.before = tailOf(rows, columns, weight, best.row);
  return best;
}

/** The words of a clause before its last one that attend to an earlier column than a word before them. @returns {[number, number][]} */
function tailOf(rows, columns, weight, last) {
  const clear = (row) => columns.findIndex((token, column) => isWord(token) && weight(row, column) >= CLEAR);
  let first = last;
  while (first > 0 && isWord(rows[first - 1])) first--;
  const found = [];
  for (let row = last - 1; row > first; row--) {
    const column = clear(row);
    const jumps = rows.slice(first, row).some((_, at) => clear(first + at) > column);
    if (column < 0 || !jumps) break;
    found.unshift([row, column]);
  }
  return found;
}

/** The result of `farthest` in words. */
export function tellMove({ row, column, last, before }, rows, columns) {
  const [word, origin] = [rows[row].trim(), columns[column].trim()];
  if (before.length) {
    const list = (tokens) => tokens.map((token) => `“${token.trim()}”`).join(", ").replace(/, ([^,]*)$/, " and $1");
    return `${list([...before.map(([at]) => rows[at]), word])} come last in their clause: they attend to ${list([...before.map(([, at]) => columns[at]), origin])}.`;
  }
  return last ? `“${word}” comes last in its clause: it attends to “${origin}”.` : `“${word}”, token ${row + 1}, attends to “${origin}”, token ${column + 1}.`;
}

/** The word of a translation that has moved farthest, by the mean of the heads that are shown. */
export function moved(story, moment) {
  if (kindOf(story) !== "translation") return null;
  const { source_tokens: source, target_tokens: target } = story.sentences[moment.sentence];
  const [, count] = nearest(story, moment).sentences[moment.sentence].shape;
  const shown = Array.from({ length: count }, (_, head) => head).filter((head) => !moment.hidden.has(head));
  const weights = shown.map((head) => weightsOf(story, moment, head));
  return farthest(target, source, (row, column) => weights.reduce((sum, weight) => sum + weight(row, column), 0) / (weights.length || 1));
}

/** The caption of a moment, computed from the probe. @returns {string} */
export function captionOf(story, moment) {
  const kind = kindOf(story);
  const at = Math.round(moment.at);
  if (kind === "images") return pictureCaption(story, at, moment.sentence);
  const loss = lossOf(story.probes[at]);
  if (kind === "language") return `Perplexity ${Math.exp(loss).toFixed(1)}: as unsure as a choice among ${Math.max(1, Math.round(Math.exp(loss)))} equally likely tokens.`;
  const [right, count] = rightOf(story, at, moment.sentence);
  if (!checked(story, at, moment.sentence).length) return `It writes nothing yet.${bestHead(story, moment)}`;
  if (!isRight(story, at, moment.sentence)) return `${right} of ${count} tokens are right.${bestHead(story, moment)}`;
  return `All ${count} tokens are right. ${movedCaption(story, moment)}`;
}

function movedCaption(story, moment) {
  const word = moved(story, moment);
  const { source_tokens: source, target_tokens: target } = story.sentences[moment.sentence];
  return word ? tellMove(word, target, source) : "Each word attends to the word that it translates.";
}

/** The head that aligns best, if there are gold alignments. */
function bestHead(story, { at, layer, sentence }) {
  const [, count] = story.probes[0].sentences[sentence].shape;
  const shares = Array.from({ length: count }, (_, head) => alignmentOf(story, at, layer, head));
  if (shares[0] === null) return "";
  const head = shares.indexOf(Math.max(...shares));
  return ` Head ${layer + 1}·${head + 1} aligns best: ${percent(shares[head])} %.`;
}

const percent = (share) => Math.round(100 * Math.max(0, share));

function pictureCaption(story, at, sentence) {
  const [name, share] = story.probes[at].sentences[sentence].probabilities[0];
  const { label } = story.sentences[sentence];
  return name === label ? `Right: class ${label} has ${percent(share)} percent.` : `Wrong: it takes class ${label} for ${name}, with ${percent(share)} percent.`;
}

/**
 * Positions among the probes from which on something holds to the end of the training.
 * @returns {{at: number, text: string}[]}
 */
export function milestones(story, sentence) {
  const kind = kindOf(story);
  const last = story.probes.length - 1;
  /** @type {[string, (at: number) => boolean][]} */
  let known = [];
  if (kind === "images") known = [["recognised", (at) => story.probes[at].sentences[sentence].probabilities[0][0] === story.sentences[sentence].label]];
  if (kind === "translation") {
    known = [
      ["first right word", (at) => checked(story, at, sentence).some(([token, same]) => same && isWord(token))],
      ["half right", (at) => 2 * rightOf(story, at, sentence)[0] >= rightOf(story, at, sentence)[1]],
      ["all right", (at) => isRight(story, at, sentence)],
    ];
  }
  const reached = known.flatMap(([text, holds]) => {
    let at = last + 1;
    while (at > 0 && holds(at - 1)) at--;
    return at > 0 && at <= last ? [{ at, text }] : [];
  });
  return reached.filter(({ at }, number) => at !== reached[number + 1]?.at);
}

/**
 * The position among the probes after a share of the playing time. It is slow where the loss changes.
 * @param {import("./watchparts.js").Story} story @returns {(share: number) => number}
 */
export function pace(story) {
  const losses = story.probes.map(lossOf);
  const changes = losses.slice(1).map((loss, at) => Math.abs(loss - losses[at]));
  const total = changes.reduce((a, b) => a + b, 0) || 1;
  const ends = [0];
  for (const change of changes) ends.push(ends[ends.length - 1] + EVEN / changes.length + ((1 - EVEN) * change) / total);
  return (share) => {
    const next = ends.findIndex((end) => end > share);
    if (next < 0) return changes.length;
    return next === 0 ? 0 : next - 1 + (share - ends[next - 1]) / (ends[next] - ends[next - 1]);
  };
}
