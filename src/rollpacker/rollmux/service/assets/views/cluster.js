// The whole cluster: who runs where, groups, memory, what has ended.

import { at, bar, fill, keyed, make, rows, tiles } from "./dom.js";
import {
  NONE, colour, jobLink, money, nodeLink, ofTotal, outcome, placeOf, seconds, slack, spaced, times,
} from "./format.js";
import { Gantt } from "./gantt.js";

const gantt = new Gantt(at("gantt"));

// An owner's nodes cost nothing by the hour; a cloud's are there only while they are held.
function numbersOf(status) {
  const used = status.nodes.filter((node) => node.group !== null);
  const both = [
    ["live jobs", status.jobs.length],
    ["groups", status.groups.length],
    ...(status.draining ? [["no new jobs", "draining", "warn"]] : []),
  ];
  const inPool = (nodes, pool) => nodes.filter((node) => node.pool === pool).length;
  if (status.named) {
    const closed = status.nodes.filter((node) => node.status !== "open").length;
    const share = (pool) => `${inPool(used, pool)} of ${inPool(status.nodes, pool)}`;
    return [
      ["rollout nodes used", share("rollout")],
      ["training nodes used", share("train")],
      ["nodes closed", closed, closed ? "warn" : ""],
      ["jobs waiting", status.jobs.filter((job) => job.queue).length],
      ...both,
    ];
  }
  const cost = status.cost_per_h;
  const saved = cost.solo > 0 ? `${(cost.solo / Math.max(cost.now, 0.01)).toFixed(2)}×` : NONE;
  return [
    ["cost now", money(cost.now)],
    ["every job alone", money(cost.solo)],
    ["cheaper by", saved, cost.solo > cost.now ? "good" : ""],
    ["rollout nodes", inPool(status.nodes, "rollout")],
    ["training nodes", inPool(status.nodes, "train")],
    ...both,
  ];
}

// Host memory on every node; named ones have a page of their own.
function showResidency(status) {
  at("residency-section").hidden = status.named;
  if (status.named) return;
  const create = () => {
    const row = make("div", null, "resident");
    row.append(make("span"), make("div", null, "bar"), make("span", null, "none"));
    return row;
  };
  keyed(at("residency"), status.nodes, (node) => node.name, create, (row, node) => {
    const jobs = Object.entries(node.memory_gb);
    fill(row.children[0], [nodeLink(node.name)]);
    bar(row.children[1], jobs.map(([job, gb]) => ({
      share: gb / node.total_gb, colour: colour(job), title: `${job}: ${gb.toFixed(0)} GB`,
    })));
    const total = jobs.reduce((sum, [, gb]) => sum + gb, 0);
    const state = node.state === "held" ? "" : `, ${node.state}`;
    fill(row.children[2], [`${total.toFixed(0)} of ${node.total_gb.toFixed(0)} GB${state}`]);
  });
}

function show(status, timeline) {
  tiles(at("tiles"), numbersOf(status));
  const used = status.nodes.filter((node) => node.group !== null || !status.named);
  gantt.draw(used.map((node) => node.name), timeline);
  rows(at("jobs"), status.jobs, (job) => job.id, (job) => [
    jobLink(job.id), job.state, job.group ?? NONE, placeOf(job), ofTotal(job),
    times(job.slowdown), times(job.spec.slo), slack(job),
  ], "No live jobs: rollpacker mux submit job.json");
  rows(at("groups"), status.groups, (group) => group.id, (group) => [
    group.id, group.epoch, spaced(group.jobs.map(jobLink)),
    spaced(group.rollout.map(nodeLink)), spaced(group.train.map(nodeLink)),
  ], "No groups.");
  showResidency(status);
  rows(at("ended"), [...status.ended].reverse(), (job) => job.id, (job) => [
    jobLink(job.id), outcome(job), ofTotal(job), seconds(job.elapsed_s), seconds(job.solo_s),
    { text: times(job.slowdown), className: job.slowdown > job.spec.slo ? "bad" : "good" },
    times(job.spec.slo),
  ], "None yet.");
}

export const cluster = { main: "cluster", asks: () => "/v1/status", only: () => "", show };
