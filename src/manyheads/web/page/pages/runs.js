// Runs, the home page: what this is, where to begin, and the runs in the folder.

import { get } from "../api.js";
import { element, html, nothing, put, shown } from "../dom.js";
import { fits, pageOf, PAGES } from "../pages.js";
import { lastProbe } from "../probes.js";
import { address } from "../state.js";
import { sparkline, thumbnail } from "../thumbnail.js";
import { trainingPanel } from "../training.js";

const WAYS = PAGES.filter((page) => page.name !== "runs");
const START = [
  ["tour", "Take the tour", "The way of a sentence through a Transformer in 17 steps, with formulas and live views."],
  ["watch", "Watch it learn", "One example from the first step of training to the last: attention, output, loss."],
  ["flow", "Follow the numbers", "The forward pass as a diagram, down to the sum behind a single cell."],
];
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

export async function draw(place, state, signal) {
  const { folder, runs } = await get("/api/runs", {}, signal);
  const panel = await trainingPanel(signal);
  const pictures = new Map(runs.map((run) => [run.name, element("div", { class: "picture" })]));
  const about = "Train a Transformer and see what happens in it: every head, every layer, every step of decoding and of training. All numbers come from forward passes of your own models, on this computer.";
  put(
    place,
    html`<h1>Look inside Transformers</h1>
      <p class="lead">${about}</p>
      ${startHere(runs, state)} ${panel}
      <h2 class="count">${runs.length === 1 ? "1 run" : `${runs.length} runs`} in ${folder}</h2>
      <div class="cards">${runs.map((run) => card(run, state, pictures.get(run.name)))}</div>`,
  );
  // After the cards, one by one: no card waits for a picture.
  for (const run of runs) {
    const story = run.probed ? await lastProbe(run.name, signal) : null;
    if (story) pictures.get(run.name).replaceChildren(thumbnail(story));
  }
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
    return [html`<a class="way" href=${href}><strong>${title}</strong><span>${about}</span><small>opens ${run.name}</small></a>`];
  });
  return ways.length ? html`<section aria-label="Start here"><h2>Start here</h2><div class="ways-in">${ways}</div></section>` : nothing;
}

function card(run, state, picture) {
  if (run.error) return html`<article class="card broken"><h2>${run.name}</h2><p>${run.error}</p></article>`;
  const link = (page) => html`<a href=${address(page.name, { theme: state.theme ?? "", ...page.opens, run: run.name })}>${page.title}</a>`;
  return html`<article class="card">
    <h2>${run.name}</h2>
    <p class="kind">${[languages(run), KINDS[run.kind] ?? run.kind].filter(Boolean).join(" · ")}</p>
    <div class="pictures">${sparkline(run.losses ?? [])}${picture}</div>
    <dl>${facts(run).map(([key, value]) => html`<dt>${key}</dt><dd>${value}</dd>`)}</dl>
    <nav aria-label=${run.name}>${WAYS.filter((page) => fits(page, run)).map(link)}</nav>
    ${run.command ? html`<p class="command"><code>${run.command}</code><button type="button" class="quiet" @click=${(event) => copy(event.target, run.command)}>Copy</button></p>` : nothing}
    ${run.kind === "imported" ? nothing : html`<details @toggle=${(event) => settings(event.target, run.name)}><summary>Settings</summary></details>`}
  </article>`;
}

/** The language pair: English → German. */
function languages({ languages: codes = [] }) {
  const names = new Intl.DisplayNames(["en"], { type: "language", fallback: "code" });
  const name = (code) => {
    try {
      return names.of(code);
    } catch {
      return code; // not a language tag
    }
  };
  return codes.length === 2 ? codes.map(name).join(" → ") : "";
}

function facts(run) {
  const known = [];
  if (run.parameters) known.push(["parameters", run.parameters.toLocaleString("en")]);
  if (run.step !== undefined) known.push(["step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)]);
  if (run.best_loss !== null && run.best_loss !== undefined) known.push(["best validation loss", shown(run.best_loss)]);
  for (const [name, value] of Object.entries(run.scores ?? {}).slice(0, 4)) known.push([name.replaceAll("_", " "), shown(value)]);
  return known;
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
