// Watch an image classifier: a picture with the attention of each head over it, the probabilities of
// the classes, and what the model makes of the other pictures.

import { captionOf } from "./watchstory.js";
import { between, drawHeader, FONT, HEAD_COLOURS, nearest, weightsOf } from "./watchparts.js";

const GAP = 14;
const BAR_ROW = 20;

/** Tiles of the picture and its heads, bars next to or below them, then all pictures. */
export function pictureLayout({ left, right, top, narrow, staged, curve }, heads, examples, most) {
  const wide = right - left;
  const tiles = heads + 1;
  const bars = narrow ? wide : Math.min(300, wide * 0.28);
  const room = narrow ? wide : wide - bars - 2 * GAP;
  const across = narrow ? Math.min(3, tiles) : Math.min(tiles, Math.max(1, Math.floor((room + GAP) / (110 + GAP))));
  if (staged) {
    const half = Math.ceil(tiles / 2); // two rows
    const side = Math.min(Math.floor((room - GAP * (half - 1)) / half), Math.floor((most - top - curve - 76) / 2));
    const end = top + 2 * (side + 24);
    return { tile: { size: side, across: half }, bars: { x: right - bars, y: top + 6, width: bars }, strip: 0, small: 0, axis: end, target: -100, write: end };
  }
  const size = Math.min(200, Math.floor((room - GAP * (across - 1)) / across));
  const rows = Math.ceil(tiles / across);
  const below = top + rows * (size + 24);
  const barHeight = 10 * BAR_ROW + 20;
  const barBox = narrow ? { x: left, y: below + 14, width: wide } : { x: right - bars, y: top + 6, width: bars };
  const strip = narrow ? barBox.y + barHeight + 8 : below + 10;
  const small = Math.min(72, Math.floor((room - 10 * (examples - 1)) / examples));
  const axis = Math.max(strip + small + 40, barBox.y + barHeight + 12);
  return { tile: { size, across }, bars: barBox, strip, small, axis, target: -100, write: strip };
}

/** The pictures of examples as canvases. @type {WeakMap<object, HTMLCanvasElement>} */
const drawn = new WeakMap();

/** @param {import("./watchparts.js").Example} example */
export function pictureOf(example) {
  const made = drawn.get(example);
  if (made) return made;
  const [height, width, channels] = example.size;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const image = new ImageData(width, height);
  for (let at = 0; at < width * height; at++) {
    for (let colour = 0; colour < 3; colour++) image.data[4 * at + colour] = example.bytes[channels * at + (channels === 1 ? 0 : colour)];
    image.data[4 * at + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  drawn.set(example, canvas);
  return canvas;
}

/** Probabilities at a moment, between two probes; few classes stay in one order. */
export function classesAt(story, moment) {
  const [a, b] = [Math.floor, Math.ceil].map((round) => new Map(story.probes[round(moment.at)].sentences[moment.sentence].probabilities));
  const names = [...new Set([...a.keys(), ...b.keys()])];
  const all = names.map((name) => /** @type {[string, number]} */ ([name, between(a.get(name) ?? 0, b.get(name) ?? 0, moment.at - Math.floor(moment.at))]));
  const byName = (one, other) => one[0].localeCompare(other[0], "en", { numeric: true });
  return names.length <= 10 && a.size === names.length ? all.sort(byName) : all.sort((one, other) => other[1] - one[1]).slice(0, 10);
}

/** The five likeliest classes, with the true one. */
function likeliest(classes, truth) {
  const top = [...classes].sort((one, other) => other[1] - one[1]).slice(0, 5);
  const missing = classes.find(([name]) => name === truth && !top.some(([other]) => other === name));
  return missing ? [...top.slice(0, 4), missing] : top;
}

/** The likeliest class of an example at a probe. */
const answerOf = (probed) => probed.probabilities[0];

/** The output in words. */
export function pictureText(story, moment) {
  const [name, share] = answerOf(nearest(story, moment).sentences[moment.sentence]);
  return `${name}, ${Math.round(100 * share)} %`;
}

/** @returns {number[]} no tokens */
export function drawPictures(context, story, moment, theme, box) {
  const probe = nearest(story, moment);
  const example = story.sentences[moment.sentence];
  const right = probe.sentences.filter((probed, at) => answerOf(probed)[0] === story.sentences[at].label).length;
  drawHeader(context, story, moment, theme, box, `${right} of ${story.sentences.length} pictures right`, captionOf(story, moment));
  const [, heads, rows, columns] = probe.sentences[moment.sentence].shape;
  const { size, across } = box.tile;
  context.imageSmoothingEnabled = false;
  for (let tile = 0; tile <= heads; tile++) {
    const head = tile - 1;
    const [x, y] = [box.left + (tile % across) * (size + GAP), box.top + Math.floor(tile / across) * (size + 24)];
    const isHidden = moment.hidden.has(head);
    context.globalAlpha = head < 0 ? 1 : isHidden ? 0.2 : 0.55;
    context.drawImage(pictureOf(example), x, y, size, size);
    context.globalAlpha = 1;
    if (head >= 0) {
      if (!isHidden) drawLook(context, weightsOf(story, moment, head), x, y, size, rows, columns, HEAD_COLOURS[head % HEAD_COLOURS.length]);
      context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
      context.lineWidth = 2;
      context.strokeRect(x, y, size, size);
    }
    label(context, head < 0 ? `class ${example.label}` : `head ${moment.layer + 1}·${head + 1}`, x, y + size + 16, theme.quiet);
  }
  const classes = classesAt(story, moment);
  drawClasses(context, box.staged ? likeliest(classes, example.label) : classes, example.label, theme, box);
  if (box.small) drawStrip(context, story, probe, moment, theme, box);
  return [];
}

/** Where a head looks: patches in its colour, relative to the greatest weight. */
function drawLook(context, weight, x, y, size, rows, columns, colour) {
  context.fillStyle = colour;
  const edge = (at, count) => Math.round((at * size) / count);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      context.globalAlpha = 0.85 * weight(row, column);
      const [left, top] = [edge(column, columns), edge(row, rows)];
      context.fillRect(x + left, y + top, edge(column + 1, columns) - left, edge(row + 1, rows) - top);
    }
  }
  context.globalAlpha = 1;
}

