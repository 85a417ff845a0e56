// Quiz: the questions of the lectures. A choice is answered by a computation, with the number that decides.

import { get, post } from "../api.js";
import { button, element, html, nothing, render } from "../dom.js";
import { definePage } from "../page.js";
import { change, read } from "../state.js";

/** @typedef {{name: string, lecture: string, slide: string, question: string, choices: Record<string, string>}} Question */

const place = element("div", { class: "quizzes" });
const score = element("p", { class: "note", role: "status" });
/** The computed answers, by name. @type {Map<string, any>} */
const answers = new Map();
/** @type {Question[]} */
let questions = [];

export const { draw, keys } = definePage({
  name: "quiz",
  about: "Questions of the lectures. Choose an answer: it is computed now, not looked up, and the number that decides is shown.",
  withoutRun: true,
  build: () => [score, place],
  show,
});

/** The choices in the state: `thinking.c masked.B`; an open question has only its name. @returns {Map<string, string>} */
function chosenIn(text = "") {
  return new Map(text.split(" ").filter(Boolean).map((one) => /** @type {[string, string]} */ ([one.split(".")[0], one.split(".")[1] ?? ""])));
}

async function show({ state }, signal) {
  if (!questions.length) questions = (await get("/api/quizzes", {}, signal)).quizzes;
  const chosen = chosenIn(state.answers);
  const asked = questions.filter(({ name }) => chosen.has(name));
  await Promise.all(asked.filter(({ name }) => !answers.has(name)).map(async ({ name }) => answers.set(name, await post("/api/quiz", { name }, signal))));
  render(questions.map((quiz) => card(quiz, chosen.get(quiz.name))), place);
  const judged = asked.filter(({ choices }) => Object.keys(choices).length);
  const right = judged.filter(({ name }) => answers.get(name).answer.split(", ").includes(chosen.get(name))).length;
  score.textContent = judged.length ? `${right} of ${judged.length} right.` : `${questions.length} questions.`;
}

/** Adds a choice to the state. @param {string} name @param {string} letter */
function answer(name, letter) {
  const all = chosenIn(read().answers).set(name, letter);
  change({ answers: [...all].map(([one, choice]) => (choice ? `${one}.${choice}` : one)).join(" ") });
}

/** A text with its one-letter indices lowered: d_k. @param {string} text */
const indexed = (text) => text.split(/(?<=[A-Za-zα])_([a-z0-9])(?![a-z_])/).map((part, at) => (at % 2 ? html`<sub>${part}</sub>` : part));

/** @param {Question} quiz @param {string|undefined} chosen undefined: not answered */
function card({ name, lecture, slide, question, choices }, chosen) {
  const result = chosen === undefined ? null : answers.get(name);
  const letters = Object.entries(choices);
  const note = (text) => html`<p class="note">${text}</p>`;
  const open = () => (result ? result.findings.map(({ text }) => html`<p class="finding">${indexed(text)}</p>`) : button("Compute the answer", () => answer(name, ""), { id: `quiz-${name}` }));
  return html`<article class="card quiz">
    ${note(`${lecture}, “${slide}”`)}
    <h2>${indexed(question)}</h2>
    ${letters.length ? html`<ul>${letters.map(([letter, text]) => choiceOf(name, letter, text, chosen, result))}</ul>` : open()}
    ${result?.printed ? note(`The lecture says ${result.printed}.`) : nothing}
    ${result?.remark ? note(result.remark) : nothing}
  </article>`;
}

/** A choice; once answered, with what was computed for it. */
function choiceOf(name, letter, text, chosen, result) {
  const finding = result?.findings.find((one) => one.letter === letter);
  const judged = finding ? (finding.right ? "right" : "wrong") : "";
  return html`<li class=${judged}>
    ${button(`(${letter}) ${text}`, () => answer(name, letter), { id: `quiz-${name}-${letter}`, pressed: chosen === letter })}
    ${finding ? html`<p class="finding"><strong>${finding.right ? "✓" : "✗"} ${judged}: </strong>${finding.text}</p>` : nothing}
  </li>`;
}
