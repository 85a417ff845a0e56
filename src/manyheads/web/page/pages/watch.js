// Watch it learn: one example over training. The loss curve is the time axis. A sentence has its
// cross-attention as ribbons, a text its self-attention as arcs, a picture that of each head over it.

import { post } from "../api.js";
import { StepDifference } from "../compare.js";
import { button, checkbox, element, escaped, html, labelled, numbered, percent, put, render, select, shown, tabs } from "../dom.js";
import { saveFile, saveMenu } from "../exports.js";
import { canFilm, film } from "../film.js";
import { fitting, nothingFits } from "../fitting.js";
import { refresh, sourceOf } from "../probes.js";
import { request } from "../recording.js";
import { lead, runChoice } from "../runs.js";
import { exampleName, outputAt } from "../samples.js";
import { change } from "../state.js";
import { bestLayer, HEAD_COLOURS, kindOf, mostReordered, momentAt, nearest, positionOf, stepAt } from "../watchparts.js";
import { pictureAt } from "../watchpictures.js";
import { pace, playFrom, SECONDS } from "../watchstory.js";
import { drawWatch, layout, themeOf } from "../watchview.js";

const EVERY = 1500; // milliseconds between two requests
const STILL = 0.8; // seconds for which a film shows its last picture
const MODULES = ["numbers.js", "watchparts.js", "watchstory.js", "watchlanguage.js", "watchpictures.js", "watchview.js"]; // of a saved file

const played = new Set(); // runs whose training was played since the page was loaded

/** The words of the page for each kind of example; `attention` names the heads that can be removed. */
const KINDS = {
  translation: {
    lead: "A held-out sentence and its reference. Ribbons: cross-attention. Dials: words that a head aligns. Bars: P of each token.",
    example: "Sentence",
    written: "Translation written so far",
    attention: "decoder.cross",
  },
  language: {
    lead: "A held-out text. Arcs: self-attention. Dials: weight on the token before. Bars: P of each token.",
    example: "Text",
    written: "Text read so far",
    attention: "decoder.self",
  },
  images: {
    lead: "Held-out pictures while the model learns to name them. Heads colour what they attend to. Blue marks: it was right.",
    example: "Picture",
  },
};

export const keys = [
  ["← →", "previous probe, next probe"],
  ["Home End", "first step, last step"],
  ["Space", "play the training in six seconds, with a rest at each milestone"],
  ["[ ]", "one token of the translation less, one more"],
];

export async function draw(place, state, signal) {
  const { runs, run } = await fitting("watch", state.run, signal);
  if (!run) return nothingFits(place, "watch");
  const source = sourceOf(run.name);
  await refresh(source, signal);
  const other = state.run && state.run !== run.name ? html`<p class="note">“${state.run}” does not support this page. Showing “${run.name}”.</p>` : "";
  const heading = html`<h1>Watch ${run.name} learn</h1>${other}`;
  const form = (controls) => html`<form class="controls" @submit=${(event) => event.preventDefault()}>${runChoice(runs, run.name)}${controls}</form>`;
  if (!source.probes.length) {
    const hint = "This run has no probes. Models that translate, write or name pictures record them while they train (train.probes=40): manyheads demo --open.";
    put(place, html`${heading}${form("")}<p class="lead" role="status">${hint}</p>`);
    poll(source, signal, () => source.probes.length && draw(place, state, signal));
    return;
  }
  new Watch(place, heading, form, source, state, signal);
}

const base64Of = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));

function poll(source, signal, act) {
  const again = async () => {
    if (signal.aborted) return;
    try {
      if (!document.hidden && (await refresh(source, signal))) act();
    } catch {
      if (signal.aborted) return; // else the server is busy: try again
    }
    setTimeout(again, EVERY);
  };
  setTimeout(again, EVERY);
}

/** Keeps a number of the URL within bounds. */
const bounded = (text, most, otherwise = 0) => {
  const number = Number(text ?? otherwise);
  return Number.isInteger(number) && number >= 0 && number <= most ? number : otherwise;
};

