// Parts that the views of Watch share: the moment between two probes, words in a row, the output and
// the loss curve. A saved HTML file contains these modules, so they import only one another.

/** Colours of heads (Okabe and Ito, and two more), distinguishable for colour-blind readers. */
export const HEAD_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f00", "#7b4bb7"];

export const FONT = "system-ui, sans-serif";

/**
 * @typedef {object} Probed an example at one step
 * @property {string} [text] the greedy output @property {string[]} [tokens] @property {number[]} [log_probs]
 * @property {number[]} reference_log_probs @property {number[]} shape layers, heads, rows, columns
 * @property {Uint8Array} weights 255 · attention; for a picture divided by `maxima`
 * @property {[string, number][]} [probabilities] of the likeliest classes @property {number[][]} [maxima]
 *
 * @typedef {object} Example
 * @property {"language"|"images"} [kind] without one it is a sentence to translate
 * @property {string} [source] @property {string} [target]
 * @property {string[]} [source_tokens] @property {string[]} [target_tokens]
 * @property {string} [label] @property {number[]} [size] height, width, channels @property {Uint8Array} [bytes] pixels
 *
 * @typedef {object} Story everything that the view draws
 * @property {string} run @property {Example[]} sentences
 * @property {{step: number, alignment_error?: number[][], sentences: Probed[]}[]} probes
 *
 * @typedef {object} Moment
 * @property {number} at position among the probes; fractions lie between two probes
 * @property {number} sentence @property {number} layer
 * @property {Set<number>} hidden heads that are not drawn
 * @property {number} token the reference is shown up to this token; -1: all of it
 * @property {number} focus a token whose ribbons stand out; -1: none
 * @property {boolean} [resting] nothing moves, at the last probe: the word or head of the caption stands out
 * @property {string} [note] a line under the output
 */

/** The kind of the examples. @param {Story} story @returns {"translation"|"language"|"images"} */
export const kindOf = (story) => story.sentences[0]?.kind ?? "translation";

/** The value between two probes. @param {number} a @param {number} b @param {number} share */
export const between = (a, b, share) => a + (b - a) * share;

/**
 * Attention of one head at a moment, between the two nearest probes.
 * @param {Story} story @param {Moment} moment @param {number} head
 * @returns {(row: number, column: number) => number}
 */
export function weightsOf(story, moment, head) {
  const first = story.probes[Math.floor(moment.at)].sentences[moment.sentence];
  const next = story.probes[Math.ceil(moment.at)].sentences[moment.sentence];
  const [, heads, rows, columns] = first.shape;
  const start = (moment.layer * heads + head) * rows * columns;
  const share = moment.at - Math.floor(moment.at);
  return (row, column) => {
    const cell = start + row * columns + column;
    return between(first.weights[cell], next.weights[cell], share) / 255;
  };
}

/** log P of the reference at a moment. @param {Story} story @param {Moment} moment */
export function referenceLogProb(story, moment) {
  const total = (at) => sum(story.probes[at].sentences[moment.sentence].reference_log_probs);
  return between(total(Math.floor(moment.at)), total(Math.ceil(moment.at)), moment.at - Math.floor(moment.at));
}

/** The nearest probe. @param {Story} story @param {Moment} moment */
export const nearest = (story, moment) => story.probes[Math.round(moment.at)];

/** The step at a moment, between two probes on a logarithmic scale. */
export function stepAt(story, at) {
  const [a, b] = [story.probes[Math.floor(at)].step, story.probes[Math.ceil(at)].step];
  return Math.round(Math.expm1(between(Math.log1p(a), Math.log1p(b), at - Math.floor(at))));
}

/** How many sentences `alignments` is over, in words. @param {Story} story */
export const overAll = ({ sentences: { length } }) => (length === 1 ? "in this sentence" : `over all ${length} sentences`);

/** How well each head of the layer aligns: 1 − alignment error; null without gold alignments. @returns {number[]|null} */
export function alignments(story, { at, layer }) {
  const [a, b] = [story.probes[Math.floor(at)], story.probes[Math.ceil(at)]].map((probe) => probe.alignment_error?.[layer]);
  return a && b ? a.map((error, head) => 1 - between(error, b[head], at - Math.floor(at))) : null;
}

