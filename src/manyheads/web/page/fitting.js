// Pages for one kind of model: which runs they can show, and what they say where there is none.

import { element } from "./dom.js";
import { lead } from "./runs.js";

/** Those of the runs that have one of these names or kinds, then those that only opening could tell of. */
export function fitting(runs, { names = [], kinds = [] }) {
  const known = runs.filter((run) => names.includes(run.name) || kinds.includes(run.kind));
  return [...known, ...runs.filter((run) => run.kind === "imported")];
}

/**
 * The run that the state names where it fits, else the first that does: a link from another page
 * may name one of another kind.
 * @param {import("./runs.js").Run[]} fitting @param {string} [name] @returns {import("./runs.js").Run|undefined}
 */
export function fittingRun(fitting, name) {
  return fitting.find((run) => run.name === name) ?? fitting[0];
}

/** A page that has nothing to show, and how to get something. */
export function nothingFits(place, title, needed, command) {
  place.replaceChildren(
    element("h1", {}, title),
    lead(`This page is for ${needed}, and there is none here.`),
    element("p", {}, "Train one: ", element("code", {}, command)),
  );
}

/** Says that another run is shown than the address names. */
export function insteadOf(name, run, needed) {
  return name && name !== run.name ? element("p", { class: "note" }, `“${name}” is none of ${needed}: this is “${run.name}”.`) : null;
}

/** A number that a person sets. @param {(value: string) => void} change */
export function numberInput(value, least, most, change, step = "1") {
  return element("input", {
    type: "number",
    min: String(least),
    max: String(most),
    step,
    value: String(value),
    onchange: (event) => event.target.checkValidity() && change(event.target.value),
  });
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
