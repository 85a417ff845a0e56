// Numbers as colours: white to ink for weights, blue–white–red around zero for signed values, viridis
// (public domain) as an option for weights. In the dark theme white is the colour of a panel, and ink is light. Lightness is monotonic in each of them on both sides of
// zero, so that they are also read in grey and by people who do not see red and green apart.

import { context2d } from "./dom.js";
import { isDark, read } from "./state.js";

const VIRIDIS =
  "44015444025645045745055946075a46085c460a5d460b5e470d60470e61471063471164471365481467481668481769" +
  "48186a481a6c481b6d481c6e481d6f481f70482071482173482374482475482576482677482878482979472a7a472c7a" +
  "472d7b472e7c472f7d46307e46327e46337f463480453581453781453882443983443a83443b84433d84433e85423f85" +
  "4240864241864142874144874045884046883f47883f48893e49893e4a893e4c8a3d4d8a3d4e8a3c4f8a3c508b3b518b" +
  "3b528b3a538b3a548c39558c39568c38588c38598c375a8c375b8d365c8d365d8d355e8d355f8d34608d34618d33628d" +
  "33638d32648e32658e31668e31678e31688e30698e306a8e2f6b8e2f6c8e2e6d8e2e6e8e2e6f8e2d708e2d718e2c718e" +
  "2c728e2c738e2b748e2b758e2a768e2a778e2a788e29798e297a8e297b8e287c8e287d8e277e8e277f8e27808e26818e" +
  "26828e26828e25838e25848e25858e24868e24878e23888e23898e238a8d228b8d228c8d228d8d218e8d218f8d21908d" +
  "21918c20928c20928c20938c1f948c1f958b1f968b1f978b1f988b1f998a1f9a8a1e9b8a1e9c891e9d891f9e891f9f88" +
  "1fa0881fa1881fa1871fa28720a38620a48621a58521a68522a78522a88423a98324aa8325ab8225ac8226ad8127ad81" +
  "28ae8029af7f2ab07f2cb17e2db27d2eb37c2fb47c31b57b32b67a34b67935b77937b87838b9773aba763bbb753dbc74" +
  "3fbc7340bd7242be7144bf7046c06f48c16e4ac16d4cc26c4ec36b50c46a52c56954c56856c66758c7655ac8645cc863" +
  "5ec96260ca6063cb5f65cb5e67cc5c69cd5b6ccd5a6ece5870cf5773d05675d05477d1537ad1517cd2507fd34e81d34d" +
  "84d44b86d54989d5488bd6468ed64590d74393d74195d84098d83e9bd93c9dd93ba0da39a2da37a5db36a8db34aadc32" +
  "addc30b0dd2fb2dd2db5de2bb8de29bade28bddf26c0df25c2df23c5e021c8e020cae11fcde11dd0e11cd2e21bd5e21a" +
  "d8e219dae319dde318dfe318e2e418e5e419e7e419eae51aece51befe51cf1e51df4e61ef6e620f8e621fbe723fde725";

/** The index of −∞ in a scale, after the 256 colours of a byte. */
export const NOTHING = 256;
const [GREY, DARK_GREY] = [[142, 147, 153], [92, 98, 105]]; // −∞: neither low nor high

/** Colours between some of equal distance. @param {number[][]} stops */
function between(stops) {
  return Array.from({ length: 256 }, (_, byte) => {
    const place = (byte / 255) * (stops.length - 1);
    const at = Math.min(stops.length - 2, Math.floor(place));
    return stops[at].map((from, part) => Math.round(from + (place - at) * (stops[at + 1][part] - from)));
  });
}

const viridis = Array.from({ length: 256 }, (_, byte) =>
  [0, 2, 4].map((at) => parseInt(VIRIDIS.slice(6 * byte + at, 6 * byte + at + 2), 16)),
);
const ink = between([[255, 255, 255], [196, 203, 219], [132, 144, 178], [70, 82, 125], [16, 20, 48]]);
const signed = between([[5, 48, 97], [51, 122, 183], [146, 197, 222], [255, 255, 255], [244, 165, 130], [203, 77, 67], [103, 0, 31]]);

const wrong = between([[255, 255, 255], [255, 222, 190], [245, 166, 100], [196, 92, 22], [112, 44, 4]]); // of what is wrong, beside ink

