// Train: the metrics of runs, live while they train: where the training stands, what the model gives
// for held-out examples, and the formula of the learning-rate schedule over the measured rate.

import { get } from "../api.js";
import { Chart, smooth } from "../chart.js";
import { LINES } from "../colour.js";
import { checkbox, element, html, labelled, nothing, points, put, render, shown } from "../dom.js";
import { lossStory } from "../insights.js";
import { refresh as refreshProbes, sourceOf } from "../probes.js";
import { chosenRun, lead, runChoice, usableRuns } from "../runs.js";
import { Samples } from "../samples.js";
import { change } from "../state.js";

const EVERY = 2000; // milliseconds between two requests
const QUIET = 180; // seconds without a line after which a training has stopped
const SEPARATOR = "|"; // of runs in the URL
const MANY = 80; // lines of metrics.jsonl, from which curves are smoothed
const TITLES = { bleu: "BLEU", chrf: "chrF" }; // exceptions to the capitalisation
const SPLITS = { valid: "validation" }; // in words
const SCORES = ["bleu", "chrf", "accuracy", "f1", "perplexity", "bits_per_character"]; // the first that there is

const POINTS = { bleu: "BLEU, 0 to 100", chrf: "chrF, 0 to 100" }; // titles of their axes
const DECADE = 10; // the greatest loss over the least, from which the y axis is logarithmic by default
const FIRST = ["loss", "bleu", "chrf", "accuracy", "f1", "learning_rate"]; // the other charts are under a disclosure

/** The title of a metric. */
const titleOf = (key) => TITLES[key] ?? (key[0].toUpperCase() + key.slice(1)).replaceAll("_", " ");

export const keys = [["← →", "in a chart: previous step, next step"]];

let charts = new Map(); // by metric; reused while the page is open

/**
 * @typedef {object} Watched a run whose files are read
 * @property {string} name @property {string} colour of its lines: training is solid, validation dashed
 * @property {Record<string, any>[]} records of metrics.jsonl: step, split and numbers
 * @property {number} broken @property {number} next @property {string} version
 * @property {number} age seconds since the last line @property {number} seconds from the start to it
 * @property {[number, number][]} seen [step, time in seconds] at which a step was seen first
 * @property {import("../probes.js").Source} source @property {Record<string, any>} [schedule]
 */

/** @returns {Watched} */
const watch = (name, number) => ({ name, colour: LINES[number % LINES.length], records: [], broken: 0, next: 0, version: "", age: 0, seconds: 0, seen: [], source: sourceOf(name) });

export async function draw(place, state, signal) {
  const runs = await usableRuns(signal);
  const run = chosenRun(runs, state.run);
  const names = (state.beside ?? "").split(SEPARATOR).filter((name) => name !== run.name && runs.some((one) => one.name === name));
  const grid = element("div", { class: "charts" });
  const others = element("div", { class: "charts" });
  const more = element("details", { class: "more-charts" }, element("summary", {}, "Speed, gradient norm and other metrics"), others);
  const status = element("p", { class: "note", role: "status" });
  const header = element("div", { class: "standing" });
  const samples = new Samples();
  charts = new Map();
  const insight = element("p", { class: "insight" });
  // Hidden until it is complete: nothing moves when the numbers arrive.
  const body = element("div", { hidden: true });
  const form = element("form", { class: "controls", onsubmit: (event) => event.preventDefault() });
  const about = lead("The numbers of metrics.jsonl, and what the model writes for a held-out example at the steps that were saved.");
  const open = () => put(place, html`<h1>Training of ${run.name}</h1>${about}${body}`);
  // What is on screen stays until another run, added to the charts, has arrived.
  const isOpen = place.querySelector(".standing") !== null;
  if (!isOpen) open();
  body.append(header, insight, form, grid, more, status);
  const watched = [run.name, ...names].map(watch);
  const show = () => {
    body.hidden = false;
    standing(header, watched[0]);
    insight.textContent = lossStory(watched[0].records);
    render(controls(runs, run, names, state, watched), form);
    samples.show(watched.map((one) => ({ ...one, validated: one.records.filter((record) => record.split === "valid").map((record) => record.step) })));
    showCharts(grid, others, watched, state, status, samples);
    more.hidden = !others.hasChildNodes();
    charts.get("loss").root.after(samples.root);
  };
  await refresh(watched, signal);
  if (isOpen) open();
  show();
  // Request again only after the last response: two requests at once would add the same lines.
  const again = async () => {
    if (signal.aborted) return;
    try {
      // A hidden page sends no requests.
      if (!document.hidden && (await refresh(watched, signal))) show();
      else standing(header, watched[0]);
    } catch (error) {
      if (!signal.aborted) status.textContent = error.message;
    }
    setTimeout(again, EVERY);
  };
  setTimeout(again, EVERY);
}

