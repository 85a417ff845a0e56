// Numbers as texts. A saved HTML file contains this module.

/** Formats a number with `digits` + 1 significant digits, and all of an integer part: 0.0774, −96, 1235, 2.06e−8, −∞. */
export function shown(number, digits = 2) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  if (size === Infinity) return number < 0 ? "−∞" : "∞";
  const isScientific = size !== 0 && (size < 1e-4 || size >= 1e6);
  const plain = size >= 10 ** digits ? number.toFixed(0) : String(Number(number.toPrecision(digits + 1)));
  return (isScientific ? number.toExponential(digits).replace(/\.?0+e/, "e") : plain).replaceAll("-", "−");
}

/** A score of 0 to 100, as papers print it: 97.0. @param {number} score */
export const points = (score) => score.toFixed(1);

/** A probability: 73.6 %, 0.12 %, < 0.01 %, > 99.9 %. */
export function percent(share) {
  if (share > 0 && share < 1e-4) return "< 0.01 %";
  if (share < 1 && share >= 0.9995) return "> 99.9 %";
  return `${Number(Number((100 * share).toPrecision(3)).toFixed(2))} %`;
}
