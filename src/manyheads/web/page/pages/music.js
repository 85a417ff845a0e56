// Music: attention of each event of a piece, mean weight by distance, and playback.

import { post, tensor } from "../api.js";
import { Chart } from "../chart.js";
import { element, html, labelled, numbered, select } from "../dom.js";
import { base64, countInput, limited, numberInput } from "../fitting.js";
import { definePage } from "../page.js";
import { Roll } from "../roll.js";
import { Player } from "../sound.js";
import { change, onChange, pageName } from "../state.js";

const MAP = "decoder.self";
const EVENTS = 256;
const TOP = 12; // arcs of an event

let screen = null;
let upload = null; // a file cannot be in the URL; it is kept until the page is closed

// Stop playback when the user leaves the page.
onChange(() => pageName() !== "music" && screen?.player.stop());

export const { draw, keys } = definePage({
  name: "music",
  about: "Arcs lead from the chosen event to the events it attends to; thicker arcs have larger weights. Click an event, or use the arrow keys.",
  keys: [["← →", "in the roll: previous event, next event"]],
  build,
  show,
});

async function show({ run, state, controls }, signal) {
  const isUpload = state.piece === "upload" && upload;
  const request = { run: run.name, begin: limited(state.begin, 2 ** 31), events: limited(state.events, 1025, EVENTS) || EVENTS };
  Object.assign(request, isUpload ? { upload: upload.content } : { piece: limited(state.piece, 2 ** 31) });
  controls(...controlsOf(state, isUpload, null));
  const trace = await post("/api/music", request, signal);
  if (screen.now?.trace.trace !== trace.trace) screen.player.stop();
  screen.now = { state, isUpload, trace };
  controls(...controlsOf(state, isUpload, trace));
  await showTrace(signal);
}

function build() {
  screen = {
    about: element("p", { class: "note", role: "status" }),
    roll: new Roll({ choose: (event, how) => change({ event: String(event) }, how) }),
    distance: new Chart({ name: "by-distance", title: "Weight by distance back", across: "events back" }),
    likely: new Chart({ name: "likelihood", title: "log P of each event", across: "event" }),
    play: element("button", { type: "button", id: "play", onclick: () => startOrStop() }, "Play"),
    download: element("a", { class: "button", download: "music.mid" }, "Download MIDI"),
    player: new Player(() => label()),
  };
  const { play, download, about, roll, distance, likely } = screen;
  return html`<div class="controls">${play}${download}</div>${about}${roll.root}<div class="charts loose">${distance.root}${likely.root}</div>`;
}

function controlsOf(state, isUpload, trace) {
  const file = html`<input type="file" accept=".mid,.midi,audio/midi" @change=${(event) => taken(event.target.files[0])} />`;
  const set = (key) => (value) => change({ [key]: value, event: "" });
  const made = [
    labelled("Piece of the validation split", countInput(isUpload ? null : limited(state.piece, 2 ** 31), trace?.count, set("piece"))),
    labelled("Your own (MIDI)", file),
    labelled("From event", countInput(trace?.begin ?? limited(state.begin, 2 ** 31), trace?.words, set("begin"))),
    labelled("Events", numberInput(limited(state.events, 1025, EVENTS), 4, 1024, set("events"))),
  ];
  if (!trace) return made;
  const map = trace.maps.find((one) => one.name === MAP);
  const heads = [["mean", "mean of all"], ...numbered(map.heads)];
  made.push(
    labelled("Layer", select(numbered(map.layers), String(limited(state.layer, map.layers, map.layers - 1)), (layer) => change({ layer }))),
    labelled("Head", select(heads, headOf(state, map) < 0 ? "mean" : String(headOf(state, map)), (head) => change({ head: head === "mean" ? "" : head }))),
  );
  return made;
}

/** −1 is the mean of all heads. */
const headOf = (state, map) => (state.head === undefined ? -1 : limited(state.head, map.heads));

async function showTrace(signal) {
  const { trace, state, isUpload } = screen.now;
  const map = trace.maps.find((one) => one.name === MAP);
  const [layer, head] = [limited(state.layer, map.layers, map.layers - 1), headOf(state, map)];
  const [weights, far] = await Promise.all(["weights", "distance"].map((what) => tensor(trace.trace, `${MAP}.${what}`, { layer }, signal)));
  const count = trace.events.length;
  const at = limited(state.event, count, count - 1);
  const size = count + 1;
  const of = (values, width, offset) => {
    const heads = Array.from({ length: map.heads }, (_, one) => values.subarray(one * width + offset, one * width + offset + size));
    if (head >= 0) return heads[head];
    return Float32Array.from({ length: size }, (_, key) => heads.reduce((sum, row) => sum + row[key], 0) / map.heads);
  };
  const called = head < 0 ? "mean of all heads" : `head ${head + 1}`;
  const title = `Layer ${layer + 1}, ${called}: attention of event ${trace.begin + at + 1}, “${trace.events[at].word}”`;
  const row = of(weights.values, size * size, (at + 1) * size);
  screen.roll.show({ name: `music-${layer + 1}-${head < 0 ? "mean" : head + 1}`, title, notes: trace.notes, events: trace.events, first: trace.begin + 1, weights: row, at, top: TOP });
  const points = (values) => Array.from(values, (value, back) => [back, value]);
  screen.distance.show([{ name: `layer ${layer + 1}, ${called}`, points: points(of(far.values, size, 0)) }], {
    note: "Mean over all events with enough earlier events. 0 is the event itself.",
  });
  screen.likely.show([{ name: "log P", points: trace.output.log_probabilities.map((value, event) => [trace.begin + event + 1, value]) }]);
  const from = isUpload ? upload.name : `Piece ${limited(state.piece, 2 ** 31) + 1} of ${trace.count}`;
  const lost = state.piece === "upload" && !isUpload ? " The page has lost the uploaded file: choose it again." : "";
  const part = count < trace.words ? `events ${trace.begin + 1} to ${trace.begin + count} of ${trace.words}` : `${count} events`;
  screen.about.textContent = `${from}, ${trace.encoding} encoding, ${part}, ${trace.notes.length} notes.${lost}`;
  screen.download.setAttribute("href", `data:audio/midi;base64,${trace.midi}`);
}

function startOrStop() {
  const { player, now } = screen;
  if (player.playing) return player.stop();
  if (!now) return;
  player.play(now.trace.notes);
  label();
}

function label() {
  screen.play.textContent = screen.player.playing ? "Stop" : "Play";
}

async function taken(file) {
  if (!file) return;
  upload = { name: file.name, content: await base64(file) };
  change({ piece: "upload", begin: "", event: "" });
}
