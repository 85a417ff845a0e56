// What Watch says about a moment: a caption in words, the milestones of the training, and the pace at
// which it plays. A saved HTML file contains this module.

import { percent, shown } from "./numbers.js";
import { alignments, kindOf, labelsOf, lossOf, nearest, overAll, weightsOf } from "./watchparts.js";

export const SECONDS = 6; // from the first step to the last
const CLEAR = 0.4; // weight from which a token counts as attending to a word
const MOVED = 1.5; // positions from which a word has moved
const REGULAR = 0.3; // share of its weight from which a head follows a pattern
const ENDS = /^([.,;:!?…–—]|[<[].+[>\]])$/; // of a clause: its punctuation or the end token
const EVEN = 0.1; // share of the playing time that is the same between all probes
const REST = 0.08; // share of the playing time for each milestone

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
export function isRight(story, at, sentence) {
  const [right, count] = rightOf(story, at, sentence);
  return right === count && checked(story, at, sentence).length === count;
}

/**
 * The word that has moved farthest: a row that clearly attends to a column far from its own position, words both.
 * A word that has moved to the end of its clause is preferred. Null if word orders are the same.
 * @param {string[]} rows @param {string[]} columns tokens @param {(row: number, column: number) => number} weight
 * @returns {{row: number, column: number, last: boolean, distance: number, before: [number, number]|null}|null} `last`: it has moved to
 * the end of its clause; `before`: the word before it and its column, if it has moved there too
 */
export function farthest(rows, columns, weight) {
  const origins = rows.map((token, row) => (isWord(token) ? clearColumn(columns, (column) => weight(row, column)) : -1));
  let best = null;
  origins.forEach((column, row) => {
    const distance = Math.abs(row - (column * rows.length) / columns.length);
    if (column < 0 || column === row || distance <= MOVED) return;
    const last = (row + 1 === rows.length || ENDS.test(rows[row + 1].trim())) && fallsBack(rows, origins, row);
    // Words that have moved to the end of a clause come first: they are verbs that another language has earlier.
    if ((best?.last && !last) || (best?.last === last && best.distance >= distance)) return;
    best = { row, column, last, distance, before: last && fallsBack(rows, origins, row - 1) ? [row - 1, origins[row - 1]] : null };
  });
  return best;
}

/** The word of a row with most weight; -1 if it is not clear. @param {string[]} columns @param {(column: number) => number} weight */
function clearColumn(columns, weight) {
  return columns.reduce((best, token, column) => (isWord(token) && weight(column) >= Math.max(CLEAR, best < 0 ? 0 : weight(best)) ? column : best), -1);
}

/**
 * Whether a word attends to an earlier column than the clear word before it in its clause; the second of two such words may
 * attend to the same column (“closed”: “zugemacht haben”). @param {number[]} origins the column of each row; -1: not clear
 */
function fallsBack(rows, origins, row) {
  if (!(origins[row] >= 0)) return false;
  let other = row - 1;
  while (other >= 0 && isWord(rows[other]) && origins[other] < 0) other--;
  if (!(origins[other] >= 0)) return false;
  return origins[row] < origins[other] || (origins[row] === origins[other] && fallsBack(rows, origins, other));
}

/** The result of `farthest` in words. */
export function tellMove({ row, column, last, before }, rows, columns) {
  const [word, origin] = [rows, columns].map((tokens, at) => `“${tokens[[row, column][at]].trim()}”`);
  if (before) {
    const first = `“${columns[before[1]].trim()}”`;
    return `“${rows[before[0]].trim()}” and ${word} come last in their clause: ${before[1] === column ? `both attend to ${origin}` : `they attend to ${first} and ${origin}`}.`;
  }
  const away = Math.abs(row - column);
  return last ? `${word} comes last in its clause: it attends to ${origin}.` : `${word} attends to ${origin}, ${away} token${away > 1 ? "s" : ""} ${column < row ? "earlier" : "later"} in the source.`;
}

/** The heads that are shown. */
function shownHeads(story, { sentence, hidden }) {
  const [, count] = story.probes[0].sentences[sentence].shape;
  return Array.from({ length: count }, (_, head) => head).filter((head) => !hidden.has(head));
}

/** The mean of the heads that are shown. @returns {(row: number, column: number) => number} */
function meanOf(story, moment) {
  const weights = shownHeads(story, moment).map((head) => weightsOf(story, moment, head));
  return (row, column) => weights.reduce((sum, weight) => sum + weight(row, column), 0) / (weights.length || 1);
}

/** The rows and columns of the maps of an example, as tokens. @returns {[string[], string[]]} */
function tokensOf(story, { sentence }) {
  const { source_tokens: source, target_tokens: target } = story.sentences[sentence];
  const all = [...source, ...target];
  return kindOf(story) === "translation" ? [target, source] : [all, all];
}

/**
 * The words that stand out: the one under the pointer, the one written last, or that of the caption.
 * @returns {{row: number, column: number, last?: boolean}|null}
 */
