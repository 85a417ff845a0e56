// A piano roll: notes over time and pitch, and arcs from one event to the events it attends to.

import { LINES } from "./colour.js";
import { element, percent, shown, visible } from "./dom.js";
import { Figure, onArrow } from "./figure.js";
import { strongest } from "./lines.js";

const LEFT = 44;
const SIXTEENTHS = 4; // of a beat
const KEY = 9; // the height of a pitch
const AROUND = 76; // on stage: title, legend and read-out
const BASE = 34; // below the lowest: events without a pitch, and seconds
const TOP = 14;
const ARC = "#c2410c"; // contrast of 3 or more with the panels of both themes
const NAMES = ["C", "C♯", "D", "D♯", "E", "F", "F♯", "G", "G♯", "A", "A♯", "B"];

/** What a pitch is called: 60 is C4. */
export function nameOf(pitch) {
  return `${NAMES[pitch % 12]}${Math.floor(pitch / 12) - 1}`;
}

/** The name of an event: of its note, if it has one; else its word. @param {{word: string, pitch: number|null}} event */
export const eventName = ({ word, pitch }) => (pitch === null ? visible(word) : /^(p|on)/.test(word) ? nameOf(pitch) : `${visible(word)}, ${nameOf(pitch)}`);

export class Roll extends Figure {
  /** @param {{choose: (event: number, how?: {replace: boolean}) => void}} how called with the chosen event */
  constructor({ choose }) {
    super("roll");
    this.choose = choose;
    this.plane = element("div", {
      tabindex: "0",
      role: "img",
      "aria-roledescription": "piano roll",
      onkeydown: (event) => this.walk(event),
      onclick: (event) => this.pick(event),
    });
    this.frame = element("div", { class: "scroll" }, this.plane);
    this.legend = element("p", { class: "note voices" });
    this.fill(this.frame, this.legend);
    new ResizeObserver(() => this.fit()).observe(this.root);
  }

  /** Draws the piece again for another width, or for the stage. */
  fit() {
    if (!this.roll) return;
    const before = [this.width, this.height];
    this.measure();
    if (this.width !== before[0] || this.height !== before[1]) this.draw();
  }

  /** Sizes for the available room; on stage all pitches fit the window. */
  measure() {
    const { notes, events } = this.roll;
    const last = Math.max(1000, ...notes.map((note) => note.end), ...events.map((event) => event.time));
    const room = Math.max(300, this.frame.clientWidth - LEFT - 16);
    const pitches = this.high - this.low + 1;
    const staged = this.root.classList.contains("staged");
    this.key = staged ? Math.max(4, Math.min(14, (this.root.clientHeight - AROUND - TOP - BASE) / pitches)) : KEY;
    this.scale = Math.max(room / last, staged ? 0 : 0.05); // pixels of a millisecond
    this.width = LEFT + this.scale * last + 12;
    this.height = TOP + this.key * pitches + BASE;
  }

  /**
   * @param {{name: string, title: string, notes: {start: number, end: number, pitch: number, part: number, loud: number}[], events: {word: string, time: number, pitch: number|null}[],
   *   first: number, weights: ArrayLike<number>, at: number, top: number, voices: string[]}} roll `first` is the number
   * of the first event in the piece; `weights` are of the chosen event: the first is that of what
   * stands before these events, then one for each; `voices` are the names of the parts
   */
  show(roll) {
    this.open(roll.title);
    this.name = roll.name;
    this.roll = roll;
    this.plane.setAttribute("aria-label", `${roll.title}. Left and right: the event before and after.`);
    this.legend.replaceChildren(...roll.voices.map((voice, part) => {
      const sample = element("span", { class: "voice" });
      sample.style.background = LINES[part % LINES.length];
      return element("span", {}, sample, voice);
    }));
    this.share = element("span", {});
    this.legend.append(this.share);
    const pitches = roll.notes.map((note) => note.pitch);
    this.low = Math.min(...(pitches.length ? pitches : [60])) - 1;
    this.high = Math.max(...(pitches.length ? pitches : [72])) + 1;
    this.measure();
    this.draw();
  }

  x(time) {
    return LEFT + this.scale * time;
  }

  y(pitch) {
    return pitch === null ? this.height - BASE + 10 : TOP + this.key * (this.high - pitch) + this.key / 2;
  }

  /** The largest weights of the chosen event; −1 is before the piece. @returns {[number, number][]} event and weight */
  strongestKeys() {
    const { weights, at, top } = this.roll;
    return strongest(weights, 0, at + 2, top).map(([key, weight]) => /** @type {[number, number]} */ ([key - 1, weight]));
  }

  /** The drawn arcs: the largest weights on other events. */
  arcs() {
    return this.strongestKeys().filter(([event]) => event !== this.roll.at);
  }

