// All nodes, by pool and rack.

import { at, bar, differs, fill, keyed, make, tiles } from "./dom.js";
import { colour, jobLink, nodeLink, seconds, spaced } from "./format.js";

const STATUS = {
  open: "good", cordoned: "warn", draining: "warn", drained: "warn", set_aside: "bad", down: "bad",
};
const WORDS = { set_aside: "set aside" };
const POOL_TITLES = { rollout: "Rollout nodes", train: "Training nodes" };

export const statusOf = (node) => node.status ?? (node.state === "failed" ? "down" : "open");
export const statusPart = (node) => {
  const status = statusOf(node);
  return { text: WORDS[status] ?? status, className: `badge ${STATUS[status] ?? ""}` };
};
export const usedGb = (node) => Object.values(node.memory_gb).reduce((sum, gb) => sum + gb, 0);
export const reported = (node) =>
  (node.reported_s === null ? "no agent" : `reported ${seconds(node.reported_s)} ago`);

export function memoryBar(place, node) {
  bar(place, Object.entries(node.memory_gb).map(([job, gb]) => ({
    share: gb / node.total_gb, colour: colour(job), title: `${job}: ${gb.toFixed(0)} GB`,
  })));
}

function card() {
  const made = make("li", null, "card");
  const [head, agent] = [make("p", null, "head"), make("p", null, "none")];
  made.append(head, make("div", null, "bar"), make("p"), make("p"), agent);
  return made;
}

function showCard(made, node) {
  const [head, memory, room, jobs, agent] = made.children;
  const name = { ...nodeLink(node.name), className: "name" };
  fill(head, [name, " ", statusPart(node), ` ${node.state}`]);
  memoryBar(memory, node);
  const count = node.machine?.devices;
  const devices = count ? `, ${count} device${count > 1 ? "s" : ""}` : "";
  fill(room, [`${usedGb(node).toFixed(0)} of ${node.total_gb.toFixed(0)} GB${devices}`]);
  fill(jobs, spaced(Object.keys(node.memory_gb).map(jobLink)));
  fill(agent, [node.why ? `${node.why}; ${reported(node)}` : reported(node)]);
}

function section() {
  const made = make("section");
  made.append(make("h3"), make("ul", null, "cards"));
  return made;
}

function byRack(nodes) {
  const found = new Map();
  for (const node of nodes) {
    const key = JSON.stringify([node.pool, node.machine?.rack ?? ""]);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(node);
  }
  return [...found.entries()].sort(([one], [other]) => one.localeCompare(other));
}

function show(status) {
  const counts = new Map();
  for (const node of status.nodes) {
    const word = WORDS[statusOf(node)] ?? statusOf(node);
    counts.set(word, (counts.get(word) ?? 0) + 1);
  }
  tiles(at("nodes-tiles"), [["nodes", status.nodes.length], ...counts]);
  at("nodes-none").hidden = status.nodes.length > 0;
  keyed(at("nodes-racks"), byRack(status.nodes), ([key]) => key, section, (made, [key, nodes]) => {
    const [pool, rack] = JSON.parse(key);
    const title = POOL_TITLES[pool] + (rack ? `, rack ${rack}` : "");
    if (differs(made, title)) made.firstChild.textContent = title;
    keyed(made.lastChild, nodes, (node) => node.name, card, showCard);
  });
}

export const nodes = { main: "nodes", asks: () => "/v1/status", show };
