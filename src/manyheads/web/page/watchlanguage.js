// Watch a language model: a held-out text with self-attention as arcs, and the map of each head.

import { captionOf, chosen, regularHead } from "./watchstory.js";
import { drawBars, drawDots, drawHeader, drawOutput, FONT, HEAD_COLOURS, justified, labelsOf, nearest, tiling, weightsOf } from "./watchparts.js";

const LEAST_ARC = 0.06; // weights below are not drawn
const MAP_GAP = 12; // between maps
const MAP_LABEL = 20; // below a map

/** Arcs over the text, the maps of the heads to the right of them, the output below; on a phone the maps come last. */
export function languageLayout(context, story, sentence, { left, right, narrow, compact, top, high }) {
  const { source_tokens: prompt, target_tokens: rest } = story.sentences[sentence];
  const [, heads] = story.probes[0].sentences[sentence].shape;
  const tokens = [...prompt, ...rest];
  const after = compact ? 8 : 34; // from the output to the curve
  const target = narrow ? top + 164 : Math.max(top + (compact ? 80 : 140), high - after - (compact ? 46 : 62));
  const write = target + (narrow ? 92 : compact ? 46 : 62);
  let [end, maps, axis] = [right, null, write + after];
  if (narrow) {
    maps = mapsIn(heads, left, write + 30, right - left, 130);
    axis = maps.bottom + 14;
  } else if (!compact) {
    maps = mapsIn(heads, right, top - 6, 0.26 * (right - left), target - top + 50);
    end = maps.left - 28;
  }
  const size = compact || narrow ? 13 : 20;
  const least = compact ? 11.5 : 10;
  const words = justified(context, [tokens], { left: left + 8, right: end - 8, size, least })?.[0] ?? standing(tokens, left, end);
  return { words, end, maps, target, write, axis, lines: narrow || !compact ? 2 : 1 };
}

/** Tokens from below to above, where a row of them would be too small. @returns {import("./watchparts.js").Words & {upright: boolean}} */
function standing(tokens, left, right) {
  const step = (right - left) / tokens.length;
  return { labels: labelsOf(tokens), centres: tokens.map((_, at) => left + step * (at + 0.5)), widths: tokens.map(() => 0.7 * step), rows: tokens.map(() => 0), font: 12, upright: true };
}

/** Sizes of the maps of all heads in a box; `edge` is its left edge on a phone, else its right one. */
function mapsIn(heads, edge, top, wide, high) {
  const { size, across, down } = tiling(heads, wide, high - MAP_LABEL, MAP_GAP, MAP_LABEL);
  const side = Math.min(size, 260);
  const used = across * (side + MAP_GAP) - MAP_GAP;
  return { size: side, across, top: top + MAP_LABEL, left: edge > wide ? edge - used : edge, bottom: top + MAP_LABEL + down * (side + MAP_LABEL) };
}

