// One plain sentence for a page, computed from the numbers that it shows.

import { percent, shown } from "./dom.js";
import { greedyPath, pathTo, rankOf } from "./tree.js";
import { compared, halfOf } from "./watchstory.js";

const LEAST = 0.3; // a smaller weight aligns no words
const UNSURE = 0.1; // a best guess below this says little
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
  return `The word order changes: “${best.first.text}” comes before “${best.second.text}”, but “${of(best.first)}” after “${of(best.second)}”.`;
}

/** The path to the best result. @param {import("./tree.js").Candidate[]} nodes */
const bestPath = (nodes) => pathTo(nodes, nodes.findIndex((node) => node.place === 1));

/**
 * The token at which the best result leaves the path of greedy search, with its rank in its step; null if it does not.
 * @param {import("./tree.js").Candidate[]} nodes @returns {{node: number, rank: number}|null}
 */
export function deciding(nodes) {
  const greedy = new Set(greedyPath(nodes));
  const node = bestPath(nodes).find((at) => !greedy.has(at));
  return node === undefined ? null : { node, rank: rankOf(nodes, node)[0] };
}

/** @typedef {{width: number, vocabulary: number, nodes: import("./tree.js").Candidate[], greedy: any[], beam: any[]}} Search of the Decode page */

/** What the beam is good for, in one sentence: where greedy search drops the best result. @param {Search} search */
export function outcomeOf({ width, nodes, greedy: [greedy], beam: [best, second] }) {
  if (!best || !greedy) return "No hypothesis ended within the limit.";
  if (width === 1) return "With a beam of 1, this is greedy search: the best candidate of each step, nothing else.";
  if (best.text === greedy.text) {
    const led = bestPath(nodes).every((at) => rankOf(nodes, at)[0] === 1) ? ": at every step the best candidate led to the best result" : "";
    const close = second ? ` The runner-up, “${second.text}”, has score ${shown(second.score)} against ${shown(best.score)}.` : "";
    return `Greedy search finds the same text${led}.${close}`;
  }
  if (best.score < greedy.score) return `Greedy search finds a better text here: score ${shown(greedy.score)}; the beam pruned it and ends with ${shown(best.score)}.`;
  const fork = deciding(nodes);
  const keeping = fork ? `keeps ${pieceOf(nodes[fork.node])} at step ${nodes[fork.node].step} and ` : "";
  return `Greedy search writes “${greedy.text}” (${shown(greedy.score)})${lacking(greedy.text, best.text)}. The beam ${keeping}finds “${best.text}” (${shown(best.score)})${byLength(best, greedy)}.`;
}

/** The words that greedy search leaves out, if it has no others. @param {string} greedy @param {string} best */
function lacking(greedy, best) {
  const [less, more] = [greedy, best].map((text) => text.replace(/\p{P}/gu, ""));
  const parts = replaced(less, more);
  const come = parts.flatMap((part) => part.come);
  return come.length && parts.every(({ gone }) => !gone.length) ? ` and leaves out “${come.join(" ")}”` : "";
}

/** What decides if the best result has the lower log P. @param {{log_probability: number}} best @param {{log_probability: number}} greedy */
const byLength = (best, greedy) => (best.log_probability < greedy.log_probability ? `; its log P is lower (${shown(best.log_probability)}, not ${shown(greedy.log_probability)}): the length penalty decides` : "");

/** A candidate as a word. @param {import("./tree.js").Candidate} node */
const pieceOf = ({ piece }) => (SPECIAL.test(piece) ? "the end" : `“${piece.trim()}”`);

/**
 * The candidates at the edge of the beam at a step, and the cost of keeping all; at the last step the outcome.
 * @param {Search} search @param {number} step
 */
