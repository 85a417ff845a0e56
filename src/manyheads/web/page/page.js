// The way to define a page: its run, its elements, its keys.

import { element, html, render } from "./dom.js";
import { describe } from "./exports.js";
import { fitting, nothingFits } from "./fitting.js";
import { pageOf } from "./pages.js";
import { recording } from "./recording.js";
import { lead, runChoice } from "./runs.js";

/**
 * @typedef {object} Now what a page shows
 * @property {import("./runs.js").Run} run @property {import("./runs.js").Run[]} runs that the page supports
 * @property {Record<string, string>} state @property {string} text of the URL, or the example of the run
 * @property {import("./dom.js").Part} choice of the run
 * @property {(...controls: import("./dom.js").Part[]) => void} controls sets the controls after the choice of the run
 *
 * @typedef {object} Definition
 * @property {string} name in pages.js @property {string} about one line under the title
 * @property {[string, string][]} [keys] keys and their meaning, for the help
 * @property {(run: import("./runs.js").Run, signal: AbortSignal, controls: Now["controls"]) => string|undefined|Promise<string|undefined>} [example] a text for this page, in place of the example of the run
 * @property {boolean} [withoutRun] shown even if no run fits; it places the choice of the run where it needs it
 * @property {() => import("./dom.js").Part|import("./dom.js").Part[]} build the elements below the controls, made once and reused while the state changes
 * @property {(now: Now, signal: AbortSignal) => Promise<void>} show
 * @property {(by: number) => void} [next] moves to the next state in stage mode, if the page has no arrow keys
 * @property {(event: KeyboardEvent) => void} [press] a key, unless it is typed into a control
 */

/**
 * The exports of a page module. The page shows the run in the URL, or the first that fits if the URL
 * names none or one of another kind (as a link from another page may do).
 * @param {Definition} page
 */
export function definePage({ name, about, keys = [], withoutRun = false, example = () => undefined, build, show, next, press }) {
  const root = element("div");
  const controls = element("form", { class: "controls", onsubmit: (/** @type {Event} */ event) => event.preventDefault() });
  const instead = element("p", { class: "note" });

  /** @param {HTMLElement} place @param {Record<string, string>} state @param {AbortSignal} signal */
  async function draw(place, state, signal) {
    const { runs, run } = await fitting(name, state.run, signal);
    if (!run && !withoutRun) return nothingFits(place, name);
    if (root.parentNode !== place) {
      render(html`<h1>${pageOf(name).title}</h1>${lead(about)}${controls}${instead}${build()}`, root);
      place.replaceChildren(root);
    }
    const other = run && state.run && state.run !== run.name;
    instead.textContent = other ? `“${state.run}” does not support this page. Showing “${run.name}”.` : "";
    instead.hidden = !other;
    const choice = run ? runChoice(runs, run.name) : "";
    // The choice of the run comes first, so that another run can be chosen if this one fails.
    const first = withoutRun ? "" : choice;
    if (controls.dataset.run !== run?.name) render([first], controls);
    controls.dataset.run = run?.name ?? "";
    // A static copy has recorded the example of the run.
    const set = (/** @type {import("./dom.js").Part[]} */ ...parts) => void render([first, ...parts], controls);
    const text = state.text ?? (run && !recording ? await example(run, signal, set) : undefined) ?? run?.example ?? "";
    describe({ run: run?.name, text });
    await show({ run, runs, state, text, choice, controls: set }, signal);
  }

  if (press) {
    document.addEventListener("keydown", (event) => {
      const on = /** @type {HTMLElement} */ (event.target);
      if (!root.isConnected || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if (!on.closest("input, textarea, select, pre, dialog, header, .saving")) press(event);
    });
  }
  return { draw, keys, next };
}
