// Pieces of a text, side by side, each with its id where it has one.

import { html, nothing, visible } from "./dom.js";
import { compared } from "./watchstory.js";

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
