// Runs, the home page: what this is, where to begin, and the runs in the folder.

import { get } from "../api.js";
import { element, html, nothing, points, put, render, shown } from "../dom.js";
import { fits, pageOf, PAGES } from "../pages.js";
import { lastProbe, refresh, sourceOf } from "../probes.js";
import { nameOf as pitchName } from "../roll.js";
import { address } from "../state.js";
import { exampleOf, sparkline, thumbnail } from "../thumbnail.js";
import { trainingPanel } from "../training.js";
import { bestLayer, kindOf, mostReordered } from "../watchparts.js";
import { playStory } from "../watchview.js";

const WAYS = PAGES.filter((page) => page.name !== "runs");
const START = [
  ["tour", "Take the tour", "One sentence on its way through a Transformer: 17 steps, each with its formula and a live view."],
  ["watch", "Watch it learn", "One sentence from the first training step to the last: drag along the loss curve."],
  ["flow", "Follow the numbers", "The forward pass as a diagram, down to the sum behind a single cell."],
];
const SCORES = { bleu: "test BLEU", chrf: "test chrF", loss: "test loss", perplexity: "test perplexity" };
const POINTS = new Set(["bleu", "chrf"]); // scores from 0 to 100
const MOST_FACTS = 4; // of a card
const KINDS = {
  seq2seq: "encoder–decoder Transformer",
  "decoder-only-seq2seq": "decoder-only Transformer",
  gpt: "language model",
  bert: "text encoder",
  vit: "Vision Transformer",
  rnn: "recurrent network",
  gnmt: "recurrent network (GNMT)",
  convs2s: "convolutional network (ConvS2S)",
  bytenet: "convolutional network (ByteNet)",
  imported: "imported model",
};

const played = new Set(); // runs that the large picture has played since the page was loaded

export async function draw(place, state, signal) {
  const { folder, runs } = await get("/api/runs", {}, signal);
  const panel = await trainingPanel(signal);
  const pictures = new Map(runs.map((run) => [run.name, { thumb: element("div", { class: "picture" }), sample: element("p", { class: "sample" }) }]));
  const first = heroRun(runs);
  const inOrder = first ? [first, ...runs.filter((run) => run !== first)] : runs;
  const [hero, below] = [element("div", { class: "hero-picture" }), element("p", { class: "note" })];
  put(
    place,
    html`<section class=${first ? "hero" : "hero plain"}>
        <div>
          <h1>Look inside Transformers</h1>
          <p class="lead">Manyheads trains Transformers on this computer and shows what happens inside: every head, every layer, every step of decoding and of training. Each number on these pages comes from a forward pass of your own model.</p>
          ${startHere(runs, state)}
        </div>
        ${first ? html`<a class="hero-frame" href=${address("watch", { theme: state.theme ?? "", run: first.name })} aria-label=${`Watch ${first.name} learn`}>${hero}${below}</a>` : nothing}
      </section>
      ${panel}
      <h2 class="count">${runs.length === 1 ? "1 run" : `${runs.length} runs`} in the folder “${folder}”</h2>
      <div class="cards">${inOrder.map((run) => card(run, state, pictures.get(run.name)))}</div>`,
  );
  // After the cards, one by one: no card waits for a picture.
  for (const run of inOrder) {
    const story = run.probed ? await lastProbe(run.name, signal) : null;
    if (!story) continue;
    if (run === first) await showHero(hero, below, run, signal);
    const { thumb, sample } = pictures.get(run.name);
    thumb.replaceChildren(thumbnail(story));
    const { input, output } = (run.can ?? []).includes("music") ? sung(exampleOf(story)) : exampleOf(story);
    render(html`<span>${input}</span> <span aria-hidden="true">→</span> <strong>${output}</strong>`, sample);
  }
}

/** The run of the large picture: a translator with probes, or any run with them. */
function heroRun(runs) {
  const probed = runs.filter((run) => !run.error && run.probed && fits(pageOf("watch"), run));
  return probed.find((run) => fits(pageOf("tour"), run)) ?? probed[0];
}

/** The beginning of a prompt and of its continuation, in the names of notes. @param {{input: string, output: string}} example */
function sung({ input, output }) {
  const notes = (words) => words.split(/\s+/).filter((word) => /^(p|on)_?\d+$/.test(word)).map((word) => pitchName(Number(word.replace(/\D/g, ""))));
  return { input: `${notes(input).slice(0, 8).join(" ")} …`, output: `${notes(output).slice(0, 8).join(" ")} …` };
}

/** The training of a run as on Watch: played once, then its last frame, with one sentence below it. */
async function showHero(hero, below, run, signal) {
  const source = sourceOf(run.name);
  await refresh(source, signal);
  const last = source.probes.length - 1;
  const says = {
    translation: `Each ribbon is the attention of one head from ${language(run, 1, "target")} below to ${language(run, 0, "source")} above.`,
    language: "Each arc is attention of one head to an earlier token.",
    images: "Each head looks at other patches.",
  }[kindOf(source)];
  render(html`<b>${run.name}</b> over ${source.probes[last].step} steps, on an example that it has not seen. ${says}`, below);
  const canvas = element("canvas", { role: "img", "aria-label": says });
  hero.replaceChildren(canvas);
  const still = played.has(run.name) || matchMedia("(prefers-reduced-motion: reduce)").matches;
  const moment = { at: still ? last : 0, sentence: mostReordered(source), layer: bestLayer(source), hidden: new Set(), token: -1, focus: -1 };
  const { play } = playStory(canvas, source, moment, () => {
    const zoom = Math.max(1, Math.min(1.3, hero.clientWidth / 540, hero.clientHeight / 290)); // larger letters where they fit
    return { width: hero.clientWidth / zoom, height: hero.clientHeight / zoom, compact: true, zoom };
  });
  if (!still) play();
  played.add(run.name);
}

