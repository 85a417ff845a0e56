// Stage mode: one figure fills the window, without header and controls, for a lecture hall.

/** The figures of a page that are shown: those made for the stage first, from left to right; then the largest. @param {HTMLElement} content */
function figures(content) {
  const all = [...content.querySelectorAll("figure")].filter((one) => !one.hidden && one.getClientRects().length);
  const size = (one) => one.clientWidth * one.clientHeight;
  const rank = (one) => (one.dataset.stage ? 1 : 0);
  const along = (one, other) => one.left - other.left || one.top - other.top;
  return all.sort((one, other) => rank(other) - rank(one) || (rank(one) ? along(one.getBoundingClientRect(), other.getBoundingClientRect()) : size(other) - size(one)));
}

/**
 * Puts a figure on stage. @param {HTMLElement} content @param {string} number from 1 on; empty: none
 */
export function stage(content, number) {
  const on = Boolean(number);
  const root = document.documentElement;
  if (!on && !root.classList.contains("stage")) return;
  const before = content.querySelector(".staged");
  before?.classList.remove("staged");
  root.classList.toggle("stage", on);
  if (!on) return;
  const all = figures(content);
  const staged = all[(Number.parseInt(number, 10) - 1) % all.length || 0];
  staged?.classList.add("staged");
  // Figures are laid out again for the window, after which the chosen part has its final position.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const here = staged?.querySelector("[data-here], [aria-pressed='true'], [aria-selected='true']");
    here?.scrollIntoView({ block: here.closest("svg, .diagram") ? "nearest" : "center", inline: "center" });
  }));
}

/** Hovering a token highlights it everywhere on the page. */
export function linkTokens() {
  let marked = "";
  document.addEventListener("pointerover", (event) => {
    const token = /** @type {Element} */ (event.target).closest("[data-token]")?.getAttribute("data-token")?.trim() ?? "";
    if (token === marked) return;
    marked = token;
    for (const one of document.querySelectorAll("[data-token]")) {
      one.classList.toggle("linked", token !== "" && one.getAttribute("data-token").trim() === token);
    }
  });
}
