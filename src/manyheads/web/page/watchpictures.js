// Watch an image classifier: a picture with the attention of each head over it, the probabilities of
// the classes, and what the model makes of the other pictures.

import { captionOf } from "./watchstory.js";
import { between, drawHeader, FONT, HEAD_COLOURS, nearest, tiling, weightsOf } from "./watchparts.js";

const GAP = 14;
const LABEL = 24; // below a tile
const STRIP = 46; // below a picture of the strip: its answer, and over the training whether it was right

/** Tiles of the picture and its heads, bars next to or below them, then all pictures. */
export function pictureLayout(context, story, sentence, { left, right, narrow, compact, curve, top, high }) {
  const examples = story.sentences.length;
  const wide = right - left;
  const tiles = story.probes[0].sentences[sentence].shape[1] + 1;
  const bars = narrow ? wide : Math.min(340, wide * 0.28);
  const room = narrow ? wide : wide - bars - 2 * GAP;
  const spare = high - top - 10;
  const tile = narrow ? { size: Math.floor((wide - 2 * GAP) / 3), across: 3, down: Math.ceil(tiles / 3) } : tiling(tiles, room, compact ? spare : Math.max(150, spare - STRIP - 60), GAP, LABEL);
  const below = top + tile.down * (tile.size + LABEL);
  const classes = story.probes[0].sentences[sentence].probabilities.length;
  const pitch = narrow || compact ? 20 : Math.max(19, Math.min(30, (below - top - 34) / Math.min(10, classes)));
  const barBox = { x: narrow ? left : right - bars, y: narrow ? below + 14 : top + 6, width: bars, pitch };
  const bottom = barBox.y + 10 * pitch + 20;
  if (compact) return { tile, bars: barBox, strip: 0, small: 0, axis: high, target: -100, write: high };
  const strip = narrow ? bottom + 8 : below + 12;
  const across = ((bottom > strip ? room : wide) - 10 * (examples - 1)) / examples;
  const small = Math.floor(narrow ? across : Math.max(60, Math.min(across, 0.8 * tile.size, high - strip - STRIP)));
  const axis = strip + small + STRIP + 14;
  const least = narrow ? axis : Math.max(axis, bottom);
  return { tile, bars: barBox, strip, small, axis: least, curve: curve + (narrow ? 0 : Math.max(0, high - least)), target: -100, write: strip };
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
    const [x, y] = [box.left + (tile % across) * (size + GAP), box.top + Math.floor(tile / across) * (size + LABEL)];
    const isHidden = moment.hidden.has(head);
    context.fillStyle = "#000"; // behind the head's colours the picture is dark
    context.globalAlpha = isHidden ? 0.3 : 1;
    context.fillRect(x, y, size, size);
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
  drawClasses(context, box.compact ? likeliest(classes, example.label) : classes, example.label, theme, box);
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
    const y = bars.y + 24 + at * bars.pitch;
    const isTrue = name === truth;
    label(context, name, bars.x, y, isTrue ? theme.text : theme.quiet, `${isTrue ? "600 " : ""}13px ${FONT}`);
    context.fillStyle = theme.edge;
    context.fillRect(bars.x + names, y - 9, wide, 9);
    context.fillStyle = isTrue ? theme.strong : theme.alarm;
    context.fillRect(bars.x + names, y - 9, wide * share, 9);
    label(context, `${Math.round(100 * share)} %`, bars.x + names + wide + 6, y, theme.quiet);
  });
}

/** The picture of the strip under a point; -1: none. @param {Record<string, any>} box */
export function pictureAt(box, count, x, y) {
  const { left, strip, small } = box;
  const at = Math.floor((x - left) / (small + 10));
  return y >= strip && y <= strip + small && at >= 0 && at < count ? at : -1;
}

/** All pictures with the likeliest class of each, and the probes at which it was right: high where it was. */
function drawStrip(context, story, probe, moment, theme, box) {
  const { left, strip, small } = box;
  const rightAt = (one, at) => answerOf(one.sentences[at])[0] === story.sentences[at].label;
  story.sentences.forEach((example, at) => {
    const x = left + at * (small + 10);
    context.drawImage(pictureOf(example), x, strip, small, small);
    if (at === moment.sentence) {
      context.strokeStyle = theme.strong;
      context.lineWidth = 3;
      context.strokeRect(x - 2.5, strip - 2.5, small + 5, small + 5);
    }
    const isRight = rightAt(probe, at);
    label(context, `${isRight ? "✓" : "✗"} ${answerOf(probe.sentences[at])[0]}`, x, strip + small + 19, isRight ? theme.text : theme.alarm, `14px ${FONT}`);
    const wide = small / story.probes.length;
    story.probes.forEach((one, number) => {
      const high = rightAt(one, at) ? 8 : 2;
      context.fillStyle = high > 2 ? theme.strong : theme.alarm;
      context.globalAlpha = number <= moment.at ? 1 : 0.3;
      context.fillRect(x + number * wide, strip + small + 36 - high, Math.max(1, wide - 0.5), high);
    });
    context.globalAlpha = 1;
  });
}