function label(context, text, x, y, colour, font = `12px ${FONT}`) {
  context.font = font;
  context.fillStyle = colour;
  context.textAlign = "left";
  context.fillText(text, x, y);
}

function drawClasses(context, classes, truth, theme, { bars }) {
  label(context, "P(class)", bars.x, bars.y + 4, theme.quiet);
  const names = Math.min(bars.width * 0.4, Math.max(40, 8 * Math.max(...classes.map(([name]) => name.length))));
  const wide = bars.width - names - 44;
  classes.forEach(([name, share], at) => {
    const y = bars.y + 24 + at * BAR_ROW;
    const isTrue = name === truth;
    label(context, name, bars.x, y, isTrue ? theme.text : theme.quiet, `${isTrue ? "600 " : ""}13px ${FONT}`);
    context.fillStyle = theme.edge;
    context.fillRect(bars.x + names, y - 9, wide, 9);
    context.fillStyle = isTrue ? theme.strong : theme.alarm;
    context.fillRect(bars.x + names, y - 9, wide * share, 9);
    label(context, `${Math.round(100 * share)} %`, bars.x + names + wide + 6, y, theme.quiet);
  });
}

/** The picture of the strip under a point; -1: none. */
export function pictureAt({ left, strip, small }, count, x, y) {
  const at = Math.floor((x - left) / (small + 10));
  return y >= strip && y <= strip + small && at >= 0 && at < count ? at : -1;
}

/** All pictures with the likeliest class of each. */
function drawStrip(context, story, probe, moment, theme, { left, strip, small }) {
  story.sentences.forEach((example, at) => {
    const x = left + at * (small + 10);
    context.drawImage(pictureOf(example), x, strip, small, small);
    if (at === moment.sentence) {
      context.strokeStyle = theme.strong;
      context.lineWidth = 3;
      context.strokeRect(x - 2.5, strip - 2.5, small + 5, small + 5);
    }
    const [name] = answerOf(probe.sentences[at]);
    const isRight = name === example.label;
    label(context, `${isRight ? "✓" : "✗"} ${name}`, x, strip + small + 17, isRight ? theme.text : theme.alarm, `13px ${FONT}`);
  });
}
