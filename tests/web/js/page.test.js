// Unit tests of the page's pure functions: node --test tests/web/js

import assert from "node:assert/strict";
import test from "node:test";

// The browser's location and history, as far as state.js uses them.
globalThis.location = new URL("http://127.0.0.1/");
globalThis.addEventListener = () => {};
globalThis.document = { createTreeWalker: () => ({}) }; // what lit-html reads when it is loaded
const visited = [];
globalThis.history = {
  pushState: (_data, _title, to) => {
    visited.push(to);
    globalThis.location = new URL(to, globalThis.location);
  },
  replaceState: (_data, _title, to) => (globalThis.location = new URL(to, globalThis.location)),
};

const page = "../../../src/manyheads/web/page";
const { logTicks, smooth, ticks } = await import(`${page}/chart.js`);
const { byteOf, css, LINES, NOTHING, rgb, scaleFor } = await import(`${page}/colour.js`);
const { exact, percent, shown, spelled, visible } = await import(`${page}/dom.js`);
const { csv, wrapped } = await import(`${page}/exports.js`);
const { cellOf, coverages, greatestHead, limited, reordered, tellingCell } = await import(`${page}/fitting.js`);
const { mergeTree } = await import(`${page}/tokens.js`);
const { diagram, headDiagram, headOf, pathOf, sublayers } = await import(`${page}/flowlayout.js`);
const { attentionStory, bareWord, classStory, concentration, deciding, fillStory, goldCells, hiddenStory, knockStory, lookStory, lossStory, mostHelped, musicStory, nearShare, orderOf, outcomeOf, ownVoice, positionStory, replaced, similarStory, stepStory, tokenStory, wordsOf } = await import(`${page}/insights.js`);
const { handsOf } = await import(`${page}/dials.js`);
const { mathml } = await import(`${page}/math.js`);
const { boxStory, lengthsOf, softmax, weightStory } = await import(`${page}/flowstory.js`);
const { offsetsOf, roleOf } = await import(`${page}/headgrid.js`);
const { strongest } = await import(`${page}/lines.js`);
const { address, change, onChange, pageName, read } = await import(`${page}/state.js`);
const { columnsFor, greedyPath, headOf: stepOf, labelOf } = await import(`${page}/tree.js`);
const { captionLines, drawBars, drawDots, justified, mostReordered, tiling } = await import(`${page}/watchparts.js`);
const { alignmentNames, layout } = await import(`${page}/watchview.js`);
const { captionOf, chosen, compared, farthest, halfOf, milestones, pace, regularHead, tellMove } = await import(`${page}/watchstory.js`);

test("ticks are round numbers inside the range", () => {
  assert.deepEqual(ticks(0, 10), [0, 2, 4, 6, 8, 10]);
  assert.deepEqual(ticks(0, 3, 6, 1), [0, 1, 2, 3]); // integers only
  for (const [low, high] of [[-0.31, 0.72], [1e-7, 9e-7], [120, 98000], [-5, -4.9]]) {
    const all = ticks(low, high);
    assert.ok(all.length >= 2 && all.length <= 8, `${low} ${high}: ${all}`);
    const step = all[1] - all[0];
    assert.ok(all.every((tick) => tick >= low - 1e-9 * step && tick <= high + 1e-9 * step));
    const power = step / 10 ** Math.floor(Math.log10(step) + 1e-9);
    assert.ok([1, 2, 5, 10].some((round) => Math.abs(power - round) < 1e-6), `step ${step}`);
  }
  assert.deepEqual(ticks(3, 3), [3]);
});

test("logarithmic ticks are powers of ten, with halves and fifths where they are few", () => {
  assert.deepEqual(logTicks(1, 1e6), [1, 10, 100, 1e3, 1e4, 1e5, 1e6]);
  assert.deepEqual(logTicks(1, 100), [1, 2, 5, 10, 20, 50, 100]);
  assert.ok(logTicks(3, 4).length > 1); // no power of ten inside
});

test("smoothing is an exponential moving average", () => {
  const points = [[1, 4], [2, 0], [3, 8]];
  assert.deepEqual(smooth(points, 0), points);
  assert.deepEqual(smooth(points, 0.5), [[1, 4], [2, 2], [3, 5]]);
  const constant = [[1, 7], [2, 7], [3, 7]];
  assert.deepEqual(smooth(constant, 0.9).map(([, y]) => Math.round(y * 1e9) / 1e9), [7, 7, 7]);
});

/** A stack with one layer of attention and feed-forward, as /api/flow describes it. */
function stack(name, kinds) {
  const box = (what, stage) => ({ name: `${name}.${what}`, title: what, stage, column: null });
  const parts = { self: ["norm", "q", "k", "v", "scores", "mask", "masked", "weights", "mix", "output", "sum"], feedforward: ["norm", "hidden", "output", "sum"] };
  parts.cross = parts.self.filter((what) => what !== "mask" && what !== "masked");
  const inside = kinds.flatMap((kind) => parts[kind].map((what) => box(`${kind}.${what}`, "layer")));
  const column = {
    name,
    layers: 2,
    heads: 2,
    tokens: ["The", " dog", "."],
    stream: [`${name}.input`, ...kinds.map((kind) => `${name}.${kind}.sum`)],
    norms: Object.fromEntries([[`${name}.input`, [2]], ...kinds.map((kind) => [`${name}.${kind}.sum`, [3, 4]])]),
    boxes: [box("tokens", "tokens"), box("embedding", "before"), box("position", "before"), box("input", "before"), ...inside, box("states", "after")],
  };
  for (const one of column.boxes) one.column = column;
  return column;
}

test("the layout of Flow keeps every box inside, apart from the others, and connected", () => {
  const columns = [stack("encoder", ["self", "feedforward"]), stack("decoder", ["self", "cross", "feedforward"])];
  assert.deepEqual(sublayers(columns[1]), ["self", "cross", "feedforward"]);
  for (const width of [420, 760, 1200]) {
    for (const [zoom, limit] of [["model", Infinity], ["layer", Infinity], ["layer", 700], ["layer", 0]]) {
      const { nodes, edges, buses, height } = diagram(columns, { layer: 0, zoom, width, limit, chosen: "decoder.cross.weights" });
      for (const { x, y, width: wide, height: tall } of nodes) {
        assert.ok(x >= -0.5 && y >= 0 && x + wide <= width + 0.5 && y + tall <= height, `${zoom} ${width}`);
      }
      const tiles = nodes.filter((node) => node.kind === "tile");
      for (const [at, one] of tiles.entries()) {
        for (const other of tiles.slice(at + 1)) {
          const apart = one.x + one.width <= other.x + 0.5 || other.x + other.width <= one.x + 0.5 || one.y + one.height <= other.y + 0.5 || other.y + other.height <= one.y + 0.5;
          assert.ok(apart, `${one.box.name} covers ${other.box.name} at ${width}`);
        }
      }
      assert.ok(edges.some((edge) => edge.kind === "encoder"), "the encoder output reaches cross-attention");
      // The bus is as wide as the norm.
      const [thin, thick] = [2, 4].map((norm) => buses.find((bus) => bus.norm === norm).width);
      assert.ok(Math.abs(thick / thin - 2) < 1e-9);
    }
  }
  const head = headDiagram(columns[0], "self", { layer: 0, width: 900, rows: 3 });
  assert.ok(head.nodes.some((node) => node.box.name === "encoder.self.scores"));
});