/** The first sentence to show: most pairs of its ribbons cross, and the last probe translates it as the reference. @param {Story} story */
export function mostReordered(story) {
  if (kindOf(story) !== "translation") return 0;
  const crossings = story.probes.at(-1).sentences.map(({ tokens, weights, shape: [layers, heads, rows, columns] }, at) => {
    if (tokens.join("") !== story.sentences[at].target_tokens.join("")) return 0;
    const looks = Array.from({ length: rows - 1 }, (_, row) => {
      const sums = Array.from({ length: columns }, (__, column) => {
        let sum = 0;
        for (let map = 0; map < layers * heads; map++) sum += weights[(map * rows + row) * columns + column];
        return sum;
      });
      return sums.indexOf(Math.max(...sums));
    });
    return looks.reduce((count, look, row) => count + looks.slice(row + 1).filter((later) => later < look).length, 0);
  });
  const shares = crossings.map((count, at) => count / story.probes[story.probes.length - 1].sentences[at].shape[2] ** 2);
  return shares.indexOf(Math.max(...shares));
}

/** The layer with the head that aligns best at the last probe, or the last layer. @param {Story} story */
export function bestLayer(story) {
  const probe = story.probes[story.probes.length - 1];
  const errors = probe.alignment_error?.map((heads) => Math.min(...heads));
  return errors ? errors.indexOf(Math.min(...errors)) : probe.sentences[0].shape[0] - 1;
}

/** Rows and columns that make square tiles large, each with a label below; more rows only where they gain a tenth. */
export function tiling(count, wide, high, gap, label) {
  let best = { size: 0, across: count, down: 1 };
  for (let across = count; across > 0; across--) {
    const down = Math.ceil(count / across);
    const size = Math.floor(Math.min((wide + gap) / across - gap, high / down - label));
    if (size > 1.1 * best.size) best = { size, across, down };
  }
  return best;
}

/** @typedef {{labels: string[], centres: number[], widths: number[], rows: number[], font: number}} Words a row of words; rows: 0, or 1 for those a row further out */

export const labelsOf = (tokens) => tokens.map((token) => (/^[<[].+[>\]]$/.test(token) ? "■" : token.trim() || (token.includes("\n") ? "⏎" : "·")));
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function widthsOf(context, labels, font) {
  context.font = `${font}px ${FONT}`;
  return labels.map((label) => context.measureText(label).width);
}

/**
 * Rows of words in one font, justified: they begin and end at the same x, so that words in the same order are above one
 * another. Null if the font would be smaller than `least`. @param {string[][]} rows tokens @returns {Words[]|null}
 */
export function justified(context, rows, { left, right, size, least }) {
  const all = rows.map(labelsOf);
  for (let font = size; font >= least; font -= 0.5) {
    const widths = all.map((labels) => widthsOf(context, labels, font));
    const needed = (gap) => Math.max(...widths.map((row) => sum(row) + gap * (row.length - 1)));
    if (needed(0.5 * font) > right - left) continue;
    const span = Math.min(right - left, needed(5 * font));
    return all.map((labels, row) => {
      const gap = (span - sum(widths[row])) / Math.max(1, labels.length - 1);
      let x = (left + right - span) / 2;
      const centres = widths[row].map((width) => (x += width + gap) - gap - width / 2);
      return { labels, centres, widths: widths[row], rows: labels.map(() => 0), font };
    });
  }
  return null;
}

/** Words of which every other one is a row further out, where they may overlap their neighbours. @returns {Words} */
export function staggered(context, tokens, { left, right, size }) {
  const labels = labelsOf(tokens);
  const last = labels.length - 1;
  for (let font = size; ; font -= 0.5) {
    const widths = widthsOf(context, labels, font);
    /** @type {number[]} */
    const centres = [];
    widths.forEach((width, at) => {
      const inRow = at > 1 ? centres[at - 2] + widths[at - 2] / 2 + 6 : left;
      centres.push(Math.max(inRow + width / 2, at ? centres[at - 1] + 10 : 0));
    });
    const end = right - widths[last] / 2;
    if (centres[last] > end && font > 7) continue;
    const scale = (end - centres[0]) / (centres[last] - centres[0] || 1);
    return { labels, centres: centres.map((centre) => centres[0] + (centre - centres[0]) * scale), widths, rows: labels.map((_, at) => at % 2), font };
  }
}

/** x on the curve of a probe: probes are evenly spaced, which is a logarithmic scale of steps. */
export function curveX(box, story, at) {
  const last = Math.max(1, story.probes.length - 1);
  return box.left + 8 + ((box.right - box.left - 16) * at) / last;
}