class Watch {
  constructor(place, heading, form, source, state, signal) {
    this.source = source;
    this.signal = signal;
    this.kind = kindOf(source);
    const words = KINDS[this.kind];
    const [layers] = source.probes[0].sentences[0].shape;
    const step = state.step === undefined ? Infinity : Number(state.step);
    this.moment = {
      at: positionOf(source, Number.isFinite(step) ? step : Infinity),
      sentence: bounded(state.sentence, source.sentences.length - 1, mostReordered(source)),
      layer: bounded(state.layer, layers - 1, bestLayer(source)),
      hidden: new Set((state.hide ?? "").split(".").filter(Boolean).map(Number)),
      token: -1,
      focus: -1,
    };
    this.off = new Set(); // heads removed from the model
    this.against = state.against === undefined || this.kind === "images" ? null : bounded(state.against, source.probes.at(-1).step);
    this.difference = new StepDifference();
    this.canvas = element("canvas", {
      class: "watch",
      tabindex: "0",
      role: "slider",
      "aria-label": "Training step",
      "aria-valuemin": "0",
      onpointerdown: (event) => this.press(event),
      onpointermove: (event) => this.point(event),
      onpointerleave: () => this.look(-1),
    });
    this.status = element("output", { class: "readout unseen", "aria-live": "polite" }); // the picture shows it, too
    this.heads = element("div", { class: "field", role: "group", "aria-label": "Heads of this layer" });
    this.writing = element("input", { type: "range", min: "0", oninput: () => this.write(Number(this.writing.value)) });
    this.playing = element("button", { type: "button", class: "primary", onclick: () => this.play() }, "Play");
    const sentences = source.sentences.map((example, number) => [String(number), exampleName(example, number)]);
    const canRemove = source.weights.length > 0 && Boolean(words.attention);
    this.removes = canRemove && state.remove === "1";
    const actions = element("div", { class: "actions" });
    const figure = element("figure", { class: "watch-figure" }, this.canvas, element("div", { class: "below" }, actions, this.status, this.saving()));
    const removing = checkbox("Remove heads by clicking", this.removes, (on) => change({ remove: on ? "1" : "" }, { replace: true }));
    render([this.kind === "images" ? null : this.pinning(), canRemove ? removing : null], actions);
    const controls = [
      this.playing,
      labelled(words.example, select(sentences, String(this.moment.sentence), (value) => change({ sentence: value }))),
      labelled("Layer", tabs("Layer", numbered(layers), String(this.moment.layer), (value) => change({ layer: value }))),
      this.heads,
      words.written ? labelled(words.written, this.writing) : null,
    ];
    put(place, html`${heading}${lead(words.lead)}${form(controls)}${figure}${this.difference.root}`);
    new ResizeObserver(() => this.draw()).observe(figure);
    addEventListener("resize", () => this.draw(), { signal });
    document.addEventListener("keydown", (event) => this.key(event), { signal });
    const first = state.step === undefined && !this.removes && this.against === null && !played.has(source.run);
    if (first && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.moment.at = 0;
      this.play();
    }
    this.draw();
    poll(source, signal, () => this.extend());
  }

  /** A button that compares this step with others. */
  pinning() {
    const isOn = this.against !== null;
    const pin = () => change({ against: isOn ? "" : String(stepAt(this.source, this.moment.at)) });
    const pinned = button(isOn ? `Compared with step ${this.against}` : "Compare with this step", pin, { pressed: isOn, kind: "quiet" });
    return isOn ? [pinned, html`<span>Drag along the curve to another step.</span>`] : pinned;
  }

  /** New probes: a page at the last one follows, and one that plays goes to it. */
  extend() {
    const last = this.source.probes.length - 1;
    if (this.cancel || this.moment.at >= (this.last ?? last) - 0.5) this.moment.at = last;
    this.stop();
    this.draw();
  }

  draw() {
    const { canvas, source, moment } = this;
    this.last = source.probes.length - 1;
    moment.resting = !this.cancel && moment.at === this.last;
    const figure = /** @type {HTMLElement} */ (canvas.parentElement);
    const width = Math.floor(figure.clientWidth - 24);
    if (width < 50) return;
    const [, heads] = source.probes[0].sentences[0].shape;
    this.legend(heads); // before the height below it is measured
    const context = canvas.getContext("2d");
    this.box = layout(context, source, moment.sentence, { width, ...this.room(figure) });
    // Stage mode zooms the figure: draw as fine as the screen shows it.
    const fine = (devicePixelRatio || 1) * (canvas.getBoundingClientRect().width / canvas.offsetWidth || 1);
    canvas.width = this.box.width * fine;
    canvas.height = this.box.height * fine;
    canvas.style.width = `${this.box.width}px`;
    canvas.style.height = `${this.box.height}px`;
    context.setTransform(fine, 0, 0, fine, 0, 0);
    drawWatch(context, source, moment, themeOf(), this.box);
    const probe = nearest(source, moment).sentences[moment.sentence];
    const step = stepAt(source, moment.at);
    canvas.setAttribute("aria-valuemax", String(source.probes.at(-1).step));
    canvas.setAttribute("aria-valuenow", String(step));
    const output = outputAt(source, Math.round(moment.at), moment.sentence);
    canvas.setAttribute("aria-valuetext", `step ${step}: ${output}`);
    this.writing.max = String(probe.shape[2] - 1);
    this.writing.value = String(moment.token < 0 ? probe.shape[2] - 1 : moment.token);
    this.status.textContent = `step ${step}: ${output}`;
    this.difference.show(source, moment, this.against);
  }

