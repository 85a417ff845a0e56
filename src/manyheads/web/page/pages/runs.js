// Runs, the home page: what this is, where to begin, and the runs in the folder.

import { get } from "../api.js";
import { element, shown } from "../dom.js";
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
  const count = runs.length === 1 ? "1 run" : `${runs.length} runs`;
  const cards = runs.map((run) => card(run, state));
  place.replaceChildren(
    element("h1", {}, "Look inside Transformers"),
    element("p", { class: "lead" }, "Train a Transformer and see what happens in it: every head, every layer, every step of decoding and of training. All numbers come from forward passes of your own models, on this computer."),
    startHere(runs, state),
    panel,
    element("h2", { class: "count" }, `${count} in ${folder}`),
    element("div", { class: "cards" }, ...cards.map(({ root }) => root)),
  );
  // After the cards, one by one: no card waits for a picture.
  for (const { run, picture } of cards) {
    const story = run.probed ? await lastProbe(run.name, signal) : null;
    if (story) picture.replaceChildren(thumbnail(story));
  }
}

/** Large links to Tour, Watch and Flow, with the first run that fits. */
function startHere(runs, state) {
  const usable = runs.filter((run) => !run.error);
  const ways = START.flatMap(([name, title, about]) => {
    if (!pageOf(name)) return [];
    const fitting = usable.filter((run) => fits(pageOf(name), run));
    const run = fitting.find((one) => one.probed) ?? (name === "watch" ? undefined : fitting[0]);
    if (!run) return [];
    const href = address(name, { theme: state.theme ?? "", run: run.name });
    return [element("a", { class: "way", href }, element("strong", {}, title), element("span", {}, about), element("small", {}, `opens ${run.name}`))];
  });
  return ways.length ? element("section", { "aria-label": "Start here" }, element("h2", {}, "Start here"), element("div", { class: "ways-in" }, ...ways)) : "";
}

function card(run, state) {
  if (run.error) {
    return { run, root: element("article", { class: "card broken" }, element("h2", {}, run.name), element("p", {}, run.error)) };
  }
  const shared = { theme: state.theme ?? "" };
  const ways = WAYS.filter((page) => fits(page, run)).map((page) =>
    element("a", { href: address(page.name, { ...shared, ...page.opens, run: run.name }) }, page.title),
  );
  const details = element("details", {}, element("summary", {}, "Settings"));
  details.addEventListener("toggle", () => details.open && settings(details, run.name), { once: true });
  const picture = element("div", { class: "picture" });
  const root = element(
    "article",
    { class: "card" },
    element("h2", {}, run.name),
    element("p", { class: "kind" }, [languages(run), KINDS[run.kind] ?? run.kind].filter(Boolean).join(" · ")),
    element("div", { class: "pictures" }, sparkline(run.losses ?? []), picture),
    element("dl", {}, ...facts(run).flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)])),
    element("nav", { "aria-label": run.name }, ...ways),
    run.command ? copyable(run.command) : null,
    run.kind === "imported" ? null : details,
  );
  return { run, root, picture };
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
  if (run.best_loss !== null && run.best_loss !== undefined) known.push(["best loss", shown(run.best_loss)]);
  for (const [name, value] of Object.entries(run.scores ?? {}).slice(0, 4)) known.push([name.replaceAll("_", " "), shown(value)]);
  return known;
}

/** A command with a button that copies it. */
function copyable(command) {
  const button = element("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    const done = await navigator.clipboard.writeText(command).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Select the text";
  });
  return element("p", { class: "command" }, element("code", {}, command), button);
}

async function settings(place, run) {
  try {
    const answer = await get("/api/settings", { run });
    place.append(element("pre", { tabindex: "0" }, answer.settings));
  } catch (error) {
    place.append(element("p", { class: "broken" }, error.message));
  }
}
