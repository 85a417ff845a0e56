// Runs: the runs in the folder, with links to their pages.

import { get } from "../api.js";
import { element, shown } from "../dom.js";
import { fits, pageOf, PAGES } from "../pages.js";
import { address } from "../state.js";

const WAYS = PAGES.filter((page) => page.name !== "runs");

export async function draw(place, state, signal) {
  const { folder, runs } = await get("/api/runs", {}, signal);
  const count = runs.length === 1 ? "1 run" : `${runs.length} runs`;
  place.replaceChildren(
    element("h1", {}, folder),
    element("p", { class: "lead" }, "Look inside Transformers that you trained: every head, layer and decoding step. All numbers come from forward passes of these models."),
    startHere(runs, state),
    element("p", { class: "lead" }, `${count}:`),
    element("div", { class: "cards" }, ...runs.map((run) => card(run, state))),
  );
}

/** Links to the Tour and to Watch, with the first run that fits. */
function startHere(runs, state) {
  const ways = [
    ["tour", "Take the tour", "the way of a sentence in 17 steps, with formulas and live views"],
    ["watch", "Watch it learn", "one sentence from the first step of training to the last"],
  ].flatMap(([name, title, about]) => {
    const run = runs.find((one) => !one.error && fits(pageOf(name), one));
    if (!run) return [];
    const shared = { theme: state.theme ?? "" };
    const link = element("a", { href: address(name, { ...shared, run: run.name }) }, title);
    return [element("li", {}, link, `: ${about}`)];
  });
  return ways.length ? element("ul", { class: "start" }, ...ways) : "";
}

function card(run, state) {
  if (run.error) {
    return element("article", { class: "card broken" }, element("h2", {}, run.name), element("p", {}, run.error));
  }
  const shared = { theme: state.theme ?? "" };
  const ways = WAYS.filter((page) => fits(page, run)).map((page) =>
    element("a", { href: address(page.name, { ...shared, ...page.opens, run: run.name }) }, page.title),
  );
  const details = element("details", {}, element("summary", {}, "Settings"));
  details.addEventListener("toggle", () => details.open && settings(details, run.name), { once: true });
  return element(
    "article",
    { class: "card" },
    element("h2", {}, run.name),
    element("dl", {}, ...facts(run).flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)])),
    element("nav", { "aria-label": run.name }, ...ways),
    run.kind === "imported" ? null : details,
  );
}

function facts(run) {
  const known = [["model", run.kind]];
  if (run.task) known.push(["task", run.task]);
  if (run.parameters) known.push(["parameters", run.parameters.toLocaleString("en")]);
  if (run.step !== undefined) known.push(["step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)]);
  if (run.best_loss !== null && run.best_loss !== undefined) known.push(["best loss", shown(run.best_loss)]);
  for (const [name, value] of Object.entries(run.scores ?? {}).slice(0, 4)) known.push([name, shown(value)]);
  return known;
}

async function settings(place, run) {
  try {
    const answer = await get("/api/settings", { run });
    place.append(
      element("p", {}, "Repeat this training: ", element("code", {}, answer.command)),
      element("pre", { tabindex: "0" }, answer.settings),
    );
  } catch (error) {
    place.append(element("p", { class: "broken" }, error.message));
  }
}
