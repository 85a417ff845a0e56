// The frame: menu, the page in the URL, stage mode, light and dark theme, help.

import { button, checkbox, html, identity, nothing, put, render, select } from "./dom.js";
import { linkRoles } from "./math.js";
import { fits, pageOf, PAGES, sharedState } from "./pages.js";
import { recording } from "./recording.js";
import { usableRuns } from "./runs.js";
import { linkTokens, stage } from "./stage.js";
import { address, change, go, isDark, onChange, pageName, read } from "./state.js";

const GLOBAL_KEYS = [
  ["?", "this help"],
  ["s", "stage mode: one figure fills the window; arrow keys show the next state, f is the next figure, Escape leaves"],
  ["Tab", "to the next control; Enter or Space uses it"],
];

const content = document.getElementById("content");
const problem = document.getElementById("problem");
const help = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
let drawing = new AbortController();
let drawn = ""; // the page on screen
let keys = [];
let nextState = null; // the next state of the page in stage mode
let focused = ""; // the focused control before a redraw
/** The runs of the folder: the menu shows the pages that fit one of them. @type {import("./runs.js").Run[]} */
let runs = [];

/** Shows an error message; an empty message hides it. @param {string} message */
function say(message) {
  problem.textContent = message;
  problem.hidden = message === "";
}

async function draw() {
  const name = pageName();
  const state = read();
  remember();
  frame(name, state);
  restore();
  drawing.abort();
  const controller = (drawing = new AbortController());
  if (name === "runs" || !runs.some((run) => run.name === state.run)) findRuns(name, state, controller.signal);
  content.setAttribute("aria-busy", "true");
  try {
    if (!pageOf(name)) return nowhere();
    const page = await import(`./pages/${name}.js`);
    if (controller.signal.aborted) return;
    if (drawn !== name) content.replaceChildren();
    drawn = name;
    keys = page.keys ?? [];
    nextState = page.next ?? null;
    await page.draw(content, state, controller.signal);
    if (!controller.signal.aborted) say("");
    content.classList.remove("stale");
  } catch (error) {
    if (controller.signal.aborted || error.name === "AbortError") return;
    say(error.message);
    content.classList.add("stale"); // pictures of the last state are dimmed
    if (error.type === "no-run") await otherRuns(name, state, controller.signal);
    if (error.type === undefined) throw error; // a bug in the page: log it in the console
  } finally {
    if (!controller.signal.aborted) {
      stage(content, state.stage);
      content.removeAttribute("aria-busy");
      restore();
    }
  }
}

const ALL_RUNS = () => html`<p><a href=${address("runs", {})}>All runs</a></p>`;

/** The content of an unknown address. */
function nowhere() {
  drawn = "";
  say("");
  put(content, html`<h1>Page not found</h1><p class="lead">There is no page at ${location.pathname}.</p>${ALL_RUNS()}`);
}

/** The content for an unknown run: the runs that this page can show. */
async function otherRuns(name, state, signal) {
  const all = await usableRuns(signal).catch(() => []);
  if (signal.aborted) return;
  const fitted = all.filter((one) => fits(pageOf(name), one));
  const link = (one) => html`<li><a href=${address(name, { stage: state.stage ?? "", theme: state.theme ?? "", run: one.name })}>${one.name}</a></li>`;
  const words = fitted.length ? "Choose a run:" : "No run of this folder fits this page.";
  content.classList.remove("stale");
  put(content, html`<h1>${pageOf(name).title}</h1><p class="lead">${words}</p><ul>${fitted.map(link)}</ul>${ALL_RUNS()}`);
}

/** Finds the runs of the folder, and draws the menu for them; without any it has all pages. */
async function findRuns(name, state, signal) {
  const known = await usableRuns(signal).catch(() => runs);
  if (signal.aborted) return;
  runs = known;
  remember();
  frame(name, state);
  restore();
}

/** Keeps the keyboard focus on the same control after a redraw. */
function remember() {
  const on = document.activeElement;
  if (on && on !== document.body) focused = on === content ? "" : identity(on);
}

function restore() {
  if (document.activeElement !== document.body || !focused) return;
  const all = [...document.querySelectorAll("a, button, input, select, textarea, [tabindex]")];
  /** @type {HTMLElement|undefined} */ (all.find((control) => identity(control) === focused))?.focus();
}

