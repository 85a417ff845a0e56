// Training from the page: a button that trains the demo, its progress, and a button that stops it.

import { get, post } from "./api.js";
import { button, element, html, nothing, render } from "./dom.js";
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
    render(content(status, act), panel);
  };
  const act = async (what) => {
    follows = what === "start";
    panel.inert = true;
    try {
      show(await post(`/api/training/${what}`, {}, signal));
    } catch (error) {
      if (!signal.aborted) panel.after(element("p", { class: "broken", role: "alert" }, error.message));
    }
    panel.inert = false;
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

function content({ run, state, listed, step, steps, reason, error }, act) {
  if (state === "running") {
    return html`<strong>${step ? `Training the demo: step ${step} of ${steps}` : "Starting the training …"}</strong>
      <progress max=${steps || 1} value=${step || nothing} aria-label="Training of the demo"></progress>
      ${listed ? html`<a class="button" href=${address("watch", { run })}>Watch it learn</a>` : nothing}
      ${button("Stop", () => act("stop"))}`;
  }
  const failed = error ? html`<p class="broken" role="alert">${error}</p>` : nothing;
  if (reason) return [failed, state === "ended" ? html`<p class="note">The training of ${run} has ended.</p>` : nothing];
  return html`${button("Train the demo (4 minutes)", () => act("start"), { kind: "primary" })}
    <span class="note">A translator from English to German, on this computer. You watch it learn from the first step.</span>${failed}`;
}
