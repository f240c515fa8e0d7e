// One node: what it is, who is on it, what ran there.

import { at, rows, tiles } from "./dom.js";
import { NONE, jobLink, seconds } from "./format.js";
import { Gantt } from "./gantt.js";
import { memoryBar, reported, statusPart, usedGb } from "./nodes.js";

const gantt = new Gantt(at("node-gantt"));

function show(node, timeline) {
  at("node-name").textContent = node.name;
  const status = statusPart(node);
  tiles(at("node-tiles"), [
    ["pool", node.pool ?? NONE],
    ["state", node.state],
    ["status", status.text, status.className.replace("badge", "")],
    ...(node.status_s == null ? [] : [["since", `${seconds(node.status_s)} ago`]]),
    ...(node.why ? [["reason", node.why]] : []),
    ["memory used", `${usedGb(node).toFixed(0)} of ${node.total_gb.toFixed(0)} GB`],
    ["agent", reported(node)],
    ...(node.group === null ? [] : [["group", node.group]]),
  ]);
  memoryBar(at("node-memory"), node);
  rows(at("node-jobs"), Object.entries(node.memory_gb), ([job]) => job,
    ([job, gb]) => [jobLink(job), `${gb.toFixed(0)} GB`], "No job is on it.");
  const here = [...timeline.phases].map(([token, phase]) => [
    token, { ...phase, nodes: [node.name] },
  ]);
  gantt.draw([node.name], { ...timeline, phases: new Map(here) });
  const machine = Object.entries(node.machine ?? {});
  rows(at("node-machine"), machine, ([name]) => name, ([name, value]) => [
    name, typeof value === "object" ? JSON.stringify(value) : value,
  ], "A rented node, like all others of its pool.");
}

export const node = {
  main: "node",
  asks: (name) => `/v1/nodes/${encodeURIComponent(name)}`,
  only: (name) => `node=${encodeURIComponent(name)}`,
  show,
};
