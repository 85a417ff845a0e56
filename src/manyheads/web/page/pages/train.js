// Train: what was measured while a run learned, live while it does, and the schedule's formula over
// the learning rate that was measured.

import { get } from "../api.js";
import { Chart, smooth } from "../chart.js";
import { checkbox, element, labelled } from "../dom.js";
import { chosenRun, lead, runChoice, usableRuns } from "../runs.js";
import { change } from "../state.js";

const EVERY = 2000; // milliseconds between two questions
const TITLES = { bleu: "BLEU", chrf: "chrF" }; // what is not written as other words are

/** What is measured, in words. */
const titleOf = (key) => TITLES[key] ?? (key[0].toUpperCase() + key.slice(1)).replaceAll("_", " ");

export const keys = [["← →", "in a chart: the step before, the step after"]];

let charts = new Map(); // by what is measured; they stay while the page does

export async function draw(place, state, signal) {
  const runs = await usableRuns(signal);
  const run = chosenRun(runs, state.run);
  const beside = runs.find((one) => one.name === state.beside && one.name !== run.name);
  const grid = element("div", { class: "charts" });
  const status = element("p", { class: "note", role: "status" });
  charts = new Map();
  place.replaceChildren(
    element("h1", {}, `Training of ${run.name}`),
    lead("Each point is a line of metrics.jsonl; the dashed curve is the formula, not a measurement."),
    controls(runs, run, beside, state),
    status,
    grid,
  );
  const watched = [run, beside].filter(Boolean).map((one) => ({ name: one.name, records: [], broken: 0, next: 0, version: "" }));
  await refresh(watched, signal);
  show(grid, watched, state, status);
  // The next question when the last is answered, however long that took: two would add the same lines.
  const again = async () => {
    if (signal.aborted) return;
    try {
      // A hidden page asks nothing.
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
    runChoice(runs.filter((one) => one.name !== run.name), beside?.name ?? "", "beside", "Beside", "nothing"),
    flag("logx", "log x"),
    flag("logy", "log y"),
    labelled("Smoothing", slider),
  );
}

/** Asks for what is new; whether there was any. */
async function refresh(watched, signal) {
  let news = false;
  for (const one of watched) {
    let found;
    do {
      const { name, next, version } = one;
      found = await get("/api/metrics", { run: name, since: next, version }, signal);
      if (found.reset) [one.records, one.broken] = [[], 0];
      if (found.schedule !== undefined) one.schedule = found.schedule;
      one.records = one.records.concat(found.records);
      one.broken += found.broken;
      one.next = found.next;
      one.version = found.version;
      news ||= found.reset || found.records.length > 0 || found.broken > 0;
    } while (found.more); // of a long file an answer has a part
  }
  return news;
}

/** The series of each thing measured: {loss: {"demo train": points, …}, …}. */
function measured(watched) {
  const found = new Map([["loss", []], ["learning_rate", []]]);
  for (const { name, records } of watched) {
    for (const record of records) {
      for (const [key, value] of Object.entries(record)) {
        if (key === "step" || key === "split") continue;
        if (!found.has(key)) found.set(key, []);
        const series = `${watched.length > 1 ? `${name} ` : ""}${record.split}`;
        const all = found.get(key);
        let own = all.find((one) => one.name === series);
        if (!own) all.push((own = { name: series, points: [] }));
        own.points.push([record.step, value]);
      }
    }
  }
  return found;
}

function show(grid, watched, state, status) {
  const share = Number(state.smooth ?? 0);
  for (const [key, found] of measured(watched)) {
    if (!charts.has(key)) {
      charts.set(key, new Chart({ name: key, title: titleOf(key) }));
      grid.append(charts.get(key).root);
    }
    let note = "";
    const series = found.map((one) => {
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
  const lost = watched[0].broken ? ` Lines of metrics.jsonl that could not be read: ${watched[0].broken}.` : "";
  status.textContent = (last ? `Last measured at step ${last.step}; new lines appear by themselves.` : "Nothing was measured yet.") + lost;
}
