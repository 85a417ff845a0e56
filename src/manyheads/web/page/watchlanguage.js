// Watch a language model: a held-out text with self-attention as arcs, and the map of each head.

import { captionOf } from "./watchstory.js";
import { drawBars, drawDots, drawHeader, drawOutput, FONT, HEAD_COLOURS, nearest, place, referenceLogProb, weightsOf } from "./watchparts.js";

const LEAST_ARC = 0.06; // weights below are not drawn

/** Sizes of the maps of all heads, in rows below `top`, to the right of the output. */
export function mapLayout({ left, right, narrow }, top, heads) {
  const gap = 12;
  const across = Math.min(narrow ? 4 : 8, heads);
  const room = narrow ? right - left : 0.62 * (right - left);
  const size = Math.min(108, Math.floor((room - gap * (across - 1)) / across));
  const rows = Math.ceil(heads / across);
  return { top, size, across, gap, left: narrow ? left : right - across * size - (across - 1) * gap, bottom: top + rows * (size + 20) };
}

/** @returns {number[]} x of each token */
export function drawLanguage(context, story, moment, theme, box) {
  const { source_tokens: prompt, target_tokens: rest } = story.sentences[moment.sentence];
  const tokens = [...prompt, ...rest];
  const probe = nearest(story, moment).sentences[moment.sentence];
  const heads = probe.shape[1];
  drawHeader(context, story, moment, theme, box, `log P(text) ${referenceLogProb(story, moment).toFixed(1)}`, captionOf(story, moment));
  drawDots(context, story, moment, theme, box, heads);
  const row = words(context, tokens, box);
  const shown = moment.token < 0 ? tokens.length : moment.token + 1;
  const slot = Math.max(1.2, Math.min(7, (box.width / tokens.length - 6) / heads));
  const base = box.target - 18;
  const highest = base - box.top + 8;
  for (let head = 0; head < heads; head++) {
    if (moment.hidden.has(head)) continue;
    const weight = weightsOf(story, moment, head);
    const shift = (head - (heads - 1) / 2) * slot;
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let t = 1; t < shown; t++) {
      const strength = moment.focus === t ? 1.6 : moment.focus >= 0 ? 0.08 : 0.9;
      for (let s = 0; s < t; s++) {
        const value = weight(t, s);
        if (value < LEAST_ARC) continue;
        const [from, to] = [row.centres[s] + shift, row.centres[t] + shift];
        const height = highest * Math.sqrt((t - s) / tokens.length);
        context.globalAlpha = Math.min(0.8, strength * (0.08 + value)); // weak ones recede
        context.lineWidth = value * slot;
        context.beginPath();
        context.moveTo(from, base);
        context.bezierCurveTo(from, base - 1.3 * height, to, base - 1.3 * height, to, base);
        context.stroke();
      }
    }
  }
  context.globalAlpha = 1;
  drawWords(context, row, prompt.length, shown, theme, box);
  // The first token is given: nothing predicts it.
  drawBars(context, row.centres.slice(0, shown), box.target + 7, theme, (t) => (t ? Math.exp(probe.reference_log_probs[t - 1]) : NaN));
  drawOutput(context, probe.tokens.map((token) => [token, true]), probe.log_probs, moment, theme, box);
  if (box.maps) drawMaps(context, story, moment, theme, box, heads, tokens.length);
  return row.centres;
}

/** Tokens in a row; upright where they would be too small. */
function words(context, tokens, box) {
  const row = place(context, tokens, box.width, box.narrow ? 12 : 17);
  if (row.font >= (box.staged ? 12 : 10)) return { ...row, upright: false };
  const step = (box.right - box.left) / tokens.length;
  return { ...row, font: 12, upright: true, centres: tokens.map((_, at) => box.left + step * (at + 0.5)) };
}

/** The words, and a line between the prompt and its continuation. */
function drawWords(context, { labels, centres, font, upright }, split, shown, theme, box) {
  context.font = `${font}px ${FONT}`;
  context.textAlign = upright ? "right" : "center";
  labels.forEach((label, at) => {
    context.globalAlpha = at < shown ? 1 : 0.25;
    context.fillStyle = at < split ? theme.text : theme.strong;
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
  context.lineTo(x, box.target + 28);
  context.stroke();
  if (upright) return;
  context.font = `12px ${FONT}`;
  context.fillStyle = theme.quiet;
  context.textAlign = "right";
  context.fillText("prompt", x - 8, box.target + 26);
  context.textAlign = "left";
  context.fillStyle = theme.strong;
  context.fillText("the text's own continuation", x + 8, box.target + 26);
}

/** The map of each head: rows attend to columns, the darker the more. */
function drawMaps(context, story, moment, theme, box, heads, count) {
  const { left, top, size, across, gap } = box.maps;
  const cell = size / count;
  for (let head = 0; head < heads; head++) {
    const weight = weightsOf(story, moment, head);
    const [x, y] = [left + (head % across) * (size + gap), top + Math.floor(head / across) * (size + 20)];
    context.globalAlpha = moment.hidden.has(head) ? 0.25 : 1;
    context.strokeStyle = theme.edge;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    context.fillStyle = theme.quiet;
    context.font = `12px ${FONT}`;
    context.textAlign = "left";
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
