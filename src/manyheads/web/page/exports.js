// Every view can be saved as a picture (PNG, SVG), as numbers (CSV), and as one HTML file that opens
// without this server and without a network. A file names the run, the text and what was chosen.

import { scaleBar } from "./colour.js";
import { context2d, element, escaped, shown } from "./dom.js";

/**
 * @typedef {object} Drawing
 * @property {number} width @property {number} height @property {string} inside SVG
 * @property {{low: number, high: number, scale: import("./colour.js").Scale}} [colours]
 * @typedef {{columns: string[], rows: (string|number)[][]}} Table
 * @typedef {object} View what can be saved
 * @property {string} name of the file @property {string} title one line that says what it shows
 * @property {() => Drawing} drawing @property {() => Table} table its numbers
 */

const LETTER = 7.6; // the width of a letter of a title
const LINE = 16; // the height of a line of the notes

/** Run, text and choices of the page on screen. @type {Record<string, string>} */
let origin = {};

/** Sets what saved files say about their origin. @param {Record<string, string|number|undefined>} values */
export function describe(values) {
  const known = Object.entries(values).filter(([, value]) => value !== undefined && value !== "");
  origin = Object.fromEntries(known.map(([key, value]) => [key, String(value)]));
}

/** The Save menu of a view. @param {() => View} view evaluated when a file is chosen */
export function saving(view) {
  /** @param {string} ending @param {(it: View) => Promise<Blob>|Blob} make */
  const save = (ending, make) => async () => {
    const it = view();
    const name = [origin.run, it.name].filter(Boolean).join("-").replace(/[^\w.-]+/g, "-");
    saveFile(`${name}.${ending}`, await make(it));
  };
  return saveMenu([
    ["PNG", save("png", (it) => png(svg(it)))],
    ["SVG", save("svg", (it) => blob(svg(it), "image/svg+xml"))],
    ["CSV", save("csv", (it) => blob(csv(it.table()), "text/csv"))],
    ["HTML", save("html", (it) => blob(html(it), "text/html"))],
  ]);
}

/** A menu that closes after a choice, by Escape, and when the focus leaves it. @param {[string, () => void][]} entries */
export function saveMenu(entries) {
  const button = (/** @type {[string, () => void]} */ [name, act]) =>
    element("button", { type: "button", onclick: () => ((menu.open = false), act()) }, name);
  const menu = element(
    "details",
    {
      class: "saving",
      onkeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key !== "Escape" || !menu.open) return;
        event.stopPropagation();
        menu.open = false;
        menu.querySelector("summary")?.focus();
      },
      onfocusout: (/** @type {FocusEvent} */ event) => {
        if (event.relatedTarget && !menu.contains(/** @type {Node} */ (event.relatedTarget))) menu.open = false;
      },
    },
    element("summary", {}, "Save"),
    element("div", { role: "group", "aria-label": "Save as" }, ...entries.map(button)),
  );
  return menu;
}

/** Words in lines of at most `most` letters; a name stays with its value. @param {string} text @param {number} most */
export function wrapped(text, most) {
  const lines = [""];
  for (const word of text.split(/(?<!:) /)) {
    const last = lines[lines.length - 1];
    if (last && last.length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] = last ? `${last} ${word}` : word;
  }
  return lines;
}

/** A view as an SVG file: title, picture, colour scale and origin. @param {View} view */
export function svg(view) {
  const { width, height, inside, colours } = view.drawing();
  const wide = Math.ceil(Math.max(width + 12, 360));
  const titles = wrapped(view.title, wide / LETTER);
  const notes = wrapped(Object.entries(origin).map(([key, value]) => `${key}: ${key === "text" || key === "target" ? `“${value}”` : value}`).join(" · "), wide / 6.6);
  const top = 10 + 18 * titles.length;
  const under = top + height + (colours ? 26 : 6);
  const tall = Math.ceil(under + LINE * notes.length + 8);
  /** @param {string} text @param {number} y @param {string} look */
  const line = (text, y, look) => `<text x="6" y="${y}" ${look}>${escaped(text)}</text>`;
  const parts = [
    ...titles.map((text, at) => line(text, 18 + 18 * at, 'font-size="14"')),
    `<g transform="translate(0 ${top})" color="#111">${inside}</g>`,
    colours ? `<g transform="translate(6 ${top + height + 6})">${scaleBar(shown(colours.low), shown(colours.high), colours.scale)}</g>` : "",
    ...notes.map((text, at) => line(text, under + LINE * (at + 0.8), 'font-size="11" fill="#555"')),
  ];
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${tall}" ` +
    `viewBox="0 0 ${wide} ${tall}" font-family="system-ui, sans-serif" font-size="12" ` +
    `fill="#111"><rect width="${wide}" height="${tall}" fill="#fff"/>${parts.join("")}</svg>`
  );
}

/** Numbers as a table of text, by RFC 4180. @param {Table} table */
export function csv({ columns, rows }) {
  /** @param {string} value */
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replace(/"/g, '""')}"` : value);
  return [columns, ...rows].map((row) => row.map((value) => cell(String(value))).join(",") + "\r\n").join("");
}

/** One file with the picture and its numbers; nothing in it is fetched. @param {View} view */
export function html(view) {
  const { columns, rows } = view.table();
  /** @param {(string|number)[]} cells @param {string} tag */
  const line = (cells, tag) => `<tr>${cells.map((c) => `<${tag}>${escaped(String(c))}</${tag}>`).join("")}</tr>`;
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>${escaped(view.title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{font:16px/1.5 system-ui,sans-serif;margin:2rem;background:#fff;color:#111}
svg{max-width:100%;height:auto}td,th{border:1px solid #bbb;padding:.1rem .4rem;text-align:right}
table{border-collapse:collapse;font-size:.8rem}</style></head>
<body><h1>${escaped(view.title)}</h1>
${svg(view)}
<details><summary>Numbers</summary><table>${line(columns, "th")}${rows.map((row) => line(row, "td")).join("\n")}</table></details>
</body></html>
`;
}

/** An SVG as PNG, at twice the resolution of the screen. @param {string} drawn @returns {Promise<Blob>} */
export async function png(drawn) {
  const address = URL.createObjectURL(blob(drawn, "image/svg+xml"));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = element("canvas");
    const fine = Math.min(2, 8000 / Math.max(image.width, image.height));
    canvas.width = Math.max(1, image.width * fine);
    canvas.height = Math.max(1, image.height * fine);
    const context = context2d(canvas);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done, fail) => canvas.toBlob((made) => (made ? done(made) : fail(new Error("The picture is too large for PNG: save it as SVG."))), "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** @param {string} text @param {string} type */
const blob = (text, type) => new Blob([text], { type: `${type};charset=utf-8` });

/** Saves a file. @param {string} name @param {Blob} content */
export function saveFile(name, content) {
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