  /** The height for the canvas: that of the stage, or what the window has below the controls. */
  room(figure) {
    if (figure.classList.contains("staged")) return { height: figure.clientHeight - 14, compact: true };
    const above = this.canvas.getBoundingClientRect().top + scrollY;
    const below = figure.getBoundingClientRect().bottom - this.canvas.getBoundingClientRect().bottom;
    return { height: Math.floor(innerHeight - above - below - 16) };
  }

  legend(heads) {
    const sample = (head) => html`<span class="sample" .style=${`background: ${HEAD_COLOURS[head % HEAD_COLOURS.length]}`}></span>${this.moment.layer + 1}·${head + 1}`;
    const buttons = Array.from({ length: heads }, (_, head) => button(sample(head), () => this.toggle(head), { pressed: this.isOn(head) }));
    render(html`<span>Heads: click to ${this.removes ? "remove" : "hide"}</span><div class="heads-legend">${buttons}</div>`, this.heads);
  }

  isOn(head) {
    return this.removes ? !this.off.has(head) : !this.moment.hidden.has(head);
  }

  async toggle(head) {
    const set = this.removes ? this.off : this.moment.hidden;
    if (!set.delete(head)) set.add(head);
    if (this.removes) {
      this.stop();
      await this.remove();
    } else change({ hide: [...set].sort().join(".") }, { replace: true, quiet: true });
    this.draw();
  }

  /** Asks for the translation without the heads that are off, at the nearest probe. */
  async remove() {
    const { source, moment } = this;
    if (!this.off.size) {
      moment.note = "";
      return;
    }
    const step = nearest(source, moment).step;
    moment.at = Math.round(moment.at);
    const off = [...this.off].map((head) => `${KINDS[this.kind].attention}.${moment.layer}.${head}`);
    const answer = await post("/api/probes/removed", { run: source.run, step, sentence: moment.sentence, off }, this.signal);
    const before = nearest(source, moment).sentences[moment.sentence].reference_log_probs;
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    const isText = this.kind === "language"; // its probability is too small for a percentage
    const measured = (numbers) => (isText ? shown(Math.exp(-sum(numbers) / numbers.length)) : percent(Math.exp(sum(numbers))));
    const heads = [...this.off].map((head) => `${moment.layer + 1}·${head + 1}`).join(", ");
    moment.note = `without ${heads}: ${answer.text || "(nothing)"}   ${isText ? "perplexity" : "P of the reference"} ${measured(before)} → ${measured(answer.reference_log_probs)}`;
  }

  go(at, { quiet = true } = {}) {
    this.moment.at = Math.max(0, Math.min(this.source.probes.length - 1, at));
    this.moment.note = "";
    this.off.clear();
    this.draw();
    if (quiet) change({ step: String(stepAt(this.source, this.moment.at)) }, { replace: true, quiet: true });
  }

  write(token) {
    this.moment.token = token >= Number(this.writing.max) ? -1 : token;
    this.draw();
  }

  look(token) {
    if (token === this.moment.focus) return;
    this.moment.focus = token;
    this.draw();
  }

  press(event) {
    this.stop();
    if (this.kind === "images") {
      const at = pictureAt(this.box, this.source.sentences.length, event.offsetX, event.offsetY);
      if (at >= 0) change({ sentence: String(at) });
    }
    if (event.offsetY < this.box.axis - 10) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.go(momentAt(this.box, this.source, event.offsetX));
  }

  point(event) {
    if (event.buttons && this.canvas.hasPointerCapture(event.pointerId)) {
      this.go(momentAt(this.box, this.source, event.offsetX));
    } else if (Math.abs(event.offsetY - this.box.target) < 20) {
      const away = this.box.centres.map((centre) => Math.abs(centre - event.offsetX));
      this.look(away.indexOf(Math.min(...away)));
    } else this.look(-1);
  }