  draw() {
    const { events, at, first } = this.roll;
    this.plane.innerHTML = `<svg width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}" aria-hidden="true">${this.inside()}</svg>`;
    const [x, seen] = [this.x(events[at].time), this.frame.clientWidth];
    if (x < this.frame.scrollLeft || x > this.frame.scrollLeft + seen - 20) this.frame.scrollLeft = Math.max(0, x - seen + 60);
    const called = (event) => (event < 0 ? "the beginning" : `${first + event} (${this.placed(event)})`);
    const readings = this.strongestKeys().slice(0, 4).map(([event, weight]) => `${called(event)} ${percent(weight)}`);
    const arcs = this.arcs();
    this.share.textContent = `${arcs.length} arcs: ${percent(arcs.reduce((sum, [, weight]) => sum + weight, 0))} of the attention; width grows with √weight. Strong notes have more attention, on all their events together.`;
    this.output.textContent = `Event ${called(at)} at ${shown(events[at].time / 1000)} s attends to ${readings.join("; ")}`;
  }

  /** An event in words: its voice, note and beat, if the events are a grid of voices. @param {number} event */
  placed(event) {
    const { events, first, voices } = this.roll;
    const name = eventName(events[event]);
    if (!voices.length) return name;
    const at = first - 1 + event;
    return `${voices[at % voices.length]} ${name}, beat ${Math.floor(at / voices.length / SIXTEENTHS) + 1}`;
  }

  /** The attention of the chosen event to all events of a note. @param {{start: number, end: number, pitch: number, part: number}} note */
  shareOf({ start, end, pitch, part }) {
    const { events, weights, at, first, voices } = this.roll;
    const isOwn = (key) => !voices.length || (first - 1 + key) % voices.length === part;
    return events.reduce((sum, event, key) => (key <= at && event.pitch === pitch && start <= event.time && event.time < end && isOwn(key) ? sum + weights[key + 1] : sum), 0);
  }

  inside() {
    const { notes, events, at } = this.roll;
    const parts = [];
    for (let pitch = this.low; pitch <= this.high; pitch++) {
      if (pitch % 12) continue;
      const y = TOP + this.key * (this.high - pitch + 1);
      parts.push(`<path stroke="#8886" d="M${LEFT} ${y}H${this.width}"/><text x="${LEFT - 6}" y="${y - 1}" text-anchor="end">${nameOf(pitch)}</text>`);
    }
    for (let second = 0; this.x(1000 * second) < this.width; second += this.scale > 0.03 ? 1 : 5) {
      parts.push(`<text x="${this.x(1000 * second)}" y="${this.height - 4}" text-anchor="middle">${second} s</text>`);
    }
    const shares = notes.map((note) => this.shareOf(note));
    const most = Math.max(1e-9, ...shares);
    for (const [number, { start, end, pitch, part }] of notes.entries()) {
      const wide = Math.max(2, this.scale * (end - start) - 1);
      const isLit = start <= events[at].time && events[at].time < end; // it sounds at the chosen event
      parts.push(`<rect ${isLit ? 'class="lit" stroke="currentColor" stroke-width="1.5" ' : ""}x="${this.x(start)}" y="${this.y(pitch) - this.key / 2}" width="${wide}" height="${this.key - 1}" rx="2" fill="${LINES[part % LINES.length]}" fill-opacity="${(0.3 + 0.65 * Math.sqrt(shares[number] / most)).toFixed(3)}"/>`);
    }
    const place = (event) => (event < 0 ? [LEFT, this.height - BASE + 10] : [this.x(events[event].time) + 3, this.y(events[event].pitch)]);
    const [x, y] = place(at);
    const arcs = this.arcs();
    parts.push(`<path class="playhead" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="3 3" d="M${x} ${TOP}V${this.height - BASE}"/>`);
    for (const [event, weight] of arcs) {
      const [toX, toY] = place(event);
      const bow = Math.max(4, Math.min(y, toY) - 18 - Math.abs(x - toX) / 6);
      const share = Math.sqrt(weight); // the same for every event and head: a weight of 1 is the widest arc
      const stroke = `stroke="${ARC}" stroke-opacity="${(0.25 + 0.75 * share).toFixed(3)}" stroke-width="${(0.8 + 2.8 * share).toFixed(2)}"`;
      parts.push(`<path class="arc" fill="none" ${stroke} d="M${x} ${y}Q${(x + toX) / 2} ${bow} ${toX} ${toY}"/><circle cx="${toX}" cy="${toY}" r="${(2 + 3.5 * share).toFixed(1)}" fill="${ARC}" stroke="#fff" stroke-width="0.8"/>`);
    }
    parts.push(`<circle class="chosen" cx="${x}" cy="${y}" r="7" fill="${ARC}" stroke="#fff" stroke-width="2"/>`);
    return parts.join("");
  }

  walk(event) {
    const { events, at } = this.roll;
    onArrow(event, { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: events.length - 1 }, (to) => events[to] && this.choose(to, { replace: true }));
  }

  /** The event nearest to a click. */
  pick(event) {
    const box = this.plane.firstElementChild.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const away = this.roll.events.map((one) => Math.hypot(this.x(one.time) + 3 - x, 2 * (this.y(one.pitch) - y)));
    this.choose(away.indexOf(Math.min(...away)));
  }

  drawing() {
    return { width: this.width, height: this.height, inside: this.inside() };
  }

  table() {
    const { events, weights, first } = this.roll;
    const rows = events.map(({ word, time, pitch }, at) => [first + at, word, time, pitch ?? "", weights[at + 1]]);
    return { columns: ["event", "word", "milliseconds", "pitch", "weight"], rows: [[first - 1, "(before)", "", "", weights[0]], ...rows] };
  }
}
