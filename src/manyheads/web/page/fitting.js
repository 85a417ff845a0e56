// Pages for one kind of model: the runs they support, and the message if there is none.

import { html, put } from "./dom.js";
import { fits, pageOf } from "./pages.js";
import { lead, missing, usableRuns } from "./runs.js";
import { farthest, isWord } from "./watchstory.js";

/**
 * The runs that a page supports, and the one to show: the run in the URL, or the first if the URL
 * names none or one of another kind (as a link from another page may do).
 * @param {string} page @param {string|undefined} name @param {AbortSignal} signal
 * @returns {Promise<{runs: import("./runs.js").Run[], run: import("./runs.js").Run|undefined}>}
 */
export async function fitting(page, name, signal) {
  const all = await usableRuns(signal);
  if (name && !all.some((run) => run.name === name)) throw missing(name);
  const supported = all.filter((run) => fits(pageOf(page), run));
  // Imported models are checked only when loaded, so they come last.
  const runs = [...supported.filter((run) => run.kind !== "imported"), ...supported.filter((run) => run.kind === "imported")];
  return { runs, run: runs.find((run) => run.name === name) ?? runs[0] };
}

/** The message of a page without a supported run, with the command that trains one. */
export function nothingFits(place, page) {
  const { title, needed, command } = pageOf(page);
  put(place, html`<h1>${title}</h1>${lead(`This page needs ${needed}; this folder has none.`)}<p>Train one: <code>${command}</code></p>`);
}

/**
 * A number input. The browser reports an invalid value; on blur the old value is restored.
 * @param {(value: string) => void} change
 */
export function numberInput(value, least, most, change, step = "1") {
  const typed = ({ target }) => target.reportValidity() && change(target.value);
  const left = ({ target }) => target.checkValidity() || (target.value = String(value));
  return html`<input type="number" min=${least} max=${most} step=${step} required .value=${String(value)} @change=${typed} @blur=${left} />`;
}

/** An index input: shown from 1, stored in the URL from 0; null is empty. */
export function countInput(at, count, change) {
  return numberInput(at === null ? "" : at + 1, 1, Math.max(1, count ?? 2 ** 31), (value) => change(String(Number(value) - 1)));
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

/** An integer of the state, clamped to 0 … count − 1. */
export function limited(text, count, otherwise = 0) {
  const number = Number.parseInt(text ?? "", 10);
  return Number.isInteger(number) ? Math.max(0, Math.min(count - 1, number)) : otherwise;
}

/** The cell in the state: "row,column". */
export function cellOf(text, otherwise = [0, 0]) {
  const cell = (text ?? "").split(",").map(Number);
  return cell.length === 2 && cell.every((one) => Number.isInteger(one) && one >= 0) ? cell : otherwise;
}

/**
 * The first cell of an alignment to show: the weight above ½ that is farthest from the diagonal, where word orders
 * differ. The last row, the end token, aligns with nothing. If no weight is above ½, the greatest one. @param {ArrayLike<number>} values row after row @param {number} columns
 * @returns {[number, number]}
 */
export function reordered(values, columns) {
  const all = Array.from(values).slice(0, values.length > columns ? -columns : undefined);
  const least = Math.min(0.5, all.reduce((most, one) => Math.max(most, one), 0));
  const rows = all.length / columns;
  const distances = all.map((value, cell) => (value < least ? -1 : Math.abs(Math.floor(cell / columns) / rows - (cell % columns) / columns)));
  const cell = distances.indexOf(distances.reduce((most, one) => Math.max(most, one), -1));
  return [Math.floor(cell / columns), cell % columns];
}

/**
 * The first cell of a map to show: the word that has moved farthest; if none has, as `reordered`.
 * @param {string[]} rows @param {string[]} columns tokens @param {ArrayLike<number>} values row after row @returns {[number, number]}
 */
export function tellingCell(rows, columns, values) {
  const word = farthest(rows, columns, (row, column) => values[row * columns.length + column]);
  return word ? [word.row, word.column] : reordered(values, columns.length);
}

/** Whether the cells of a box belong to a query and a key. @param {string} name of a box */
export const isPair = (name) => /\.(scores|bias|mask|masked|weights)$/.test(name);

/** The query and the key of a cell: a row of Q and of the mix is a query, one of K and V a key. @param {string} name of a box @param {[number, number]} cell @param {[number, number]} pair before @returns {[number, number]} */
export function pairAt(name, [row, column], [query, key]) {
  if (isPair(name)) return [row, column];
  if (/\.(q|mix)$/.test(name)) return [row, key];
  return /\.[kv]$/.test(name) ? [query, row] : [query, key];
}

/**
 * The first cell of a box to show: the query and key of its attention; of vectors and hidden units the greatest number; of next tokens the position that is least certain.
 * @param {string} name of a box @param {{shape: number[], values: ArrayLike<number>}|undefined} numbers @param {[number, number]} [pair]
 * @returns {[number, number]}
 */
export function firstCell(name, numbers, pair) {
  if (pair && isPair(name)) return pair;
  if (!numbers) return [0, 0];
  const [rows, columns] = numbers.shape;
  const at = (row, column) => numbers.values[row * columns + column];
  if (/\.(logits|distribution)$/.test(name)) {
    const margins = Array.from({ length: rows }, (_, row) => (columns > 1 ? at(row, 0) - at(row, 1) : 0));
    return [margins.indexOf(Math.min(...margins)), 0];
  }
  if (/\.(hidden|embedding|position|input|norm|sum|output|states)$/.test(name)) {
    const greatest = Array.from(numbers.values).reduce((most, value, cell, all) => (Math.abs(value) > Math.abs(all[most]) ? cell : most), 0);
    return [Math.floor(greatest / columns), greatest % columns];
  }
  if (!pair || !/\.[qkv]$|\.mix$/.test(name)) return [0, 0];
  const row = Math.min(rows - 1, pair[/\.[kv]$/.test(name) ? 1 : 0]);
  const sizes = Array.from({ length: columns }, (_, column) => Math.abs(at(row, column)));
  return [row, sizes.indexOf(Math.max(...sizes))];
}

/**
 * How well each head of cross-attention covers the words of the source: the mean over words of the greatest weight.
 * @param {{shape: number[], values: ArrayLike<number>}} maps layers, heads, queries, keys; bytes @param {string[]} tokens of the source
 * @returns {number[][]} layers, heads
 */
export function coverages({ shape: [layers, heads, rows, columns], values }, tokens) {
  const words = tokens.flatMap((token, column) => (isWord(token) ? [column] : []));
  const greatest = (map, column) => {
    let most = 0;
    for (let row = 0; row < rows; row++) most = Math.max(most, values[(map * rows + row) * columns + column]);
    return most / 255;
  };
  const covered = (map) => words.reduce((sum, column) => sum + greatest(map, column), 0) / (words.length || 1);
  return Array.from({ length: layers }, (_, layer) => Array.from({ length: heads }, (__, head) => covered(layer * heads + head)));
}

/** Layer and head of the greatest number. @param {number[][]} numbers @returns {[number, number]} */
export function greatestHead(numbers) {
  const all = numbers.flat();
  const at = all.indexOf(Math.max(...all));
  return [Math.floor(at / numbers[0].length), at % numbers[0].length];
}