function frame(name, state) {
  const title = pageOf(name)?.title ?? name;
  document.title = [title, state.run, "Manyheads"].filter(Boolean).join(" · ");
  document.documentElement.dataset.theme = state.theme ?? "";
  const run = runs.find((one) => one.name === state.run);
  // A page that needs another kind of model stays in its place: it shows another run.
  const link = (page) => html`<a class=${run && !page.everywhere && !fits(page, run) ? "other" : nothing} href=${address(page.name, sharedState(page.name, state))} aria-current=${page.name === name ? "page" : nothing}>${page.title}</a>`;
  const shown = PAGES.filter((page) => page.name === name || page.everywhere || !runs.length || runs.some((one) => fits(page, one)));
  const groups = [...new Set(shown.map((page) => page.group))].map(
    (group) => html`<div class="group" role="group" aria-label=${group}><span aria-hidden="true">${group}</span>${shown.filter((page) => page.group === group).map(link)}</div>`,
  );
  const menu = document.getElementById("pages");
  render(groups, menu);
  // On a phone the menu is one line that scrolls.
  const current = /** @type {HTMLElement|null} */ (menu.querySelector("[aria-current]"));
  if (current && menu.scrollWidth > menu.clientWidth) menu.scrollLeft = current.offsetLeft + (current.parentElement?.offsetLeft ?? 0) - menu.clientWidth / 2;
  const turn = () => change({ theme: isDark() ? "light" : "dark" }, { replace: true });
  render(
    [recordedTexts(name, state), button("Stage", toggleStage, { pressed: Boolean(state.stage) }), button("Dark", turn, { pressed: isDark() }), button("Keys", showHelp)],
    document.getElementById("tools"),
  );
}

/** In a static copy: the sentences that it holds. */
function recordedTexts(name, state) {
  if (!recording || ["runs", "watch", "train", "quiz"].includes(name)) return nothing;
  const texts = recording.texts[state.run] ?? Object.values(recording.texts)[0];
  return select(texts.map((text) => [text, text]), state.text ?? texts[0], (text) => go(address(name, { run: state.run ?? "", stop: state.stop ?? "", text })), "Recorded sentence");
}

function toggleStage() {
  change({ stage: read().stage ? "" : "1" }, { replace: true });
}

function showHelp() {
  const rows = [...keys, ...GLOBAL_KEYS].map(([key, meaning]) => html`<tr><th><kbd>${key}</kbd></th><td>${meaning}</td></tr>`);
  const letters = checkbox("Use keys that are single letters or signs", shortcutsOn(), (on) => {
    localStorage.setItem(SHORTCUTS, on ? "on" : "off");
  });
  render(html`<h2>Keys</h2><table><tbody>${rows}</tbody></table>${letters}${button("Close", () => help.close())}`, help);
  help.showModal();
}

const SHORTCUTS = "shortcuts"; // in local storage

/** Whether keys that are single letters or signs do something; speech input may press them by accident. */
function shortcutsOn() {
  try {
    return localStorage.getItem(SHORTCUTS) !== "off";
  } catch {
    return true; // storage may be blocked
  }
}

// Before all other listeners: a letter that is off reaches none of them.
addEventListener(
  "keydown",
  (event) => {
    const typed = /** @type {HTMLElement} */ (event.target).closest?.("input, textarea, select");
    if (event.key.length === 1 && event.key !== " " && !typed && !shortcutsOn()) event.stopImmediatePropagation();
  },
  { capture: true },
);

// Links within the app change the URL without reloading the page.
document.addEventListener("click", (event) => {
  const link = /** @type {HTMLElement} */ (event.target).closest("a");
  if (!link || link.origin !== location.origin || link.hasAttribute("download")) return;
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
  const href = link.getAttribute("href");
  event.preventDefault();
  if (href !== "#content") go(href.startsWith("#") ? href : link.pathname + link.search);
  content.focus();
});

document.addEventListener("keydown", (event) => {
  const writing = /** @type {HTMLElement} */ (event.target).closest("input, textarea, select");
  if (writing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") showHelp();
  if (event.key === "s") toggleStage();
  if (!read().stage || help.open) return;
  if (event.key === "Escape") change({ stage: "" }, { replace: true });
  if (event.key === "f") change({ stage: String(Number.parseInt(read().stage, 10) + 1) }, { replace: true });
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by && nextState && !event.defaultPrevented) nextState(by);
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
linkTokens();
linkRoles();
onChange(draw);
draw();