export function stepStory(search, step) {
  const { nodes, vocabulary, greedy, beam } = search;
  const last = nodes.at(-1)?.step ?? 0;
  if (step >= last) return outcomeOf(search);
  const at = (/** @type {number} */ number, /** @type {string} */ state) => nodes.filter((node) => node.step === number && node.state === state);
  const before = step === 1 ? 1 : at(step - 1, "kept").length;
  const [kept, [dropped]] = [at(step, "kept"), at(step, "pruned")];
  const many = `${(before * vocabulary).toLocaleString("en")} continuations`;
  const first = `Step ${step} of ${last}: of ${many} the beam keeps ${kept.length}.`;
  const fork = beam[0]?.text === greedy[0]?.text ? null : deciding(nodes);
  if (fork && nodes[fork.node].step === step) {
    return `${first} Greedy search drops ${pieceOf(nodes[fork.node])}, only candidate ${fork.rank}; the beam keeps it, and it leads to the result of the best score${byLength(beam[0], greedy[0])}.`;
  }
  const edge = kept.length && dropped ? ` The last of them is ${pieceOf(kept.at(-1))} (${shown(kept.at(-1).score)}); ${pieceOf(dropped)} (${shown(dropped.score)}) is dropped.` : "";
  const power = [...String(step)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("");
  return `${first}${edge}${step > 1 ? ` Without pruning, ${vocabulary.toLocaleString("en")}${power} texts would continue.` : ""}`;
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
  const above = `above training loss (${number(same.loss)} at that step)`;
  const gap = last.loss > 1.5 * same.loss ? `it is far ${above}, so much of what is learned does not carry over` : last.loss > 1.1 * same.loss ? `it is ${above}` : "what the model learns carries over to unseen examples";
  return `${fell}; validation loss is ${number(last.loss)}${trend}: ${gap}.`;
}

/**
 * What differs between two texts, word by word: before each word that is in both, and after the last of them, the words that
 * are gone and those that have come. @param {string} before @param {string} after
 * @returns {{gone: string[], come: string[], same: string|null}[]}
 */
export function replaced(before, after) {
  const [old, now] = [before, after].map((text) => text.split(" ").filter(Boolean));
  const common = compared(old, now).flatMap(([word, same]) => (same ? [word] : []));
  const parts = common.map((same) => ({ gone: old.splice(0, old.indexOf(same) + 1).slice(0, -1), come: now.splice(0, now.indexOf(same) + 1).slice(0, -1), same }));
  return [...parts, { gone: old, come: now, same: null }];
}

/**
 * What a model loses without some heads: the words that change, or how much less probable the same text is.
 * @param {{text: string, log_probability: number}} full @param {{free: string, log_probability: number}} without
 * @param {string[]} off the heads: map, layer, head
 */
export function knockStory(full, without, off) {
  const heads = off.map((place) => place.split(".").slice(-2).map((one) => Number(one) + 1).join("·"));
  const who = `Without ${heads.length > 1 ? "heads" : "head"} ${heads.join(", ")}`;
  const chance = `the probability of the complete model’s text goes from ${percent(Math.exp(full.log_probability))} to ${percent(Math.exp(without.log_probability))}`;
  const bare = (words) => words.map((word) => word.replace(/[.,!?]+$/, "")).join(" ");
  const quoted = (words) => `“${bare(words)}”`;
  const changes = replaced(full.text, without.free).flatMap(({ gone, come }) => {
    if (gone.length && come.length) return bare(gone) === bare(come) ? [] : [`${quoted(gone)} becomes ${quoted(come)}`];
    return gone.length ? [`${quoted(gone)} is lost`] : come.length ? [`${quoted(come)} is new`] : [];
  });
  return changes.length ? `${who}: ${changes.join("; ")}; ${chance}.` : `${who} the model writes the same; ${chance}.`;
}

const bytesOf = (text) => new TextEncoder().encode(text).length;
/** A piece that is no text has its bytes spelled out: \\xc3. */
const pieceBytes = (piece) => bytesOf(piece.replace(/\\x[0-9a-f]{2}/g, "?"));

/** Why subwords matter: what attention over them saves. @param {number} characters @param {number} tokens */
export function lengthGain(characters, tokens) {
  const pairs = (count) => (count * count).toLocaleString("en");
  return tokens && tokens < characters ? `${characters} characters are ${tokens} tokens: attention compares ${pairs(tokens)} pairs instead of ${pairs(characters)}.` : "";
}

/** The letter or word that is divided into most tokens, or how many are unknown. @param {string} text @param {string[]} pieces */
export function tokenStory(text, pieces) {
  const starts = [...text.matchAll(/[\p{L}\p{N}]+/gu)].map((match) => ({ word: match[0], from: bytesOf(text.slice(0, match.index)), to: bytesOf(text.slice(0, match.index + match[0].length)) }));
  if (!pieces.length) return "";
  let end = 0;
  const ends = pieces.map((piece) => (end += pieceBytes(piece)));
  if (end !== bytesOf(text)) {
    const unknown = pieces.filter((piece) => /^[<[]unk[>\]]$/i.test(piece)).length;
    if (unknown) return `${unknown} of ${pieces.length} tokens are unknown: the model cannot tell their words apart.`;
    return `${pieces.length} tokens for ${starts.length} words.`;
  }
  const countOf = ({ from, to }) => pieces.filter((piece, at) => ends[at] > from && ends[at] - pieceBytes(piece.trimStart()) < to).length;
  const letters = [...text.matchAll(/\P{ASCII}/gu)].map((match) => ({ letter: match[0], from: bytesOf(text.slice(0, match.index)), to: bytesOf(text.slice(0, match.index)) + bytesOf(match[0]) }));
  const divided = new Map(letters.filter((one) => countOf(one) > 1).map(({ letter }) => [letter, bytesOf(letter)]));
  if (divided.size) return `${[...divided].slice(0, 4).map(([letter, bytes]) => `“${letter}” is ${bytes} bytes`).join(", ")}: training has learned no merge that joins them, so the bytes stay several tokens.`;
  if (!starts.length) return `${pieces.length} token${pieces.length > 1 ? "s" : ""}, no word among them.`;
  const counts = starts.map(countOf);
  const most = Math.max(...counts);
  const single = counts.filter((count) => count === 1).length;
  if (most === 1) return "Each word is frequent enough to be one token.";
  return `“${starts[counts.indexOf(most)].word}” is divided into ${most} tokens: it is too rare for a token of its own. ${single} of ${starts.length} words are one token each.`;
}

/**
 * The class that the model finds, and whether it is right; empty without classes.
 * @param {{label: string, probability: number}[]} classes likeliest first @param {string|undefined} label the true class
 */
export function classStory([best], label) {
  if (!best) return "";
  const judged = label === undefined ? "" : best.label === label ? ", which is right" : `, but it is “${label}”`;
  return `The model sees “${best.label}” (${percent(best.probability)})${judged}.`;
}

/** A patch in words. @param {number} at @param {number} side patches in a row */
export const patchName = (at, side) => `row ${Math.floor(at / side) + 1}, column ${(at % side) + 1}`;

/**
 * Where a map over the patches looks: its greatest weight, and how many patches hold half of all.
 * @param {string} who looks @param {ArrayLike<number>} weights of the patches @param {number} query the patch that looks, −1 for none
 * @param {number} side patches in a row
 */
export function lookStory(who, weights, query, side) {
  const all = Array.from(weights);
  const best = all.indexOf(Math.max(...all));
  const half = halfOf(all);
  const where = query < 0 ? `the framed patch (${patchName(best, side)})` : query === best ? "that patch itself" : "the patch that the arrow points at";
  const rest = half > 1 ? ` Half of its attention is on ${half} of ${all.length} patches.` : "";
  return `${who} looks most at ${where}: ${percent(all[best])}.${rest}`;
}

/**
 * What a model loses without the patch that a head looks most at.
 * @typedef {{label: string, probability: number}} Class
 * @param {Class} best with the complete picture @param {Class[]} classes with the patch hidden
 */
export function hiddenStory({ label, probability }, classes) {
  const now = classes.reduce((most, one) => (one.probability > most.probability ? one : most));
  const share = classes.find((one) => one.label === label)?.probability ?? 0;
  const [before, after] = [percent(probability), percent(share)];
  if (now.label !== label) return `With that patch hidden the model sees “${now.label}” (${percent(now.probability)}); P(“${label}”) falls to ${after}.`;
  if (before === after) return `With that patch hidden, P(“${label}”) stays at ${after}: the model does not need it.`;
  return `With that patch hidden, P(“${label}”) ${share < probability ? "falls" : "rises"} to ${after}.`;
}

/**
 * Whether the positions that are most similar to that of a patch are those around it.
 * @param {ArrayLike<number>} cosines with each patch @param {number} query the patch, −1 for none @param {number} side patches in a row
 */
export function similarStory(cosines, query, side) {
  if (query < 0) return "Choose a patch to compare its position with all others.";
  const [row, column] = [Math.floor(query / side), query % side];
  const isNear = (at) => Math.abs(Math.floor(at / side) - row) <= 1 && Math.abs((at % side) - column) <= 1;
  const others = Array.from(cosines, (value, at) => ({ value, at })).filter(({ at }) => at !== query).sort((one, other) => other.value - one.value);
  const around = others.filter(({ at }) => isNear(at)).length;
  const found = others.slice(0, around).filter(({ at }) => isNear(at)).length;
  const usual = (around * around) / others.length;
  const means = found >= 0.75 * around ? "the positions show the grid, although the model reads a sequence" : found > 1.5 * usual ? "the positions show the grid in part" : "the positions hardly show the grid";
  return `The vector of ${patchName(query, side)} is most similar to that of ${patchName(others[0].at, side)} (cosine ${shown(others[0].value, 1)}). ${found} of the ${around} most similar positions ${found === 1 ? "lies" : "lie"} around it (${shown(usual, 1)} by chance): ${means}.`;
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
 * How concentrated the attention to earlier events is: the sum of squared weights, mean over events.
 * @param {(event: number) => ArrayLike<number>} rowOf as in `ownVoice` @param {number} events
 */
export function concentration(rowOf, events) {
  let all = 0;
  for (let at = 1; at < events; at++) {
    const weights = rowOf(at);
    for (let key = 0; key < at; key++) all += weights[key + 1] ** 2;
  }
  return all / Math.max(1, events - 1);
}

/**
 * What a head of a music model prefers: its own voice, or a distance back.
 * @param {string} who looks @param {ArrayLike<number>} distances mean weight by distance back, from 0
 * @param {string[]} voices names of the events of a time step, none if events have no grid @param {number} own share of the own voice
 * @param {[number, number][]} arcs from the chosen event: event and weight
 */
export function musicStory(who, distances, voices, own, arcs) {
  const rounded = (share) => `${Math.round(100 * share)} %`;
  if (voices.length) {
    const usual = 1 / voices.length;
    const means = own > 1.15 * usual ? "it prefers the voice of each event" : own < 0.87 * usual ? "it prefers the other voices" : "it does not prefer a voice";
    const totals = voices.map((_, voice) => arcs.reduce((sum, [event, weight]) => (event >= 0 && event % voices.length === voice ? sum + weight : sum), 0));
    const share = Math.max(...totals) / (arcs.reduce((sum, [, weight]) => sum + weight, 0) || 1);
    const ends = share > 0.5 ? ` The arcs end mostly in the ${voices[totals.indexOf(Math.max(...totals))]}: ${rounded(share)} of their weight.` : "";
    return `${who} puts ${rounded(own)} of its attention to earlier events on the same voice (${rounded(usual)} by chance): ${means}.${ends}`;
  }
  const back = Array.from(distances).reduce((best, weight, at) => (at > 0 && (best === 0 || weight > distances[best]) ? at : best), 0);
  return back ? `${who} looks most at the event ${back} back: ${percent(distances[back])} of its weight on average.` : `${who} has no earlier event to look at.`;
}

/**
 * The share of positions that are most similar to a neighbour.
 * @param {ArrayLike<number>} cosines of all pairs, row after row @param {number} count
 * @param {{columns: number, before: number}|null} [grid] of patches after `before` other positions: neighbours are those around a patch
 */
export function nearShare(cosines, count, grid = null) {
  const first = grid ? grid.before : 0;
  const placeOf = (at) => (grid ? [Math.floor((at - first) / grid.columns), (at - first) % grid.columns] : [at, 0]);
  const similarity = (row, other) => cosines[row * count + other];
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

/** The mean cosine of positions at some distances. @param {ArrayLike<number>} cosines of all pairs, row after row @param {number} count */
function similarities(cosines, count) {
  const cosine = (/** @type {number} */ distance) => {
    const all = Array.from({ length: count - distance }, (_, at) => cosines[at * count + at + distance]);
    return all.reduce((sum, one) => sum + one, 0) / all.length;
  };
  const distances = [1, 10, 50].filter((one) => one < count);
  return distances.length ? `The cosine of two positions is ${distances.map((one) => `${shown(cosine(one))} at distance ${one}`).join(", ")}.` : "";
}

/**
 * What a position scheme tells a model.
 * @param {{scheme: string, length: number, dim: number, grid: {columns: number, before: number}|null, curves: {name: string, points: [number, number][]}[]}} info
 * @param {ArrayLike<number>|null} cosines of all pairs of positions @param {{base: number|null, isTrained: boolean, hands?: {number: number, turn: number}[]}} how `base` of the wavelengths of a sinusoidal scheme, the turns of a rotary one
 */
export function positionStory({ scheme, length, dim, grid, curves }, cosines, { base, isTrained, hands = [] }) {
  if (cosines) {
    const share = nearShare(cosines, length, grid);
    const near = `${share === 1 ? `Every ${grid ? "patch" : "position"} is` : `${Math.round(100 * share)} % of the ${grid ? "patches" : "positions"} are`} most similar to ${grid ? "one around it" : "a neighbour"}`;
    if (scheme === "sinusoidal" && base) return `The first channel repeats every ${shown(2 * Math.PI, 1)} positions, the last every ${Math.round(2 * Math.PI * base ** ((dim - 2) / dim)).toLocaleString("en")}, like the digits of a number. ${share === 1 && !grid ? similarities(cosines, length) : `${near}.`}`;
    if (hands.length > 1) return `From one position to the next, pair ${hands[0].number} turns by ${shown(hands[0].turn)}° and pair ${hands.at(-1).number} by ${shown(hands.at(-1).turn)}°: fast pairs tell neighbours apart, slow pairs tell far positions apart. ${similarities(cosines, length)}`;
    if (scheme === "learned" && !isTrained) return `${near}: before training, the table does not know which positions are close.`;
    if (scheme === "learned") return `${near}: ${share > 0.5 ? "training has taught the table which positions are close" : "training has hardly taught the table which positions are close"}.`;
    return `${near}: ${share > 0.5 ? "the scheme tells near from far" : "the scheme hardly tells near from far"}.`;
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
 * @typedef {{top: {piece: string, probability: number}[], hidden: {piece: string|null, rank: number|null, probability?: number|null}|null}} Mask
 * @param {Mask[]} masks @param {string[]} words under the masks, empty for a mask that hides none
 * @param {Mask|null} [before] the only mask, predicted from the words before it
 */
export function fillStory(masks, words, before = null) {
  const first = (mask) => `“${bareWord(mask.top[0].piece)}” (${percent(mask.top[0].probability)})`;
  const hiding = words.flatMap((word, at) => (word && masks[at].hidden ? [{ word, mask: masks[at], rank: masks[at].hidden.rank }] : []));
  const best = Math.max(...masks.map(({ top }) => top[0].probability));
  const unsure = best < UNSURE ? ` No guess has more than ${percent(best)}: the model hardly knows.` : "";
  if (!hiding.length) return `The model would write ${masks.map(first).join(" and ")}.${unsure}`;
  const guesses = ({ word, mask, rank }) => {
    const likely = mask.top.slice(0, 3).map(({ piece }) => `“${bareWord(piece)}”`).join(", ");
    return `for “${word}” it would write ${likely}; “${word}” is ${rank === null ? "not among its 1,000 best tokens" : `number ${rank}`}`;
  };
  if (hiding.length === 1) {
    const [{ word, mask, rank }] = hiding;
    const found = rank === 1 ? `The model puts “${word}” back: it is its first choice (${percent(mask.top[0].probability)}).` : `The model guesses another word: ${guesses(hiding[0])}.`;
    return found + unsure + (before ? helpOf(word, mask, before) : "");
  }
  const right = hiding.filter(({ rank }) => rank === 1).length;
  if (!right) return `The model guesses other words: ${hiding.map(guesses).join("; ")}.${unsure}`;
  const each = hiding.map(({ word, mask, rank }) => {
    if (rank === 1) return `“${word}” is its first choice (${percent(mask.top[0].probability)})`;
    return rank === null ? `“${word}” is not among its 1,000 best tokens, which begin with ${first(mask)}` : `“${word}” is number ${rank}, after ${first(mask)}`;
  });
  return `The model puts back ${right} of ${hiding.length} words: ${each.join("; ")}.${unsure}`;
}

/**
 * The word whose probability from both sides differs most from that of the words before it only; the first if no word can be compared.
 * @param {[Mask|null, Mask|null][]} pairs of predictions for each word: from both sides, and from the words before it
 */
export function mostHelped(pairs) {
  const differences = pairs.map(([both, left]) => Math.abs((both?.hidden?.probability ?? 0) - (left?.hidden?.probability ?? both?.hidden?.probability ?? 0)));
  return differences.indexOf(Math.max(...differences));
}

/** A token as a word, without its space; “…s” continues the word before it. @param {string} piece */
export const bareWord = (piece) => piece.replace(/^##/, "…").trim();

/** How much of its attention a mask has for the words on each side. @param {Map<number, number>} weights of words, by position @param {number} mask its position */
export function attentionStory(weights, mask) {
  const sum = (/** @type {(at: number) => boolean} */ has) => [...weights].reduce((all, [at, weight]) => (has(at) ? all + weight : all), 0);
  const [before, after] = [sum((at) => at < mask), sum((at) => at > mask)];
  return ` The mask puts ${percent(before)} of its attention on the words before it and ${percent(after)} on those after it.`;
}

/** How much the words after a mask add to the probability of its word. @param {string} word @param {Mask} mask @param {Mask} before */
function helpOf(word, mask, before) {
  const [both, left] = [mask.hidden?.probability, before.hidden?.probability];
  if (!both || !left) return "";
  const means = both > 1.25 * left ? "the words after it help" : both < 0.8 * left ? "the words after it mislead here" : "the words after it change little";
  return ` From the words before it only, “${word}” gets ${percent(left)} instead of ${percent(both)}: ${means}.`;
}
