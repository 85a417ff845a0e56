// Requests to the server. An error response is thrown with the message of the server.

import { request } from "./recording.js";

export class Refused extends Error {
  /** @param {string} message @param {string} type @param {number} status */
  constructor(message, type, status) {
    super(message);
    this.type = type;
    this.status = status;
  }
}

const TRIES = 30; // while the server is busy (503)

async function ask(path, options) {
  let answer;
  for (let left = TRIES; left > 0; left--) {
    try {
      answer = await request(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("the server does not respond: is `manyheads view` still running?", "gone", 0);
    }
    if (answer.ok) return answer;
    if (answer.status !== 503) break;
    await new Promise((done) => setTimeout(done, 1000 * Number(answer.headers.get("Retry-After") ?? 1)));
  }
  const body = await answer.json().catch(() => null);
  const { message, type } = body?.error ?? { message: answer.statusText, type: "error" };
  throw new Refused(message, type, answer.status);
}

/** @param {Record<string, string|number>} values */
const queryOf = (values) => new URLSearchParams(Object.entries(values).map(([key, value]) => [key, String(value)]));

/** @param {string} path @param {Record<string, string|number>} [query] @param {AbortSignal} [signal] */
export async function get(path, query = {}, signal = undefined) {
  return (await ask(`${path}?${queryOf(query)}`, { signal })).json();
}

/** @param {string} path @param {object} body @param {AbortSignal} [signal] */
export async function post(path, body, signal = undefined) {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

/**
 * @typedef {object} Tensor numbers in the order of their indices, the last index fastest
 * @property {number[]} shape
 * @property {Float32Array|Uint8Array} values bytes are values of 0 … 255 between low and high
 * @property {number} low @property {number} high
 */

/**
 * A tensor of a trace, or one layer or head of it.
 * @param {string} trace @param {string} name as `encoder.self.weights`
 * @param {{layer?: number, head?: number, dtype?: string, side?: number, normalize?: number}} [which]
 * `side` limits rows and columns by max-pooling; `normalize` divides each map by its maximum
 * @returns {Promise<Tensor>}
 */
export async function tensor(trace, name, which = {}, signal = undefined) {
  const answer = await ask(`/api/trace/${trace}/tensor/${name}?${queryOf(which)}`, { signal });
  const bytes = await answer.arrayBuffer();
  const shape = answer.headers.get("X-Shape").split(",").map(Number);
  const isBytes = answer.headers.get("X-Dtype") === "u8";
  return {
    shape,
    values: isBytes ? new Uint8Array(bytes) : new Float32Array(bytes),
    low: Number(answer.headers.get("X-Low") ?? 0),
    high: Number(answer.headers.get("X-High") ?? 1),
  };
}

/**
 * Several matrices in one answer. @param {string} path @param {Record<string, string|number>} query
 * @returns {Promise<{shape: number[], values: Float32Array}[]>}
 */
export async function matrices(path, query, signal = undefined) {
  const answer = await ask(`${path}?${queryOf(query)}`, { signal });
  const bytes = await answer.arrayBuffer();
  let from = 0;
  return answer.headers.get("X-Shape").split(";").map((text) => {
    const shape = text.split(",").map(Number);
    const values = new Float32Array(bytes, 4 * from, shape[0] * shape[1]);
    from += values.length;
    return { shape, values };
  });
}
