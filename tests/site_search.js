// Ask the search of a built site: `node site_search.js SITE QUERY...` prints one line of JSON for each query.
// The search worker of the site itself runs here as in a browser, on the site's own index.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = path.join(site, "assets", "javascripts", "workers");
const SETUP = 0; // types of the worker's messages
const QUERY = 2;
let receive; // the worker's listener for messages
let answered; // takes the worker's answer

const scope = {
  console,
  addEventListener: (_, listener) => { receive = listener; },
  postMessage: (message) => answered(message),
  importScripts: (...names) => names.forEach((name) => run(path.join(workers, name))),
};
scope.self = scope;
vm.createContext(scope);

function run(file) {
  vm.runInContext(fs.readFileSync(file, "utf8"), scope, { filename: file });
}

function ask(type, data) {
  return new Promise((resolve) => {
    answered = resolve;
    receive({ data: { type, data } });
  });
}

async function main() {
  run(path.join(workers, fs.readdirSync(workers).find((name) => name.endsWith(".min.js"))));
  const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));
  await ask(SETUP, { ...index, options: { suggest: false } });
  for (const query of queries) {
    const { data } = await ask(QUERY, query);
    // A group is a page: its best section first, where a section is the hit
    const hits = data.items.map((group) => group[0].location);
    console.log(JSON.stringify({ query, hits }));
  }
}

main();
