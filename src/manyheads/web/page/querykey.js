// A query meets a key: channel by channel what q · k is made of, and what weight came of it.

import { element, labelled, render, select, percent, shown, visible } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { change } from "./state.js";

export class QueryKey {
  constructor() {
    this.map = new HeatMap();
    this.choice = element("div", { class: "controls" });
    this.sum = element("p", { class: "formula", role: "status" });
    const note = "A mask, a bias by position and another score than the dot product come on top where the model has them.";
    this.root = element("div", {}, this.choice, this.map.root, this.sum, element("p", { class: "note" }, note));
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
      title: `${head.title}: “${visible(rows[query])}” meets “${visible(columns[key])}”`,
      rows: ["q", "k", "q × k"],
      columns: Array.from({ length: channels }, (_, at) => String(at + 1)),
      values,
      low: -most,
      high: most,
      says: (what, channel, value) => `${what}, channel ${channel}: ${value}`,
    });
    const dot = products.reduce((sum, value) => sum + value, 0);
    const weight = weights.values[query * columns.length + key];
    this.sum.textContent =
      `q · k = ${shown(dot)};  q · k ⁄ √${channels} = ${shown(dot / Math.sqrt(channels))};  weight after the softmax = ${percent(weight)}`;
  }

  choiceOf(labels, chosen, cell) {
    const options = labels.map((label, at) => [String(at), `${at + 1} ${visible(label)}`]);
    return select(options, String(chosen), (value) => change({ cell: cell(value) }, { replace: true }));
  }
}
