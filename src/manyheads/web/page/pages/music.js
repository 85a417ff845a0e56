// Music: attention of each event of a piece, mean weight by distance, and playback.

import { post, tensor } from "../api.js";
import { Chart } from "../chart.js";
import { element, html, labelled, numbered, select, shown } from "../dom.js";
import { base64, countInput, limited, numberInput } from "../fitting.js";
import { concentration, musicStory, ownVoice } from "../insights.js";
import { definePage } from "../page.js";
import { eventName, Roll } from "../roll.js";
import { Player } from "../sound.js";
import { change, onChange, pageName } from "../state.js";

const MAP = "decoder.self";
const EVENTS = 256;
const TOP = 12; // arcs of an event
const VOICES = { chorale: ["soprano", "alto", "tenor", "bass"] };

let screen = null;
let upload = null; // a file cannot be in the URL; it is kept until the page is closed

// Stop playback when the user leaves the page.
onChange(() => pageName() !== "music" && screen?.player.stop());

export const { draw, keys } = definePage({
  name: "music",
  about: "A piece as a piano roll. Arcs lead from one event to the events that it attends to. Click an event, or press Play.",
  keys: [["← →", "in the roll: previous event, next event"]],
  build,
  show,
  next: (by) => change({ event: String(Math.max(0, screen.at + by)) }, { replace: true }),
});

async function show({ run, state, controls }, signal) {
  const isUpload = state.piece === "upload" && upload;
  const request = { run: run.name, begin: limited(state.begin, 2 ** 31), events: limited(state.events, 1025, EVENTS) || EVENTS };
  Object.assign(request, isUpload ? { upload: upload.content } : { piece: limited(state.piece, 2 ** 31) });
  controls(...controlsOf(state, isUpload, null));
  const trace = await post("/api/music", request, signal);
  if (screen.now?.trace.trace !== trace.trace) screen.player.stop();
  screen.now = { state, isUpload, trace };
  screen.controls = controls;
  await showTrace(signal);
}

function build() {
  screen = {
    about: element("p", { class: "note", role: "status" }),
    bar: element("div", { class: "playing", hidden: true }),
    insight: element("p", { class: "insight" }),
    at: 0,
    roll: new Roll({ choose: (event, how) => change({ event: String(event) }, how) }),
    distance: new Chart({ name: "by-distance", title: "Weight by distance back", across: "events back" }),
    likely: new Chart({ name: "likelihood", title: "log P of each event", across: "event" }),
    play: element("button", { type: "button", class: "primary", id: "play", onclick: () => startOrStop() }, "Play"),
    download: element("a", { class: "button", download: "music.mid" }, "Download MIDI"),
    player: new Player(() => label()),
  };
  const { play, download, about, insight, roll, distance, likely, bar } = screen;
  bar.append(play, download, about);
  return html`${insight}${bar}${roll.root}<div class="charts loose two">${distance.root}${likely.root}</div>`;
}

function controlsOf(state, isUpload, trace) {
  const file = html`<input type="file" accept=".mid,.midi,audio/midi" @change=${(event) => taken(event.target.files[0])} />`;
  const set = (key) => (value) => change({ [key]: value, event: "" });
  const made = [
    labelled(trace?.source === "model" ? "Piece by the model" : "Piece of the validation split", countInput(isUpload ? null : limited(state.piece, 2 ** 31), trace?.count, set("piece"))),
    labelled("Your own (MIDI)", file),
    labelled("From event", countInput(trace?.begin ?? limited(state.begin, 2 ** 31), trace?.words, set("begin"))),
    labelled("Events", numberInput(limited(state.events, 1025, EVENTS), 4, 1024, set("events"))),
  ];
  if (!trace) return made;
  const map = trace.maps.find((one) => one.name === MAP);
  const heads = [["mean", "mean"], ...numbered(map.heads)];
  made.push(
    labelled("Layer", select(numbered(map.layers), String(limited(state.layer, map.layers, map.layers - 1)), (layer) => change({ layer }))),
    labelled("Head", select(heads, screen.head < 0 ? "mean" : String(screen.head), (head) => change({ head }))),
  );
  return made;
}

/** −1 is the mean of all heads; the default is the head of the most concentrated attention. */
function headOf(state, map, concentrated) {
  if (state.head !== undefined) return state.head === "mean" ? -1 : limited(state.head, map.heads);
  const all = Array.from({ length: map.heads }, (_, head) => concentrated(head));
  return all.indexOf(Math.max(...all));
}

/** The first event to show: in the second half, the one with the greatest weight on an earlier time step. */
function focused(events, rowOf) {
  const begin = Math.floor(events.length / 2);
  const peaks = events.map((event, at) => {
    if (at < begin) return 0;
    const weights = rowOf(at);
    return events.reduce((most, other, key) => (other.time < event.time ? Math.max(most, weights[key + 1]) : most), 0);
  });
  const most = Math.max(...peaks);
  return most > 0 ? peaks.indexOf(most) : events.length - 1;
}

