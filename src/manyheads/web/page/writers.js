// Shared by Translate and Decode: tokens as buttons, tokens in the URL.

import { escaped, html, percent, shown, spelled, visible } from "./dom.js";

/** The beam widths to choose from. */
export const BEAMS = ["1", "2", "3", "4", "5", "6", "7", "8"].map((beam) => [beam, beam]);

/** A response with control characters escaped in all its strings. */
export function legible(answer) {
  return JSON.parse(JSON.stringify(answer), (_, value) => (typeof value === "string" ? spelled(value) : value));
}

/** Tokens to and from the URL. */
export const tokensIn = (text) => (text ? text.split(" ").map(Number).filter(Number.isInteger) : []);
export const tokensOut = (tokens) => tokens.join(" ");

/** An integer of the state, or undefined. */
export const integer = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : undefined);

/**
 * Subwords as a row of buttons with arrow-key navigation.
 * @param {string} label @param {string[]} pieces @param {number[]} chances P of each
 * @param {{chosen: number, given: number, choose: (at: number) => void}} how the first `given` tokens are forced
 */
export function pieceButtons(label, pieces, chances, { chosen, given, choose }) {
  const stop = chosen >= 0 ? chosen : Math.max(0, given - 1);
  const piece = (text, at) => html`<button type="button" class=${at < given ? "given" : ""} data-token=${text} tabindex=${at === stop ? 0 : -1} aria-pressed=${at === chosen}
    aria-label=${`${visible(text)} ${percent(chances[at])}: position ${at + 1}${at < given ? ", forced" : ""}`} @click=${() => choose(at)} .style=${`--share: ${chances[at]}`}>
    <span class="piece">${visible(text)}</span> <span class="id">${percent(chances[at])}</span></button>`;
  const walk = (event) => {
    const buttons = [...event.currentTarget.children];
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || !buttons[to]) return;
    event.preventDefault();
    buttons[to].focus();
    buttons.forEach((one, number) => (one.tabIndex = number === to ? 0 : -1));
  };
  return html`<div class="written" role="group" aria-label=${label} @keydown=${walk}>${pieces.map(piece)}</div>`;
}

/**
 * Texts with their scores, for export.
 * @param {string} name @param {string} title
 * @param {{way?: string, text: string, score: number, log_probability: number}[]} texts best first
 */
export function textsView(name, title, texts) {
  const line = (one, at) => `${one.way ? `${one.way}: ` : `${at + 1}. `}${one.text}   (score ${shown(one.score)}, log P ${shown(one.log_probability)})`;
  const lines = texts.map(line);
  const inside = lines.map((text, at) => `<text x="12" y="${18 + 22 * at}" font-size="13" xml:space="preserve">${escaped(text)}</text>`).join("");
  return {
    name,
    title,
    drawing: () => ({ width: 30 + 7.5 * Math.max(...lines.map((text) => text.length)), height: 6 + 22 * lines.length, inside }),
    table: () => ({
      columns: ["way", "place", "text", "score", "log P"],
      rows: texts.map((one, at) => [one.way ?? "", at + 1, one.text, one.score, one.log_probability]),
    }),
  };
}
