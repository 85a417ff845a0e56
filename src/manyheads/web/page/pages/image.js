// Image: classes and attention maps of a Vision Transformer.

import { post, tensor } from "../api.js";
import { Bars } from "../bars.js";
import { button, element, html, labelled, numbered, select, tabs } from "../dom.js";
import { base64, countInput, limited } from "../fitting.js";
import { Overlay, pictureOf, SmallOverlays } from "../overlay.js";
import { definePage } from "../page.js";
import { change } from "../state.js";

const MAP = "encoder.self";
const MOST_BYTES = 600_000; // larger files are downscaled before upload
const MOST_SIDE = 1024;
const MOST_CLASSES = 10;

let screen = null;
let upload = null; // a file cannot be in the URL; it is kept until the page is closed

export const { draw, keys } = definePage({
  name: "image",
  about: "Attention of a patch or the class token to all patches. A weight shows what is mixed in, not why a class is chosen.",
  keys: [
    ["← → ↑ ↓", "in the image: next patch"],
    ["Enter", "in the image: use this patch as query"],
    ["c", "in the image: use the class token as query"],
  ],
  build,
  show,
});

async function show({ run, state, controls }, signal) {
  const isUpload = state.picture === "upload" && upload;
  const request = isUpload ? { run: run.name, upload: upload.content } : { run: run.name, picture: limited(state.picture, 2 ** 31) };
  controls(...controlsOf(state, isUpload, null));
  const trace = await post("/api/image", request, signal);
  controls(...controlsOf(state, isUpload, trace));
  await showTrace(trace, { state, isUpload }, signal);
}

function build() {
  screen = {
    large: new Overlay({ choose: (query) => change({ query: query < 0 ? "class" : String(query) }) }),
    small: new SmallOverlays({ choose: (head) => change({ head: String(head), view: "" }) }),
    classes: new Bars({ name: "classes" }),
  };
  return [html`<div class="charts loose">${screen.large.root}<div class="stacked">${screen.small.root}${screen.classes.root}</div></div>`];
}

function controlsOf(state, isUpload, trace) {
  const file = html`<input type="file" accept="image/png,image/jpeg" @change=${(event) => taken(event.target.files[0])} />`;
  const made = [
    labelled("Image of the validation split", countInput(isUpload ? null : limited(state.picture, 2 ** 31), trace?.count, (picture) => change({ picture }))),
    labelled("Your own (PNG, JPEG)", file),
  ];
  if (!trace) return made;
  const map = trace.maps.find((one) => one.name === MAP);
  const views = [["head", "Head"], ["rollout", "Rollout"]];
  if (trace.tensors.includes("positions.similarity")) views.push(["positions", "Positions"]);
  const faded = (event) => change({ opacity: event.target.value }, { replace: true });
  made.push(
    labelled("Layer", select(numbered(map.layers), String(layerOf(state, map)), (layer) => change({ layer }))),
    tabs("View", views, state.view || "head", (view) => change({ view })),
    labelled("Opacity", html`<input type="range" min="0" max="100" .value=${state.opacity ?? "60"} @change=${faded} />`),
  );
  if (trace.before) {
    const isClass = queryOf(state, trace) < 0;
    made.push(button("Class token as query", () => change({ query: "class" }), { pressed: isClass }));
  }
  return made;
}

/** Default: the last layer. */
const layerOf = (state, map) => limited(state.layer, map.layers, map.layers - 1);

/** The query patch; −1 is the class token, the default if there is one. */
function queryOf(state, trace) {
  if (trace.before && (state.query === undefined || state.query === "class")) return -1;
  return limited(state.query, trace.side ** 2, Math.floor(trace.side ** 2 / 2) + Math.floor(trace.side / 2) * (1 - (trace.side % 2)));
}

async function showTrace(trace, { state, isUpload }, signal) {
  const map = trace.maps.find((one) => one.name === MAP);
  const [layer, head] = [layerOf(state, map), limited(state.head, map.heads)];
  const query = queryOf(state, trace);
  const row = query + trace.before;
  const of = (name, which = {}) => tensor(trace.trace, name, which, signal);
  const [pixels, weights] = await Promise.all([of("image.pixels"), of(`${MAP}.weights`, { layer })]);
  const image = pictureOf(pixels);
  const patches = trace.side ** 2 + trace.before;
  /** The query row of a square matrix, without the class token. */
  const over = (values, offset = 0) => values.subarray(offset + row * patches + trace.before, offset + (row + 1) * patches);
  const opacity = limited(state.opacity, 101, 60) / 100;
  const shared = { image, side: trace.side, opacity };
  const who = query < 0 ? "the class token" : `row ${Math.floor(query / trace.side) + 1}, column ${(query % trace.side) + 1}`;
  const heads = Array.from({ length: map.heads }, (_, at) => ({ label: `head ${at + 1}`, values: over(weights.values, at * patches ** 2) }));
  const view = state.view || "head";
  let [title, values, what] = [`Layer ${layer + 1}, head ${head + 1}: attention of ${who}`, heads[head].values, "weight"];
  if (view === "rollout" && map.rollout) {
    [title, values, what] = [`Rollout over layers 1 to ${layer + 1}: sources of ${who}`, over((await of(`${MAP}.rollout`, { layer })).values), "share"];
  } else if (view === "positions" && trace.tensors.includes("positions.similarity")) {
    [title, values, what] = [`Position similarity with ${who} (cosine)`, over((await of("positions.similarity")).values), "cosine"];
  }
  screen.large.show({ ...shared, name: `image-${view}-${layer + 1}-${head + 1}`, title, values, query, what });
  screen.small.show({ ...shared, name: `image-heads-${layer + 1}`, title: `All heads of layer ${layer + 1}: attention of ${who}` }, heads, view === "head" ? head : -1);
  const classes = [...trace.output.classes].sort((one, other) => other.probability - one.probability).slice(0, MOST_CLASSES);
  const from = isUpload ? upload.name : `Image ${limited(state.picture, 2 ** 31) + 1} of ${trace.count}, class “${trace.label}”`;
  const lost = state.picture === "upload" && !isUpload ? " The page has lost the uploaded file: choose it again." : "";
  screen.classes.show(
    classes.map(({ label, probability }) => ({ label, values: [probability], strong: label === trace.label })),
    classes.length ? "Classes" : "The model has no classes",
    `${from}; ${trace.size} × ${trace.size} pixels in ${trace.side} × ${trace.side} patches. Colours range from 0 to the maximum of each map.${lost}`,
  );
}

/** Uploads a file; large images are downscaled, as the model would do anyway. */
async function taken(file) {
  if (!file) return;
  // If the browser cannot decode the file, the server reports the error.
  const sent = file.size > MOST_BYTES ? await smaller(file).catch(() => file) : file;
  upload = { name: file.name, content: await base64(sent) };
  change({ picture: "upload", query: "" });
}

async function smaller(file) {
  const image = await createImageBitmap(file);
  const share = Math.min(1, MOST_SIDE / Math.max(image.width, image.height));
  const canvas = element("canvas", { width: Math.round(image.width * share), height: Math.round(image.height * share) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
}
