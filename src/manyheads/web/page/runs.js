// The choice of a run, shared by all pages.

import { get } from "./api.js";
import { html, labelled, select } from "./dom.js";
import { LASTING_KEYS } from "./pages.js";
import { address, change, go, pageName, read } from "./state.js";

/**
 * @typedef {object} Run
 * @property {string} name @property {string} [error] why it cannot be read
 * @property {string} kind @property {string} task @property {string} example a text to begin with
 * @property {string} [ambiguous] a text with several likely outputs
 * @property {number[]} [kept] steps whose weights can be opened, as run@step
 * @property {string[]} [can] pages that it supports in addition to those of its kind
 */

/** The runs that can be shown. @returns {Promise<Run[]>} */
export async function usableRuns(signal) {
  const { runs } = await get("/api/runs", {}, signal);
  return runs.filter((run) => !run.error);
}

/**
 * The run that the state names, or the first; throws if there is none.
 * @param {Run[]} runs @param {string} [name] @returns {Run}
 */
export function chosenRun(runs, name) {
  const chosen = name ? runs.find((run) => run.name === name) : runs[0];
  if (chosen) return chosen;
  throw missing(name);
}

/** @param {string} [name] */
export function missing(name) {
  const message = name ? `Run “${name}” not found.` : "This folder has no readable run.";
  return Object.assign(new Error(message), { type: "no-run" });
}

/** The control that chooses among them. @param {Run[]} runs @param {string} name */
export function runChoice(runs, name, key = "run", label = "Run", none = null) {
  const options = runs.map((run) => [run.name, run.name]);
  if (none !== null) options.unshift(["", none]);
  return labelled(label, select(options, name, (value) => (key === "run" ? open(value) : change({ [key]: value }))));
}

/** Opens another run on the same page and drops heads and cells of the last one. */
function open(run) {
  const state = read();
  const shared = LASTING_KEYS.filter((key) => key in state).map((key) => [key, state[key]]);
  go(address(pageName(), { ...Object.fromEntries(shared), run }));
}

/** The introductory line of a page. */
export const lead = (text) => html`<p class="lead">${text}</p>`;
