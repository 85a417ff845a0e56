// Quiz: the questions of the lectures. A choice is answered by a computation, with the number that decides.

import { get, post } from "../api.js";
import { barTable } from "../bars.js";
import { css, rgb } from "../colour.js";
import { button, element, escaped, html, nothing, render, shown } from "../dom.js";
import { coloured } from "../math.js";
import { definePage } from "../page.js";
import { pageOf } from "../pages.js";
import { address, change, read } from "../state.js";

/** @typedef {{name: string, lecture: string, slide: string, question: string, choices: Record<string, string>}} Question */

const place = element("div", { class: "quizzes" });
const score = element("p", { role: "status" });
const list = element("div");
/** The computed answers, by name. @type {Map<string, any>} */
const answers = new Map();
/** @type {Question[]} */
let questions = [];
let current = 0; // the question on screen

export const { draw, keys } = definePage({
  name: "quiz",
  about: "Questions of the lectures. Choose an answer: it is computed now, not looked up, and the number that decides is shown.",
  keys: [
    ["← →", "previous question, next question"],
    ["a b c …", "choose this answer"],
  ],
  withoutRun: true,
  press,
  build: () => html`<div class="quiz-page"><aside class="quiz-list" aria-label="Questions">${score}${list}</aside>${place}</div>`,
  show,
});

/** The choices in the state: `thinking.c masked.B`; an open question has only its name, or whether the reader was right (`scale.yes`). @returns {Map<string, string>} */
function chosenIn(text = "") {
  return new Map(text.split(" ").filter(Boolean).map((one) => /** @type {[string, string]} */ ([one.split(".")[0], one.split(".")[1] ?? ""])));
}

async function show({ state }, signal) {
  if (!questions.length) questions = (await get("/api/quizzes", {}, signal)).quizzes;
  const chosen = chosenIn(state.answers);
  // Without a question in the state: the one that was answered last, or the first.
  current = Math.max(0, questions.findIndex(({ name }) => name === (state.question ?? [...chosen.keys()].at(-1))));
  const asked = questions.filter(({ name }) => chosen.has(name));
  drawAll(chosen); // a computation may take seconds: the choice is shown before
  await Promise.all(asked.filter(({ name }) => !answers.has(name)).map(async ({ name }) => answers.set(name, await post("/api/quiz", { name }, signal))));
  drawAll(chosen);
}

/** Whether a choice is right, or the reader of an open question; undefined if that is not known. @param {Question} quiz @param {string|undefined} letter */
function verdict({ name, choices }, letter) {
  if (!Object.keys(choices).length) return letter ? letter === "yes" : undefined;
  const result = letter ? answers.get(name) : undefined;
  return result && result.answer.split(", ").includes(letter);
}

/** @param {Map<string, string>} chosen */
function drawAll(chosen) {
  const shownNow = questions[current];
  const way = (label, by, kind) => button(label, () => turn(by), { disabled: !questions[current + by], kind });
  const tools = html`<div class="tools">${way("← Back", -1)}<span class="note">${current + 1} of ${questions.length}</span>${way("Next →", 1, chosen.has(shownNow.name) ? "primary" : "")}</div>`;
  render([tools, card(shownNow, chosen.get(shownNow.name))], place); // the buttons stay in their position
  const verdicts = questions.map((quiz) => verdict(quiz, chosen.get(quiz.name)));
  const judged = verdicts.filter((right) => right !== undefined);
  const right = judged.length ? `, ${judged.filter(Boolean).length} of ${judged.length} right` : "";
  score.textContent = `${chosen.size} of ${questions.length} done${right}.`;
  render(index(chosen, verdicts), list);
}

/** The questions by lecture, with what became of each. */
function index(chosen, verdicts) {
  const mark = (at) => {
    if (verdicts[at] === undefined) return html`<span aria-hidden="true">${chosen.has(questions[at].name) ? "•" : "○"}</span>`;
    const word = verdicts[at] ? "right" : "wrong";
    return html`<span class=${word} role="img" aria-label=${word}>${verdicts[at] ? "✓" : "✗"}</span>`;
  };
  const lectures = [...new Set(questions.map(({ lecture }) => lecture))];
  const entry = ({ name, slide }, at) => html`<li><a href=${address("quiz", { ...read(), question: name })} aria-current=${at === current ? "step" : nothing}>${mark(at)}<span>${slide}</span></a></li>`;
  return html`<progress max=${questions.length} value=${chosen.size} aria-label="Answered questions"></progress><p class="note">✓ right · ✗ wrong · • computed, not scored</p>
    ${lectures.map((lecture) => html`<div><h3>${lecture}</h3><ul>${questions.map((quiz, at) => (quiz.lecture === lecture ? entry(quiz, at) : nothing))}</ul></div>`)}`;
}

/** Another question. @param {number} by */
function turn(by) {
  const to = questions[current + by];
  if (to) change({ question: to.name });
}