/** The same scales in the dark theme: they begin at the colour of its panels. */
const night = {
  ink: between([[30, 34, 38], [66, 77, 104], [112, 129, 172], [172, 188, 224], [240, 244, 255]]),
  signed: between([[176, 220, 255], [96, 170, 232], [45, 92, 140], [30, 34, 38], [140, 62, 48], [226, 116, 92], [255, 205, 180]]),
  repeated: between([[30, 34, 38], [70, 74, 80]]),
  wrong: between([[30, 34, 38], [84, 58, 38], [150, 88, 38], [222, 136, 62], [255, 206, 150]]),
};

const repeated = between([[255, 255, 255], [196, 199, 203]]); // of tokens that repeat the input
const heat = between([[0, 0, 0], [255, 140, 26]]); // over a picture: as opaque as the weight is large

/** @typedef {"ink"|"signed"|"viridis"|"heat"|"wrong"|"repeated"} Scale */
/** @param {Record<string, number[][]>} scales @param {number[]} grey */
const tables = (scales, grey) =>
  Object.fromEntries(
    Object.entries(scales).map(([name, colours]) => {
      const all = [...colours, grey];
      return [name, { colours: all, pixels: new Uint32Array(Uint8Array.from(all.flatMap((one) => [...one, 255])).buffer) }];
    }),
  );
const LIGHT = tables({ ink, signed, viridis, heat, wrong, repeated }, GREY);
const DARK = tables({ viridis, heat, ...night }, DARK_GREY);
/** A scale in the theme on screen. @param {Scale} scale */
const tableOf = (scale) => (isDark() ? DARK : LIGHT)[scale];

/** The scale of weights and probabilities: white to ink, or viridis by `palette=viridis` in the URL. */
export const weightScale = () => /** @type {Scale} */ (read().palette === "viridis" ? "viridis" : "ink");

/** A colour as [red, green, blue]. @param {number} byte @param {Scale} [scale] */
export const rgb = (byte, scale = weightScale()) => tableOf(scale).colours[byte];

/**
 * The byte of a value: round(255 · (value − low) / (high − low)), kept between 0 and 255; −∞ is NOTHING.
 * @param {number} value @param {number} [low] @param {number} [high]
 */
export function byteOf(value, low = 0, high = 1) {
  if (value === -Infinity) return NOTHING;
  if (!(high > low)) return 0;
  return Math.max(0, Math.min(255, Math.round((255 * (value - low)) / (high - low))));
}

/** A colour as CSS and SVG write it. @param {number} byte @param {Scale} [scale] */
export function css(byte, scale = weightScale()) {
  return `rgb(${rgb(byte, scale).join(",")})`;
}

/** The scale for values between two numbers: signed if zero is their middle. @param {number} low @param {number} high @returns {Scale} */
export const scaleFor = (low, high) => (low < 0 && low === -high ? "signed" : weightScale());

/**
 * Line colours that colour-blind readers can distinguish (Okabe and Ito); yellow and light blue are darker, so
 * that each has a contrast of 3 or more with the panels of both themes.
 */
export const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b57a00", "#3a8fbf"];

/**
 * Bytes as the pixels of a canvas that is as large as the matrix: one pixel a cell, never blurred.
 * @param {HTMLCanvasElement} canvas @param {ArrayLike<number>} bytes
 * @param {number} rows @param {number} columns @param {Scale} [scale]
 */
export function paint(canvas, bytes, rows, columns, scale = weightScale()) {
  const table = tableOf(scale).pixels;
  canvas.width = columns;
  canvas.height = rows;
  const context = context2d(canvas);
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let cell = 0; cell < rows * columns; cell++) pixels[cell] = table[bytes[cell]];
  context.putImageData(image, 0, 0);
}

/** The colours of a scale from its lowest to its highest value, as SVG. @param {string} low @param {string} high @param {Scale} scale */
export function scaleBar(low, high, scale) {
  const left = 6 + 7 * low.length;
  const step = 4;
  const bars = Array.from({ length: 32 }, (_, at) => `<rect x="${left + step * at}" width="${step}" height="10" fill="${css(Math.round((255 * at) / 31), scale)}"/>`);
  return `<text y="10">${low}</text><g shape-rendering="crispEdges">${bars.join("")}</g><rect x="${left}" width="${step * 32}" height="10" fill="none" stroke="#777"/><text x="${left + step * 32 + 6}" y="10">${high}</text>`;
}