/** How much curves are smoothed: as the state says; by default only curves of many points. @param {Watched[]} watched */
function smoothing(state, watched) {
  const most = Math.max(...watched.map(({ records }) => records.filter((record) => record.split === "train").length));
  const share = state.smooth === undefined ? (most > MANY ? 0.8 : 0) : Number(state.smooth);
  return Math.max(0, Math.min(0.98, share || 0));
}

/** Whether the y axis is logarithmic: as the state says; by default where the loss falls by more than a decade. @param {Watched[]} watched */
function isLog(state, watched) {
  if (state.logy) return state.logy === "1";
  const losses = watched.flatMap(({ records }) => records.map(({ loss }) => loss)).filter((loss) => loss > 0);
  return Math.max(...losses) > DECADE * Math.min(...losses);
}

function controls(runs, run, names, state, watched) {
  const smoothed = ({ target }) => change({ smooth: target.value });
  return html`${runChoice(runs, run.name)} ${compared(runs.filter((one) => one.name !== run.name), names)}
    ${checkbox("log x", state.logx === "1", (on) => change({ logx: on ? "1" : "" }))}
    ${checkbox("log y", isLog(state, watched), (on) => change({ logy: on ? "1" : "0" }))}
    ${labelled("Smoothing", html`<input type="range" min="0" max="0.98" step="0.02" .value=${String(smoothing(state, watched))} @change=${smoothed} />`)}`;
}

/** A checkbox for each other run, in the colour of its lines. */
function compared(others, names) {
  if (!others.length) return nothing;
  const colour = (name) => (names.includes(name) ? LINES[(1 + names.indexOf(name)) % LINES.length] : "");
  const box = ({ name }) => checkbox(name, names.includes(name), (on) => change({ beside: (on ? [...names, name] : names.filter((one) => one !== name)).join(SEPARATOR) }), colour(name));
  return html`<fieldset class="compared"><legend>Compare with</legend>${others.map(box)}</fieldset>`;
}

/** Requests new records; returns true if there were any. @param {Watched[]} watched */
async function refresh(watched, signal) {
  let news = false;
  for (const one of watched) {
    let answer;
    do {
      const { name, next, version } = one;
      answer = await get("/api/metrics", { run: name, since: next, version }, signal);
      if (answer.reset) [one.records, one.broken, one.seen] = [[], 0, []];
      if (answer.schedule !== undefined) one.schedule = answer.schedule;
      one.records = one.records.concat(answer.records);
      one.broken += answer.broken;
      for (const key of ["next", "version", "age", "seconds"]) one[key] = answer[key];
      news ||= answer.reset || answer.records.length > 0 || answer.broken > 0;
    } while (answer.more); // a long file comes in several responses
    const step = one.records.at(-1)?.step ?? 0;
    if (one.seen.at(-1)?.[0] !== step) one.seen.push([step, performance.now() / 1000 - one.age]);
    if (await refreshProbes(one.source, signal)) news = true;
  }
  return news;
}

/** Seconds a step takes: as seen on this page, else since the start of the training. @param {Watched} run */
function pace({ seen, seconds }) {
  const [first, last] = [seen[0], seen.at(-1)];
  if (last[0] > first[0]) return (last[1] - first[1]) / (last[0] - first[0]);
  return last[0] ? seconds / last[0] : 0;
}