export function chosen(story, moment) {
  const row = moment.focus >= 0 ? moment.focus : moment.token;
  const [rows, columns] = tokensOf(story, moment);
  if (row >= 0) {
    const weight = meanOf(story, moment);
    return { row, column: columns.reduce((best, _, column) => (weight(row, column) > weight(row, best) ? column : best), 0) };
  }
  const isNamed = kindOf(story) === "translation" && (moment.resting || isRight(story, Math.round(moment.at), moment.sentence));
  return isNamed ? farthest(rows, columns, meanOf(story, moment)) : null;
}

/**
 * The most regular head of a language model: most of the weight of its rows is on the token before, on the token itself or
 * on one column. Null while none has a share of `REGULAR`.
 * @returns {{head: number, share: number, column: number|null, text: string, of: string}|null} `column`: that it returns to
 */
export function regularHead(story, moment) {
  const [tokens] = tokensOf(story, moment);
  let best = null;
  for (const head of shownHeads(story, moment)) {
    const weight = weightsOf(story, moment, head);
    const mean = (from, column) => tokens.slice(from).reduce((sum, _, at) => sum + weight(from + at, column(from + at)), 0) / (tokens.length - from);
    const ways = [{ share: mean(1, (row) => row - 1), column: null, text: "looks at the token before", of: "its weight" }, { share: mean(1, (row) => row), column: null, text: "stays on the token itself", of: "its weight" }];
    for (let column = 0; column + 2 <= (2 * tokens.length) / 3; column++) ways.push({ share: mean(column + 2, () => column), column, text: `returns to ${named(tokens, column)}`, of: "the weight of all later tokens" });
    for (const way of ways) if (way.share > Math.max(REGULAR, best?.share ?? 0)) best = { head, ...way };
  }
  return best;
}

/** A token in words; letters need their position. */
const named = (tokens, at) => (isEnd(tokens[at]) ? "the end token" : `“${labelsOf([tokens[at]])[0]}”${tokens[at].trim().length > 1 ? "" : ` (token ${at + 1})`}`);

/** The caption of a moment, computed from the probe. @returns {string[]} sentences, the most important one first */
export function captionOf(story, moment) {
  const kind = kindOf(story);
  const at = Math.round(moment.at);
  if (kind === "images") return pictureCaption(story, moment);
  const marked = chosen(story, moment);
  const [rows, columns] = tokensOf(story, moment);
  if (marked && (moment.focus >= 0 || moment.token >= 0)) {
    const share = percent(meanOf(story, moment)(marked.row, marked.column));
    return [`${named(rows, marked.row)} attends most to ${named(columns, marked.column)}: ${share} of its weight${moment.hidden.size ? " in the heads shown" : ""}.`];
  }
  if (kind === "language") return [...regularCaption(story, moment), perplexityCaption(Math.exp(lossOf(story.probes[at])))];
  const [right, count] = rightOf(story, at, moment.sentence);
  if (!checked(story, at, moment.sentence).length) return ["It writes nothing yet.", ...bestHead(story, moment)];
  const progress = `${right === count ? "All" : `${right} of`} ${count} tokens are right.`;
  const word = farthest(rows, columns, meanOf(story, moment));
  const isDone = isRight(story, at, moment.sentence) || (word && moment.resting);
  if (!isDone) return [...repeated(story, at, moment.sentence), progress, ...bestHead(story, moment)];
  return [word ? tellMove(word, rows, columns) : "No word attends clearly to one far from its own position.", progress];
}

/** The word that makes up half of the output or more. */
function repeated(story, at, sentence) {
  const words = checked(story, at, sentence).map(([token]) => token.trim().toLowerCase()).filter(isWord);
  const most = words.find((word) => words.length > 3 && 2 * words.filter((other) => other === word).length >= words.length);
  return most ? [`It repeats “${most}”.`] : [];
}

const headName = ({ layer }, head) => `Head ${layer + 1}·${head + 1}`;

/** The head that aligns best, if there are gold alignments. */
function bestHead(story, moment) {
  const shares = alignments(story, moment);
  if (!shares) return [];
  const head = shares.indexOf(Math.max(...shares));
  return [`${headName(moment, head)} aligns best: ${Math.round(100 * Math.max(0, shares[head]))} % ${overAll(story)}.`];
}

function regularCaption(story, moment) {
  const regular = regularHead(story, moment);
  return [regular ? `${headName(moment, regular.head)} ${regular.text}: ${percent(regular.share)} of ${regular.of}.` : "No head of this layer has a simple pattern yet."];
}

const perplexityCaption = (perplexity) => `Perplexity ${shown(perplexity)}: as unsure as a choice among ${Math.max(1, Math.round(perplexity))} equally likely tokens.`;

/** The number of patches that hold half of the attention. @param {ArrayLike<number>} weights */
export function halfOf(weights) {
  const sorted = Array.from(weights).sort((a, b) => b - a);
  const total = sorted.reduce((a, b) => a + b, 0);
  let [sum, count] = [0, 0];
  while (count < sorted.length && sum < total / 2) sum += sorted[count++];
  return count;
}

