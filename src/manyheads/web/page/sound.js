// Notes as sound: an oscillator for each, nothing loaded.

const SOON = 0.08; // seconds before the first note
const FADE = 0.03;
const LOUDEST = 0.12; // of one note: several sound at once

/** The frequency of a MIDI pitch in hertz: 440 · 2^((pitch − 69) ⁄ 12). */
export function frequency(pitch) {
  return 440 * 2 ** ((pitch - 69) / 12);
}

export class Player {
  /** @param {() => void} ended called when it is silent again */
  constructor(ended) {
    this.ended = ended;
    this.context = null;
  }

  get playing() {
    return this.context !== null;
  }

  /** Seconds since the beginning of what is played. */
  get time() {
    return this.context ? this.context.currentTime - SOON : 0;
  }

  /** @param {{start: number, end: number, pitch: number, loud: number}[]} notes in milliseconds @param {number} from */
  play(notes, from = 0) {
    this.stop();
    const later = notes.filter((note) => note.start >= from);
    if (!later.length) return;
    const context = (this.context = new AudioContext());
    let last = null;
    for (const note of later) {
      const [start, end] = [note.start, note.end].map((time) => SOON + (time - from) / 1000);
      const gain = context.createGain();
      gain.gain.setValueAtTime(0, start);
      gain.gain.linearRampToValueAtTime(LOUDEST * note.loud, start + FADE);
      gain.gain.setValueAtTime(LOUDEST * note.loud, Math.max(start + FADE, end - FADE));
      gain.gain.linearRampToValueAtTime(0, Math.max(start + 2 * FADE, end));
      const tone = context.createOscillator();
      tone.type = "triangle";
      tone.frequency.value = frequency(note.pitch);
      tone.connect(gain).connect(context.destination);
      tone.start(start);
      tone.stop(Math.max(start + 2 * FADE, end));
      if (!last || end > last.end) last = { tone, end };
    }
    last.tone.onended = () => this.context === context && this.stop();
  }

  stop() {
    if (!this.context) return;
    this.context.close();
    this.context = null;
    this.ended();
  }
}