/** The moment under a point of the curve. */
export function momentAt(box, story, x) {
  const last = Math.max(1, story.probes.length - 1);
  const at = ((x - box.left - 8) / (box.right - box.left - 16)) * last;
  return Math.max(0, Math.min(story.probes.length - 1, at));
}

/** The position among the probes of a step. */
export function positionOf(story, step) {
  const steps = story.probes.map((probe) => probe.step);
  const after = steps.findIndex((other) => other >= step);
  if (after <= 0) return after < 0 ? steps.length - 1 : 0;
  const [a, b, x] = [steps[after - 1], steps[after], step].map((n) => Math.log1p(n));
  return after - 1 + (x - a) / (b - a);
}

/**
 * Step and a number at the top left, and the caption below them, on an empty canvas.
 * @param {string} text @param {string[]} caption sentences, the most important one first; as many as fit in the lines
 */
export function drawHeader(context, story, moment, theme, box, text, caption) {
  context.clearRect(0, 0, box.width, box.height);
  context.fillStyle = theme.panel;
  context.fillRect(0, 0, box.width, box.height);
  context.textBaseline = "alphabetic";
  context.fillStyle = theme.text;
  context.textAlign = "left";
  context.font = `700 ${box.compact ? 17 : box.narrow ? 18 : 22}px ${FONT}`;
  context.fillText(`step ${stepAt(story, moment.at)}`, box.left, box.first);
  const after = box.left + context.measureText(box.compact || box.narrow ? "step 0000" : "step 00000").width;
  context.font = `15px ${FONT}`;
  context.fillStyle = theme.quiet;
  box.headerEnd = after;
  if (!box.narrow && !box.compact) {
    context.fillText(text, after, box.first);
    box.headerEnd += context.measureText(text).width;
  }
  context.fillStyle = theme.text;
  context.font = `${box.caption}px ${FONT}`;
  const wide = box.right - box.left;
  const lines = captionLines(context, caption, wide, box.narrow ? 3 : 2);
  lines.forEach((line, at) => context.fillText(line, box.left, box.first + (box.compact ? 17 + 14 * at : box.narrow ? 22 + 19 * at : 23 + 20 * at)));
}

/** As many sentences as fit in `most` lines; the first is cut with “…” if it does not. @param {string[]} caption @returns {string[]} */
export function captionLines(context, caption, wide, most) {
  for (let count = caption.length; count; count--) {
    const lines = inLines(context, caption.slice(0, count).join(" "), wide);
    if (lines.length <= most) return lines;
    if (count > 1) continue;
    const words = lines.slice(0, most).join(" ").split(" ");
    while (words.length > 1 && inLines(context, `${words.join(" ")} …`, wide).length > most) words.pop();
    return inLines(context, `${words.join(" ")} …`, wide);
  }
  return [];
}

/** A text in lines that fit. @param {string} text @param {number} wide @returns {string[]} */
export function inLines(context, text, wide) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (context.measureText(longer).width <= wide) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** P of the first `shown` words under them, as bars of one width, so that lengths can be compared. @param {Words} words @param {(at: number) => number} probability */
export function drawBars(context, words, shown, y, high, theme, probability) {
  const { centres, font } = words;
  const closest = Math.min(...centres.slice(1).map((centre, at) => centre - centres[at]));
  const wide = Math.max(4, Math.min(3 * font, closest - 3));
  for (let at = 0; at < shown; at++) {
    const share = probability(at);
    if (Number.isNaN(share)) continue;
    context.fillStyle = theme.edge;
    context.fillRect(centres[at] - wide / 2, y, wide, high);
    context.fillStyle = theme.strong;
    context.fillRect(centres[at] - wide / 2, y, wide * share, high);
  }
}

/**
 * A dot for each head, filled from below by its share, with the number next to it where there is room.
 * @param {number[]} shares @param {string[]} names of the share, the longest first
 */
