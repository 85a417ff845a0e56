// Watch it learn, on a canvas: examples at one moment of training. A saved HTML file contains this
// module and those that it imports.

import { percent } from "./numbers.js";
import { drawLanguage, languageLayout } from "./watchlanguage.js";
import { captionOf, checked, chosen, isRight, milestones, playFrom } from "./watchstory.js";
import { alignments, drawBars, drawCurve, drawDots, drawHeader, drawOutput, HEAD_COLOURS, FONT, justified, kindOf, momentAt, nearest, overAll, referenceLogProb, staggered, weightsOf } from "./watchparts.js";
import { drawPictures, pictureLayout } from "./watchpictures.js";

/** @typedef {import("./watchparts.js").Story} Story @typedef {import("./watchparts.js").Moment} Moment */

const LEAST = 0.02; // weights below are not drawn
const ROW = 14; // from a row of words to the second one
const LOW = 170; // the least height of the ribbons
const THEME = ["panel", "text", "quiet", "edge", "strong", "alarm"];

/** The colours of the page, from its CSS variables. @returns {Record<string, string>} */
export function themeOf() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(THEME.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/**
 * Positions of everything on a canvas. It fills the height, except on a phone, which scrolls.
 * @param {CanvasRenderingContext2D} context @param {Story} story @param {number} sentence
 * @param {{width: number, height: number, compact?: boolean}} size `compact`, for the stage and the home page: small
 * letters, which the stage enlarges, and the curve low
 * @returns {Record<string, any>} with `axis`, y of the curve, and `target`, y of the words that can be pointed at
 */
export function layout(context, story, sentence, { width, height, compact = false }) {
  const kind = kindOf(story);
  const narrow = width < 560 && !compact;
  const curve = compact ? 28 : 84;
  const base = {
    ...{ kind, width, narrow, compact, curve, left: 16, right: width - 16 },
    ...(compact ? { first: 18, top: 54, caption: 12.5, lines: 1 } : narrow ? { first: 28, top: 86, caption: 13, lines: 4 } : { first: 28, top: 82, caption: 16, lines: 2 }),
    foot: compact ? 20 : 26, // of the numbers below the curve
    high: height - curve - (compact ? 20 : 26), // of what is above the curve
  };
  const made = { translation: translationLayout, language: languageLayout, images: pictureLayout }[kind];
  const box = { ...base, ...made(context, story, sentence, base) };
  return { ...box, height: box.axis + box.curve + base.foot };
}

/** Two rows of words between the same edges, the output below them, and ribbons as high as the rest. */
function translationLayout(context, story, sentence, { left, right, narrow, compact, top, high }) {
  const { source_tokens: source, target_tokens: target } = story.sentences[sentence];
  const size = compact ? 14 : narrow ? 13 : Math.max(19, Math.min(26, (right - left) / 70));
  const sides = { left, right, size, least: compact ? 11.5 : narrow ? 11 : 14 };
  const words = justified(context, [source, target], sides) ?? [source, target].map((tokens) => staggered(context, tokens, sides));
  const [above, below] = words.map(({ rows }) => ROW * Math.max(...rows));
  const begin = Math.round(top + above + 0.8 * words[0].font);
  const between = narrow ? 44 : compact ? 25 : 42; // from the words to the output
  const after = narrow ? 74 : compact ? 8 : 36; // from the output to the curve
  const end = narrow ? begin + 164 : Math.max(begin + (compact ? 60 : LOW), high - after - below - between);
  return { words, size, top: begin, target: end, write: end + below + between, axis: end + below + between + after };
}

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
  const at = Math.round(moment.at);
  const probe = nearest(story, moment).sentences[moment.sentence];
  const heads = probe.shape[1];
  drawHeader(context, story, moment, theme, box, `P of the reference ${percent(Math.exp(referenceLogProb(story, moment)))}, the product over its tokens`, captionOf(story, moment));
  const shares = alignments(story, moment);
  if (shares) drawDots(context, shares, alignmentNames(story), moment, theme, box);

  // Words and ribbons.
  const [above, below] = box.words;
  const shown = moment.token < 0 ? below.labels.length : moment.token + 1;
  const slot = Math.max(1.2, Math.min(box.compact ? 6 : Math.max(7, Math.min(12, box.width / 160)), ((box.right - box.left) / Math.max(above.labels.length, below.labels.length) - 6) / heads));
  const marked = chosen(story, moment);
  const back = moment.focus < 0 ? 0.4 : 0.12; // strength of all other ribbons
  for (let head = 0; head < heads; head++) {
    if (moment.hidden.has(head)) continue;
    const weight = weightsOf(story, moment, head);
    const shift = (head - (heads - 1) / 2) * slot;
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let t = 0; t < shown; t++) {
      const strength = !marked ? 1 : marked.row === t ? 1.3 : back;
      for (let s = 0; s < above.labels.length; s++) {
        const value = weight(t, s);
        if (value < LEAST) continue;
        context.globalAlpha = Math.min(1, strength * (0.12 + 0.66 * value)); // weak ones recede
        ribbon(context, above.centres[s] + shift, box.top + 8, below.centres[t] + shift, box.target - below.font, value * slot);
      }
    }
  }
  context.globalAlpha = 1;
  drawWords(context, above, box.top, -ROW, marked?.column, above.labels.length, theme);
  drawWords(context, below, box.target, ROW, marked?.row, shown, theme);
  drawBars(context, below, shown, box.target + (box.compact ? 7 : 9) + ROW * Math.max(...below.rows), box.compact ? 4 : 6, theme, (t) => Math.exp(probe.reference_log_probs[t]));
  drawOutput(context, checked(story, at, moment.sentence), probe.log_probs, moment, theme, box, isRight(story, at, moment.sentence));
  return below.centres;
}

