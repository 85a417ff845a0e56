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

/** @typedef {{text: string, from: number, to: number, level: number, step: number, until: number}} Span a piece over the leaves [from, to), there from a step until it is merged */

/** The bytes of a piece, a character each: a part of a letter is written as \\xc3. @param {string} piece */
const bytesOf = (piece) => piece.replace(/\\x([0-9a-f]{2})|[^ -~]/gu, (sign, byte) => String.fromCharCode(...(byte ? [Number.parseInt(byte, 16)] : new TextEncoder().encode(sign))));

/**
 * The merges of a text as a tree for each token; null if pieces do not join to longer ones (as in WordPiece).
 * @param {string[][]} steps the pieces after each merge @returns {Span[][]|null}
 */
export function mergeTree([leaves, ...steps]) {
  const span = (text, from, to, level, step) => ({ text, from, to, level, step, until: Infinity });
  let now = leaves.map((text, at) => span(text, at, at + 1, 0, 0));
  const all = [...now];
  for (const [before, pieces] of steps.entries()) {
    let at = 0;
    const next = pieces.map((piece) => {
      const parts = [];
      const bytes = bytesOf(piece);
      let joined = "";
      for (; joined.length < bytes.length && at < now.length; at++) {
        joined += bytesOf(now[at].text);
        parts.push(now[at]);
      }
      if (joined !== bytes) return null;
      if (parts.length === 1) return parts[0];
      for (const part of parts) part.until = before + 1;
      const merged = span(piece, parts[0].from, parts[parts.length - 1].to, 1 + Math.max(...parts.map(({ level }) => level)), before + 1);
      all.push(merged);
      return merged;
    });
    if (next.includes(null)) return null;
    now = /** @type {Span[]} */ (next);
  }
  return now.map((root) => all.filter(({ from, to }) => from >= root.from && to <= root.to));
}

/** A tree for each token, its letters below: it grows with the steps. @param {Span[][]} trees @param {number} step */
export function treeView(trees, step) {
  return html`<ol class="merges">${trees.map((tree, tint) => {
    const spans = tree.filter((span) => span.step <= step);
    const [low, high] = [spans[0].from, Math.max(...spans.map(({ level }) => level))];
    const place = ({ from, to, level }) => `grid-area: ${high - level + 1} / ${from - low + 1} / auto / ${to - low + 1}`;
    const kind = (span) => `span tint${tint % TINTS} ${span.until > step ? "top" : "past"} ${step && span.step === step ? "strong" : ""}`;
    return html`<li>${spans.map((span) => html`<span class=${kind(span)} .style=${place(span)}>${visible(span.text)}</span>`)}</li>`;
  })}</ol>`;
}

/** A changed word: marked by a colour, a line below and, for a screen reader, a word. @param {string} text */
export const changed = (text) => html`<mark class="changed"><span class="unseen">changed: </span>${text}</mark>`;

/** A text with the words marked that are not in the earlier one. @param {string} text @param {string} before */
export const marked = (text, before) => compared(before.split(" "), text.split(" ")).flatMap(([word, same]) => [same ? word : changed(word), " "]);
