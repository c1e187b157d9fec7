// Run the scripts of a report: `node report_charts.js LANGUAGE < scripts.json`, a list with uPlot and then our script.
// Print one line of JSON: the type of uPlot, and for some values [least, most] the bounds of the vertical axis.
"use strict";
const fs = require("fs");
const vm = require("vm");

const [library, ours] = JSON.parse(fs.readFileSync(0, "utf8"));
const nothing = () => {};
const events = { addEventListener: nothing, removeEventListener: nothing };
const element = (fields) => ({ ...events, classList: { add: nothing }, remove: nothing, ...fields });
const line = { colour: 0, x: [1, 2], y: [0, 0] };
const parts = {
  script: { textContent: JSON.stringify({ axis: "env steps", lines: [line] }) },
  ".plot": element({ clientWidth: 300, clientHeight: 200 }),
  ".readout": element({ textContent: "0" }),
};
const figure = element({ querySelector: (name) => parts[name] });
const controls = element({ hidden: true, querySelector: () => element({ value: "0" }) });
const scope = {
  ...events,
  Intl,
  console,
  devicePixelRatio: 1,
  navigator: Object.create({ language: process.argv[2] }),
  matchMedia: () => element({}),
  getComputedStyle: () => ({ stroke: "#000", getPropertyValue: () => "#000" }),
  ResizeObserver: class { observe() {} },
  CustomEvent: class {},
  dispatchEvent: nothing,
  document: {
    ...events,
    body: { append: nothing },
    documentElement: {},
    querySelector: () => controls,
    querySelectorAll: () => [figure],
    createElementNS: () => element({ firstChild: element({}) }),
  },
};
scope.window = scope;
vm.createContext(scope);
try {
  vm.runInContext(library, scope);
} catch (error) {
  console.error(String(error));
}
const kind = typeof scope.uPlot;
let drawn = null;
if (kind === "function") {
  const { rangeNum, join } = scope.uPlot;
  scope.uPlot = Object.assign(function (options) { drawn = options; }, { rangeNum, join });
}
vm.runInContext(ours, scope);
const range = drawn?.scales.y?.range ?? (() => null);
const bounds = [[0, 0], [0, 4], [null, null]].map(([least, most]) => range({}, least, most));
console.log(JSON.stringify({ kind, bounds, shown: !controls.hidden }));
