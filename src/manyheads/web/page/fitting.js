// Pages for one kind of model: which runs they can show, and what they say where there is none.

import { element } from "./dom.js";
import { fits, pageOf } from "./pages.js";
import { lead, missing, runChoice, usableRuns } from "./runs.js";

/**
 * The runs that a page can show, and which of them it shows: the one that the address names, or the
 * first where that is of another kind (a link from another page may name it) or none is named.
 * @param {string} page @param {string|undefined} name @param {AbortSignal} signal
 * @returns {Promise<{runs: import("./runs.js").Run[], run: import("./runs.js").Run|undefined}>}
 */
export async function fitting(page, name, signal) {
  const all = await usableRuns(signal);
  if (name && !all.some((run) => run.name === name)) throw missing(name);
  const own = all.filter((run) => fits(pageOf(page), run));
  // Of what was imported only opening tells whether it fits: known ones first.
  const runs = [...own.filter((run) => run.kind !== "imported"), ...own.filter((run) => run.kind === "imported")];
  return { runs, run: runs.find((run) => run.name === name) ?? runs[0] };
}

/** A page that has nothing to show, and how to get something. */
export function nothingFits(place, page) {
  const { title, needed, command } = pageOf(page);
  place.replaceChildren(
    element("h1", {}, title),
    lead(`This page is for ${needed}, and there is none here.`),
    element("p", {}, "Train one: ", element("code", {}, command)),
  );
}

/** The choice of a run is there before the answer is: who gets none chooses another. */
export function chooseFirst(controls, runs, run, name, page) {
  if (controls.dataset.run === run.name) return;
  controls.dataset.run = run.name;
  controls.replaceChildren(runChoice(runs, run.name), insteadOf(name, run, page));
}

/** Says that another run is shown than the address names; nothing where it is the same. */
export function insteadOf(name, run, page) {
  if (!name || name === run.name) return "";
  return element("p", { class: "note" }, `“${name}” is not among the ${pageOf(page).needed}: this is “${run.name}”.`);
}

/**
 * A number that a person sets. What it cannot be is said; the old one is there again when they leave it.
 * @param {(value: string) => void} change
 */
export function numberInput(value, least, most, change, step = "1") {
  return element("input", {
    type: "number",
    min: String(least),
    max: String(most),
    step,
    required: true,
    value: String(value),
    onchange: ({ target }) => target.reportValidity() && change(target.value),
    onblur: ({ target }) => target.checkValidity() || (target.value = String(value)),
  });
}

/** The same for one of several, which people count from 1 and the address from 0; null is none of them. */
export function countInput(at, count, change) {
  return numberInput(at === null ? "" : at + 1, 1, Math.max(1, count ?? 2 ** 31), (value) => change(String(value - 1)));
}

/** A file as base64. @param {Blob} file @returns {Promise<string>} */
export function base64(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onerror = () => fail(reader.error);
    reader.onload = () => done(String(reader.result).split(",")[1] ?? "");
    reader.readAsDataURL(file);
  });
}

/** A whole number of the state, kept between 0 and count − 1. */
export function limited(text, count, otherwise = 0) {
  const number = Number.parseInt(text ?? "", 10);
  return Number.isInteger(number) ? Math.max(0, Math.min(count - 1, number)) : otherwise;
}

/** The cell that the state names: "row,column". */
export function cellOf(text, otherwise = [0, 0]) {
  const cell = (text ?? "").split(",").map(Number);
  return cell.length === 2 && cell.every((one) => Number.isInteger(one) && one >= 0) ? cell : otherwise;
}