/** Half of the attention of a head is on so many of so many patches. */
function patchesOf(story, moment, head) {
  const [, , rows, columns] = story.probes[0].sentences[moment.sentence].shape;
  const weight = weightsOf(story, moment, head);
  return halfOf(Array.from({ length: rows * columns }, (_, cell) => weight(Math.floor(cell / columns), cell % columns)));
}

function pictureCaption(story, moment) {
  const [name, share] = nearest(story, moment).sentences[moment.sentence].probabilities[0];
  const { label } = story.sentences[moment.sentence];
  const answer = name === label ? `Right: “${label}” has ${percent(share)}.` : `Wrong: it takes “${label}” for “${name}” (${percent(share)}).`;
  const counts = shownHeads(story, moment).map((head) => ({ head, now: patchesOf(story, moment, head) }));
  if (!counts.length) return [answer];
  const { head, now } = counts.reduce((best, other) => (other.now < best.now ? other : best));
  const [, , rows, columns] = story.probes[0].sentences[moment.sentence].shape;
  const before = patchesOf(story, { ...moment, at: 0 }, head);
  const change = before === now ? "" : `, at step ${story.probes[0].step} on ${before}`;
  const look = `${headName(moment, head)} has half of its attention on ${now} of ${rows * columns} patches${change}.`;
  return name === label ? [look, answer] : [answer, look];
}

/** Words of two letters or more, between two that are not. @param {string} text */
const realWords = (text) => text.toLowerCase().match(/(?<![\p{L}\p{N}])\p{L}{2,}(?![\p{L}\p{N}])/gu) ?? [];

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
  if (kind === "language") {
    const words = new Set(story.sentences.flatMap(({ source, target }) => realWords(`${source} ${target}`)));
    const written = (at) => story.probes[at].sentences[sentence].text ?? "";
    known = [
      ["first space", (at) => /\p{L}\s+\p{L}/u.test(written(at))],
      ["first word of the texts", (at) => realWords(written(at)).some((word) => words.has(word))],
      ["perplexity halved", (at) => lossOf(story.probes[at]) <= lossOf(story.probes[0]) - Math.LN2],
    ];
  }
  const reached = known.flatMap(([text, holds]) => {
    let at = last + 1;
    while (at > 0 && holds(at - 1)) at--;
    return at > 0 && at <= last ? [{ at, text }] : [];
  });
  reached.sort((one, other) => one.at - other.at);
  return reached.filter(({ at }, number) => at !== reached[number + 1]?.at);
}

/**
 * The position among the probes after a share of the playing time. It is slow where the loss falls; the square root gives
 * more time to the late progress, which is small in numbers but large on screen. It rests at the milestones of an example.
 * @param {import("./watchparts.js").Story} story @param {number} sentence @returns {(share: number) => number}
 */
export function pace(story, sentence) {
  let least = Infinity;
  const roots = story.probes.map((probe) => Math.sqrt((least = Math.min(least, lossOf(probe)))));
  const falls = roots.slice(1).map((root, at) => roots[at] - root);
  const total = roots[0] - roots[roots.length - 1] || 1;
  const rests = milestones(story, sentence).map(({ at }) => at).filter((at) => at < falls.length);
  const moving = 1 - REST * rests.length;
  let end = 0;
  const ends = [{ end, at: 0 }];
  falls.forEach((fall, before) => {
    const at = before + 1;
    ends.push({ end: (end += moving * (EVEN / falls.length + ((1 - EVEN) * fall) / total)), at });
    if (rests.includes(at)) ends.push({ end: (end += REST), at });
  });
  return (share) => {
    const next = ends.findIndex((one) => one.end > share);
    if (next < 0) return falls.length;
    if (next === 0) return 0;
    const [from, to] = [ends[next - 1], ends[next]];
    return from.at + ((to.at - from.at) * (share - from.end)) / (to.end - from.end);
  };
}

/**
 * Plays a training: calls `show` with a position among the probes for each frame, the last one when it ends.
 * @param {import("./watchparts.js").Story} story @param {number} sentence at whose milestones it rests @param {number} from the position at which it begins
 * @param {(at: number) => void} show @returns {() => void} stops it
 */
export function playFrom(story, sentence, from, show) {
  const position = pace(story, sentence);
  const last = story.probes.length - 1;
  let passed = 0; // share of the time that the part before `from` takes
  while (passed < 1 && position(passed) < from) passed += 0.002;
  const begun = performance.now();
  const tick = (now) => {
    const at = Math.min(last, position(passed + Math.max(0, now - begun) / (1000 * SECONDS)));
    frame = requestAnimationFrame(tick);
    if (at >= last) cancelAnimationFrame(frame);
    show(at);
  };
  let frame = requestAnimationFrame(tick);
  return () => cancelAnimationFrame(frame);
}