/** What the dots of a translation show, the longest name first. @param {Story} story */
export const alignmentNames = (story) => [...["words aligned by each head ", "words aligned ", "aligned "].map((name) => name + overAll(story)), "aligned"];

/** A row of words; those from `shown` on are pale. @param {import("./watchparts.js").Words} words */
function drawWords(context, words, y, out, marked, shown, theme) {
  const { labels, centres, rows, font } = words;
  context.textAlign = "center";
  labels.forEach((label, at) => {
    context.fillStyle = marked === at ? theme.strong : theme.text;
    context.font = `${marked === at ? "700 " : ""}${font}px ${FONT}`;
    context.globalAlpha = at < shown ? 1 : 0.25;
    context.fillText(label, centres[at], y + out * rows[at]);
  });
  context.globalAlpha = 1;
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

/**
 * A player without controls, for a saved file and the home page: scrubbing and playing without a server.
 * @param {HTMLCanvasElement} canvas @param {Story} story @param {Moment} moment
 * @param {() => {width: number, height: number, compact?: boolean, zoom?: number}} size of the canvas, in enlarged pixels
 */
export function playStory(canvas, story, moment, size) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const last = story.probes.length - 1;
  /** @type {ReturnType<typeof layout>} */
  let box;
  let stop = () => {};
  const draw = () => {
    const { zoom = 1, ...sides } = size();
    box = layout(context, story, moment.sentence, sides);
    const fine = zoom * (devicePixelRatio || 1);
    [canvas.width, canvas.height] = [box.width * fine, box.height * fine];
    canvas.style.width = `${box.width * zoom}px`;
    canvas.style.height = `${box.height * zoom}px`;
    context.setTransform(fine, 0, 0, fine, 0, 0);
    drawWatch(context, story, moment, themeOf(), box);
  };
  const go = (at) => {
    moment.at = Math.max(0, Math.min(last, at));
    moment.resting = moment.at === last;
    draw();
  };
  const play = () => {
    stop();
    stop = playFrom(story, moment.sentence, 0, go);
  };
  const drag = (event) => {
    if (event.buttons) go(momentAt(box, story, event.offsetX));
  };
  canvas.addEventListener("pointerdown", (event) => (stop(), drag(event)));
  canvas.addEventListener("pointermove", drag);
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === " ") play();
    else if (by) {
      stop();
      go(Math.round(moment.at) + by);
    } else return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(/** @type {HTMLElement} */ (canvas.parentElement));
  go(moment.at);
  return { play };
}
