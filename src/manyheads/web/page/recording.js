// A static copy of the page (manyheads view RUN --export DIR) has no server: it answers requests
// from the responses that it holds. On the server's own page `recording` is null.

/**
 * @typedef {object} Recording
 * @property {string[]} pages that work @property {Record<string, string[]>} texts of each run
 * @property {Record<string, [Record<string, string>, string|number[]]>} answers by request: headers
 * and body, a text or parts of `bodies` @property {string[]} bodies base64
 */

const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

/** Inflates zlib data. @param {Uint8Array<ArrayBuffer>} packed @returns {Response} */
export function inflated(packed) {
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate")));
}

/** @type {Recording|null} */
export const recording = globalThis.recording ? await inflated(bytesOf(globalThis.recording)).json() : null;

/** The request as `Recorder` of web/export.py names it. */
function nameOf(path, { method = "GET", body = "" }) {
  if (method === "POST") {
    const values = Object.entries(JSON.parse(body)).sort(([a], [b]) => (a < b ? -1 : 1));
    return `POST ${path} ${JSON.stringify(Object.fromEntries(values))}`;
  }
  const [place, query] = path.split("?");
  const sorted = new URLSearchParams(query);
  sorted.sort();
  return `GET ${place}?${sorted}`;
}

/** As `fetch`, from the server or from the recording. @returns {Promise<Response>} */
export async function request(path, options = {}) {
  if (!recording) return fetch(path, options);
  const answer = recording.answers[nameOf(path, options)];
  if (answer) {
    const [headers, body] = answer;
    const parts = typeof body === "string" ? [body] : body.map((at) => bytesOf(recording.bodies[at]));
    return new Response(new Blob(parts), { headers });
  }
  const message = "This copy has no server and holds only some sentences: choose one at the top, or run `manyheads view`.";
  return new Response(JSON.stringify({ error: { message, type: "not-recorded" } }), { status: 404 });
}