test("a diagram that is too high closes parts, the chosen one last", () => {
  const count = (made, kind) => made.nodes.filter((node) => node.kind === kind).length;
  const how = { layer: 1, zoom: "layer", width: 740, chosen: "decoder.cross.weights" };
  const columns = [stack("encoder", ["self", "feedforward"]), stack("decoder", ["self", "cross", "feedforward"])];
  const free = diagram(columns, how);
  const fitted = diagram(columns, { ...how, limit: free.height - 60 });
  assert.ok(fitted.height < free.height);
  assert.ok(count(fitted, "closed") > 0);
  assert.ok(fitted.nodes.some((node) => node.box?.name === "decoder.cross.weights"));
});

test("paths go through their points, and arrow heads end there", () => {
  assert.equal(pathOf([[0, 0], [10, 0]]), "M0 0L10 0");
  assert.match(pathOf([[0, 0], [20, 0], [20, 20]]), /^M0 0L14 0Q20 0 20 6L20 20$/);
  assert.match(headOf([[0, 0], [10, 0]]), /^M10 0L/);
});

test("colours: ends, middle, values outside, −∞", () => {
  assert.equal(byteOf(0), 0);
  assert.equal(byteOf(1), 255);
  assert.equal(byteOf(2), 255);
  assert.equal(byteOf(-1), 0);
  assert.equal(byteOf(-Infinity), NOTHING);
  assert.equal(byteOf(0, -3, 3), 128);
  assert.equal(byteOf(5, 1, 1), 0); // an empty range
  assert.equal(css(0, "ink"), "rgb(255,255,255)");
  assert.equal(scaleFor(-2, 2), "signed");
  assert.equal(scaleFor(0, 1), "ink");
  const light = ([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b;
  for (let byte = 1; byte < 256; byte++) {
    assert.ok(light(rgb(byte, "ink")) <= light(rgb(byte - 1, "ink")), "ink gets darker");
    assert.ok(light(rgb(byte, "viridis")) >= light(rgb(byte - 1, "viridis")) - 1, "viridis gets lighter");
  }
  assert.equal(new Set(LINES).size, LINES.length);
});

test("the state is in the URL", () => {
  assert.equal(pageName(), "runs");
  assert.equal(address("runs", {}), "/");
  assert.equal(address("flow", { run: "a/b", text: "", head: "" }), "/flow?run=a%2Fb&text=");
  let told = 0;
  onChange(() => told++);
  globalThis.location = new URL("http://127.0.0.1/attention?run=demo&head=1");
  change({ head: "2", cell: "1,2" });
  assert.deepEqual(read(), { run: "demo", head: "2", cell: "1,2" });
  assert.equal(pageName(), "attention");
  change({ head: "" }, { replace: true, quiet: true });
  assert.deepEqual(read(), { run: "demo", cell: "1,2" });
  assert.equal(told, 1); // the second was quiet
  assert.deepEqual(visited, ["/attention?run=demo&head=2&cell=1%2C2"]); // and replaced that entry
  change({ cell: "1,2" });
  assert.equal(visited.length, 1); // the same state is no new entry
});

test("numbers of the state stay within their bounds", () => {
  assert.equal(limited("7", 4), 3);
  assert.equal(limited("-2", 4), 0);
  assert.equal(limited("x", 4, 2), 2);
  assert.deepEqual(cellOf("2,3"), [2, 3]);
  assert.deepEqual(cellOf("2,x", [1, 1]), [1, 1]);
});

test("first states show where word orders differ", () => {
  assert.deepEqual(reordered([0.9, 0.1, 0, 0, 0.2, 0.8, 0, 0.7, 0.3], 3), [1, 2]); // both off the diagonal: the first
  assert.deepEqual(reordered([0.2, 0.3, 0.3, 0.2], 2), [0, 1]); // none above ½: the greatest
  const probed = (text, ...maps) => ({ tokens: text.split(" "), shape: [1, 1, 3, 3], weights: maps.flat() });
  const straight = [9, 0, 0, 0, 9, 0, 0, 0, 9];
  const crossed = [0, 9, 0, 9, 0, 0, 0, 0, 9];
  const sentences = ["a b .", "c d .", "e f ."].map((text) => ({ target_tokens: text.split(" ") }));
  const story = { sentences, probes: [{ sentences: [probed("a b .", straight), probed("x d .", crossed), probed("e f .", crossed)] }] };
  assert.equal(mostReordered(story), 2); // the second is not translated as its reference
});

test("what Watch says is computed from the probes", () => {
  const target = ["Er", " wird", " heute", " gehen", ".", "</s>"];
  const source = ["He", " will", " go", " today", ".", "</s>"];
  const attends = (...columns) => columns.flatMap((column) => source.map((_, at) => (at === column ? 255 : 0)));
  const probe = (text, loss, ...columns) => {
    const sentence = { tokens: text, log_probs: text.map(() => -1), reference_log_probs: target.map(() => -loss), shape: [1, 1, 6, 6], weights: attends(...columns) };
    return { step: 10 * loss, alignment_error: [[loss / 10]], sentences: [sentence] };
  };
  const still = [5, 5, 5, 5, 5, 5];
  const crossed = [0, 1, 3, 2, 4, 5];
  const far = [3, 1, 3, 0, 4, 5]; // “gehen” from the first word, “Er” from the fourth
  const story = { run: "r", sentences: [{ source_tokens: source, target_tokens: target }], probes: [probe([], 9, ...still), probe([" wird", "</s>"], 8, ...still), probe(target, 1, ...crossed), probe(target, 1, ...far)] };
  const moment = (at) => ({ at, sentence: 0, layer: 0, hidden: new Set(), token: -1, focus: -1 });
  const caption = (one) => captionOf(story, one).join(" ");
  assert.match(caption(moment(0)), /nothing/);
  assert.match(caption(moment(1)), /^1 of 5 tokens are right\. Head 1·1 aligns best: 20 % in this sentence\.$/);
  const second = { ...story, sentences: [...story.sentences, ...story.sentences] };
  assert.match(captionOf(second, moment(1)).join(" "), /aligns best: 20 % over all 2 sentences\.$/);
  assert.equal(alignmentNames(second)[0], "words aligned by each head over all 2 sentences");
  assert.match(caption(moment(2)), /^No word attends clearly to one far .* All 5 tokens are right/);
  const atRest = { ...moment(3), resting: true };
  assert.equal(chosen(story, { ...moment(2), resting: true }), null); // moved by one position only
  assert.deepEqual(chosen(story, moment(3)), chosen(story, atRest)); // all words are right: the caption names it
  assert.match(caption(moment(3)), /^“gehen” comes last/);
  const cell = chosen(story, atRest);
  assert.deepEqual([cell.row, cell.column, cell.last], [3, 0, true]); // the end of the clause comes first
  assert.match(caption(atRest), /^“gehen” comes last in its clause: it attends to “He”/);
  // The word written last leads, as one under the pointer does: the caption names no ribbon that is hidden.
  assert.match(caption({ ...atRest, token: 1 }), /^“wird” attends most to “will”: 100 % of its weight\.$/);
  assert.deepEqual(chosen(story, { ...atRest, token: 1, focus: 2 }), { row: 2, column: 3 });
  const silly = { ...story, probes: [probe([" die", " die", " die", " die", " Hut"], 8, ...still), ...story.probes] };
  assert.match(captionOf(silly, moment(0)).join(" "), /^It repeats “die”\. 0 of 5 tokens are right/);
  assert.deepEqual(milestones(story, 0), [{ at: 1, text: "first right word" }, { at: 2, text: "all right" }]);
  const dots = { ...story, probes: [probe([".", "."], 8, ...still), ...story.probes] };
  assert.equal(milestones(dots, 0)[0].at, 2); // a point is right, but no word
  const position = pace(story, 0);
  assert.equal(position(0), 0);
  assert.equal(position(1), 3);
  // It rests at both milestones, and nowhere else.
  const resting = (at) => Array.from({ length: 1001 }, (_, n) => position(n / 1000)).filter((now) => now === at).length / 1001;
  assert.deepEqual([0.5, 1, 1.5, 2].map((at) => resting(at) > 0.07), [false, true, false, true]);
  const taken = (from, to) => Array.from({ length: 1001 }, (_, n) => position(n / 1000)).filter((at) => at >= from && at < to).length;
  assert.ok(taken(1, 2) > taken(0, 1)); // slow where the loss changes most
  const flat = { ...story, probes: [9, 9, 9, 9, 9, 9, 9, 1, 9, 1].map((loss) => probe(target, loss, ...still)) };
  const share = (from, to) => Array.from({ length: 1001 }, (_, n) => pace(flat, 0)(n / 1000)).filter((at) => at >= from && at < to).length / 1001;
  assert.ok(share(0, 6) < 0.1); // nothing is learned, even if it takes most of the probes
  assert.ok(share(7, 9) < 0.05); // nor when the loss only comes back
});

test("the milestones of a language model are computed from what it writes", () => {
  const probe = (text, loss) => ({ step: 1, sentences: [{ text, reference_log_probs: [-loss, -loss] }] });
  const sentences = [{ kind: "language", source: "To be,", target: " or not." }];
  const probes = [probe("ooo", 5), probe("o o", 4.9), probe("oo", 4.8), probe("q be r", 4.5), probe("be o", 4.2), probe("or be", 3)];
  assert.deepEqual(milestones({ sentences, probes }, 0), [{ at: 3, text: "first word of the texts" }, { at: 4, text: "perplexity halved" }]);
  const split = [probe("ooo", 5), probe("o o", 4.9), probe("be o", 4.9)]; // “o” has one letter
  assert.deepEqual(milestones({ sentences, probes: split }, 0), [{ at: 1, text: "first space" }, { at: 2, text: "first word of the texts" }]);
  const early = [probe("ooo", 5), probe("ooo", 3), probe("be o", 3)]; // in the order of the training
  assert.deepEqual(milestones({ sentences, probes: early }, 0), [{ at: 1, text: "perplexity halved" }, { at: 2, text: "first word of the texts" }]);
  const music = [probe("p60 p60", 3), probe("p60 p62", 1)];
  assert.deepEqual(milestones({ sentences: [{ kind: "language", source: "p60 p62", target: "p60" }], probes: music }, 0), [{ at: 1, text: "perplexity halved" }]);
});

test("the tasks of the heads of a language model", () => {
  const tokens = ["a", "b", "\n", "c", "d", "e"];
  const weights = (at) => tokens.flatMap((_, row) => tokens.map((__, column) => (column === at(row) ? 255 : 0)));
  const before = weights((row) => Math.max(0, row - 1));
  const back = weights((row) => (row > 2 ? 2 : row));
  const even = tokens.flatMap((_, row) => tokens.map((__, column) => (column <= row ? 255 / (row + 1) : 0)));
  const story = (...maps) => ({
    sentences: [{ kind: "language", source_tokens: tokens.slice(0, 3), target_tokens: tokens.slice(3) }],
    probes: [{ step: 1, sentences: [{ shape: [1, maps.length, 6, 6], weights: maps.flat(), reference_log_probs: [-Math.log(4)] }] }],
  });
  const moment = { at: 0, sentence: 0, layer: 0, hidden: new Set(), token: -1, focus: -1 };
  assert.equal(regularHead(story(even), moment), null);
  assert.match(captionOf(story(even), moment)[0], /^No head of this layer has a simple pattern/);
  const both = story(back, before);
  assert.equal(captionOf(both, moment)[0], "Head 1·1 returns to “⏎” (token 3): 100 % of the weight of all later tokens.");
  assert.equal(captionOf(both, { ...moment, hidden: new Set([0]) })[0], "Head 1·2 looks at the token before: 100 % of its weight.");
  assert.equal(captionOf(both, moment)[1], "Perplexity 4: as unsure as a choice among 4 equally likely tokens.");
});

test("where the heads look in a picture, and how that has changed", () => {
  const probe = (step, ...weights) => ({ step, sentences: [{ shape: [1, 1, 2, 2], weights, probabilities: [["3", 0.8], ["5", 0.2]], reference_log_probs: [-1] }] });
  const story = (label) => ({ sentences: [{ kind: "images", label }], probes: [probe(0, 9, 9, 9, 9), probe(7, 255, 0, 0, 0)] });
  const moment = (at) => ({ at, sentence: 0, layer: 0, hidden: new Set(), token: -1, focus: -1 });
  assert.deepEqual(captionOf(story("3"), moment(1)), ["Head 1·1 has half of its attention on 1 of 4 patches, at step 0 on 2.", "Right: “3” has 80 %."]);
  assert.deepEqual(captionOf(story("5"), moment(0)), ["Wrong: it takes “5” for “3” (80 %).", "Head 1·1 has half of its attention on 2 of 4 patches."]);
});

test("rows of words begin and end at the same x", () => {
  const context = { font: "", measureText: (text) => ({ width: text.length * Number.parseFloat(context.font) }) };
  const rows = [["Must", " she", " rest", "</s>"], ["Muss", " sie", " sich", " jetzt", " ausruhen", "</s>"]];
  const sides = { left: 10, right: 900, size: 20, least: 12 };
  const edges = ({ centres, widths }) => [centres[0] - widths[0] / 2, centres.at(-1) + widths.at(-1) / 2];
  const [above, below] = justified(context, rows, sides);
  edges(below).forEach((edge, at) => assert.ok(Math.abs(edge - edges(above)[at]) < 1e-9 && edge >= 10 && edge <= 900));
  assert.equal(above.font, below.font);
  const tight = justified(context, rows, { ...sides, right: 470 });
  for (const { centres, widths, font } of tight) {
    assert.ok(font < 20 && font >= 12);
    centres.slice(1).forEach((centre, at) => assert.ok(centre - widths[at + 1] / 2 - centres[at] - widths[at] / 2 >= 0.5 * font - 1e-9)); // no two words touch
  }
  assert.equal(justified(context, rows, { ...sides, right: 200 }), null);
});

test("on stage the ribbons of a sentence get the most of the height", () => {
  const context = { font: "", measureText: (text) => ({ width: 0.56 * text.length * Number.parseFloat(context.font.replace("700 ", "")) }) };
  const words = (text) => [...text.split(" "), "</s>"];
  const sentence = { source_tokens: words("Must Sophie rest near the forest in autumn ?"), target_tokens: words("Muss Sophie sich im Herbst in der Nähe des Waldes ausruhen ?") };
  const story = { run: "r", sentences: [sentence], probes: [] };
  const [zoom, height] = [2.5, 306]; // of the style sheet; a window of 1280 × 800
  const box = layout(context, story, 0, { width: 488, height, compact: true });
  assert.ok(zoom * (box.target - box.words[1].font - box.top - 8) >= 350);
  assert.ok(box.height <= height);
  assert.ok(zoom * box.words[1].font >= 28);
});

test("a caption is wrapped or shortened, never squeezed", () => {
  const context = { measureText: (text) => ({ width: text.length }) };
  const caption = ["One two three four.", "All are right."];
  assert.deepEqual(captionLines(context, caption, 40, 2), ["One two three four. All are right."]);
  assert.deepEqual(captionLines(context, caption, 20, 2), ["One two three four.", "All are right."]);
  assert.deepEqual(captionLines(context, caption, 12, 2), ["One two", "three four."]); // the first sentence only
  assert.deepEqual(captionLines(context, caption, 8, 2), ["One two", "three …"]);
});

test("the bars of a sentence have one width", () => {
  const words = { centres: [20, 60, 120], widths: [30, 26, 80], font: 14 };
  const drawn = (count) => {
    const rectangles = [];
    drawBars({ fillRect: (...box) => rectangles.push(box) }, words, count, 0, 6, {}, () => 0.5);
    return rectangles;
  };
  assert.deepEqual(drawn(2), drawn(3).slice(0, 4));
  assert.deepEqual(drawn(3).map(([, , wide]) => wide), [37, 18.5, 37, 18.5, 37, 18.5]); // not over a neighbour
});

test("tiles are as large as the space allows", () => {
  assert.deepEqual(tiling(5, 1000, 120, 10, 20), { size: 100, across: 5, down: 1 });
  assert.deepEqual(tiling(4, 210, 240, 10, 20), { size: 100, across: 2, down: 2 });
});

test("heads that cover the source, and the cell to begin with", () => {
  const tokens = ["a", "b", "</s>"];
  const one = [255, 0, 0, 0, 255, 0]; // two rows
  const other = [0, 0, 255, 0, 0, 255]; // only the end token
  const covered = coverages({ shape: [2, 1, 2, 3], values: [...other, ...one] }, tokens);
  assert.deepEqual(covered, [[0], [1]]);
  assert.deepEqual(greatestHead(covered), [1, 0]);
  assert.deepEqual(tellingCell(["x", "y"], ["a", "b"], [0.1, 0.9, 0.2, 0.1]), [0, 1]);
});

test("numbers, subwords and files", () => {
  assert.equal(shown(0.0773812), "0.0774");
  assert.equal(shown(2.0561e-8), "2.06e−8");
  assert.equal(shown(-1234.56), "−1235");
  assert.equal(exact(-1234.5678), "−1234.57");
  assert.deepEqual([0, 3e-5, 0.00123, 0.07361, 0.735686, 0.9995, 0.99996, 1].map(percent), ["0 %", "< 0.01 %", "0.12 %", "7.36 %", "73.6 %", "> 99.9 %", "> 99.9 %", "100 %"]);
  assert.equal(shown(null), "–");
  assert.equal(visible(" dog"), "·dog");
  assert.equal(visible(""), "∅");
  assert.equal(spelled("a\u0001\tb"), "a\\x01\tb");
  assert.equal(csv({ columns: ["a", 'b"'], rows: [[1, "x,y"]] }), 'a,"b"""\r\n1,"x,y"\r\n');
  assert.deepEqual(wrapped("one two three", 8), ["one two", "three"]);
  assert.deepEqual(wrapped("layer: 1 · head: 1", 16), ["layer: 1 ·", "head: 1"]);
  assert.deepEqual(strongest([0.1, 0.7, 0.2, 0.5, 0.4, 0.1], 0, 3, 2), [[1, 0.7], [2, 0.2]]);
  assert.deepEqual(compared(["a", "b"], ["a", "c", "b"]), [["a", true], ["c", false], ["b", true]]);
});

test("formulas become MathML", () => {
  const plain = (text) => mathml(text).replace(/<mspace[^>]*><\/mspace>/g, "");
  const [q, k] = ["<msub><mi>q</mi><mrow><mi>i</mi></mrow></msub>", "<msub><mi>k</mi><mrow><mi>j</mi></mrow></msub>"];
  assert.equal(plain("q_i · k_j / √c + b"), `<math displaystyle="true"><mfrac><mrow>${q}<mo>·</mo>${k}</mrow><mrow><msqrt><mi>c</mi></msqrt></mrow></mfrac><mo>+</mo><mi>b</mi></math>`);
  assert.equal(plain("Q Kᵀ"), "<math displaystyle=\"true\"><mi>Q</mi><msup><mi>K</mi><mo>⊤</mo></msup></math>");
  assert.equal(plain("10^(−2i/c)"), "<math displaystyle=\"true\"><msup><mn>10</mn><mrow><mo>−</mo><mn>2</mn><mi>i</mi><mo>/</mo><mi>c</mi></mrow></msup></math>");
  assert.match(plain("exp(e_i) / Σ_k exp(e_k)"), /<mfrac><mrow><mi>exp.*<\/mrow><mrow><msub><mi>Σ.*<mi>exp<\/mi><mrow><mo>\(.*<\/mfrac><\/math>$/);
  assert.match(mathml("a < b"), /<mo>&#60;<\/mo>/); // never markup
  assert.doesNotThrow(() => mathml("x (")); // an open bracket ends with the line
});

test("each token belongs to the word that it is a part of", () => {
  assert.deepEqual(wordsOf(["Der", " Stu", "dent", " denkt", ",", "</s>"], ["Der", "Student", "denkt", ","]), [0, 1, 1, 2, 3, -1]);
  assert.deepEqual(wordsOf(["a", " b", " a"], ["a", "a"]), [0, -1, 1]);
});

test("gold links are those of the words, for the same translation only", () => {
  const pair = { rows: ["Der", "Student"], columns: ["The", "student"] };
  const links = [1, 0, 0, 1];
  const columns = ["The", " student", "</s>"];
  assert.deepEqual(goldCells(pair, links, ["Der", " Stu", "dent", "</s>"], columns), [[0, 0], [1, 1], [2, 1]]);
  assert.deepEqual(goldCells(pair, links, ["Ein", " Student", "</s>"], columns), []);
});

test("the word order changes where links cross farthest", () => {
  const [rows, columns] = [["das", "Bild", "wird", "</s>"], ["will", "the", "picture", "</s>"]];
  const crossing = [0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0];
  assert.match(orderOf(crossing, rows, columns), /“Bild” comes before “wird”, but “picture” after “will”\.$/);
  const straight = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0];
  assert.match(orderOf(straight, rows, columns), /order stays/);
  assert.match(orderOf(Array(16).fill(0.25), rows, columns), /does not align/);
});

/** Candidates of a search of width 2, in which “jetzt” leads at first; `later` is log P of the end after “dir”. */
const candidates = (later) => {
  const node = (step, parent, piece, log_probability, rest = {}) => ({ step, parent, piece, log_probability, score: log_probability, state: "kept", place: null, ...rest });
  const ended = (place) => ({ state: "ended", place });
  return [node(1, -1, " jetzt", -0.5), node(1, -1, " dir", -0.9), node(1, -1, " nun", -3, { state: "pruned" }), node(2, 1, "</s>", later, ended(1)), node(2, 0, "</s>", -1.5, ended(2))];
};

test("dials have their numbers where these fit, on a phone too", () => {
  const written = (shares, box) => {
    const texts = [];
    const measured = { measureText: (text) => ({ width: 6 * text.length }), fillText: (text) => texts.push(text) };
    const context = new Proxy(measured, { get: (known, name) => known[name] ?? (() => {}), set: () => true });
    drawDots(context, shares, ["words aligned by each head", "aligned"], { hidden: new Set() }, {}, { first: 28, ...box });
    return texts;
  };
  const phone = { narrow: true, right: 316, headerEnd: 115 };
  assert.deepEqual(written([0.69, 0.76, 0.58, 0.65], phone), ["69 %", "76 %", "58 %", "65 %"]);
  assert.deepEqual(written(Array(8).fill(0.5), phone), []);
  assert.deepEqual(written([0.69, 0.76], { right: 900, headerEnd: 300 }), ["69 %", "76 %", "words aligned by each head"]);
});

test("the merges of a text are a tree for each token", () => {
  const steps = [["a", "b", "c", " ", "a", "b"], ["ab", "c", " ", "ab"], ["abc", " ", "ab"], ["abc", " ab"]];
  const trees = mergeTree(steps);
  assert.deepEqual(trees.map((spans) => spans.map(({ text, level, step, until }) => [text, level, step, until])), [
    [["a", 0, 0, 1], ["b", 0, 0, 1], ["c", 0, 0, 2], ["ab", 1, 1, 2], ["abc", 2, 2, Infinity]],
    [[" ", 0, 0, 3], ["a", 0, 0, 1], ["b", 0, 0, 1], ["ab", 1, 1, 3], [" ab", 2, 3, Infinity]],
  ]);
  assert.equal(mergeTree([["unable"], ["un", "##able"]]), null); // WordPiece divides
  const [letter] = mergeTree([["\\xc3", "\\x9f", "e"], ["ß", "e"], ["ße"]]); // a letter of two bytes
  assert.deepEqual(letter.map(({ text }) => text), ["\\xc3", "\\x9f", "e", "ß", "ße"]);
});

test("the outcome names the step at which the best text leaves the path of greedy search", () => {
  const nodes = candidates(-1);
  const [best, other] = [{ text: "dir", score: -0.8, log_probability: -1 }, { text: "jetzt", score: -1.5, log_probability: -1.5 }];
  const search = { width: 2, vocabulary: 50, nodes };
  const missed = { ...search, greedy: [other], beam: [best, other] };
  assert.match(outcomeOf(missed), /writes “jetzt” \(−1.5\)\. The beam keeps “dir” at step 1 and finds “dir” \(−0.8\)/);
  assert.match(outcomeOf(missed), /\(−0.8\)\.$/); // log P is higher too
  const longer = { ...best, log_probability: -1.6 };
  assert.match(outcomeOf({ ...missed, beam: [longer, other] }), /\(−0.8\); its log P is lower \(−1.6, not −1.5\): the length penalty decides\.$/);
  assert.match(outcomeOf({ ...search, greedy: [best], beam: [best] }), /same text\.$/); // “dir” was candidate 2
  assert.match(outcomeOf({ ...search, greedy: [best], beam: [other] }), /Greedy search finds a better/);
  const lost = { ...missed, greedy: [{ ...other, text: "Ist es so?" }], beam: [{ ...best, text: "Ist es, das, so?" }] };
  assert.match(outcomeOf(lost), /writes “Ist es so\?” \(−1.5\) and leaves out “das”\. The beam/);
  assert.doesNotMatch(outcomeOf({ ...lost, beam: [{ ...best, text: "Ist das so?" }] }), /leaves out/); // another word stands there
  assert.deepEqual(greedyPath(nodes), [0, 4]);
  assert.deepEqual(deciding(nodes), { node: 1, rank: 2 });
});

test("a step of the tree keeps its number", () => {
  assert.deepEqual([[8, "rank 2", 90], [8, "rank 2", 40], [9, "", 90]].map(([step, note, width]) => stepOf(step, note, width)), ["8: rank 2", "8", "9"]);
});

test("the story of a hidden patch compares the same class", () => {
  const best = { label: "cat", probability: 0.8 };
  const hidden = (...shares) => hiddenStory(best, ["cat", "dog"].map((label, at) => ({ label, probability: shares[at] })));
  assert.match(hidden(0.6, 0.4), /P\(“cat”\) falls to 60 %\.$/);
  assert.match(hidden(0.9, 0.1), /rises to 90 %\.$/);
  assert.match(hidden(0.8, 0.2), /stays at 80 %/);
  assert.match(hidden(0.3, 0.7), /sees “dog” \(70 %\); P\(“cat”\) falls to 30 %/);
});

test("a candidate that is punctuation has quotes", () => {
  assert.deepEqual([",", " .", " der", "</s>", "1,5"].map((piece) => labelOf({ piece })), ["“,”", "“.”", "·der", "</s>", "1,5"]);
});

test("a step of the search tells what is dropped, and what greedy search drops", () => {
  const [best, other] = [{ text: "dir", score: -0.8, log_probability: -1 }, { text: "jetzt", score: -1.5, log_probability: -1.5 }];
  const search = { width: 2, vocabulary: 50, nodes: candidates(-1), greedy: [other], beam: [best, other] };
  assert.match(stepStory(search, 1), /^Step 1 of 2: of 50 continuations the beam keeps 2\. Greedy search drops “dir”, only candidate 2; the beam keeps it/);
  assert.match(stepStory(search, 1), /best score\.$/);
  assert.match(stepStory({ ...search, beam: [{ ...best, log_probability: -1.6 }, other] }, 1), /best score; its log P is lower .* the length penalty decides/);
  assert.match(stepStory({ ...search, greedy: [best] }, 1), /The last of them is “dir” \(−0.9\); “nun” \(−3\) is dropped\.$/);
  assert.equal(stepStory(search, 2), outcomeOf(search));
  const longer = { ...search, nodes: [...search.nodes, { ...search.nodes[3], step: 3 }], greedy: [best] };
  assert.match(stepStory(longer, 2), /of 100 continuations .* Without pruning, 50² texts would continue/);
});

test("the boxes of all steps fit, as long as they are readable", () => {
  for (const [steps, room] of [[3, 1200], [13, 1200], [14, 1216], [12, 848]]) {
    const { lefts, widths } = columnsFor([28, ...Array(steps).fill(90)], room);
    assert.ok(lefts.at(-1) + widths.at(-1) <= room, `${steps} steps in ${room}`);
    lefts.slice(1).forEach((left, at) => assert.ok(left >= lefts[at] + widths[at] + 7));
  }
  assert.deepEqual(columnsFor([28, ...Array(60).fill(90)], 1200).widths, [28, ...Array(60).fill(90)]); // it scrolls: no token is cut
});

test("a knock-out tells what is lost, what has changed, and how probable the text is", () => {
  const texts = (before, after) => replaced(before, after).flatMap(({ gone, come, same }) => [gone.join(" "), come.join(" "), same]);
  assert.deepEqual(texts("a b c", "a x c d"), ["", "", "a", "b", "x", "c", "", "d", null]);
  const full = { text: "Wir kaufen morgen Brot.", log_probability: Math.log(0.9) };
  const without = { free: "Wir suchen Brot.", log_probability: Math.log(0.3) };
  const told = knockStory(full, without, ["decoder.cross.1.3"]);
  assert.match(told, /Without head 2·4: “kaufen morgen” becomes “suchen”; .* from 90 % to 30 %/);
  assert.match(knockStory(full, { ...without, free: "Wir kaufen Brot." }, ["decoder.cross.1.3"]), /“morgen” is lost/);
  assert.match(knockStory(full, { ...without, free: full.text }, ["a.0.0", "a.0.1"]), /heads 1·1, 1·2 the model writes the same/);
});

test("a text is told by what is divided most, whatever is typed", () => {
  assert.match(tokenStory("Unseen cat", ["Un", "seen", " cat"]), /“Unseen” is divided into 2 tokens.* 1 of 2 words are one token/);
  assert.match(tokenStory("é a", ["\\xc3", "\\xa9", " a"]), /^“é” is 2 bytes: /);
  assert.match(tokenStory("é a", ["é", " a"]), /^Each word is frequent enough/);
  assert.match(tokenStory("The cat", ["<unk>", "cat"]), /^1 of 2 tokens are unknown/);
  assert.match(tokenStory("!?", ["!", "?"]), /^2 tokens, no word/);
  assert.equal(tokenStory("", []), "");
});

test("the loss story tells overfitting from convergence", () => {
  const train = [[10, 4], [20, 1], [30, 0.5], [40, 0.4]].map(([step, loss]) => ({ step, loss, split: "train" }));
  const valid = (...losses) => losses.map((loss, at) => ({ step: 20 + 10 * at, loss, split: "valid" }));
  assert.match(lossStory([...train, ...valid(1, 0.8, 0.9)]), /lowest at step 30 \(0.8\) and rises to 0.9 while training loss still falls: the model overfits/);
  assert.match(lossStory([...train, ...valid(1, 0.6, 0.4)]), /0.4 and still falls: what the model learns carries over/);
  assert.match(lossStory([...train, ...valid(1, 0.9, 0.9)]), /has levelled off: it is far above training loss \(0.4 at that step\), so much/);
  assert.match(lossStory([...train, ...valid(1, 0.5, 0.5)]), /it is above training loss \(0.4 at that step\)\.$/);
  assert.match(lossStory(train), /No validation yet/);
});

test("half of the attention is counted from the greatest weight on", () => {
  assert.equal(halfOf([0.1, 0.6, 0.3]), 1);
  assert.equal(halfOf([0.25, 0.25, 0.25, 0.25]), 2);
  const classes = [{ label: "4", probability: 0.5 }];
  assert.match(classStory(classes, "9"), /“4” \(50 %\), but it is “9”/);
  assert.match(classStory(classes, "4"), /which is right/);
  assert.equal(classStory([], "4"), "");
  assert.match(lookStory("Head 1", [0, 0.3, 0.3, 0.4], -1, 2), /looks most at the framed patch \(row 2, column 2\): 40 %\. Half of its attention is on 2 of 4/);
  assert.match(lookStory("Head 1", [0, 0, 0, 1], 0, 2), /at the patch that the arrow points at: 100 %\.$/);
  assert.match(lookStory("Head 1", [0, 0, 0, 1], 3, 2), /at that patch itself: 100 %\.$/);
});

test("positions that are most similar to those around them show the grid", () => {
  const near = Array.from({ length: 25 }, (_, at) => -Math.hypot(Math.floor(at / 5) - 2, (at % 5) - 2));
  assert.match(similarStory(near, 12, 5), /8 of the 8 most similar positions lie around it \(2.7 by chance\): the positions show/);
  assert.match(similarStory(near.map((value) => -value), 12, 5), /0 of the 8 most similar positions .* hardly show/);
  const some = near.map((_, at) => ([6, 7, 11, 13, 17].includes(at) ? -1 : [0, 4, 20].includes(at) ? -2 : -5));
  assert.match(similarStory(some, 12, 5), /5 of the 8 most similar positions .* in part/);
});

test("a head that follows its voice has all its attention there", () => {
  const rows = (key) => (event) => Array.from({ length: 9 }, (_, at) => (at === key(event) + 1 ? 1 : 0));
  assert.equal(ownVoice(rows((event) => event - 2), 8, 2), 1);
  assert.equal(ownVoice(rows((event) => event - 1), 8, 2), 0);
  const voices = ["soprano", "bass"];
  assert.match(musicStory("Head 1", [0, 1], voices, 1, [[0, 0.1], [2, 0.1], [-1, 0.2]]), /100 % .* \(50 % by chance\): it prefers the voice of each event\.$/);
  assert.match(musicStory("Head 1", [0, 1], voices, 0.3, [[1, 0.2], [3, 0.1], [2, 0.1]]), /30 % .*: it prefers the other voices\. The arcs end mostly in the bass: 75 % of their weight\.$/);
  assert.match(musicStory("Head 1", [0.5, 0.1, 0.3], [], 0, []), /event 2 back: 30 %/);
  assert.ok(concentration(rows((event) => event - 1), 8) > concentration(() => Array(9).fill(1 / 9), 8));
  assert.equal(concentration(rows(() => -1), 8), 0); // the beginning is no event
});

test("positions are near if each is most similar to a neighbour", () => {
  const near = Array.from({ length: 9 }, (_, cell) => 3 - Math.abs(Math.floor(cell / 3) - (cell % 3)));
  assert.equal(nearShare(near, 3), 1);
  assert.equal(nearShare([3, 0, 1, 1, 3, 0, 1, 0, 3], 3), 1 / 3); // only the middle one
  // On a grid of 2 columns every patch is around every other; in a row of 4 it is not.
  const pairs = Array.from({ length: 16 }, (_, cell) => (Math.floor(cell / 4) === cell % 4 ? 2 : Math.abs(Math.floor(cell / 4) - (cell % 4)) === 2 ? 1 : 0));
  assert.equal(nearShare(pairs, 4), 0);
  assert.equal(nearShare(pairs, 4, { columns: 2, before: 0 }), 1);
  const curves = [["head 1", -8], ["head 2", -1]].map(([name, low]) => ({ name, points: [[-4, low], [0, 0]] }));
  const about = { scheme: "alibi", length: 5, dim: 8, grid: null };
  assert.match(positionStory({ ...about, curves }, null, { base: 1e4, isTrained: false }), /up to 8 in head 1 and 1 in head 2: head 2 can look farther/);
});

test("the hands of rotary positions turn as their channels do", () => {
  const angles = [1, 0.1]; // of a pair, from one position to the next
  const turned = (at, pair) => [Math.cos, Math.sin].map((part) => part(Math.PI / 4 + at * angles[pair]));
  const rows = [0, 1, 2, 3].map((at) => [turned(at, 0), turned(at, 1)]);
  const tables = { interleaved: rows.map(([[a, b], [c, d]]) => [a, b, c, d]), halves: rows.map(([[a, b], [c, d]]) => [a, c, b, d]) };
  for (const [pairing, table] of Object.entries(tables)) {
    const hands = handsOf({ shape: [4, 4], values: table.flat() }, pairing);
    assert.deepEqual(hands.map(({ number }) => number), [0, 1]);
    hands.forEach(({ turn, angles: all }, pair) => {
      assert.ok(Math.abs(turn - (angles[pair] * 180) / Math.PI) < 1e-9);
      assert.ok(Math.abs(((all[3] - 3 * turn + 540) % 360) - 180) < 1e-9);
    });
    const cosines = table.flatMap((row) => table.map((other) => row.reduce((sum, one, at) => sum + one * other[at], 0) / 2)); // of two pairs
    const about = { scheme: "rotary", length: 4, dim: 4, grid: null, curves: [] };
    const cosine = ((Math.cos(1) + Math.cos(0.1)) / 2).toPrecision(3);
    assert.match(positionStory(about, cosines, { base: 1e4, isTrained: false, hands }), new RegExp(`pair 0 turns by 57.3° and pair 1 by 5.73°.* is ${cosine} at distance 1\\.$`));
  }
});

test("the story of masks counts the words that are put back", () => {
  const top = [{ piece: " dog", probability: 0.6 }];
  const masks = [{ top, hidden: { piece: " dog", rank: 1 } }, { top, hidden: { piece: " tree", rank: 7 } }];
  assert.match(fillStory(masks, ["dog", "tree"]), /1 of 2 words: “dog” is its first choice \(60 %\); “tree” is number 7, after “dog”/);
  assert.match(fillStory([{ top, hidden: null }], [""]), /would write “dog”/);
  assert.match(fillStory([masks[1], masks[1]], ["tree", "tree"]), /guesses other words: for “tree” it would write “dog”; “tree” is number 7/);
});

test("the attention of a mask is summed over the words on each side", () => {
  assert.match(attentionStory(new Map([[0, 0.1], [2, 0.15], [6, 0.4]]), 4), /25 % of its attention on the words before it and 40 % on those after/);
  assert.deepEqual(["##s", " the", "."].map(bareWord), ["…s", "the", "."]);
});

test("a mask is compared with its prediction from the words before it", () => {
  const mask = (probability) => ({ top: [{ piece: " in", probability }], hidden: { piece: " in", rank: 1, probability } });
  assert.match(fillStory([mask(0.6)], ["in"], mask(0.2)), /puts “in” back.* gets 20 % instead of 60 %: the words after it help/);
  assert.match(fillStory([mask(0.2)], ["in"], mask(0.6)), /mislead/);
  assert.match(fillStory([mask(0.5)], ["in"], mask(0.5)), /change little/);
  assert.match(fillStory([mask(0.6)], ["in"]), /first choice \(60 %\)\.$/);
  assert.match(fillStory([mask(0.04)], ["in"]), /\(4 %\)\. No guess has more than 4 %: the model hardly knows\.$/);
  const second = { ...mask(0.04), hidden: { piece: " at", rank: 2, probability: 0.03 } };
  assert.match(fillStory([second], ["at"], mask(0.01)), /“at” is number 2\. No guess .* “at” gets 1 % instead of 3 %: the words after it help/);
  assert.equal(mostHelped([[mask(0.9), mask(0.8)], [null, null], [mask(0.5), mask(0.1)], [mask(0.6), mask(0.5)]]), 2);
  assert.equal(mostHelped([[mask(0.3), mask(0.2)], [mask(0.1), mask(0.7)]]), 1);
});

test("a clause that ends in two verbs is told with both", () => {
  const rows = ["das", " Bild", " verstecken", " wird", "."];
  const columns = [" will", " hide", " the", " picture", "."];
  const links = [2, 3, 1, 0, 4];
  const values = rows.flatMap((_, row) => columns.map((__, column) => Number(links[row] === column)));
  const both = "“verstecken” and “wird” come last in their clause: they attend to “hide” and “will”.";
  assert.equal(weightStory({ rows, columns, values }, 3), both);
  assert.equal(weightStory({ rows, columns, values }, 2), both);
  assert.equal(weightStory({ rows, columns, values }, 1), "“Bild” attends most to “picture”: 100 % of its weight.");
});

test("only words that have moved to the end of their clause come last in it", () => {
  const tell = (source, target, links) => {
    const [columns, rows] = [source.split(" "), target.split(" ")];
    const moved = farthest(rows, columns, (row, column) => Number(links[row] === column));
    return tellMove(moved, rows, columns);
  };
  const rest = ["Must she rest near the wood in autumn ?", "Muss sie sich im Herbst in der Nähe des Waldes ausruhen ?", [0, 1, 2, 6, 7, 2, 4, 3, 4, 5, 2, 8]];
  assert.equal(tell(...rest), "“ausruhen” comes last in its clause: it attends to “rest”.");
  const closed = ["As guests closed many grey bottles , he left", "Weil Gäste viele graue Flaschen zugemacht haben , ging er", [0, 1, 3, 4, 5, 2, 2, 6, 8, 7]];
  assert.equal(tell(...closed), "“zugemacht” and “haben” come last in their clause: both attend to “closed”.");
  // “Königinnen” ends the clause, but follows “fünf” in both languages.
  const queens = ["We think of five queens in the morning .", "Wir denken am Morgen an fünf Königinnen .", [0, 1, 5, 7, 2, 3, 4, 8]];
  assert.equal(tell(...queens), "“Morgen” attends to “morning”, 4 tokens later in the source.");
  const hyphen = ["a b c d e - f", "a e - b c d f", [0, 4, 5, 1, 2, 3, 6]]; // a hyphen ends no clause
  assert.equal(tell(...hyphen), "“e” attends to “e”, 3 tokens later in the source.");
});

test("what a box of Flow shows", () => {
  const near = { kind: "self", of: () => undefined };
  const tell = (what, rows, columns, values, at, more = {}) => boxStory({ name: `decoder.self.${what}`, words: [] }, { rows, columns, values }, at, { ...near, ...more });
  const masked = [1, -Infinity, -Infinity, 1, 2, -Infinity, 0, 0, 0];
  const [a, b, c] = ["a", " b", " c"];
  assert.match(tell("masked", [a, b, c], [a, b, c], masked, [0, 0]), /^2 tokens that “a” must not see have a score of −∞/);
  assert.match(tell("masked", [a, b, c], [a, b, c], masked, [1, 2]), /“b” must not see “c”/);
  assert.match(tell("masked", [a, b, c], [a, b, c], masked, [2, 0]), /^The query of “c” fits the key of “a” best: 0/);
  const scaled = [softmax([1, 0]), softmax([4, 0])];
  assert.match(tell("scores", [a], [a, b], [1, 0], [0, 0], { scaled }), /Without √c its weight would be 98.2 %, not 73.1 %/);
  const weights = { rows: [a, b], columns: [a, b], values: [0.25, 0.75, 0.6, 0.4] };
  assert.match(tell("q", [a, b], ["1"], [1, 1], [0, 0], { weights }), /fits the key of “b” best: that token gets 75 %/);
  assert.match(tell("v", [a, b], ["1"], [1, 1], [0, 0], { weights }), /The value of “a” goes most to “b”, with a weight of 60 %/);
  assert.match(tell("mix", [a, b], ["1"], [1, 1], [1, 0], { weights }), /holds 60 % of the value of “a”, 40 % of that of “b”/);
  const output = [0, 4, 3, 0]; // added to x = [1, 0] and [0, 4]
  assert.match(tell("sum", [a, b], ["1", "2"], [1, 4, 3, 4], [0, 0], { of: () => output }), /^Self-attention changes “a” most: it adds a vector of length 4, and ‖x‖ goes from 1 to 4\.1\./);
  assert.match(tell("states", [a, b, c], ["1", "2"], [1, 0, 0, 1, 2, 0.1], [0, 0]), /^“a” and “c” have the most similar vectors/);
  assert.deepEqual(lengthsOf([3, 4, 0, 1], 2), [5, 1]);
  assert.equal(softmax([1000, 0])[0], 1);
});

test("a head is named by the distance at which it looks", () => {
  const back = [255, 0, 0, 255, 0, 0, 0, 255, 0]; // each token attends to the one before it
  const even = [85, 85, 85, 85, 85, 85, 85, 85, 85];
  const offsets = offsetsOf({ shape: [1, 2, 3, 3], values: Uint8Array.from([...back, ...even]) });
  assert.equal(offsets[0][0].get(-1), 1);
  const map = { statistics: { entropy: [[0, Math.log2(3)]], first: [[0.4, 0.33]] }, offsets };
  assert.equal(roleOf(map, 0, 0).name, "1 back 100\u00a0%");
  map.offsets[0][1].forEach((_, distance, shares) => shares.set(distance, 0.1));
  assert.deepEqual(roleOf(map, 0, 1), { name: "3 tokens", does: "spreads its weight over about 3 tokens" });
});

test("colours of the dark theme begin at its panels", () => {
  const before = location.search;
  location.search = "?theme=dark";
  try {
    const light = ([red, green, blue]) => 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    assert.deepEqual(rgb(0, "ink"), [30, 34, 38]);
    for (const [from, to] of [[0, 255], [128, 0], [128, 255]]) {
      const scale = from ? "signed" : "ink";
      assert.ok(light(rgb(to, scale)) > light(rgb(from, scale)) + 100);
    }
    assert.notDeepEqual(rgb(NOTHING, "signed"), rgb(128, "signed"));
  } finally {
    location.search = before;
  }
});
