// Watch it learn, on a canvas: cross-attention as ribbons between a sentence and its translation at
// one moment of training. It has no imports, because a saved HTML file contains this module.

/** Colours of heads (Okabe and Ito, and two more), distinguishable for colour-blind readers. */
export const HEAD_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f00", "#7b4bb7"];

const LEAST = 0.02; // weights below are not drawn
const FONT = "system-ui, sans-serif";

/**
 * @typedef {object} ProbedSentence
 * @property {string} text the greedy translation @property {string[]} tokens @property {number[]} log_probs
 * @property {number[]} reference_log_probs @property {number[]} shape layers, heads, target, source
 * @property {Uint8Array} weights 255 · cross-attention of the reference
 *
 * @typedef {object} Story everything that the view draws
 * @property {string} run
 * @property {{source: string, target: string, source_tokens: string[], target_tokens: string[]}[]} sentences
 * @property {{step: number, alignment_error?: number[][], sentences: ProbedSentence[]}[]} probes
 *
 * @typedef {object} Moment
 * @property {number} at position among the probes; fractions lie between two probes
 * @property {number} sentence @property {number} layer
 * @property {Set<number>} hidden heads that are not drawn
 * @property {number} token the reference is shown up to this token; -1: all of it
 * @property {number} focus a target token whose ribbons stand out; -1: none
 * @property {string} [note] a line under the translation
 */

/** The value between two probes. @param {number} a @param {number} b @param {number} share */
const between = (a, b, share) => a + (b - a) * share;

/**
 * Attention of one head at a moment, between the two nearest probes.
 * @param {Story} story @param {Moment} moment @param {number} head
 * @returns {(target: number, source: number) => number}
 */
export function weightsOf(story, moment, head) {
  const first = story.probes[Math.floor(moment.at)].sentences[moment.sentence];
  const next = story.probes[Math.ceil(moment.at)].sentences[moment.sentence];
  const [, heads, rows, columns] = first.shape;
  const start = (moment.layer * heads + head) * rows * columns;
  const share = moment.at - Math.floor(moment.at);
  return (target, source) => {
    const cell = start + target * columns + source;
    return between(first.weights[cell], next.weights[cell], share) / 255;
  };
}

/** log P of the reference at a moment. @param {Story} story @param {Moment} moment */
export function referenceLogProb(story, moment) {
  const sum = (at) => story.probes[at].sentences[moment.sentence].reference_log_probs.reduce((a, b) => a + b, 0);
  return between(sum(Math.floor(moment.at)), sum(Math.ceil(moment.at)), moment.at - Math.floor(moment.at));
}

/** The nearest probe. @param {Story} story @param {Moment} moment */
export const nearest = (story, moment) => story.probes[Math.round(moment.at)];

/** The step at a moment, between two probes on a logarithmic scale. */
export function stepAt(story, at) {
  const [a, b] = [story.probes[Math.floor(at)].step, story.probes[Math.ceil(at)].step];
  return Math.round(Math.expm1(between(Math.log1p(a), Math.log1p(b), at - Math.floor(at))));
}

/** How well a head aligns: 1 − alignment error; null without gold alignments. */
export function alignmentOf(story, at, layer, head) {
  const [a, b] = [story.probes[Math.floor(at)], story.probes[Math.ceil(at)]];
  if (!a.alignment_error || !b.alignment_error) return null;
  return 1 - between(a.alignment_error[layer][head], b.alignment_error[layer][head], at - Math.floor(at));
}

/** Positions of everything for a canvas of this width. @param {number} width */
export function layout(width) {
  const narrow = width < 560;
  const tall = narrow ? 150 : Math.min(260, Math.max(170, width * 0.15));
  const [top, curve] = [narrow ? 84 : 62, 80];
  const target = top + 14 + tall;
  const write = target + 44;
  const axis = write + 34;
  return { width, height: axis + curve + 26, narrow, top, target, write, axis, curve, left: 16, right: width - 16 };
}

