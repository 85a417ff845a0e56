// The probes of a run, requested step by step while it trains, with their bytes unpacked.

import { get } from "./api.js";
import { inflated } from "./recording.js";

/**
 * @typedef {import("./watchparts.js").Story & {next: number, version: string, weights: number[]}} Source
 * `weights` are the steps whose weights were kept
 */

/** A source without probes yet. @param {string} run @returns {Source} */
export const sourceOf = (run) => ({ run, next: 0, version: "", probes: [], sentences: [], weights: [] });

/** Requests new probes; returns true if there were any. @param {Source} source */
export async function refresh(source, signal) {
  const answer = await get("/api/probes", { run: source.run, since: source.next, version: source.version }, signal);
  if (answer.reset) source.probes = [];
  for (const probe of answer.records) source.probes.push(await unpacked(probe));
  if (answer.reset || !source.sentences.length) source.sentences = await Promise.all(answer.sentences.map(withBytes));
  Object.assign(source, { next: answer.next, version: answer.version, weights: answer.weights });
  return answer.reset || answer.records.length > 0;
}

/** The last probe; null without one. @param {string} run */
export async function lastProbe(run, signal) {
  const answer = await get("/api/probes", { run, last: 1 }, signal).catch(() => null);
  if (!answer?.records.length || !answer.sentences.length) return null;
  return { run, probes: [await unpacked(answer.records[0])], sentences: await Promise.all(answer.sentences.map(withBytes)) };
}

/** Bytes from zlib and base64. @param {string} text */
async function bytesOf(text) {
  const packed = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  return new Uint8Array(await inflated(packed).arrayBuffer());
}

/** A probe with its attention as bytes. */
export async function unpacked(probe) {
  const sentences = await Promise.all(
    probe.sentences.map(async ({ attention, ...rest }) => ({ ...rest, weights: await bytesOf(attention) })),
  );
  return { ...probe, sentences };
}

/** An example with its pixels as bytes. */
export async function withBytes({ pixels, ...rest }) {
  return pixels ? { ...rest, bytes: await bytesOf(pixels) } : rest;
}
