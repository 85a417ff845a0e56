// Watch it learn, on a canvas: examples at one moment of training. A saved HTML file contains this
// module and those that it imports.

import { drawLanguage, mapLayout } from "./watchlanguage.js";
import { captionOf, checked, milestones, moved, pace } from "./watchstory.js";
import { drawBars, drawCurve, drawDots, drawHeader, drawOutput, HEAD_COLOURS, FONT, kindOf, momentAt, nearest, place, referenceLogProb, weightsOf } from "./watchparts.js";
import { drawPictures, pictureLayout } from "./watchpictures.js";

/** @typedef {import("./watchparts.js").Story} Story @typedef {import("./watchparts.js").Moment} Moment */

const LEAST = 0.02; // weights below are not drawn
const ROW = 14; // from a row of words to the second one

/**
 * Positions of everything for a canvas of this width. @param {number} width
 * @param {"translation"|"language"|"images"} [kind] @param {number} [heads] @param {number} [examples]
 * @param {number} [most] height of the stage, which leaves out what does not fit
 */
export function layout(width, kind = "translation", heads = 8, examples = 8, most = Infinity) {
  const staged = most < Infinity;
  const narrow = width < 560 && !staged;
  const second = kind === "translation" && (staged || narrow) ? ROW : 0; // words may need two rows
  const [top, curve] = staged ? [86 + second, 38] : [(narrow ? 102 : 88) + second, 84];
  const captionSize = staged || narrow ? 13 : 16;
  const base = { width, second, narrow, staged, captionSize, kind, top, curve, left: 16, right: width - 16, end: width - 16, lines: narrow ? 4 : 2, maps: null };
  if (kind === "images") return closed({ ...base, ...pictureLayout(base, heads, examples, most) });
  const plain = kind === "language" ? 140 : Math.min(380, Math.max(170, 0.35 * width - 215));
  const below = { translation: 32, language: 50 }[kind]; // from the words to the output, on stage
  const tall = staged ? Math.max(60, most - top - 14 - below - second - 28 - curve - 26) : narrow ? 150 : plain;
  const target = top + 14 + tall;
  if (staged) return closed({ ...base, target, write: target + below + second, axis: target + below + second + 28 });
  if (kind === "translation") return closed({ ...base, target, write: target + 44 + second, axis: target + (narrow ? 118 : 78) + second });
  const write = target + (narrow ? 92 : 56);
  const maps = mapLayout(base, narrow ? write + 48 : write - 20, heads);
  return closed({ ...base, target, write, maps, lines: narrow ? 2 : 5, end: narrow ? base.right : maps.left - 24, axis: maps.bottom + 14 });
}

const closed = (box) => ({ ...box, height: box.axis + box.curve + 26 });

/**
 * Draws a moment, and sets `box.centres`, x of the tokens that can be pointed at.
 * @param {CanvasRenderingContext2D} context in units of CSS pixels
 * @param {Story} story @param {Moment} moment @param {Record<string, string>} theme colours
 * @param {ReturnType<typeof layout>} box
 */
export function drawWatch(context, story, moment, theme, box) {
  const view = { translation: drawTranslation, language: drawLanguage, images: drawPictures }[box.kind];
  box.centres = view(context, story, moment, theme, box);
  drawCurve(context, story, moment, theme, box, milestones(story, moment.sentence));
}

