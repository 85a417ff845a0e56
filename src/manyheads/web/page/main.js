// The frame: the menu, the page that the address names, presenter mode, light and dark, help.

import { element, identity } from "./dom.js";
import { KEPT, pageOf, PAGES } from "./pages.js";
import { address, change, go, onChange, pageName, read } from "./state.js";

const GLOBAL_KEYS = [
  ["?", "this help"],
  ["p", "presenter mode: large and plain"],
  ["Tab", "to the next control; Enter or Space uses it"],
];

const content = document.getElementById("content");
const problem = document.getElementById("problem");
const help = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
let drawing = new AbortController();
let drawn = ""; // the page that is on screen
let keys = [];
let focused = ""; // the control that a person was on before it was drawn anew

/** Shows a failure in words; nothing to take the last one away. @param {string} message */
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
  const own = (drawing = new AbortController());
  content.setAttribute("aria-busy", "true");
  try {
    const page = await import(`./pages/${name}.js`);
    if (own.signal.aborted) return;
    if (drawn !== name) content.replaceChildren();
    drawn = name;
    keys = page.keys ?? [];
    await page.draw(content, state, own.signal);
    if (!own.signal.aborted) say("");
  } catch (error) {
    if (own.signal.aborted || error.name === "AbortError") return;
    say(error.message);
    if (error.type === undefined) throw error; // ours: the console has more of it
  } finally {
    if (!own.signal.aborted) {
      content.removeAttribute("aria-busy");
      restore();
    }
  }
}

/** Who walks by keys stays where they are: on the control of the same name. */
function remember() {
  const on = document.activeElement;
  if (on && on !== document.body) focused = on === content ? "" : identity(on);
}

function restore() {
  if (document.activeElement !== document.body || !focused) return;
  const all = [...document.querySelectorAll("a, button, input, select, textarea, [tabindex]")];
  all.find((control) => identity(control) === focused)?.focus();
}

function frame(name, state) {
  const title = pageOf(name)?.title ?? name;
  document.title = [title, state.run, "Manyheads"].filter(Boolean).join(" · ");
  document.documentElement.classList.toggle("presenter", state.present === "1");
  document.documentElement.dataset.theme = state.theme ?? "";
  const kept = Object.fromEntries(KEPT.filter((key) => key in state).map((key) => [key, state[key]]));
  const links = PAGES.map((page) =>
    element("a", { href: address(page.name, kept), "aria-current": page.name === name ? "page" : null }, page.title),
  );
  document.getElementById("pages").replaceChildren(...links);
  document.getElementById("tools").replaceChildren(
    tool("Presenter", state.present === "1", togglePresenter),
    tool("Dark", isDark(), () => change({ theme: isDark() ? "light" : "dark" }, { replace: true })),
    element("button", { type: "button", onclick: showHelp }, "Keys"),
  );
}

const tool = (text, pressed, act) =>
  element("button", { type: "button", "aria-pressed": String(pressed), onclick: act }, text);

function togglePresenter() {
  change({ present: read().present === "1" ? "" : "1" }, { replace: true });
}

function isDark() {
  const chosen = read().theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showHelp() {
  const rows = [...keys, ...GLOBAL_KEYS].map(([key, meaning]) =>
    element("tr", {}, element("th", {}, element("kbd", {}, key)), element("td", {}, meaning)),
  );
  const close = element("button", { type: "button", onclick: () => help.close() }, "Close");
  help.replaceChildren(element("h2", {}, "Keys"), element("table", {}, ...rows), close);
  help.showModal();
}

// Links within the page change the address without loading it anew.
document.addEventListener("click", (event) => {
  const link = /** @type {HTMLElement} */ (event.target).closest("a");
  if (!link || link.origin !== location.origin || link.hasAttribute("download")) return;
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
  if (link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  go(link.pathname + link.search);
  content.focus();
});

document.addEventListener("keydown", (event) => {
  const writing = /** @type {HTMLElement} */ (event.target).closest("input, textarea, select");
  if (writing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") showHelp();
  if (event.key === "p") togglePresenter();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => frame(pageName(), read()));
onChange(draw);
draw();
