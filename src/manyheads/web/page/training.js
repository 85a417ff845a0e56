// Training from the page: a button that trains the demo, its progress, and a button that stops it.

import { get, post } from "./api.js";
import { element } from "./dom.js";
import { recording } from "./recording.js";
import { address, go } from "./state.js";

const EVERY = 1500; // milliseconds between two requests

/** The panel of the home page; a static copy has no server that could train. @param {AbortSignal} signal */
export async function trainingPanel(signal) {
  if (recording) return "";
  const panel = element("div", { class: "training" });
  let follows = false; // to Watch, once the run is listed
  const show = (status) => {
    if (follows && status.listed) return go(address("watch", { run: status.run }));
    panel.replaceChildren(...parts(status, act));
  };
  const act = async (what) => {
    follows = what === "start";
    for (const button of panel.querySelectorAll("button")) button.disabled = true;
    try {
      show(await post(`/api/training/${what}`, {}, signal));
    } catch (error) {
      if (!signal.aborted) panel.append(element("p", { class: "broken", role: "alert" }, error.message));
    }
  };
  const again = async () => {
    if (signal.aborted) return;
    const status = document.hidden ? null : await get("/api/training", {}, signal).catch(() => null);
    if (status && !signal.aborted && (follows || status.state === "running" || panel.dataset.state === "running")) show(status);
    if (status) panel.dataset.state = status.state;
    setTimeout(again, EVERY);
  };
  const first = await get("/api/training", {}, signal);
  panel.dataset.state = first.state;
  show(first);
  setTimeout(again, EVERY);
  return panel;
}

function parts({ run, state, listed, step, steps, reason, error }, act) {
  const failed = error ? element("p", { class: "broken", role: "alert" }, error) : "";
  if (state === "running") {
    const bar = element("progress", { max: String(steps || 1), "aria-label": "Training of the demo" });
    if (step) bar.setAttribute("value", String(step));
    return [
      element("strong", {}, step ? `Training the demo: step ${step} of ${steps}` : "Starting the training …"),
      bar,
      listed ? element("a", { class: "button", href: address("watch", { run }) }, "Watch it learn") : "",
      element("button", { type: "button", onclick: () => act("stop") }, "Stop"),
    ];
  }
  if (reason) return [failed, state === "ended" ? element("p", { class: "note" }, `The training of ${run} has ended.`) : ""];
  const about = "A translator from English to German, on this computer. You watch it learn from the first step.";
  return [element("button", { type: "button", class: "primary", onclick: () => act("start") }, "Train the demo (4 minutes)"), element("span", { class: "note" }, about), failed];
}