  key(event) {
    const on = /** @type {HTMLElement} */ (event.target).closest("input, textarea, select, button, a");
    if (on || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const tokens = { "[": -1, "]": 1 }[event.key];
    if (by !== undefined) {
      this.stop();
      this.go(Math.round(this.moment.at) + by);
    } else if (tokens !== undefined) this.write(tokens > 0 && this.moment.token < 0 ? 0 : Math.max(0, Number(this.writing.value) + tokens));
    else if (event.key === " ") this.play();
    else return;
    event.preventDefault();
  }

  stop() {
    this.cancel?.();
    this.playing.textContent = "Play";
    this.cancel = null;
    played.add(this.source.run);
  }

  /** Runs through the training, slowly where it learns fast; with reduced motion it jumps from probe to probe. */
  play() {
    if (this.cancel) {
      this.stop();
      return this.draw();
    }
    const last = this.source.probes.length - 1;
    const from = this.moment.at >= last - 0.01 ? 0 : this.moment.at;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.playing.textContent = "Stop";
    this.cancel = playFrom(this.source, this.moment.sentence, from, (at) => {
      if (at >= last || this.signal.aborted) this.stop();
      if (!this.signal.aborted) this.go(still ? Math.floor(at) : at, { quiet: false });
    });
  }

  saving() {
    /** @type {[string, () => void][]} */
    const films = canFilm() ? [["Film (WebM)", () => this.film()]] : [];
    return saveMenu([
      ["PNG", () => this.canvas.toBlob((content) => saveFile(this.fileName("png"), content))],
      ...films,
      ["HTML", () => this.html()],
    ]);
  }

  fileName(ending) {
    return `watch-${this.source.run.replace(/[^\w-]+/g, "-")}.${ending}`;
  }

  async film() {
    if (this.cancel) this.stop();
    const position = pace(this.source, this.moment.sentence);
    const content = await film(this.canvas, SECONDS + STILL, (seconds) => this.go(position(seconds / SECONDS), { quiet: false }), this.signal);
    if (!this.signal.aborted) saveFile(this.fileName("webm"), content);
  }

  /** One file with the data, the drawing module and a player; it opens without a server. */
  async html() {
    const texts = await Promise.all(MODULES.map(async (name) => (await request(`/page/${name}`)).text()));
    const module = texts.map((text) => text.replace(/^import .*;$/gm, "").replace(/^export /gm, "")).join("\n");
    const { run } = this.source;
    const sentences = this.source.sentences.map(({ bytes, ...rest }) => (bytes ? { ...rest, bytes: base64Of(bytes) } : rest));
    const probes = this.source.probes.map((probe) => ({
      ...probe,
      sentences: probe.sentences.map(({ weights, ...rest }) => ({ ...rest, weights: base64Of(weights) })),
    }));
    const data = JSON.stringify({ run, sentences, probes }).replaceAll("<", "\\u003c");
    const { sentence, layer } = this.moment;
    const page = `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Watch ${escaped(run)} learn</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{font:16px/1.5 system-ui,sans-serif;margin:1.5rem;background:#fbfbfa;color:#1b1c1d}canvas{display:block;touch-action:none}
:root{--panel:#ffffff;--text:#1b1c1d;--quiet:#5c6166;--edge:#d5d8db;--strong:#0b5cad;--alarm:#a4161a}</style></head>
<body><h1>Watch ${escaped(run)} learn</h1>
<p>${escaped(KINDS[this.kind].lead)} Or press Space.</p>
<div><canvas tabindex="0" aria-label="Training step: arrow keys, Space plays"></canvas></div>
<script type="module">
${module}
const story = ${data};
const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
for (const probe of story.probes) for (const one of probe.sentences) one.weights = bytesOf(one.weights);
for (const one of story.sentences) if (one.bytes) one.bytes = bytesOf(one.bytes);
const moment = { at: story.probes.length - 1, sentence: ${sentence}, layer: ${layer}, hidden: new Set(), token: -1, focus: -1 };
const canvas = document.querySelector("canvas");
const size = () => ({ width: Math.max(340, canvas.parentElement.clientWidth), height: Math.max(420, innerHeight - canvas.offsetTop - 24) });
playStory(canvas, story, moment, size).play();
</script></body></html>
`;
    saveFile(this.fileName("html"), new Blob([page], { type: "text/html;charset=utf-8" }));
  }
}