export function drawDots(context, shares, names, moment, theme, box) {
  const [radius, y] = [box.narrow ? 7 : 9, box.first - 6];
  context.font = `${box.narrow ? 11 : box.compact ? 12 : 13}px ${FONT}`;
  const apart = box.narrow ? 47 : box.compact ? 58 : 62;
  const room = box.right - apart * shares.length - (box.narrow ? 6 : 20) - box.headerEnd;
  const name = names.find((one) => context.measureText(one).width < room);
  const pitch = room > 0 ? apart : 26;
  const left = box.right - shares.length * pitch + (room > 0 ? 0 : 26 - 2 * radius);
  shares.forEach((share, head) => {
    const x = left + radius + head * pitch;
    const colour = HEAD_COLOURS[head % HEAD_COLOURS.length];
    const level = Math.max(0, Math.min(1, share));
    context.globalAlpha = moment.hidden.has(head) ? 0.25 : 1;
    context.save();
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.clip();
    context.fillStyle = colour;
    context.fillRect(x - radius, y + radius - 2 * radius * level, 2 * radius, 2 * radius);
    context.restore();
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.stroke();
    context.fillStyle = theme.text;
    context.textAlign = "left";
    if (room > 0) context.fillText(`${Math.round(100 * level)} %`, x + radius + 3, y + 4);
  });
  context.globalAlpha = 1;
  context.fillStyle = theme.quiet;
  context.textAlign = "right";
  if (name) context.fillText(name, left - 8, y + 5);
}

/**
 * The model's own output: the less probable a token, the paler; a token that the reference does not have is marked.
 * @param {[string, boolean][]} tokens each with whether it is right @param {boolean} [same] it is the row of words above
 */
export function drawOutput(context, tokens, logProbs, moment, theme, box, same = false) {
  context.textAlign = "left";
  context.font = `13px ${FONT}`;
  context.fillStyle = theme.quiet;
  context.fillText("it writes", box.left, box.write);
  const size = box.compact ? 12.5 : box.narrow ? 14 : 18;
  context.font = `${size}px ${FONT}`;
  const begin = box.left + (box.compact ? 58 : 70);
  const end = box.right - (box.compact ? 120 : 14);
  let [x, y] = [begin, box.write];
  let first = 0; // a single line omits right tokens at the beginning
  const wide = () => context.measureText(tokens.slice(first).map(([token]) => token).join("")).width;
  while (box.lines === 1 && first < tokens.length && tokens[first][1] && x + wide() > end) first++;
  if (!tokens.length) context.fillText("(nothing)", x, y);
  const isShort = same && box.compact;
  if (isShort) context.fillText("the same, word for word", x, y);
  if (first && !isShort) {
    context.fillText("…", x, y);
    x += context.measureText("…").width;
  }
  for (let index = first; index < tokens.length && !isShort; index++) {
    const [token, isRight] = tokens[index];
    let label = (index ? token : token.trimStart()).replace(/\n/g, "⏎");
    if (x + context.measureText(label).width > end) {
      if (y + size + 5 > box.write + (box.lines - 1) * (size + 6)) {
        context.fillText(" …", x, y);
        break;
      }
      [x, y] = [begin, y + size + 5];
      label = label.trimStart();
    }
    const width = context.measureText(label).width;
    context.globalAlpha = 0.6 + 0.4 * Math.exp(logProbs[index]);
    context.fillStyle = isRight ? theme.text : theme.alarm;
    context.fillText(label, x, y);
    const space = label.startsWith(" ") ? context.measureText(" ").width : 0;
    if (!isRight) context.fillRect(x + space, y + 4, width - space, 1.5);
    x += width;
  }
  context.globalAlpha = 1;
  if (moment.note) {
    context.font = `13px ${FONT}`;
    context.fillStyle = theme.alarm;
    context.fillText(moment.note, box.left, box.axis - 4);
  }
}

const EXAMPLES = { translation: "sentences", language: "texts", images: "pictures" };

/** The loss of a probe: −log P per token over all its references. */
export function lossOf(probe) {
  const all = probe.sentences.flatMap((sentence) => sentence.reference_log_probs);
  return -sum(all) / all.length;
}

/**
 * The loss over training with a handle; probes are ticks, milestones are flags.
 * @param {{at: number, text: string}[]} marks
 */