async function showTrace(signal) {
  const { trace, state, isUpload } = screen.now;
  const map = trace.maps.find((one) => one.name === MAP);
  const layer = limited(state.layer, map.layers, map.layers - 1);
  const [weights, far] = await Promise.all(["weights", "distance"].map((what) => tensor(trace.trace, `${MAP}.${what}`, { layer }, signal)));
  const count = trace.events.length;
  const size = count + 1;
  const voices = VOICES[trace.encoding] ?? [];
  const rowOfHead = (head) => (event) => weights.values.subarray((head * size + event + 1) * size, (head * size + event + 2) * size);
  const head = (screen.head = headOf(state, map, (one) => concentration(rowOfHead(one), count)));
  screen.controls(...controlsOf(state, isUpload, trace));
  const of = (values, width, offset) => {
    const heads = Array.from({ length: map.heads }, (_, one) => values.subarray(one * width + offset, one * width + offset + size));
    if (head >= 0) return heads[head];
    return Float32Array.from({ length: size }, (_, key) => heads.reduce((sum, row) => sum + row[key], 0) / map.heads);
  };
  const rowOf = (event) => of(weights.values, size * size, (event + 1) * size);
  const called = head < 0 ? "mean of all heads" : `head ${head + 1}`;
  const distances = of(far.values, size, 0);
  const sameVoice = ownVoice(rowOf, count, voices.length);
  const who = head < 0 ? `The mean of all heads of layer ${layer + 1}` : `Head ${head + 1} of layer ${layer + 1}`;
  screen.showEvent = (at) => {
    screen.at = at;
    const title = `Layer ${layer + 1}, ${called}: attention of event ${trace.begin + at + 1}, ${voices.length ? `${voices[at % voices.length]} ` : ""}${eventName(trace.events[at])}`;
    screen.roll.show({ name: `music-${layer + 1}-${head < 0 ? "mean" : head + 1}`, title, notes: trace.notes, events: trace.events, first: trace.begin + 1, weights: rowOf(at), at, top: TOP, voices });
    screen.insight.textContent = musicStory(who, distances, voices, sameVoice, screen.roll.arcs());
  };
  screen.showEvent(state.event === undefined ? focused(trace.events, rowOf) : limited(state.event, count));
  const points = (values) => Array.from(values, (value, back) => [back, value]);
  screen.distance.show([{ name: `layer ${layer + 1}, ${called}`, points: points(distances) }], {
    note: "Mean over all events with enough earlier events. 0 is the event itself.",
  });
  const logs = trace.output.log_probabilities;
  const least = logs.reduce((lowest, one, at) => (one < logs[lowest] ? at : lowest), 0);
  screen.likely.show([{ name: "log P", points: logs.map((value, event) => [trace.begin + event + 1, value]) }], {
    note: `Most surprising to the model: event ${trace.begin + least + 1}, ${eventName(trace.events[least])}, with probability ${shown(Math.exp(logs[least]), 1)}.`,
  });
  const from = isUpload ? upload.name : `Piece ${limited(state.piece, 2 ** 31) + 1} of ${trace.count}`;
  const lost = state.piece === "upload" && !isUpload ? " The page has lost the uploaded file: choose it again." : "";
  const part = count < trace.words ? `events ${trace.begin + 1} to ${trace.begin + count} of ${trace.words}` : `${count} events`;
  const composed = trace.source === "model" ? "The data of the run is not in this folder: the model composed this piece. " : "";
  screen.about.textContent = `${composed}${from}, ${trace.encoding} encoding, ${part}, ${trace.notes.length} notes.${voices.length ? " An event is one voice for one sixteenth." : ""}${lost}`;
  screen.bar.hidden = false;
  screen.download.setAttribute("href", `data:audio/midi;base64,${trace.midi}`);
}

/** While it plays, the chosen event is the one that sounds. */
function follow() {
  const { player, now } = screen;
  if (!player.playing) return;
  const at = now.trace.events.findLastIndex((event) => event.time <= 1000 * player.time);
  if (at >= 0 && at !== screen.at) screen.showEvent(at);
  requestAnimationFrame(follow);
}

function startOrStop() {
  const { player, now } = screen;
  if (player.playing) return player.stop();
  if (!now) return;
  player.play(now.trace.notes);
  label();
  follow();
}

function label() {
  screen.play.textContent = screen.player.playing ? "Stop" : "Play";
}

async function taken(file) {
  if (!file) return;
  upload = { name: file.name, content: await base64(file) };
  change({ piece: "upload", begin: "", event: "" });
}
