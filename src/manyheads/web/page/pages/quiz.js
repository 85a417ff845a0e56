// Quiz: the questions of the lectures. A choice is answered by a computation, with the number that decides.

import { get, post } from "../api.js";
import { element } from "../dom.js";
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
  place.replaceChildren(...questions.map((quiz) => card(quiz, chosen.get(quiz.name))));
  const judged = asked.filter(({ choices }) => Object.keys(choices).length);
  const right = judged.filter(({ name }) => answers.get(name).answer.split(", ").includes(chosen.get(name))).length;
  score.textContent = judged.length ? `${right} of ${judged.length} right.` : `${questions.length} questions.`;
}

/** Adds a choice to the state. @param {string} name @param {string} letter */
function answer(name, letter) {
  const all = chosenIn(read().answers).set(name, letter);
  change({ answers: [...all].map(([one, choice]) => (choice ? `${one}.${choice}` : one)).join(" ") });
}

/** @param {Question} quiz @param {string|undefined} chosen undefined: not answered */
/** A text with its one-letter indices lowered: d_k. @param {string} text */
const indexed = (text) => text.split(/(?<=[A-Za-zα])_([a-z0-9])(?![a-z_])/).map((part, at) => (at % 2 ? element("sub", {}, part) : part));

function card({ name, lecture, slide, question, choices }, chosen) {
  const result = chosen === undefined ? null : answers.get(name);
  const letters = Object.entries(choices);
  const open = element("button", { type: "button", id: `quiz-${name}`, onclick: () => answer(name, "") }, "Compute the answer");
  return element(
    "article",
    { class: "card quiz" },
    element("p", { class: "note" }, `${lecture}, “${slide}”`),
    element("h2", {}, ...indexed(question)),
    letters.length ? element("ul", {}, ...letters.map(([letter, text]) => choiceOf(name, letter, text, chosen, result))) : result ? null : open,
    ...(result && !letters.length ? result.findings.map(({ text }) => element("p", { class: "finding" }, text)) : []),
    ...(result?.printed ? [element("p", { class: "note" }, `The lecture says ${result.printed}.`)] : []),
    ...(result?.remark ? [element("p", { class: "note" }, result.remark)] : []),
  );
}

/** A choice; once answered, with what was computed for it. */
function choiceOf(name, letter, text, chosen, result) {
  const finding = result?.findings.find((one) => one.letter === letter);
  const mark = finding ? (finding.right ? "✓ right: " : "✗ wrong: ") : "";
  return element(
    "li",
    { class: finding ? (finding.right ? "right" : "wrong") : "" },
    element("button", { type: "button", id: `quiz-${name}-${letter}`, "aria-pressed": String(chosen === letter), onclick: () => answer(name, letter) }, `(${letter}) ${text}`),
    finding ? element("p", { class: "finding" }, element("strong", {}, mark), finding.text) : null,
  );
}