export function drawCurve(context, story, moment, theme, box, marks) {
  const values = story.probes.map(lossOf);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const bottom = box.axis + box.curve;
  const y = (loss) => bottom - 8 - ((loss - low) / (high - low || 1)) * (box.curve - 18);
  const x = (at) => curveX(box, story, at);
  const now = between(values[Math.floor(moment.at)], values[Math.ceil(moment.at)], moment.at - Math.floor(moment.at));
  const past = values.slice(0, Math.floor(moment.at) + 1).map((loss, at) => [x(at), y(loss)]);
  past.push([x(moment.at), y(now)]);
  context.fillStyle = theme.strong;
  context.globalAlpha = 0.14;
  context.beginPath();
  context.moveTo(x(0), bottom);
  for (const [px, py] of past) context.lineTo(px, py);
  context.lineTo(x(moment.at), bottom);
  context.fill();
  context.globalAlpha = 1;
  context.strokeStyle = theme.edge;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(box.left, bottom);
  context.lineTo(box.right, bottom);
  story.probes.forEach((_, at) => {
    context.moveTo(x(at), bottom);
    context.lineTo(x(at), bottom - 5);
  });
  context.stroke();
  drawMarks(context, marks, moment, theme, { x, y: (at) => y(values[at]), top: box.axis + (box.compact ? 10 : 4), right: box.right }); // on stage below the output
  context.strokeStyle = theme.strong;
  context.lineWidth = 2;
  context.globalAlpha = 0.45; // what is still to come
  context.beginPath();
  values.forEach((loss, at) => context.lineTo(x(at), y(loss)));
  context.stroke();
  context.globalAlpha = 1;
  context.lineWidth = 2.5;
  context.beginPath();
  for (const [px, py] of past) context.lineTo(px, py);
  context.stroke();
  const here = x(moment.at);
  context.strokeStyle = theme.text;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(here, y(now));
  context.lineTo(here, bottom);
  context.stroke();
  context.fillStyle = theme.strong;
  context.beginPath();
  context.arc(here, y(now), 8, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = theme.quiet;
  context.font = `12px ${FONT}`;
  const hint = `loss on these held-out ${EXAMPLES[kindOf(story)]}, steps not to scale: drag along the curve, or press Space`;
  drawSteps(context, story, box, bottom + (box.compact ? 16 : 18));
  if (box.compact) {
    context.textAlign = "right";
    return haloed(context, theme, `${box.width < 400 ? "" : "held-out "}loss ${now.toFixed(2)}`, box.right, box.axis - 8);
  }
  context.textAlign = "left";
  haloed(context, theme, box.narrow ? "held-out loss" : hint, box.left + 8, bottom - 12);
  const [label, isLast] = [`loss ${now.toFixed(2)}`, here > box.right - 90];
  const [at, base] = [isLast ? box.right : here + 12, Math.max(box.axis + 18, y(now) - 12)];
  context.fillStyle = theme.panel; // no flag crosses the number
  if (!isLast) context.fillRect(at - 2, base - 12, context.measureText(label).width + 4, 15);
  context.textAlign = isLast ? "right" : "left";
  context.fillStyle = theme.text;
  haloed(context, theme, label, at, base);
}

/** A text with a halo, readable on lines. */
function haloed(context, theme, text, x, y) {
  context.strokeStyle = theme.panel;
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}

/** Flags where something is learned; those ahead are pale. Earlier flags yield to later ones. */
function drawMarks(context, marks, moment, theme, { x, y, top, right }) {
  context.font = `12px ${FONT}`;
  context.lineWidth = 1;
  let begin = Infinity; // of the flag to the right
  for (const { at, text } of [...marks].reverse()) {
    const wide = context.measureText(text).width;
    const isLate = x(at) + wide + 8 > right;
    const start = isLate ? x(at) - wide - 5 : x(at) + 5;
    if (start + wide + 8 > begin) continue;
    begin = Math.min(start, x(at));
    context.globalAlpha = moment.at >= at - 0.01 ? 1 : 0.6;
    context.strokeStyle = theme.quiet;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x(at), top - 8);
    context.lineTo(x(at), y(at));
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = moment.at >= at - 0.01 ? theme.text : theme.quiet;
    context.textAlign = "left";
    context.fillText(text, start, top);
  }
  context.globalAlpha = 1;
}

/** Steps under the curve: as many probes as have room for their number. */
function drawSteps(context, story, box, y) {
  context.textAlign = "center";
  let end = box.left - 20;
  const last = story.probes.length - 1;
  story.probes.forEach(({ step }, at) => {
    const label = at === last ? `step ${step}` : String(step);
    const half = context.measureText(label).width / 2;
    const x = Math.min(curveX(box, story, at), box.right - half);
    if (x - half < end + 14 || (at < last && x + half > box.right - 90)) return;
    context.fillText(label, x, y);
    end = x + half;
  });
}
