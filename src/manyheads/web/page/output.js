// The output of a model, and its output without some heads, side by side.

import { barTable } from "./bars.js";
import { html, nothing, percent, shown, visible } from "./dom.js";
import { changed, marked } from "./tokens.js";

/**
 * @param {object} baseline of the complete model @param {object|null} without with heads knocked out
 * The continuation (`text`) arrives last: until then an ellipsis is shown.
 */
export function outputPanel(baseline, without) {
  const row = (title, output, before) => html`<div><h2>${title}</h2>${content(output, before)}</div>`;
  return html`<div class="outputs">${row(without ? "Complete model" : "Output", baseline, null)}${without ? row("Without these heads", without, baseline) : nothing}</div>`;
}

function content(output, before) {
  switch (output.kind) {
    case "text":
      if (before === null) return [sentence(output.text), likelihood(output, "log P(target | text)")];
      return [sentence(output.free, before.text, "writes: "), likelihood(output, "log P(same target | text)"), tokenChanges(output, before)];
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

/** A text with changed words marked. */
function sentence(text, before, lead = "") {
  return html`<p class="sentence">${lead}${text ? marked(text, before ?? text) : "(nothing)"}</p>`;
}

function likelihood(output, name) {
  return html`<p class="note told">${name} = ${shown(output.log_probability)}, ${output.pieces.length} tokens</p>`;
}

/** log P of each token of the same text, with all heads and without some of them. */
function tokenChanges(output, before) {
  const cells = output.pieces.map((piece, at) => {
    const [was, is] = [before.log_probabilities[at], output.log_probabilities[at]];
    const sign = is - was < -0.005 ? "▼" : is - was > 0.005 ? "▲" : "";
    return html`<li data-token=${piece}><span class="piece">${visible(piece)}</span><span class="id">${was.toFixed(3)} → ${is.toFixed(3)} ${sign}</span></li>`;
  });
  return html`<ol class="chips" aria-label="log P of each token, complete model and without these heads">${cells}</ol>`;
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
