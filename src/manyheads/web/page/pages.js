// The pages in the order of the menu. Each is a module in pages/ with the same name, which exports
//   async function draw(place, state, signal): fills the element `place` from the state
//   keys (if it has any): rows of [key, what it does] for the help
// `signal` is aborted when another page or state is drawn: timers and listeners end with it.

/** @type {[string, string][]} name and title */
export const PAGES = [
  ["runs", "Runs"],
  ["train", "Train"],
  ["flow", "Flow"],
  ["attention", "Attention"],
  ["translate", "Translate"],
  ["decode", "Decode"],
  ["tokens", "Tokens"],
  ["positions", "Positions"],
  ["lens", "Lens"],
  ["fill", "Fill"],
  ["image", "Image"],
  ["music", "Music"],
];

/** The values of the state that a link to another page keeps. */
export const KEPT = ["run", "text", "present", "theme"];