/** Cross-attention as ribbons between a sentence and its translation. */
function drawTranslation(context, story, moment, theme, box) {
  const sentence = story.sentences[moment.sentence];
  const at = Math.round(moment.at);
  const probe = nearest(story, moment).sentences[moment.sentence];
  const heads = probe.shape[1];
  drawHeader(context, story, moment, theme, box, `log P(reference) ${referenceLogProb(story, moment).toFixed(1)}`, captionOf(story, moment));
  drawDots(context, story, moment, theme, box, heads);

  // Words and ribbons.
  const [size, least] = box.narrow ? [13, 11] : box.staged ? [13, 12] : [19, 0];
  const above = place(context, sentence.source_tokens, box.width, size, least);
  const below = place(context, sentence.target_tokens, box.width, size, least);
  const shown = moment.token < 0 ? below.labels.length : moment.token + 1;
  const slot = Math.max(1.2, Math.min(7, (box.width / Math.max(above.labels.length, below.labels.length) - 6) / heads));
  const emphasis = moment.resting && moment.focus < 0 ? moved(story, moment) : null; // the word of the caption
  const focus = emphasis ? emphasis.row : moment.focus;
  const back = emphasis ? 0.4 : 0.12; // strength of all other ribbons
  for (let head = 0; head < heads; head++) {
    if (moment.hidden.has(head)) continue;
    const weight = weightsOf(story, moment, head);
    const shift = (head - (heads - 1) / 2) * slot;
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let t = 0; t < shown; t++) {
      const strength = focus < 0 ? 1 : focus === t ? 1.3 : back;
      for (let s = 0; s < above.labels.length; s++) {
        const value = weight(t, s);
        if (value < LEAST) continue;
        context.globalAlpha = Math.min(1, strength * (0.12 + 0.66 * value)); // weak ones recede
        ribbon(context, above.centres[s] + shift, box.top + 8, below.centres[t] + shift, box.target - 16, value * slot);
      }
    }
  }
  context.globalAlpha = 1;
  context.textAlign = "center";
  above.labels.forEach((label, s) => {
    context.fillStyle = emphasis?.column === s ? theme.strong : theme.text;
    context.font = `${emphasis?.column === s ? "700 " : ""}${above.font}px ${FONT}`;
    context.fillText(label, above.centres[s], box.top - ROW * above.rows[s]);
  });
  below.labels.forEach((label, t) => {
    context.fillStyle = emphasis?.row === t ? theme.strong : theme.text;
    context.font = `${emphasis?.row === t ? "700 " : ""}${below.font}px ${FONT}`;
    context.globalAlpha = t < shown ? 1 : 0.25;
    context.fillText(label, below.centres[t], box.target + ROW * below.rows[t]);
    context.globalAlpha = 1;
  });
  drawBars(context, below.centres.slice(0, shown), box.target + 7 + ROW * Math.max(...below.rows), theme, (t) => Math.exp(probe.reference_log_probs[t]));

  drawOutput(context, checked(story, at, moment.sentence), probe.log_probs, moment, theme, box);
  return below.centres;
}

/** A band between two words whose width is the weight. */
function ribbon(context, x0, y0, x1, y1, width) {
  const middle = (y0 + y1) / 2;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0, middle, x1, middle, x1, y1);
  context.stroke();
}

/** The player of a saved file: scrubbing and playing without a server. @param {Story} story */
export function playStory(canvas, story, moment, theme) {
  const context = canvas.getContext("2d");
  const [heads, kind] = [story.probes[0].sentences[0].shape[1], kindOf(story)];
  let box = layout(800, kind, heads, story.sentences.length);
  let frame = 0;
  const draw = () => {
    box = layout(Math.max(340, canvas.parentElement.clientWidth), kind, heads, story.sentences.length);
    const fine = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [box.width * fine, box.height * fine];
    canvas.style.width = `${box.width}px`;
    canvas.style.height = `${box.height}px`;
    context.setTransform(fine, 0, 0, fine, 0, 0);
    drawWatch(context, story, moment, theme, box);
  };
  const go = (at) => {
    moment.at = Math.max(0, Math.min(story.probes.length - 1, at));
    moment.resting = moment.at === story.probes.length - 1;
    draw();
  };
  const play = (begun = performance.now()) => {
    cancelAnimationFrame(frame);
    const last = story.probes.length - 1;
    const position = pace(story);
    const tick = (now) => {
      go(position((now - begun) / 6000));
      if (moment.at < last) frame = requestAnimationFrame(tick);
    };
    frame = requestAnimationFrame(tick);
  };
  const drag = (event) => {
    if (event.buttons) go(momentAt(box, story, event.offsetX));
  };
  canvas.addEventListener("pointerdown", (event) => (cancelAnimationFrame(frame), drag(event)));
  canvas.addEventListener("pointermove", drag);
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === " ") play();
    else if (by) go(Math.round(moment.at) + by);
    else return;
    event.preventDefault();
  });
  addEventListener("resize", draw);
  draw();
  return { draw, go, play };
}
