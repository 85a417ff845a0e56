// Image: classes and attention maps of a Vision Transformer.

import { post, tensor } from "../api.js";
import { Bars } from "../bars.js";
import { button, element, html, labelled, numbered, select, tabs } from "../dom.js";
import { base64, countInput, limited } from "../fitting.js";
import { Overlay, pictureOf, SmallOverlays } from "../overlay.js";
import { definePage } from "../page.js";
import { classStory, hiddenStory, lookStory, patchName, similarStory } from "../insights.js";
import { change, read } from "../state.js";

const MAP = "encoder.self";
const MOST_BYTES = 600_000; // larger files are downscaled before upload
const MOST_SIDE = 1024;
const MOST_CLASSES = 10;
const MOST_MAPS = 16; // patches in a row, of which each has a map of its own
const MOST_WEIGHTS = 1_000_000; // of all layers; above that only one layer is requested

let screen = null;
let upload = null; // a file cannot be in the URL; it is kept until the page is closed

export const { draw, keys } = definePage({
  name: "image",
  about: "The patches of a picture that each attention head of a Vision Transformer looks at, and the class that it finds.",
  keys: [
    ["← → ↑ ↓", "in the image: next patch"],
    ["Enter", "in the image: use this patch as query"],
    ["Home", "in the image: first patch"],
    ["c", "in the image: use the class token, or all patches, as query"],
  ],
  build,
  show,
  next: (by) => change({ picture: String(Math.max(0, limited(read().picture, 2 ** 31) + by)) }, { replace: true }),
});

async function show({ run, state, controls }, signal) {
  const isUpload = state.picture === "upload" && upload;
  const request = isUpload ? { run: run.name, upload: upload.content } : { run: run.name, picture: limited(state.picture, 2 ** 31) };
  controls(...controlsOf(state, isUpload, null));
  const trace = await post("/api/image", request, signal);
  controls(...controlsOf(state, isUpload, trace));
  await showTrace(trace, { state, isUpload, request }, signal);
}

function build() {
  screen = {
    large: new Overlay({ choose: (query) => change({ query: query < 0 ? "class" : String(query) }) }),
    small: new SmallOverlays({ choose: (at) => screen.pick(at) }),
    classes: new Bars({ name: "classes" }),
    insight: element("p", { class: "insight" }),
  };
  return [screen.insight, html`<div class="looking">${screen.large.root}${screen.small.root}${screen.classes.root}</div>`];
}

const toPicture = (picture) => change({ picture, query: "", head: "" });

function controlsOf(state, isUpload, trace) {
  const at = isUpload ? -1 : limited(state.picture, 2 ** 31);
  const step = (text, label, by) => button(html`<span aria-hidden="true">${text}</span><span class="unseen">${label}</span>`, () => toPicture(String(at + by)), { disabled: at + by < 0 || at + by >= (trace?.count ?? 2 ** 31) });
  const file = html`<input type="file" accept="image/png,image/jpeg" @change=${(event) => taken(event.target.files[0])} />`;
  const made = [
    labelled("Image of the validation split", countInput(isUpload ? null : limited(state.picture, 2 ** 31), trace?.count, toPicture)),
    html`<div class="steps" role="group" aria-label="Image">${step("‹", "Previous image", -1)}${step("›", "Next image", 1)}</div>`,
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
    labelled("Opacity", html`<input type="range" min="0" max="100" .value=${state.opacity ?? "80"} @change=${faded} />`),
  );
  const isWhole = queryOf(state, trace) === -1;
  made.push(button(trace.before ? "Class token as query" : "All patches as query", () => change({ query: "class" }), { pressed: isWhole }));
  return made;
}

/** Default: the last layer. */
const layerOf = (state, map) => limited(state.layer, map.layers, map.layers - 1);

/** The query patch in the URL; −1 is the class token, or the mean of all patches in a model without one: it decides the class, and comes first. */
function queryOf(state, trace) {
  if (!state.query || state.query === "class") return -1;
  return limited(state.query, trace.side ** 2, -1);
}

