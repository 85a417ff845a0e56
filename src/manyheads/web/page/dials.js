// Rotary positions as dials: the hand of a pair of channels turns by the same angle from each position to the next.

import { element, shown } from "./dom.js";
import { Figure } from "./figure.js";

const MOST = 12; // positions
const [ACROSS, DOWN, RADIUS, LEFT, TOP] = [46, 66, 18, 4, 20];
const DEGREES = 180 / Math.PI;

/**
 * The angle of a pair of channels at each position, in degrees from its angle at position 0.
 * @param {{shape: number[], values: ArrayLike<number>}} table position, channel @param {[number, number]} pair
 */
function anglesOf({ shape: [rows, columns], values }, [first, second]) {
  const angle = (row) => DEGREES * Math.atan2(values[row * columns + second], values[row * columns + first]);
  return Array.from({ length: rows }, (_, row) => angle(row) - angle(0));
}

/**
 * Three pairs of channels: the fastest, one between, and one that is slow.
 * @param {{shape: number[], values: ArrayLike<number>}} table position, channel; a vector of ones, rotated @param {string} layout of the pairs
 */
export function handsOf(table, layout) {
  const count = table.shape[1] / 2;
  return [...new Set([0, Math.floor(count / 4), Math.floor(count / 2)])].map((number) => {
    const angles = anglesOf(table, layout === "interleaved" ? [2 * number, 2 * number + 1] : [number, number + count]);
    const turn = angles.length > 1 ? (angles[1] + 360) % 360 : 0;
    return { number, angles, turn };
  });
}

export class Dials extends Figure {
  constructor() {
    super("dials");
    this.name = "rotary-hands";
    this.place = element("div", { class: "plot scroll" });
    this.fill(this.place);
  }

  /** @param {{number: number, angles: number[], turn: number}[]} hands */
  show(hands) {
    this.open("Pairs of channels as hands, position by position");
    this.hands = hands;
    const { width, height, inside } = this.drawing();
    this.place.innerHTML = `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img" aria-label="${hands.map(wordsOf).join("; ")}">${inside}</svg>`;
  }

  drawing() {
    const most = Math.min(MOST, this.hands[0].angles.length);
    const rows = this.hands.map((hand, row) => {
      const y = TOP + DOWN * row + RADIUS + 4;
      const dials = hand.angles.slice(0, most).map((angle, at) => {
        const x = LEFT + ACROSS * at + RADIUS;
        const [right, up] = [Math.cos(angle / DEGREES), Math.sin(angle / DEGREES)].map((part) => (RADIUS - 3) * part);
        return `<circle cx="${x}" cy="${y}" r="${RADIUS}" fill="none" stroke="#8a8f94"/><path d="M${x} ${y}h${RADIUS}" stroke="#8a8f94" stroke-dasharray="2 2"/><path d="M${x} ${y}l${right.toFixed(2)} ${(-up).toFixed(2)}" stroke="#0072b2" stroke-width="3" stroke-linecap="round"/>`;
      });
      return `<text x="${LEFT}" y="${y - RADIUS - 8}" font-size="12">${wordsOf(hand)}</text>${dials.join("")}`;
    });
    const bottom = TOP + DOWN * this.hands.length - 4;
    const numbers = Array.from({ length: most }, (_, at) => `<text x="${LEFT + ACROSS * at + RADIUS}" y="${bottom}" font-size="12" text-anchor="middle">${at}</text>`);
    return { width: LEFT + ACROSS * most + 4, height: bottom + 6, inside: rows.join("") + numbers.join("") };
  }

  table() {
    return { columns: ["pair", "position", "degrees"], rows: this.hands.flatMap(({ number, angles }) => angles.map((angle, at) => [number, at, angle])) };
  }
}

const wordsOf = ({ number, turn }) => `pair ${number}: ${shown(turn)}° a position`;
