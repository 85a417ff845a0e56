// Small pictures of a run: the loss curve, and attention of the last probe.

import { element, shown } from "./dom.js";
import { HEAD_COLOURS, kindOf, weightsOf } from "./watchparts.js";
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
  return element("div", { class: "spark" }, picture, element("span", {}, `training loss ${shown(losses[0][1], 2)} → ${shown(lastLoss, 2)}`));
}

/** The last probe of a run on a small canvas. @param {import("./watchparts.js").Story} story */
export function thumbnail(story) {
  const kind = kindOf(story);
  const shape = /** @type {[number, number, number, number]} */ (story.probes[0].sentences[0].shape);
  const canvas = element("canvas", { class: "thumb", width: 2 * WIDTH, height: 2 * HEIGHT, role: "img", "aria-label": LABELS[kind] });
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  const layer = bestLayer(story.probes[0], shape[0]);
  const moment = { at: 0, sentence: 0, layer, hidden: new Set(), token: -1, focus: -1 };
  ({ translation: ribbons, language: arcs, images: looks })[kind](context, story, moment, shape);
  return canvas;
}

const LABELS = {
  translation: "cross-attention between a sentence and its translation, at the last probe",
  language: "self-attention of a text, at the last probe",
  images: "where the heads look in a picture, at the last probe",
};

/** The layer with the head that aligns best, or the last. */
function bestLayer(probe, layers) {
  const errors = probe.alignment_error?.map((heads) => Math.min(...heads));
  return errors ? errors.indexOf(Math.min(...errors)) : layers - 1;
}

const spread = (at, count) => 8 + ((WIDTH - 16) * (at + 0.5)) / count;

/** Calls `act` with each weight of each head that is large enough. */
function eachWeight(context, story, moment, [, heads, rows, columns], act) {
  context.globalAlpha = 0.75;
  for (let head = 0; head < heads; head++) {
    const weight = weightsOf(story, moment, head);
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const value = weight(row, column);
        if (value < LEAST) continue;
        context.lineWidth = (4.5 * value) / Math.sqrt(heads);
        context.beginPath();
        act(row, column, (head - (heads - 1) / 2) * 1.4);
        context.stroke();
      }
    }
  }
}

function ribbons(context, story, moment, shape) {
  const [, , rows, columns] = shape;
  eachWeight(context, story, moment, shape, (row, column, shift) => {
    const [from, to] = [spread(column, columns) + shift, spread(row, rows) + shift];
    context.moveTo(from, 3);
    context.bezierCurveTo(from, HEIGHT / 2, to, HEIGHT / 2, to, HEIGHT - 3);
  });
}

function arcs(context, story, moment, shape) {
  const [, , rows] = shape;
  eachWeight(context, story, moment, shape, (row, column, shift) => {
    if (row === column) return;
    const [from, to] = [spread(column, rows) + shift, spread(row, rows) + shift];
    const height = 1.25 * (HEIGHT - 8) * Math.sqrt((row - column) / rows);
    context.moveTo(from, HEIGHT - 3);
    context.bezierCurveTo(from, HEIGHT - height, to, HEIGHT - height, to, HEIGHT - 3);
  });
}

function looks(context, story, moment, [, heads, rows, columns]) {
  context.imageSmoothingEnabled = false;
  const size = Math.min(HEIGHT - 4, (WIDTH - 4) / (heads + 1) - 4);
  for (let tile = 0; tile <= heads; tile++) {
    const x = 2 + tile * (size + 4);
    context.globalAlpha = tile ? 0.5 : 1;
    context.drawImage(pictureOf(story.sentences[0]), x, 2, size, size);
    if (!tile) continue;
    const weight = weightsOf(story, moment, tile - 1);
    context.fillStyle = HEAD_COLOURS[(tile - 1) % HEAD_COLOURS.length];
    for (let cell = 0; cell < rows * columns; cell++) {
      const [row, column] = [Math.floor(cell / columns), cell % columns];
      context.globalAlpha = 0.85 * weight(row, column);
      context.fillRect(x + (column * size) / columns, 2 + (row * size) / rows, size / columns, size / rows);
    }
  }
}