/** @returns {number[]} x of each token */
export function drawLanguage(context, story, moment, theme, box) {
  const { source_tokens: prompt } = story.sentences[moment.sentence];
  const probe = nearest(story, moment).sentences[moment.sentence];
  const [, heads, count] = probe.shape;
  drawHeader(context, story, moment, theme, box, "", captionOf(story, moment));
  const before = Array.from({ length: heads }, (_, head) => {
    const weight = weightsOf(story, moment, head);
    return Array.from({ length: count - 1 }, (__, at) => weight(at + 1, at)).reduce((a, b) => a + b, 0) / (count - 1);
  });
  drawDots(context, before, ["weight of each head on the token before", "weight on the token before", "token before"], moment, theme, box);
  const { centres } = box.words;
  const shown = moment.token < 0 ? count : moment.token + 1;
  const slot = Math.max(1.2, Math.min(7, (box.end / count - 6) / heads));
  const base = box.target - 18;
  const highest = base - box.top + 8;
  const row = chosen(story, moment)?.row ?? -1;
  const named = row < 0 ? regularHead(story, moment) : null; // of the caption
  const regular = moment.resting ? named : null;
  for (let head = 0; head < heads; head++) {
    if (moment.hidden.has(head)) continue;
    const weight = weightsOf(story, moment, head);
    const shift = (head - (heads - 1) / 2) * slot;
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let t = 1; t < shown; t++) {
      const strength = row === t ? 1.6 : row >= 0 ? 0.08 : !regular ? 0.9 : regular.head === head ? 1.2 : 0.3;
      for (let s = 0; s < t; s++) {
        const value = weight(t, s);
        if (value < LEAST_ARC) continue;
        const [from, to] = [centres[s] + shift, centres[t] + shift];
        const height = highest * Math.sqrt((t - s) / count);
        context.globalAlpha = Math.min(0.9, strength * (0.08 + value)); // weak ones recede
        context.lineWidth = value * slot;
        context.beginPath();
        context.moveTo(from, base);
        context.bezierCurveTo(from, base - 1.3 * height, to, base - 1.3 * height, to, base);
        context.stroke();
      }
    }
  }
  context.globalAlpha = 1;
  drawText(context, box.words, prompt.length, shown, named?.column ?? row, theme, box);
  // The first token is given: nothing predicts it.
  drawBars(context, box.words, shown, box.target + (box.compact ? 7 : 9), box.compact ? 4 : 6, theme, (t) => (t ? Math.exp(probe.reference_log_probs[t - 1]) : NaN));
  const space = probe.text.includes(" ") && !probe.tokens.some((token) => token.includes(" ")) ? " " : ""; // tokens that are words
  drawOutput(context, probe.tokens.map((token) => [space + token, true]), probe.log_probs, moment, theme, box);
  if (box.maps) drawMaps(context, story, moment, theme, box, heads, count);
  return centres;
}

/** The words, and a line between the prompt and its continuation. */
function drawText(context, { labels, centres, font, upright }, split, shown, marked, theme, box) {
  context.textAlign = upright ? "right" : "center";
  labels.forEach((label, at) => {
    context.globalAlpha = at < shown ? 1 : 0.25;
    context.fillStyle = at < split ? theme.text : theme.strong;
    context.font = `${at === marked ? "700 " : ""}${font}px ${FONT}`;
    context.save();
    context.translate(centres[at], upright ? box.target + 16 : box.target);
    if (upright) context.rotate(-Math.PI / 2);
    context.fillText(label, 0, upright ? 4 : 0);
    context.restore();
  });
  context.globalAlpha = 1;
  const x = (centres[split - 1] + centres[split]) / 2;
  context.strokeStyle = theme.quiet;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x, box.target - 14);
  context.lineTo(x, box.target + 32);
  context.stroke();
  if (upright) return;
  context.font = `12px ${FONT}`;
  context.fillStyle = theme.quiet;
  context.textAlign = "right";
  context.fillText("prompt", x - 8, box.target + 30);
  context.textAlign = "left";
  context.fillStyle = theme.strong;
  const label = ["the text's own continuation", "continuation"].find((text) => context.measureText(text).width <= box.end - x - 8);
  if (label) context.fillText(label, x + 8, box.target + 30);
}

/** The map of each head: rows attend to columns, the darker the more. */
function drawMaps(context, story, moment, theme, box, heads, count) {
  const { left, top, size, across } = box.maps;
  const cell = size / count;
  context.font = `12px ${FONT}`;
  context.fillStyle = theme.quiet;
  context.textAlign = "left";
  context.fillText("query ↓  key →", left, top - 6);
  for (let head = 0; head < heads; head++) {
    const weight = weightsOf(story, moment, head);
    const [x, y] = [left + (head % across) * (size + MAP_GAP), top + Math.floor(head / across) * (size + MAP_LABEL)];
    context.globalAlpha = moment.hidden.has(head) ? 0.25 : 1;
    context.strokeStyle = theme.edge;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    context.fillStyle = theme.quiet;
    context.fillText(`head ${moment.layer + 1}·${head + 1}`, x, y + size + 14);
    context.fillStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    const strength = context.globalAlpha;
    for (let t = 0; t < count; t++) {
      for (let s = 0; s <= t; s++) {
        const value = weight(t, s);
        if (value < 0.01) continue;
        context.globalAlpha = strength * value;
        context.fillRect(x + s * cell, y + t * cell, cell, cell);
      }
    }
  }
  context.globalAlpha = 1;
}