/** 95 → "2 min". */
function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${shown(seconds / 3600, 1)} h`;
}

/** Step, time left and scores of a run. @param {HTMLElement} place @param {Watched} run */
function standing(place, run) {
  const { records, schedule, age } = run;
  const step = records.at(-1)?.step ?? 0;
  const steps = schedule?.steps;
  const valid = records.filter((record) => record.split === "valid");
  const best = valid.reduce((least, record) => (record.loss < (least?.loss ?? Infinity) ? record : least), null);
  const score = SCORES.find((name) => valid.at(-1)?.[name] !== undefined);
  const left = !steps ? (age > QUIET ? "stopped" : "–") : step >= steps ? "finished" : age > QUIET ? "stopped" : pace(run) ? `about ${duration(pace(run) * (steps - step) - age)}` : "–";
  const facts = [
    ["step", steps ? `${step} of ${steps}` : String(step)],
    ["time left", left],
    ["loss", best ? `${shown(best.loss)} (best, step ${best.step})` : "–"],
  ];
  if (score) facts.push([`validation ${TITLES[score] ?? score.replaceAll("_", " ")}`, (POINTS[score] ? points : shown)(valid.at(-1)[score])]);
  const bar = steps ? html`<progress max=${steps} value=${step} aria-label="Share of the training"></progress>` : nothing;
  render(html`<dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>${bar}`, place);
}

/** The series of each metric: {loss: [{name: "demo train", …}], …}. @param {Watched[]} watched */
function measured(watched) {
  const byMetric = new Map(FIRST.map((key) => [key, []]));
  for (const { name, colour, records } of watched) {
    for (const record of records) {
      for (const [key, value] of Object.entries(record)) {
        if (key === "step" || key === "split") continue;
        if (!byMetric.has(key)) byMetric.set(key, []);
        const series = `${watched.length > 1 ? `${name} ` : ""}${SPLITS[record.split] ?? record.split}`;
        const all = byMetric.get(key);
        let line = all.find((one) => one.name === series);
        if (!line) all.push((line = { name: series, colour, style: record.split === "valid" ? "marks" : "line", points: [] }));
        line.points.push([record.step, value]);
      }
    }
  }
  return new Map([...byMetric].filter(([key, series]) => series.length || key === "loss" || key === "learning_rate"));
}

function showCharts(grid, others, watched, state, status, samples) {
  const share = smoothing(state, watched);
  for (const [key, measuredSeries] of measured(watched)) {
    if (!charts.has(key)) {
      charts.set(key, new Chart({ name: key, title: titleOf(key), tall: key === "loss" ? 370 : 290, moved: (step) => samples.highlight(step) }));
      (FIRST.includes(key) ? grid : others).append(charts.get(key).root);
    }
    let note = "";
    const series = measuredSeries.flatMap((one) => {
      if (key === "learning_rate") return [{ ...one, style: "dots" }];
      if (!share || one.style === "marks") return [one];
      return [{ ...one, faint: true }, { ...one, name: `${one.name}, smoothed`, points: smooth(one.points, share) }];
    });
    if (key === "learning_rate") {
      for (const { name, colour, schedule } of watched) {
        if (!schedule) continue;
        if (schedule.points.length) {
          series.push({ name: `${watched.length > 1 ? `${name} ` : ""}formula`, colour, style: "dashes", points: schedule.points });
        }
        note += `${name}: ${schedule.name}, ${schedule.formula}. ${schedule.reason ?? ""} `;
      }
    }
    const logY = key === "loss" ? isLog(state, watched) : state.logy === "1";
    const up = key === "learning_rate" ? "" : `${POINTS[key] ?? titleOf(key).toLowerCase()}${logY ? " (log)" : ""}`;
    charts.get(key).show(series, { logX: state.logx === "1", logY, note, up, number: POINTS[key] ? points : shown });
  }
  const last = watched[0].records.at(-1);
  const lost = watched[0].broken ? ` Unreadable lines in metrics.jsonl: ${watched[0].broken}.` : "";
  status.textContent = (last ? `Last measured at step ${last.step}; updates automatically.` : "No measurements yet.") + lost;
}
