// A film as a WebM file, encoded frame by frame (WebCodecs): its time does not depend on how fast a
// computer draws. RFC 9559 has the elements.

const FRAMES = 24; // a second
const CODEC = "vp8";

/** Whether this browser can film: it needs a secure context (loopback, a file, HTTPS). */
export const canFilm = () => typeof VideoEncoder !== "undefined";

/**
 * Films a canvas. @param {HTMLCanvasElement} canvas @param {number} seconds
 * @param {(at: number) => void} draw draws the picture of a time in seconds @param {AbortSignal} signal
 * @returns {Promise<Blob>}
 */
export async function film(canvas, seconds, draw, signal) {
  /** @type {Uint8Array[]} */
  const blocks = [];
  let problem = null;
  const encoder = new VideoEncoder({
    output: (chunk) => blocks.push(block(chunk)),
    error: (error) => (problem = error),
  });
  draw(0);
  const [width, height] = [canvas.width & ~1, canvas.height & ~1]; // VP8 has pairs of pixels
  encoder.configure({ codec: CODEC, width, height, bitrate: 1_500_000, framerate: FRAMES, latencyMode: "realtime" });
  for (let number = 0; number < FRAMES * seconds && !problem && !signal.aborted; number++) {
    draw(number / FRAMES);
    const frame = new VideoFrame(canvas, { timestamp: (1e6 * number) / FRAMES, visibleRect: { x: 0, y: 0, width, height } });
    encoder.encode(frame, { keyFrame: number % FRAMES === 0 });
    frame.close();
    await new Promise((done) => setTimeout(done)); // the page shows the frame
    while (encoder.encodeQueueSize > 4) await new Promise((done) => encoder.addEventListener("dequeue", done, { once: true }));
  }
  if (!problem) await encoder.flush();
  encoder.close();
  if (problem) throw problem;
  return new Blob(webm(blocks, { width, height, seconds }), { type: "video/webm" });
}

/** A SimpleBlock: track 1, milliseconds, whether it is a key frame, and the data. @param {EncodedVideoChunk} chunk */
function block(chunk) {
  const time = Math.round(chunk.timestamp / 1000);
  const content = new Uint8Array(4 + chunk.byteLength);
  content.set([0x81, time >> 8, time & 255, chunk.type === "key" ? 0x80 : 0]);
  chunk.copyTo(content.subarray(4));
  return part("a3", content);
}

/** The parts of the file. @param {Uint8Array[]} blocks @param {{width: number, height: number, seconds: number}} about */
function webm(blocks, { width, height, seconds }) {
  const duration = new DataView(new ArrayBuffer(8));
  duration.setFloat64(0, 1000 * seconds);
  const head = part("1a45dfa3", part("4286", 1), part("42f7", 1), part("42f2", 4), part("42f3", 8), part("4282", "webm"), part("4287", 4), part("4285", 2));
  const info = part("1549a966", part("2ad7b1", 1_000_000), part("4489", new Uint8Array(duration.buffer)), part("4d80", "manyheads"), part("5741", "manyheads"));
  const track = part("ae", part("d7", 1), part("73c5", 1), part("83", 1), part("86", "V_VP8"), part("e0", part("b0", width), part("ba", height)));
  return [head, part("18538067", info, part("1654ae6b", track), part("1f43b675", part("e7", 0), ...blocks))];
}

/** An EBML element: its id in hexadecimal digits, its size and its content. @param {string} id @param {...(number|string|Uint8Array)} content */
function part(id, ...content) {
  const bytes = content.map((one) => (typeof one === "number" ? bigEndian(one, 4) : typeof one === "string" ? new TextEncoder().encode(one) : one));
  const size = bytes.reduce((sum, one) => sum + one.length, 0);
  const name = (id.match(/../g) ?? []).map((digits) => Number.parseInt(digits, 16));
  const made = new Uint8Array(name.length + 5 + size);
  made.set(name);
  made.set([0x08, ...bigEndian(size, 4)], name.length); // 08: the size has five bytes
  let at = name.length + 5;
  for (const one of bytes) {
    made.set(one, at);
    at += one.length;
  }
  return made;
}

const bigEndian = (value, count) => Uint8Array.from({ length: count }, (_, at) => (value / 256 ** (count - 1 - at)) & 255);
