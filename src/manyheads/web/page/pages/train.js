// Train: the metrics of a run, live while it trains, and the formula of the learning-rate schedule
// over the measured learning rate.

import { get } from "../api.js";
import { Chart, smooth } from "../chart.js";
import { checkbox, element, labelled } from "../dom.js";
import { chosenRun, lead, runChoice, usableRuns } from "../runs.js";
import { change } from "../state.js";

const EVERY = 2000; // milliseconds between two requests
const TITLES = { bleu: "BLEU", chrf: "chrF" }; // exceptions to the capitalisation

/** The title of a metric. */
const titleOf = (key) => TITLES[key] ?? (key[0].toUpperCase() + key.slice(1)).replaceAll("_", " ");

export const keys = [["← →", "in a chart: previous step, next step"]];

let charts = new Map(); // by metric; reused while the page is open

export async function draw(place, state, signal) {
  const runs = await usableRuns(signal);
  const run = chosenRun(runs, state.run);
  const beside = runs.find((one) => one.name === state.beside && one.name !== run.name);
  const grid = element("div", { class: "charts" });
  const status = element("p", { class: "note", role: "status" });
  charts = new Map();
  place.replaceChildren(
    element("h1", {}, `Training of ${run.name}`),
    lead("Each point is a line of metrics.jsonl. The dashed curve is the schedule formula."),
    controls(runs, run, beside, state),
    status,
    grid,
  );
  const watched = [run, beside].filter(Boolean).map((one) => ({ name: one.name, records: [], broken: 0, next: 0, version: "" }));
  await refresh(watched, signal);
  show(grid, watched, state, status);
  // Request again only after the last response: two requests at once would add the same lines.
  const again = async () => {
    if (signal.aborted) return;
    try {
      // A hidden page sends no requests.
      if (!document.hidden && (await refresh(watched, signal))) show(grid, watched, state, status);
    } catch (error) {
      if (!signal.aborted) status.textContent = error.message;
    }
    setTimeout(again, EVERY);
  };
  setTimeout(again, EVERY);
}

function controls(runs, run, beside, state) {
  const slider = element("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: state.smooth ?? "0",
    onchange: (event) => change({ smooth: event.target.value === "0" ? "" : event.target.value }),
  });
  const flag = (name, label) =>
    checkbox(label, state[name] === "1", (on) => change({ [name]: on ? "1" : "" }));
  return element(
    "form",
    { class: "controls", onsubmit: (event) => event.preventDefault() },
    runChoice(runs, run.name),
    runChoice(runs.filter((one) => one.name !== run.name), beside?.name ?? "", "beside", "Compare with", "nothing"),
    flag("logx", "log x"),
    flag("logy", "log y"),
    labelled("Smoothing", slider),
  );
}

/** Requests new records; returns true if there were any. */
async function refresh(watched, signal) {
  let news = false;
  for (const one of watched) {
    let answer;
    do {
      const { name, next, version } = one;
      answer = await get("/api/metrics", { run: name, since: next, version }, signal);
      if (answer.reset) [one.records, one.broken] = [[], 0];
      if (answer.schedule !== undefined) one.schedule = answer.schedule;
      one.records = one.records.concat(answer.records);
      one.broken += answer.broken;
      one.next = answer.next;
      one.version = answer.version;
      news ||= answer.reset || answer.records.length > 0 || answer.broken > 0;
    } while (answer.more); // a long file comes in several responses
  }
  return news;
}

/** The series of each metric: {loss: {"demo train": points, …}, …}. */
function measured(watched) {
  const byMetric = new Map([["loss", []], ["learning_rate", []]]);
  for (const { name, records } of watched) {
    for (const record of records) {
      for (const [key, value] of Object.entries(record)) {
        if (key === "step" || key === "split") continue;
        if (!byMetric.has(key)) byMetric.set(key, []);
        const series = `${watched.length > 1 ? `${name} ` : ""}${record.split}`;
        const all = byMetric.get(key);
        let line = all.find((one) => one.name === series);
        if (!line) all.push((line = { name: series, points: [] }));
        line.points.push([record.step, value]);
      }
    }
  }
  return byMetric;
}

function show(grid, watched, state, status) {
  const share = Math.max(0, Math.min(0.98, Number(state.smooth) || 0));
  for (const [key, measuredSeries] of measured(watched)) {
    if (!charts.has(key)) {
      charts.set(key, new Chart({ name: key, title: titleOf(key) }));
      grid.append(charts.get(key).root);
    }
    let note = "";
    const series = measuredSeries.map((one) => {
      if (key === "learning_rate") return { ...one, style: "dots" };
      const isSmooth = share > 0 && !one.name.endsWith("valid");
      return isSmooth ? { name: `${one.name}, smoothed`, points: smooth(one.points, share) } : one;
    });
    if (key === "learning_rate") {
      for (const { name, schedule } of watched) {
        if (!schedule) continue;
        if (schedule.points.length) {
          series.push({ name: `${watched.length > 1 ? `${name} ` : ""}formula`, style: "dashes", points: schedule.points });
        }
        note += `${name}: ${schedule.name}, ${schedule.formula}. ${schedule.reason ?? ""} `;
      }
    }
    charts.get(key).show(series, { logX: state.logx === "1", logY: state.logy === "1", note });
  }
  const last = watched[0].records.at(-1);
  const lost = watched[0].broken ? ` Unreadable lines in metrics.jsonl: ${watched[0].broken}.` : "";
  status.textContent = (last ? `Last measured at step ${last.step}; updates automatically.` : "No measurements yet.") + lost;
}
