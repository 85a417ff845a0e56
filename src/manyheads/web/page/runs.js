// Which run a page shows: a choice that every page has.

import { get } from "./api.js";
import { element, labelled, select } from "./dom.js";
import { KEPT } from "./pages.js";
import { address, change, go, pageName, read } from "./state.js";

/**
 * @typedef {object} Run
 * @property {string} name @property {string} [error] why it cannot be read
 * @property {string} kind @property {string} task @property {string} example a text to begin with
 * @property {string[]} [can] pages that it has beside those of its kind
 */

/** The runs that can be shown. @returns {Promise<Run[]>} */
export async function usableRuns(signal) {
  const { runs } = await get("/api/runs", {}, signal);
  return runs.filter((run) => !run.error);
}

/**
 * The run that the state names, or the first; a failure in words where there is none.
 * @param {Run[]} runs @param {string} [name] @returns {Run}
 */
export function chosenRun(runs, name) {
  const found = name ? runs.find((run) => run.name === name) : runs[0];
  if (found) return found;
  throw missing(name);
}

/** @param {string} [name] */
export function missing(name) {
  const message = name ? `There is no run “${name}” here (any more).` : "There is no run here that can be read.";
  return Object.assign(new Error(message), { type: "no-run" });
}

/** The control that chooses among them. @param {Run[]} runs @param {string} name */
export function runChoice(runs, name, key = "run", label = "Run", none = null) {
  const options = runs.map((run) => [run.name, run.name]);
  if (none !== null) options.unshift(["", none]);
  return labelled(label, select(options, name, (value) => (key === "run" ? open(value) : change({ [key]: value }))));
}

/** Another run on the same page: heads and cells of the last one mean nothing in it. */
function open(run) {
  const state = read();
  const kept = KEPT.filter((key) => key in state).map((key) => [key, state[key]]);
  go(address(pageName(), { ...Object.fromEntries(kept), run }));
}

/** A line that says what a page shows and what it does not say. */
export function lead(text) {
  return element("p", { class: "lead" }, text);
}
