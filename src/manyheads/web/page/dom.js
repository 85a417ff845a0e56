// Templates (lit-html), elements, and the controls that all pages use.

import { percent, points, shown } from "./numbers.js";
import { html, nothing, render } from "./vendor/lit-html.js";

export { html, nothing, percent, points, render, shown };

/** @typedef {import("./vendor/lit-html.js").TemplateResult} Template */
/** @typedef {Template|Node|string|null} Part what a template can hold */

/**
 * An element, where a reference to it is needed: `element("canvas", { class: "watch", onclick: act })`.
 * A property that begins with `on` listens; `true` sets an attribute without a value, and what is null
 * or false is left out.
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name @param {Record<string, any>} [properties] @param {...(Node|string|null)} children
 * @returns {HTMLElementTagNameMap[Name]}
 */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  set(made, properties);
  for (const child of children) if (child !== null) made.append(child);
  return made;
}

/** An empty SVG element. @param {Record<string, any>} properties */
export function svgElement(properties) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  set(made, properties);
  return made;
}

/** The drawing context of a canvas. @param {HTMLCanvasElement} canvas @returns {CanvasRenderingContext2D} */
export const context2d = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));

/** @param {Element} made @param {Record<string, any>} properties */
function set(made, properties) {
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
}

/**
 * A control with its label.
 * @param {string} label @param {Part} control @param {string} [kind] a class of the label
 */
export const labelled = (label, control, kind = "") => html`<label class="field ${kind}"><span>${label}</span>${control}</label>`;

/**
 * A button; `pressed` makes it a toggle.
 * @param {Part|Part[]} content @param {(event: Event) => void} act
 * @param {{pressed?: boolean, kind?: string, id?: string, disabled?: boolean}} [how]
 */
export const button = (content, act, { pressed, kind, id, disabled = false } = {}) =>
  html`<button type="button" class=${kind ?? nothing} id=${id ?? nothing} aria-pressed=${pressed ?? nothing} ?disabled=${disabled} @click=${act}>${content}</button>`;

/**
 * A select; a value from the URL is added to the options if it is missing. @param {string[][]} options value and text of each
 * @param {string} chosen @param {(value: string) => void} change @param {string} [label] if it has no other
 */
export function select(options, chosen, change, label) {
  const known = options.some(([value]) => value === chosen);
  const all = known ? options : [...options, [chosen, chosen]];
  return html`<select aria-label=${label ?? nothing} @change=${(event) => change(event.target.value)}>${all.map(([value, text]) => html`<option value=${value} .selected=${value === chosen}>${text}</option>`)}</select>`;
}

/**
 * A row of buttons of which one is pressed.
 * @param {string} label @param {string[][]} options @param {string} chosen
 * @param {(value: string) => void} change
 */
export const tabs = (label, options, chosen, change) =>
  html`<div class="tabs" role="group" aria-label=${label}>${options.map(([value, text]) => button(text, () => change(value), { pressed: value === chosen }))}</div>`;

/** A checkbox with its label, and a border of this colour if it has one. */
export const checkbox = (label, checked, change, colour = "") =>
  html`<label class="check" .style=${colour && `border-color: ${colour}`}><input type="checkbox" .checked=${checked} @change=${(event) => change(event.target.checked)} />${label}</label>`;

/** 1 to `count`, as options of a select. @param {number} count */
export const numbered = (count) => Array.from({ length: count }, (_, at) => [String(at), String(at + 1)]);

/** Replaces the content of a place that several pages use. @param {HTMLElement} place @param {Part|Part[]} content */
export function put(place, content) {
  const root = element("div");
  render(content, root);
  place.replaceChildren(root);
}

/** Debounce: calls `act` after a pause, so that typing a word sends one request. */
export function afterPause(act, milliseconds = 350) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...args), milliseconds);
  };
}

/**
 * A key for a control: its id, else its tag and label. The key survives a redraw of the page.
 * @param {Element} control
 */
export function identity(control) {
  const label = control.closest("label"); // the text is in a span, or next to a checkbox
  const words = control.getAttribute("aria-label") ?? (label?.querySelector("span") ?? label ?? control).textContent;
  return control.id || `${control.tagName} ${words}`;
}

/** A number of a table: six significant digits. */
export const exact = (number) => shown(number, 5);

/** A subword with visible whitespace. */
export function visible(piece) {
  return piece === "" ? "∅" : piece.replace(/^ /, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

/** A token in a sentence: without the space that begins it. */
export const plain = (piece) => visible(piece.trim() || piece);

/** Escapes control characters as \x01: tokens may have them, but SVG does not allow them. */
export function spelled(text) {
  return text.replace(/\p{Cc}/gu, (sign) => (/[\t\n\r]/.test(sign) || sign > "\x1f" ? sign : `\\x${sign.charCodeAt(0).toString(16).padStart(2, "0")}`));
}

/** Text for SVG and HTML files. */
export function escaped(text) {
  return spelled(String(text)).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