/** @param {KeyboardEvent} event */
function press(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) turn(by);
  const { name, choices } = questions[current] ?? { name: "", choices: {} };
  const letter = Object.keys(choices).find((one) => one.toLowerCase() === event.key);
  if (letter) answer(name, letter);
}

/** Adds a choice to the state. @param {string} name @param {string} letter */
function answer(name, letter) {
  const all = chosenIn(read().answers).set(name, letter);
  change({ answers: [...all].map(([one, choice]) => (choice ? `${one}.${choice}` : one)).join(" "), question: name });
}

/** A text with its matrices typeset, and one-letter indices lowered: (1 0; 0 1), d_k. @param {string} text */
const typeset = (text) => text.split(/(\([^()]*;[^()]*\))/).map((part, at) => (at % 2 ? matrix(part) : indexed(part)));

/** A matrix as MathML. @param {string} text rows between semicolons */
function matrix(text) {
  const rows = text.slice(1, -1).split(";").map((row) => row.trim().split(" "));
  const cells = rows.map((row) => `<mtr>${row.map((cell) => `<mtd><mn>${escaped(cell)}</mn></mtd>`).join("")}</mtr>`);
  return coloured(`<math displaystyle="true"><mtable>${cells.join("")}</mtable></math>`);
}

/** @param {string} text */
const indexed = (text) => text.split(/(?<=[A-Za-zα])_([a-z0-9])(?![a-z_])/).map((part, at) => (at % 2 ? html`<sub>${part}</sub>` : part));

/** @param {Question} quiz @param {string|undefined} chosen undefined: not answered */
function card({ name, lecture, slide, question, choices }, chosen) {
  const result = chosen === undefined ? null : answers.get(name);
  const letters = Object.entries(choices);
  const note = (text) => html`<p class="note">${text}</p>`;
  const think = note("Think first: how would you answer in one sentence? Then compare, and score yourself.");
  const judge = () => html`<div class="controls judge"><span>Was your answer right?</span>${["yes", "no"].map((word) => button(word, () => answer(name, word), { pressed: chosen === word, id: `quiz-${name}-${word}` }))}</div>`;
  const open = () => (result ? [result.findings.map((one) => html`<div class="finding">${indexed(one.text)}${picture(one)}</div>`), judge()] : [chosen === undefined ? think : nothing, button("Compute the answer", () => answer(name, ""), { id: `quiz-${name}`, kind: "primary" })]);
  return html`<article class="card quiz ${letters.length ? "" : "open"}" id="card-${name}">
    ${note(`${lecture} · ${slide}`)}
    <h2>${typeset(question)}</h2>
    ${result ? html`<p class="insight">${indexed(result.therefore)}${seeIn(result.page)}</p>` : nothing}
    ${letters.length ? html`<ul>${letters.map(([letter, text]) => choiceOf(name, letter, text, chosen, result))}</ul>` : html`<div>${open()}</div>`}
    ${chosen !== undefined && !result ? note("Computing …") : nothing}
    ${result?.printed ? note(`The lecture says ${result.printed}.`) : nothing}
    ${result?.remark ? note(result.remark) : nothing}
  </article>`;
}

/** The way to the page that shows the answer in a run; an exported copy may not have it. @param {string} page */
const seeIn = (page) => (page && pageOf(page) ? html` <a href=${address(page, { theme: read().theme ?? "" })}>See it in ${pageOf(page).title} →</a>` : nothing);

/** The numbers of a finding as bars, or its weights as a map. @param {{bars: Record<string, number>, weights: number[][]}} finding */
function picture({ bars, weights }) {
  const numbers = Object.entries(bars);
  if (numbers.length) {
    const full = Math.max(1e-12, ...numbers.map(([, value]) => value));
    const text = (value) => (value >= 1e4 ? `${shown(value / 1e6, 2)} million` : shown(value, 2));
    return html`<div class="shows">${barTable(numbers.map(([label, value]) => ({ label, values: [value], texts: [text(value)] })), "", full)}</div>`;
  }
  if (!weights.length) return nothing;
  const cell = (value) => html`<td .style=${`background: ${css(Math.round(255 * value))}; color: ${rgb(Math.round(255 * value))[1] < 128 ? "#fff" : "#111"}`}>${value ? value.toFixed(2) : "0"}</td>`;
  return html`<table class="shows weights" aria-label="Attention weights: a row for each query">${weights.map((row) => html`<tr>${row.map(cell)}</tr>`)}</table>`;
}

/** A choice; once answered, with what was computed for it. */
function choiceOf(name, letter, text, chosen, result) {
  const finding = result?.findings.find((one) => one.letter === letter);
  const judged = finding ? (finding.right ? "right" : "wrong") : "";
  return html`<li class=${judged}>
    ${button(html`<b>(${letter})</b> <span>${indexed(text)}</span>`, () => answer(name, letter), { id: `quiz-${name}-${letter}`, pressed: chosen === letter })}
    ${finding ? html`<p class="finding"><strong>${finding.right ? "✓" : "✗"} ${judged}: </strong>${indexed(finding.text)}</p>${picture(finding)}` : nothing}
  </li>`;
}
