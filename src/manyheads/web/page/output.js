// The output of a model, and its output without some heads, side by side.

import { barTable } from "./bars.js";
import { html, percent, shown, visible } from "./dom.js";
import { replaced } from "./insights.js";
import { changed } from "./tokens.js";

/**
 * @param {object} output of a model @param {string} [title] @param {object|null} [before] the output of the complete model,
 * if `output` is without some heads. The continuation (`text`) arrives last: until then an ellipsis is shown.
 */
export function outputPanel(output, title = "Output", before = null) {
  return html`<div class="outputs"><div><h2>${title}</h2>${content(output, before)}</div></div>`;
}

function content(output, before) {
  switch (output.kind) {
    case "text":
      if (before === null) return [sentence(output.text), likelihood(output, "log P(target | text)")];
      return [sentence(before.text, undefined, "complete model: "), sentence(output.free, before.text, "without: "), likelihood(output, "log P(same target | text)"), tokenChanges(output, before)];
    case "continuation":
      return [sentence(output.text ?? "…", before?.text, "continuation: "), bars(output.top, before?.top), likelihood(output, "log P(text)"), ...(before === null ? [] : [tokenChanges(output, before)])];
    case "words":
      return output.masked
        ? output.words.map((one, at) => html`<div><p class="note">mask ${at + 1}</p>${bars(one.top.slice(0, 5), before?.words[at]?.top)}</div>`)
        : [words(output, before)];
    case "labels":
      return [labels(output)];
    default:
      return html`<p class="note">This model has no output head; only its attention maps are shown.</p>`;
  }
}

/** A text with new words marked, and those struck out that it has no more. */
function sentence(text, before, lead = "") {
  const parts = replaced(before ?? text, text).map(({ gone, come, same }) => [
    gone.length ? html`<del><span class="unseen">lost: </span>${gone.join(" ")}</del> ` : "",
    come.map((word) => [changed(word), " "]),
    same === null ? "" : `${same} `,
  ]);
  return html`<p class="sentence">${lead}${text ? parts : "(nothing)"}</p>`;
}

function likelihood(output, name) {
  return html`<p class="note on-stage">${name} = ${shown(output.log_probability)}, ${output.pieces.length} tokens</p>`;
}

/** The probability of each token of the same text, with all heads and without some of them. */
function tokenChanges(output, before) {
  const cells = output.pieces.map((piece, at) => {
    const [was, is] = [before.log_probabilities[at], output.log_probabilities[at]];
    const sign = is - was < -0.005 ? "▼" : is - was > 0.005 ? "▲" : "";
    return html`<li data-token=${piece}><span class="piece">${visible(piece)}</span><span class="id">${percent(Math.exp(was))} → ${percent(Math.exp(is))} ${sign}</span></li>`;
  });
  return html`<ol class="chips" aria-label="Probability of each token, complete model and without these heads">${cells}</ol>`;
}

/** Probabilities as bars, with the earlier value of each if there is one. */
function bars(top, before) {
  return barTable(
    top.map(({ piece, probability }) => {
      const was = before?.find((one) => one.piece === piece)?.probability;
      const earlier = before ? ` (${was === undefined ? "not in the top" : percent(was)})` : "";
      return { label: piece, values: [probability], texts: [percent(probability) + earlier] };
    }),
  );
}

/** The most probable word at each position of a text without masks. */
function words(output, before) {
  const parts = output.words.map((one, at) => {
    const { piece, probability } = one.top[0];
    const same = before === null || before.words[at]?.top[0].piece === piece;
    const text = `${visible(piece)} ${percent(probability)}`;
    return html`<li><span>${visible(one.piece)}</span> → ${same ? text : changed(text)}</li>`;
  });
  return html`<ol class="guesses">${parts}</ol>`;
}

function labels({ labels: names, scores }) {
  const rows = Array.isArray(scores[0]) ? scores : [scores];
  const line = (one) => names.map((name, at) => `${name} ${percent(one[at])}`).join(", ");
  return html`<p class="sentence">${rows.map(line).join(" · ")}</p>`;
}
