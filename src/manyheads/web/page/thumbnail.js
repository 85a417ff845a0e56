// Small pictures of a run: the loss curve, and attention of the last probe.

import { context2d, element, shown } from "./dom.js";
import { bestLayer, HEAD_COLOURS, kindOf, mostReordered, tiling, weightsOf } from "./watchparts.js";
import { pictureOf } from "./watchpictures.js";

const [WIDTH, HEIGHT] = [220, 64];
const LEAST = 0.08; // weights below are not drawn

/** The loss over the steps as a line; empty without two of them. @param {[number, number][]} losses */
export function sparkline(losses) {
  if (losses.length < 2) return "";
  const ends = (axis) => [Math.min(...losses.map((point) => point[axis])), Math.max(...losses.map((point) => point[axis]))];
  const [[left, right], [low, high]] = [ends(0), ends(1)];
  const x = (step) => 4 + ((step - left) / (right - left || 1)) * (WIDTH - 10);
  const y = (loss) => HEIGHT - 6 - ((loss - low) / (high - low || 1)) * (HEIGHT - 14);
  const path = losses.map(([step, loss]) => `${x(step).toFixed(1)} ${y(loss).toFixed(1)}`).join("L");
  const [lastStep, lastLoss] = losses.at(-1);
  const picture = element("div", { role: "img", "aria-label": `training loss from ${shown(losses[0][1])} to ${shown(lastLoss)}` });
  picture.innerHTML = `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" aria-hidden="true"><path d="M${path}"/><circle cx="${x(lastStep)}" cy="${y(lastLoss)}" r="3.5"/></svg>`;
  return element("div", { class: "spark" }, picture, element("span", {}, `loss ${shown(losses[0][1], 2)} → ${shown(lastLoss, 2)}`));
}

/** The last probe of a run on a canvas: the example whose word order changes most. @param {import("./watchparts.js").Story} story */
export function thumbnail(story) {
  const kind = kindOf(story);
  const sentence = mostReordered(story);
  const shape = /** @type {[number, number, number, number]} */ (story.probes[0].sentences[sentence].shape);
  const canvas = element("canvas", { class: "thumb", width: 2 * WIDTH, height: 2 * HEIGHT, role: "img", "aria-label": LABELS[kind] });
  const context = context2d(canvas);
  context.scale(2, 2);
  const moment = { at: 0, sentence, layer: bestLayer(story), hidden: new Set(), token: -1, focus: -1 };
  ({ translation: ribbons, language: arcs, images: looks })[kind](context, story, moment, shape);
  return canvas;
}

/** The example of a thumbnail, in words. @param {import("./watchparts.js").Story} story */
export function exampleOf(story) {
  const sentence = mostReordered(story);
  const [example, probed] = [story.sentences[sentence], story.probes[0].sentences[sentence]];
  if (kindOf(story) === "images") return { input: `a picture of “${example.label}”`, output: `${probed.probabilities[0][0]}, ${Math.round(100 * probed.probabilities[0][1])} %` };
  return { input: example.source.trim(), output: probed.text.trim() || "(nothing)" };
}

const LABELS = {
  translation: "cross-attention between a sentence and its translation, at the last probe",
  language: "self-attention of a text, at the last probe",
  images: "where the heads look in a picture, at the last probe",
};

/** Calls `act` with each weight of each head that is large enough. */
function eachWeight(context, story, moment, [, heads, rows, columns], act) {
  context.globalAlpha = 0.75;
  for (let head = 0; head < heads; head++) {
    const weight = weightsOf(story, moment, head);
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const value = weight(row, column);
        if (value >= LEAST) act(row, column, head - (heads - 1) / 2, value);
      }
    }
  }
  context.globalAlpha = 1;
}

/** x of each of so many tokens. */
const centresOf = (count) => Array.from({ length: count }, (_, at) => 8 + ((WIDTH - 16) * (at + 0.5)) / count);

function ribbons(context, story, moment, shape) {
  const { source_tokens: source, target_tokens: target } = story.sentences[moment.sentence];
  const [top, bottom] = [3, HEIGHT - 3];
  const [from, to] = [source, target].map((tokens) => centresOf(tokens.length));
  eachWeight(context, story, moment, shape, (row, column, head, value) => {
    const [left, right] = [from[column] + 1.4 * head, to[row] + 1.4 * head];
    context.lineWidth = (4.5 * value) / Math.sqrt(shape[1]);
    context.beginPath();
    context.moveTo(left, top);
    context.bezierCurveTo(left, HEIGHT / 2, right, HEIGHT / 2, right, bottom);
    context.stroke();
  });
}

function arcs(context, story, moment, shape) {
  const bottom = HEIGHT - 3;
  const centres = centresOf(shape[2]);
  eachWeight(context, story, moment, shape, (row, column, head, value) => {
    if (row === column) return;
    const [from, to] = [column, row].map((at) => centres[at] + head * 1.4);
    const top = bottom - 1.25 * (bottom - 5) * Math.sqrt((row - column) / shape[2]);
    context.lineWidth = (4.5 * value) / Math.sqrt(shape[1]);
    context.beginPath();
    context.moveTo(from, bottom);
    context.bezierCurveTo(from, top, to, top, to, bottom);
    context.stroke();
  });
}

/** The picture and its heads. */
function looks(context, story, moment, [, heads, rows, columns]) {
  context.imageSmoothingEnabled = false;
  const { size, across } = tiling(heads + 1, WIDTH, HEIGHT, 4, 2);
  for (let tile = 0; tile <= heads; tile++) {
    const [x, y] = [(tile % across) * (size + 4), Math.floor(tile / across) * (size + 2)];
    context.fillStyle = "#000";
    context.fillRect(x, y, size, size);
    context.globalAlpha = tile ? 0.5 : 1;
    context.drawImage(pictureOf(story.sentences[moment.sentence]), x, y, size, size);
    if (!tile) continue;
    const weight = weightsOf(story, moment, tile - 1);
    context.fillStyle = HEAD_COLOURS[(tile - 1) % HEAD_COLOURS.length];
    for (let cell = 0; cell < rows * columns; cell++) {
      const [row, column] = [Math.floor(cell / columns), cell % columns];
      context.globalAlpha = 0.85 * weight(row, column);
      context.fillRect(x + (column * size) / columns, y + (row * size) / rows, size / columns, size / rows);
    }
    context.globalAlpha = 1;
  }
}
