// Pieces of a text, side by side, each with its id where it has one.

import { html, nothing, visible } from "./dom.js";

const TINTS = 6; // colour classes in style.css, so that neighbours differ

/**
 * @param {string[]} pieces @param {(number|null)[]} [ids]
 * @param {(at: number) => boolean} [strong] which pieces are new
 */
export function chips(pieces, ids = [], strong = () => false) {
  const id = (at) => (ids[at] === undefined ? nothing : html`<span class="id">${ids[at]}</span>`);
  return html`<ol class="chips">${pieces.map(
    (piece, at) => html`<li class="tint${at % TINTS} ${strong(at) ? "strong" : ""}" data-token=${piece}><span class="piece">${visible(piece)}</span>${id(at)}</li>`,
  )}</ol>`;
}

/** A changed word: marked by a colour, a line below and, for a screen reader, a word. @param {string} text */
export const changed = (text) => html`<mark class="changed"><span class="unseen">changed: </span>${text}</mark>`;

/** A text with the words marked that are not in the earlier one. @param {string} text @param {string} before */
export const marked = (text, before) => compared(before.split(" "), text.split(" ")).flatMap(([word, same]) => [same ? word : changed(word), " "]);

/** Two lists of words with what differs marked: [word, whether it is in both] of the second. */
export function compared(before, after) {
  // The longest common subsequence, from its table of lengths.
  const length = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
  for (let i = before.length - 1; i >= 0; i--) {
    for (let j = after.length - 1; j >= 0; j--) {
      length[i][j] =
        before[i] === after[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const words = [];
  for (let i = 0, j = 0; j < after.length; ) {
    if (i < before.length && before[i] === after[j]) {
      words.push([after[j], true]);
      i++, j++;
    } else if (i < before.length && length[i + 1][j] >= length[i][j + 1]) i++;
    else words.push([after[j++], false]);
  }
  return words;
}
