// A query meets a key: channel by channel what q · k is made of, and what weight came of it.

import { Bars } from "./bars.js";
import { element, labelled, percent, plain, render, select, shown, visible } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { change } from "./state.js";

const MOST = 3; // channels in the sentence
const KEYS = 8; // bars

export class QueryKey {
  constructor() {
    this.map = new HeatMap();
    this.bars = new Bars({ kind: "weights-of" });
    this.choice = element("div", { class: "controls" });
    this.sum = element("p", { class: "formula", role: "status" });
    const note = "A mask, a bias by position and another score than the dot product come on top where the model has them.";
    this.root = element("div", {}, this.choice, this.map.root, this.sum, this.bars.root, element("p", { class: "note" }, note));
  }

  /**
   * @param {import("./heatmap.js").Matrix & {weights: any, queries: any, keys: any}} head
   * @param {[number, number]} at the query and the key
   */
  show(head, [row, column]) {
    const { rows, columns, weights, queries, keys } = head;
    const [query, key] = [Math.min(row, rows.length - 1), Math.min(column, columns.length - 1)];
    const choices = [
      labelled("Query", this.choiceOf(rows, query, (value) => `${value},${key}`)),
      labelled("Key", this.choiceOf(columns, key, (value) => `${query},${value}`)),
    ];
    render(choices, this.choice);
    const channels = queries.shape.at(-1);
    if (keys.shape[0] !== columns.length || keys.shape[1] !== channels) {
      this.map.root.hidden = true;
      this.bars.root.hidden = true;
      this.sum.textContent = "This attention transforms its keys, so q · k is not defined for a single key.";
      return;
    }
    const q = queries.values.subarray(query * channels, (query + 1) * channels);
    const k = keys.values.subarray(key * channels, (key + 1) * channels);
    const products = q.map((value, at) => value * k[at]);
    const values = Float32Array.from([...q, ...k, ...products]);
    const most = values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 1e-9);
    this.map.show({
      name: `${head.name}-qk`,
      title: `${head.title}: “${plain(rows[query])}” meets “${plain(columns[key])}”`,
      insight: channelStory(products),
      rows: ["q", "k", "q × k"],
      columns: Array.from({ length: channels }, (_, at) => String(at + 1)),
      values,
      low: -most,
      high: most,
      says: (what, channel, value) => `${what}, channel ${channel}: ${value}`,
    });
    const dot = sumOf(products);
    const weight = weights.values[query * columns.length + key];
    this.sum.textContent =
      `q · k = ${shown(dot)};  q · k ⁄ √${channels} = ${shown(dot / Math.sqrt(channels))};  weight after the softmax = ${percent(weight)}`;
    const bars = columns.map((label, at) => ({ label, values: [weights.values[query * columns.length + at]], strong: at === key }));
    this.bars.name = `${head.name}-weights`;
    this.bars.show(bars.sort((one, other) => other.values[0] - one.values[0]).slice(0, KEYS), `Weights of “${plain(rows[query])}” after the softmax`);
  }

  choiceOf(labels, chosen, cell) {
    const options = labels.map((label, at) => [String(at), `${at + 1} ${visible(label)}`]);
    return select(options, String(chosen), (value) => change({ cell: cell(value) }, { replace: true }));
  }
}

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

/** The channels that carry a score: those whose products are greatest in its direction. @param {Float32Array} products */
function channelStory(products) {
  const dot = sumOf(products);
  const order = Array.from(products.keys()).sort((one, other) => (dot < 0 ? products[one] - products[other] : products[other] - products[one])).slice(0, MOST);
  const names = order.map((at) => String(at + 1)).join(", ").replace(/, (\d+)$/, " and $1");
  const side = dot < 0 ? "against each other" : "towards each other";
  return `Channels ${names} pull query and key most ${side}: ${shown(sumOf(order.map((at) => products[at])))}, of q · k = ${shown(dot)} in all.`;
}