/** Large links to Tour, Watch and Flow, with the first run that fits. */
function startHere(runs, state) {
  const usable = runs.filter((run) => !run.error);
  const tours = (run) => Number(fits(pageOf("tour"), run)); // the same run everywhere, if there is one
  const ways = START.flatMap(([name, title, about]) => {
    if (!pageOf(name)) return [];
    const fitting = usable.filter((run) => fits(pageOf(name), run)).sort((one, other) => tours(other) - tours(one));
    const run = fitting.find((one) => one.probed) ?? (name === "watch" ? undefined : fitting[0]);
    if (!run) return [];
    const href = address(name, { theme: state.theme ?? "", run: run.name });
    return [html`<a class="way" href=${href}><strong>${title}</strong><span>${about}</span></a>`];
  });
  return ways.length ? html`<section aria-label="Start here"><h2>Start here</h2><div class="ways-in">${ways}</div></section>` : nothing;
}

function card(run, state, { thumb, sample }) {
  if (run.error) return html`<article class="card broken"><h2>${run.name}</h2><p>${run.error}</p></article>`;
  const ways = WAYS.filter((page) => fits(page, run));
  const main = mainWay(run, ways);
  const link = (page) => html`<a class=${page === main ? "button" : nothing} href=${address(page.name, { theme: state.theme ?? "", ...page.opens, run: run.name })}>${page.title}</a>`;
  return html`<article class="card">
    <div class="title"><h2>${run.name}</h2><span class="kind">${[languages(run), KINDS[run.kind] ?? run.kind].filter(Boolean).join(" · ")}</span></div>
    <div class="pictures">${sparkline(run.losses ?? [])}${thumb}</div>
    ${run.probed ? sample : html`<p class="sample">${(run.can ?? []).includes("fill") ? html`Fills in hidden words, as in “${run.example}”` : nothing}</p>`}
    <dl>${facts(run).map(([key, value]) => html`<div><dt>${key}</dt><dd>${value}</dd></div>`)}</dl>
    <nav aria-label=${run.name}>${main ? link(main) : nothing}<span class="others">${ways.filter((page) => page !== main).map(link)}</span></nav>
    ${run.kind === "imported" ? nothing : html`<details @toggle=${(event) => settings(event.target, run.name)}><summary>Settings</summary>
      ${run.command ? html`<p class="command"><span class="note">Train it again</span><code>${run.command}</code><button type="button" class="quiet" @click=${(event) => copy(event.target, run.command)}>Copy</button></p>` : nothing}
    </details>`}
  </article>`;
}

/** The page that shows a run best: its training, the tour, or what it is used for. */
function mainWay(run, ways) {
  const named = (name) => ways.find((page) => page.name === name);
  return (run.probed ? named("watch") : undefined) ?? named("tour") ?? ways.findLast((page) => page.group === "Use") ?? ways[0];
}

/** The name of a language tag. */
function nameOf(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language", fallback: "code" }).of(code);
  } catch {
    return code; // not a language tag
  }
}

/** One side of a language pair. @param {{languages?: string[]}} run @param {number} at @param {string} otherwise */
const language = ({ languages: codes = [] }, at, otherwise) => (codes.length === 2 ? nameOf(codes[at]) : otherwise);

/** The language pair: English → German. */
const languages = ({ languages: codes = [] }) => (codes.length === 2 ? codes.map(nameOf).join(" → ") : "");

function facts(run) {
  const known = [];
  if (run.parameters) known.push(["parameters", run.parameters.toLocaleString("en")]);
  if (run.step !== undefined) known.push(["step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)]);
  if (run.best_loss !== null && run.best_loss !== undefined) known.push(["validation loss", shown(run.best_loss)]);
  for (const [name, value] of Object.entries(run.scores ?? {})) known.push([SCORES[name] ?? name.replaceAll("_", " "), (POINTS.has(name) ? points : shown)(value)]);
  return known.slice(0, MOST_FACTS);
}

/** Copies a command; the button says whether it did. */
async function copy(button, command) {
  const done = await navigator.clipboard.writeText(command).then(() => true, () => false);
  button.textContent = done ? "Copied" : "Select the text";
}

/** Loads the settings of a run when its details are opened for the first time. */
async function settings(details, run) {
  if (!details.open || details.querySelector("pre")) return;
  try {
    const answer = await get("/api/settings", { run });
    details.append(element("pre", { tabindex: "0" }, answer.settings));
  } catch (error) {
    details.append(element("p", { class: "broken" }, error.message));
  }
}
