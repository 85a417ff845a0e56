// Formulas as MathML. A symbol has the colour of its role, and pointing at it marks the boxes of that role.

import { escaped } from "./dom.js";

/** The roles of symbols: capital letters, and small ones with an index (q_i). */
const ROLES = { Q: "query", K: "key", V: "value", S: "scores", A: "weights", H: "encoder", Z: "decoder" };
const INDEXED = { q: "query", k: "key", v: "value" };
const SCRIPTS = { ᵀ: ["sup", "⊤"], "²": ["sup", "2"], "½": ["sup", "½"], "₁": ["sub", "1"], "₂": ["sub", "2"] };
const TOKEN = /\s+|\d+(?:\.\d+)?|[A-Za-z]+|[α-ωΑ-Ω]|./gu;
const ENDS = new Set(["+", "−", "=", "←", ",", "·", "∘", "|", ":"]); // a numerator begins after one of them, except ·

/**
 * MathML of a line such as `q_i · k_j / √c`: `_` and `^` are scripts, a slash between spaces is a fraction,
 * words of prose stay text. @param {string} text
 */
export function mathml(text) {
  const tokens = text.match(TOKEN) ?? [];
  let at = 0;

  /** One symbol, number, group or root, without its scripts. @returns {string} */
  function atom() {
    const token = tokens[at++] ?? "";
    if (token === "(" || token === "[" || token === "{") {
      const close = { "(": ")", "[": "]", "{": "}" }[token];
      const inside = row(close);
      at++;
      return token === "{" ? `<mrow>${inside}</mrow>` : `<mrow><mo>${token}</mo>${inside}<mo>${close}</mo></mrow>`;
    }
    if (token === "√") {
      const opened = tokens[at] === "(";
      if (!opened) return `<msqrt>${atom()}</msqrt>`;
      at++;
      const inside = row(")");
      at++;
      return `<msqrt>${inside}</msqrt>`;
    }
    if (/^\d/.test(token)) return `<mn>${token}</mn>`;
    if (/^[A-Za-z]{2,}$/.test(token) && (/^\s/.test(tokens[at] ?? "") || /^\s/.test(tokens[at - 2] ?? "")) && !/^[({[_^]/.test(tokens[at] ?? "")) return `<mtext>${token}</mtext>`;
    if (token === "a" && /^\s/.test(tokens[at] ?? "") && /^[a-z]{2,}$/.test(tokens[at + 1] ?? "")) return `<mtext>a</mtext>`; // the article
    if (/^[\p{L}∞]/u.test(token)) return `<mi>${token}</mi>`;
    return `<mo>${escaped(token)}</mo>`;
  }

  /** An atom with its scripts. */
  function scripted() {
    let base = atom();
    for (;;) {
      const next = tokens[at];
      if (next === "_" || next === "^") {
        at++;
        const minus = tokens[at] === "−" ? ((at += 1), "<mo>−</mo>") : "";
        const script = tokens[at] === "(" ? ((at += 1), row(")", true)) : atom();
        base = `<m${next === "_" ? "sub" : "sup"}>${base}<mrow>${minus}${script}</mrow></m${next === "_" ? "sub" : "sup"}>`;
      } else if (SCRIPTS[next]) {
        at++;
        const [kind, sign] = SCRIPTS[next];
        base = `<m${kind}>${base}<mo>${sign}</mo></m${kind}>`;
      } else return base;
    }
  }

  /** The parts without a space between them; a sum has one more. @param {string} close */
  function denominator(close) {
    const isSum = tokens[at] === "Σ";
    let made = scripted();
    if (isSum && tokens[at] === " ") at++;
    while (at < tokens.length && tokens[at] !== close && !/^\s/.test(tokens[at]) && !ENDS.has(tokens[at])) made += scripted();
    return made;
  }

  /** Parts until a closing sign. @param {string} close @param {boolean} [past] whether to go past it */
  function row(close, past = false) {
    /** @type {string[]} */
    let parts = [];
    let first = 0; // where the numerator of the next fraction begins
    while (at < tokens.length && tokens[at] !== close) {
      const token = tokens[at];
      if (/^\s/.test(token)) {
        at++;
        const [before, next] = [parts.at(-1) ?? "", tokens[at] ?? ""];
        if (token.length > 1) parts.push('<mspace width="1.2em"></mspace>');
        else if (next === "/") {
          at += 2;
          parts = [...parts.slice(0, first), `<mfrac><mrow>${parts.slice(first).join("")}</mrow><mrow>${denominator(close)}</mrow></mfrac>`];
        } else if (before.includes("mtext") || (/^[A-Za-z]{2,}$/.test(next) && !/^[(_^]/.test(tokens[at + 1] ?? ""))) parts.push("<mtext>&#160;</mtext>");
        else if (!/^<mo>/.test(before) && !ENDS.has(next)) parts.push('<mspace width="0.17em"></mspace>');
        continue;
      }
      parts.push(scripted());
      if (ENDS.has(token) && token !== "·") first = parts.length;
      if (token === ",") parts.push('<mspace width="0.3em"></mspace>');
    }
    if (past) at++;
    return parts.join("");
  }

  let inside = "";
  while (at < tokens.length) inside += row("") + (tokens[at] ?? "");
  return `<math displaystyle="true">${inside}</math>`;
}

/** MathML with the roles of its symbols. @param {string} markup @returns {Element} */
export function coloured(markup) {
  const made = /** @type {Element} */ (new DOMParser().parseFromString(markup, "text/html").body.firstElementChild);
  for (const mi of made.querySelectorAll("mi")) {
    const name = mi.textContent ?? "";
    const indexed = mi.parentElement?.localName === "msub" && mi.parentElement.firstElementChild === mi;
    const role = ROLES[name] ?? (indexed ? INDEXED[name] : undefined);
    if (role) mi.setAttribute("data-role", role);
  }
  tall(made);
  return made;
}

/** Parentheses around a fraction, which a font without tall ones does not stretch, are drawn as borders. @param {Element} math */
function tall(math) {
  for (const row of math.querySelectorAll("mrow")) {
    const [first, last] = [row.firstElementChild, row.lastElementChild];
    if (first?.textContent === "(" && last?.textContent === ")" && row.querySelector("mfrac")) row.classList.add("tall");
  }
}

/** Puts the equations of a formula below each other: those that a wide space separates. @param {Element} math */
export function stacked(math) {
  const equations = [[]];
  for (const part of [...(math.firstElementChild?.children ?? [])]) {
    if (part.localName === "mspace" && Number.parseFloat(part.getAttribute("width") ?? "0") >= 1) equations.push([]);
    else equations.at(-1)?.push(part);
  }
  if (equations.length === 1) return math;
  const make = (/** @type {string} */ name, /** @type {Element[]} */ ...parts) => {
    const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", name);
    made.append(...parts);
    return made;
  };
  const table = make("mtable", ...equations.map((parts) => make("mtr", make("mtd", make("mrow", ...parts)))));
  table.setAttribute("displaystyle", "true");
  math.replaceChildren(table);
  return math;
}

/** A line with formulas, which wraps between them; a line of prose stays text. @param {string} text @returns {(Node|string)[]} */
export function formulas(text) {
  if (!/[=←·√ᵀ/+]/.test(text)) return [text];
  return text.split(/(,) {2,}/).map((part) => (part === "," ? ",  " : coloured(mathml(part))));
}

/** Pointing at a symbol, or at a box, marks all of its role. */
export function linkRoles() {
  document.addEventListener("pointerover", (event) => {
    const role = /** @type {Element} */ (event.target).closest("[data-role]")?.getAttribute("data-role") ?? "";
    document.documentElement.dataset.lit = role;
  });
}
