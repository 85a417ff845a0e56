// Tour: the way of a sentence in steps, with text and formula on the left and the page that shows
// the numbers on the right. The texts are those of docs/follow-a-sentence.md (see docs/tour.py).

import { button, element, html, nothing, render } from "../dom.js";
import { limited, nothingFits } from "../fitting.js";
import { coloured, stacked } from "../math.js";
import { fits, pageOf, sharedState } from "../pages.js";
import { request } from "../recording.js";
import { runChoice, usableRuns } from "../runs.js";
import { address, go, read } from "../state.js";

export const keys = [["← →", "previous step, next step"]];

const WIDE = 960; // a window with two columns
let steps = null;
let screen = null;

export async function draw(place, state, signal) {
  steps ??= await (await request("/page/tour.json", { signal })).json();
  const runs = (await usableRuns(signal)).filter((run) => fits(pageOf("tour"), run));
  if (!runs.length) return nothingFits(place, "tour");
  const run = runs.find((one) => one.name === state.run) ?? runs[0];
  const at = Math.max(0, limited(state.stop, steps.length + 1, 1) - 1); // as on screen, from 1
  if (!screen || !place.contains(screen.root)) screen = build(place);
  const staged = Boolean(state.stage);
  if (screen.at !== at || screen.run !== run.name || screen.staged !== staged) show(at, run, runs, staged);
  const step = steps[at];
  const page = await import(`./${step.page}.js`);
  if (signal.aborted) return;
  screen.live.dataset.page = step.page;
  const { stop, ...inner } = state;
  await page.draw(screen.live, { ...step.state, ...inner, run: run.name }, signal);
}

function build(place) {
  const live = element("section", { class: "live", "aria-label": "Live view" });
  const text = element("section", { class: "telling" });
  const root = element("div", { class: "tour" }, text, live);
  place.replaceChildren(root);
  return { root, text, live, at: -1, run: "", staged: false };
}

function show(at, run, runs, staged) {
  const step = steps[at];
  const formula = element("div", { class: "math" });
  // On stage the formula is one line below the figure.
  if (step.formula) formula.append(staged ? coloured(step.formula) : stacked(coloured(step.formula)));
  const last = at + 1 === steps.length;
  const way = (label, to, kind) => button(label, () => move(to), { disabled: to < 0 || to >= steps.length, kind });
  const link = (one, number) => html`<li><a href=${placeOf(number)} aria-current=${number === at ? "step" : nothing}>${one.title}</a></li>`;
  render(
    html`<p class="note">Step ${at + 1} of ${steps.length}</p>
      <nav class="progress" aria-label="Steps">${steps.map((one, number) => html`<a href=${placeOf(number)} title=${one.title} aria-label=${`Step ${number + 1}: ${one.title}`} class=${number < at ? "past" : ""} aria-current=${number === at ? "step" : nothing}></a>`)}</nav>
      <div class="tools">${way("← Back", at - 1)}${last ? after(run.name) : way("Next →", at + 1, "primary")}</div>
      <p class="stagetitle" aria-hidden="true">${at + 1}/${steps.length} ${step.title}</p>
      <h1>${step.title}</h1>
      <p class="prose">${step.text}</p>
      ${formula}
      <p class="try"><strong>${step.predict ? "Predict" : "Try it"}</strong> ${step.question} ${step.predict ? button("Show the answer", answer, { id: "answer" }) : nothing}</p>
      ${runs.length > 1 ? runChoice(runs, run.name) : nothing}
      <details><summary>All steps</summary><ol class="stops">${steps.map(link)}</ol></details>`,
    screen.text,
  );
  fit(formula);
  // The list of all steps is open where the window has space for it.
  const list = screen.text.querySelector("details");
  list.open = innerWidth >= WIDE;
  list.open &&= list.getBoundingClientRect().bottom + scrollY <= innerHeight;
  new ResizeObserver(() => fit(formula)).observe(formula); // as on the way to the stage
  screen.live.replaceChildren();
  screen.root.classList.toggle("predicting", step.predict);
  Object.assign(screen, { at, run: run.name, staged });
}

/** Puts the sentence of the view, hidden until then, in the place of the button. */
function answer() {
  const said = [...screen.live.querySelectorAll(".insight:not(:empty)")].find((one) => one.checkVisibility());
  screen.text.querySelector("#answer").replaceWith(element("output", { class: "answer" }, said?.textContent ?? ""));
  screen.root.classList.remove("predicting");
}

/** Where to go after the last step. */
const after = (run) => ["quiz", "flow"].map((name) => html`<a class="next" href=${address(name, { run })}>${pageOf(name).title} →</a>`);

/** A formula does not break into lines: it shrinks until it fits its column. */
function fit(formula) {
  formula.style.fontSize = "";
  const { scrollWidth, clientWidth } = formula;
  if (scrollWidth > clientWidth) formula.style.fontSize = `${(Number.parseFloat(getComputedStyle(formula).fontSize) * clientWidth) / scrollWidth - 0.2}px`;
}

/** The address of a step: it forgets what was chosen inside the view of another, on stage also the figure. */
function placeOf(number) {
  const state = read();
  return address("tour", { ...sharedState("tour", state), stage: state.stage ? "1" : "", stop: String(number + 1) });
}

function move(to) {
  if (to >= 0 && to < steps.length) go(placeOf(to));
}

/** In the capture phase: the page inside has arrow keys of its own. */
function shortcuts(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || !screen?.root.isConnected || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, canvas, [role=img], [role=grid], [role=slider]")) return;
  event.preventDefault();
  event.stopPropagation();
  move(screen.at + by);
}

document.addEventListener("keydown", shortcuts, { capture: true });
