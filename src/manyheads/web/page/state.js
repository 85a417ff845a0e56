// The URL holds the complete state of the page, so that every view can be linked. A page reads
// values by name, changes some of them, and is redrawn from the URL.

import { recording } from "./recording.js";

const ROOT = recording ? "#" : ""; // a file has no path of its own: the state is in the fragment

/** Page and state in the URL. */
const here = () => (recording ? location.hash.slice(1) || "/" : location.pathname + location.search);

/** @returns {Record<string, string>} the values in the URL */
export function read() {
  return Object.fromEntries(new URLSearchParams(here().split("?")[1]));
}

/** Whether the theme is dark: by choice, or by the system. */
export function isDark() {
  const chosen = read().theme;
  return chosen ? chosen === "dark" : Boolean(globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches);
}

/** The page in the URL; Runs at `/`. */
export function pageName() {
  return here().split("?")[0].slice(1) || "runs";
}

/**
 * A URL. Empty values are left out, except `text`: an empty text is valid.
 * @param {string} page @param {Record<string, string>} values
 */
export function address(page, values) {
  const entries = Object.entries(values).filter(([key, value]) => value || (key === "text" && value === ""));
  const query = new URLSearchParams(entries).toString();
  return ROOT + (page === "runs" ? "/" : `/${page}`) + (query ? `?${query}` : "");
}

const listeners = [];

/** Calls `act` whenever the URL has changed, by the page or by the browser. */
export function onChange(act) {
  listeners.push(act);
}

/**
 * Changes values of the state and adds a history entry; with `replace`, as for typing and arrow
 * keys, the last entry is replaced.
 * @param {Record<string, string>} changes @param {{replace?: boolean, quiet?: boolean}} [how]
 * `quiet` changes only the URL, without a redraw
 */
export function change(changes, { replace = false, quiet = false } = {}) {
  go(address(pageName(), { ...read(), ...changes }), { replace, quiet });
}

/** Goes to a URL of this app. */
export function go(to, { replace = false, quiet = false } = {}) {
  if (replace) history.replaceState(null, "", to);
  else if (to !== ROOT + here()) history.pushState(null, "", to);
  if (!quiet) tell();
}

function tell() {
  for (const act of listeners) act();
}

addEventListener("popstate", tell);