async function showTrace(trace, { state, isUpload, request }, signal) {
  const map = trace.maps.find((one) => one.name === MAP);
  const layer = layerOf(state, map);
  const of = (name, which = {}) => tensor(trace.trace, name, which, signal);
  const patches = trace.side ** 2 + trace.before;
  const all = map.layers * map.heads * patches ** 2 <= MOST_WEIGHTS;
  const layers = all ? Array.from({ length: map.layers }, (_, at) => at) : [layer];
  const [pixels, ...weights] = await Promise.all([of("image.pixels"), ...layers.map((at) => of(`${MAP}.weights`, { layer: at }))]);
  
  const query = queryOf(state, trace);
  /** The query row of a square matrix, or the mean of all rows, without the class token. */
  const over = (values, offset = 0) => {
    const rowOf = (row) => values.subarray(offset + row * patches + trace.before, offset + (row + 1) * patches);
    if (query >= 0 || trace.before) return rowOf(query + trace.before);
    const rows = Array.from({ length: patches }, (_, row) => rowOf(row));
    return Float32Array.from({ length: patches }, (_, key) => rows.reduce((sum, row) => sum + row[key], 0) / patches);
  };
  const opacity = limited(state.opacity, 101, 80) / 100;
  const image = pictureOf(pixels, opacity > 0);
  const shared = { image, side: trace.side, opacity };
  const who = query >= 0 ? patchName(query, trace.side) : trace.before ? "the class token" : "all patches (mean)";
  const heads = layers.flatMap((at, number) =>
    Array.from({ length: map.heads }, (_, head) => ({ layer: at, head, label: `head ${at + 1}·${head + 1}`, values: over(weights[number].values, head * patches ** 2) })),
  );
  const ofLayer = heads.filter((one) => one.layer === layer);
  // The first state is the head that looks most narrowly.
  const head = state.head === undefined ? ofLayer.reduce((best, one) => (Math.max(...one.values) > Math.max(...best.values) ? one : best)).head : limited(state.head, map.heads);
  const view = state.view || "head";
  const from = query >= 0 ? "From the blue patch, " : trace.before ? "From the class token, " : "Over all patches, ";
  let [title, values, what, name] = [`Layer ${layer + 1}, head ${head + 1}: attention of ${who}`, ofLayer[head].values, "weight", `${from}head ${head + 1} of layer ${layer + 1}`];
  if (view === "rollout" && map.rollout) {
    [title, values, what, name] = [`Rollout over layers 1 to ${layer + 1}: sources of ${who}`, over((await of(`${MAP}.rollout`, { layer })).values), "share", `${from}the rollout over ${layer + 1} layers`];
  } else if (view === "positions" && trace.tensors.includes("positions.similarity")) {
    [title, values, what] = [`Position similarity with ${who} (cosine)`, over((await of("positions.similarity")).values), "cosine"];
  }
  const isGrid = what === "cosine";
  const blank = element("canvas"); // positions do not depend on the picture
  screen.large.show({ ...shared, ...(isGrid ? { image: blank } : {}), name: `image-${view}-${layer + 1}-${head + 1}`, title, values, query, what });
  screen.classes.root.hidden = isGrid;
  if (isGrid && trace.side <= MOST_MAPS) {
    const similar = (await of("positions.similarity")).values;
    const maps = Array.from({ length: trace.side ** 2 }, (_, at) => ({ label: "", name: patchName(at, trace.side), values: similar.subarray((at + trace.before) * patches + trace.before, (at + trace.before + 1) * patches) }));
    screen.pick = (at) => change({ query: String(at) });
    screen.small.show({ ...shared, image: blank, across: trace.side, name: "image-positions", title: "The same for every patch, in its place" }, maps, query);
  } else {
    screen.pick = (at) => change({ layer: String(heads[at].layer), head: String(heads[at].head), view: "" });
    screen.small.show({ ...shared, across: map.heads, name: "image-heads", title: all ? "All heads, a row for each layer" : `All heads of layer ${layer + 1}` }, heads, view === "head" ? heads.indexOf(ofLayer[head]) : -1);
  }
  const classes = [...trace.output.classes].sort((one, other) => other.probability - one.probability).slice(0, MOST_CLASSES);
  const looks = isGrid ? similarStory(values, query, trace.side) : lookStory(name, values, query, trace.side);
  screen.insight.textContent = isGrid ? looks : `${classStory(classes, trace.label)} ${looks}`.trim();
  if (!isGrid && classes.length) {
    const without = await post("/api/image", { ...request, hidden: values.indexOf(Math.max(...values)) }, signal);
    screen.insight.append(` ${hiddenStory(classes[0], without.output.classes)}`);
  }
  const source = isUpload ? upload.name : `Image ${limited(state.picture, 2 ** 31) + 1} of ${trace.count}, class “${trace.label}”`;
  const lost = state.picture === "upload" && !isUpload ? " The page has lost the uploaded file: choose it again." : "";
  const held = trace.source === "probes" ? " The data of the run is not in this folder: these are the pictures of its probes." : "";
  if (isGrid) return;
  screen.classes.show(
    classes.map(({ label, probability }) => ({ label, values: [probability], strong: label === trace.label })),
    classes.length ? "Classes" : "The model has no classes",
    `${source}; ${trace.size} × ${trace.size} pixels in ${trace.side} × ${trace.side} patches. Each map is as bright as its greatest weight allows.${held}${lost}`,
  );
}

/** Uploads a file; large images are downscaled, as the model would do anyway. */
async function taken(file) {
  if (!file) return;
  // If the browser cannot decode the file, the server reports the error.
  const sent = file.size > MOST_BYTES ? await smaller(file).catch(() => file) : file;
  upload = { name: file.name, content: await base64(sent) };
  change({ picture: "upload", query: "", head: "" });
}

async function smaller(file) {
  const image = await createImageBitmap(file);
  const share = Math.min(1, MOST_SIDE / Math.max(image.width, image.height));
  const canvas = element("canvas", { width: Math.round(image.width * share), height: Math.round(image.height * share) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
}
