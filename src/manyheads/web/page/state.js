// The whole state of the page is its address, so that every view can be linked to. A page reads
// values by name, changes some of them, and is drawn anew from the address.

/** @returns {Record<string, string>} the values in the address */
export function read() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

/** The page that the address names; the first one at `/`. */
export function pageName() {
  return location.pathname.slice(1) || "runs";
}

/**
 * An address. Values that are empty are left out, but for the text: one without a letter is a text too.
 * @param {string} page @param {Record<string, string>} values
 */
export function address(page, values) {
  const kept = Object.entries(values).filter(([key, value]) => value || (key === "text" && value === ""));
  const query = new URLSearchParams(kept).toString();
  return (page === "runs" ? "/" : `/${page}`) + (query ? `?${query}` : "");
}

const listeners = [];

/** Calls `act` whenever the address has changed, by us or by the browser's buttons. */
export function onChange(act) {
  listeners.push(act);
}

/**
 * Changes values of the state. What a person chose is a step that `back` undoes; what they type or
 * walk over with keys replaces the last one.
 * @param {Record<string, string>} changes @param {{replace?: boolean, quiet?: boolean}} [how]
 * `quiet` changes the address alone: the page has drawn it already
 */
export function change(changes, { replace = false, quiet = false } = {}) {
  go(address(pageName(), { ...read(), ...changes }), { replace, quiet });
}

/** Goes to an address of this page. */
export function go(to, { replace = false, quiet = false } = {}) {
  if (replace) history.replaceState(null, "", to);
  else if (to !== location.pathname + location.search) history.pushState(null, "", to);
  if (!quiet) tell();
}

function tell() {
  for (const act of listeners) act();
}

addEventListener("popstate", tell);
