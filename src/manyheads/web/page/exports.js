// Every view leaves as a picture (PNG, SVG), as numbers (CSV), and as one HTML file that opens
// without this server and without a network.

import { element, escaped } from "./dom.js";

/**
 * @typedef {object} View what a component offers to be saved
 * @property {string} name of the file
 * @property {string} title one line that says what it shows
 * @property {() => string} svg the picture, as text
 * @property {() => {columns: string[], rows: (string|number)[][]}} table its numbers
 * A figure is hidden until it is shown for the first time: before that there is nothing to save.
 */

/** Buttons that save a view. @param {() => View} view evaluated when a button is used */
export function saving(view) {
  const button = (text, act) =>
    element("button", { type: "button", class: "quiet", onclick: () => act(view()) }, text);
  return element(
    "div",
    { class: "saving", role: "group", "aria-label": "Save" },
    button("PNG", async (it) => saveFile(`${it.name}.png`, await png(it.svg()))),
    button("SVG", (it) => saveFile(`${it.name}.svg`, blob(it.svg(), "image/svg+xml"))),
    button("CSV", (it) => saveFile(`${it.name}.csv`, blob(csv(it.table()), "text/csv"))),
    button("HTML", (it) => saveFile(`${it.name}.html`, blob(html(it), "text/html"))),
  );
}

/** Numbers as a table of text, by RFC 4180. */
export function csv({ columns, rows }) {
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replace(/"/g, '""')}"` : value);
  return [columns, ...rows].map((row) => row.map((value) => cell(String(value))).join(",") + "\r\n").join("");
}

/** One file with the picture and its numbers; nothing in it is fetched. @param {View} view */
export function html(view) {
  const { columns, rows } = view.table();
  const line = (cells, tag) => `<tr>${cells.map((c) => `<${tag}>${escaped(c)}</${tag}>`).join("")}</tr>`;
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>${escaped(view.title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{font:16px/1.5 system-ui,sans-serif;margin:2rem;background:#fff;color:#111}
svg{max-width:100%;height:auto}td,th{border:1px solid #bbb;padding:.1rem .4rem;text-align:right}
table{border-collapse:collapse;font-size:.8rem}</style></head>
<body><h1>${escaped(view.title)}</h1>
${view.svg()}
<details><summary>Numbers</summary><table>${line(columns, "th")}${rows.map((row) => line(row, "td")).join("\n")}</table></details>
</body></html>
`;
}

/** A picture of dots from a picture of lines, twice as fine as the screen's. */
export async function png(svg) {
  const address = URL.createObjectURL(blob(svg, "image/svg+xml"));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    const fine = Math.min(2, 8000 / Math.max(image.width, image.height));
    canvas.width = Math.max(1, image.width * fine);
    canvas.height = Math.max(1, image.height * fine);
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** The beginning of a picture. @param {number} width @param {number} height @param {string} inside */
export function picture(width, height, inside) {
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" ` +
    `viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif" font-size="12" ` +
    `fill="#111"><rect width="${width}" height="${height}" fill="#fff"/>${inside}</svg>`
  );
}

const blob = (text, type) => new Blob([text], { type: `${type};charset=utf-8` });

/** Saves a file. @param {string} name @param {Blob} content */
export function saveFile(name, content) {
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