/** x of each token's centre; the font shrinks until the line fits. */
function place(context, tokens, wide, size) {
  const labels = tokens.map((token) => (/^[<[].+[>\]]$/.test(token) ? "■" : token.trim() || "·"));
  let [font, gap, widths] = [size + 1, 0, []];
  do {
    font -= 1;
    context.font = `${font}px ${FONT}`;
    widths = labels.map((label) => context.measureText(label).width);
    gap = (wide - widths.reduce((a, b) => a + b, 0)) / (labels.length + 1);
  } while (gap < 4 && font > 7);
  gap = Math.min(gap, 34);
  let x = (wide - widths.reduce((a, b) => a + b, 0) - gap * (labels.length - 1)) / 2;
  const centres = widths.map((width) => {
    x += width + gap;
    return x - gap - width / 2;
  });
  return { labels, centres, font, widths };
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
 * Draws a moment. @param {CanvasRenderingContext2D} context in units of CSS pixels
 * @param {Story} story @param {Moment} moment @param {Record<string, string>} theme colours
 * @param {ReturnType<typeof layout>} box
 */
export function drawWatch(context, story, moment, theme, box) {
  const sentence = story.sentences[moment.sentence];
  const probe = nearest(story, moment).sentences[moment.sentence];
  const heads = probe.shape[1];
  context.clearRect(0, 0, box.width, box.height);
  context.fillStyle = theme.panel;
  context.fillRect(0, 0, box.width, box.height);
  context.textBaseline = "alphabetic";

  // Step and likelihood.
  context.fillStyle = theme.text;
  context.textAlign = "left";
  context.font = `600 20px ${FONT}`;
  context.fillText(`step ${stepAt(story, moment.at)}`, box.left, 28);
  context.font = `14px ${FONT}`;
  context.fillStyle = theme.quiet;
  const likelihood = `log P(reference) ${referenceLogProb(story, moment).toFixed(1)}`;
  context.fillText(likelihood, box.left + (box.narrow ? 0 : 130), box.narrow ? 48 : 28);
  drawDots(context, story, moment, theme, box, heads);

  // Words and ribbons.
  const size = box.narrow ? 13 : 17;
  const above = place(context, sentence.source_tokens, box.width, size);
  const below = place(context, sentence.target_tokens, box.width, size);
  const shown = moment.token < 0 ? below.labels.length : moment.token + 1;
  const slot = Math.max(1.2, Math.min(7, (box.width / Math.max(above.labels.length, below.labels.length) - 6) / heads));
  for (let head = 0; head < heads; head++) {
    if (moment.hidden.has(head)) continue;
    const weight = weightsOf(story, moment, head);
    const shift = (head - (heads - 1) / 2) * slot;
    context.strokeStyle = HEAD_COLOURS[head % HEAD_COLOURS.length];
    for (let t = 0; t < shown; t++) {
      context.globalAlpha = moment.focus >= 0 && moment.focus !== t ? 0.08 : 0.72;
      for (let s = 0; s < above.labels.length; s++) {
        const value = weight(t, s);
        if (value >= LEAST) ribbon(context, above.centres[s] + shift, box.top + 8, below.centres[t] + shift, box.target - 16, value * slot);
      }
    }
  }
  context.globalAlpha = 1;
  context.textAlign = "center";
  context.fillStyle = theme.text;
  context.font = `${above.font}px ${FONT}`;
  above.labels.forEach((label, s) => context.fillText(label, above.centres[s], box.top));
  context.font = `${below.font}px ${FONT}`;
  below.labels.forEach((label, t) => {
    context.fillStyle = theme.text;
    context.globalAlpha = t < shown ? 1 : 0.25;
    context.fillText(label, below.centres[t], box.target);
    // P of the token, as a bar.
    const probability = Math.exp(probe.reference_log_probs[t]);
    context.fillStyle = theme.edge;
    context.fillRect(below.centres[t] - 11, box.target + 7, 22, 4);
    context.fillStyle = theme.strong;
    context.fillRect(below.centres[t] - 11, box.target + 7, 22 * probability, 4);
    context.globalAlpha = 1;
  });

  drawOutput(context, probe, moment, theme, box);
  drawCurve(context, story, moment, theme, box);
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

/** A dot for each head, filled from below by 1 − alignment error. */
function drawDots(context, story, moment, theme, box, heads) {
  const radius = 9;
  for (let head = 0; head < heads; head++) {
    const x = box.right - radius - (heads - 1 - head) * 26;
    const colour = HEAD_COLOURS[head % HEAD_COLOURS.length];
    const share = alignmentOf(story, moment.at, moment.layer, head);
    context.globalAlpha = moment.hidden.has(head) ? 0.25 : 1;
    context.save();
    context.beginPath();
    context.arc(x, 22, radius, 0, 2 * Math.PI);
    context.clip();
    context.fillStyle = colour;
    const level = share === null ? 1 : Math.max(0, Math.min(1, share));
    context.fillRect(x - radius, 22 + radius - 2 * radius * level, 2 * radius, 2 * radius);
    context.restore();
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x, 22, radius, 0, 2 * Math.PI);
    context.stroke();
  }
  context.globalAlpha = 1;
}

/** The model's own translation: the less probable a token, the paler. */
function drawOutput(context, probe, moment, theme, box) {
  context.textAlign = "left";
  context.font = `13px ${FONT}`;
  context.fillStyle = theme.quiet;
  context.fillText("it writes", box.left, box.write);
  const size = box.narrow ? 14 : 18;
  context.font = `${size}px ${FONT}`;
  let [x, y] = [box.left + 70, box.write];
  const tokens = probe.tokens.slice(0, -1);
  if (!tokens.length) context.fillText("(nothing)", x, y);
  tokens.forEach((token, index) => {
    const label = index ? token : token.trimStart();
    const width = context.measureText(label).width;
    if (x + width > box.right) {
      [x, y] = [box.left + 70, y + size + 5];
      if (y > box.write + size + 6) return;
    }
    context.globalAlpha = 0.45 + 0.55 * Math.exp(probe.log_probs[index]);
    context.fillStyle = theme.text;
    context.fillText(label, x, y);
    x += width;
  });
  context.globalAlpha = 1;
  if (moment.note) {
    context.font = `13px ${FONT}`;
    context.fillStyle = theme.alarm;
    context.fillText(moment.note, box.left, box.axis - 4);
  }
}

/** The loss of a probe: −log P per token over all its references. */
export function lossOf(probe) {
  const all = probe.sentences.flatMap((sentence) => sentence.reference_log_probs);
  return -all.reduce((a, b) => a + b, 0) / all.length;
}

/** The loss over training with a handle; probes are ticks. */
function drawCurve(context, story, moment, theme, box) {
  const values = story.probes.map(lossOf);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const bottom = box.axis + box.curve;
  const y = (loss) => bottom - 8 - ((loss - low) / (high - low || 1)) * (box.curve - 18);
  context.strokeStyle = theme.edge;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(box.left, bottom);
  context.lineTo(box.right, bottom);
  story.probes.forEach((_, at) => {
    context.moveTo(curveX(box, story, at), bottom);
    context.lineTo(curveX(box, story, at), bottom - 5);
  });
  context.stroke();
  context.strokeStyle = theme.strong;
  context.lineWidth = 2;
  context.beginPath();
  values.forEach((loss, at) => context.lineTo(curveX(box, story, at), y(loss)));
  context.stroke();
  const x = curveX(box, story, moment.at);
  context.strokeStyle = theme.text;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x, box.axis);
  context.lineTo(x, bottom);
  context.stroke();
  const now = between(values[Math.floor(moment.at)], values[Math.ceil(moment.at)], moment.at - Math.floor(moment.at));
  context.fillStyle = theme.strong;
  context.beginPath();
  context.arc(x, y(now), 8, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = theme.quiet;
  context.font = `12px ${FONT}`;
  context.textAlign = "left";
  context.fillText("loss on these held-out sentences: drag, or press Space", box.left, bottom + 18);
  context.textAlign = "right";
  context.fillText(`loss ${now.toFixed(2)}`, box.right, bottom + 18);
}

/** The player of a saved file: scrubbing and playing without a server. @param {Story} story */
export function playStory(canvas, story, moment, theme) {
  const context = canvas.getContext("2d");
  let box = layout(800);
  let frame = 0;
  const draw = () => {
    box = layout(Math.max(340, canvas.parentElement.clientWidth));
    const fine = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [box.width * fine, box.height * fine];
    canvas.style.width = `${box.width}px`;
    canvas.style.height = `${box.height}px`;
    context.setTransform(fine, 0, 0, fine, 0, 0);
    drawWatch(context, story, moment, theme, box);
  };
  const go = (at) => {
    moment.at = Math.max(0, Math.min(story.probes.length - 1, at));
    draw();
  };
  const play = (begun = performance.now()) => {
    cancelAnimationFrame(frame);
    const last = story.probes.length - 1;
    const tick = (now) => {
      go((last * (now - begun)) / 6000);
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
