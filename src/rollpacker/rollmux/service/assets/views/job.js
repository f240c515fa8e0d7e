// One job: where it stands, what it waits for, its phases.

import { at, differs, make, rows, tiles } from "./dom.js";
import {
  NONE, colour, nodeLink, ofTotal, outcome, placeOf, seconds, slack, spaced, start, times, wants,
} from "./format.js";
import { Gantt, room, svg } from "./gantt.js";

const gantt = new Gantt(at("job-gantt"));
const LISTED = 30, REMEMBERED = 60;

function standing(job) {
  const found = [
    ["state", job.state],
    ["iterations", ofTotal(job)],
    ["group", job.group ?? NONE],
    ["since its arrival", seconds(job.elapsed_s)],
    ["of that, not counted", seconds(job.uncounted_s)],
    ["alone so far", seconds(job.solo_s)],
    ["slowdown", times(job.slowdown)],
    ["SLO", times(job.spec.slo)],
    ["SLO slack", slack(job).text, slack(job).className],
  ];
  if (job.outcome) found.splice(1, 0, ["outcome", outcome(job).text, outcome(job).className]);
  if (job.permit) found.push(["permit", `${job.permit.token} (${job.permit.phase})`]);
  if (job.move) found.push(["move", job.move.reason, "warn"]);
  return found;
}

function placeRows(job) {
  const team = job.spec.team || NONE;
  const found = [["asks for", wants(job.spec)], ["team", team], ["nodes", placeOf(job)]];
  if (job.move) {
    const nodes = [...job.move.rollout, ...job.move.train];
    found.push(["moves to", spaced(nodes.map(nodeLink))]);
  }
  if (!job.queue) return found;
  return [
    ...found,
    ["waits for nodes", `place ${job.queue.position} of ${job.queue.of}: ${job.queue.reason}`],
    ["expected to start", start(job.queue)],
  ];
}

// The last phases, and how long the job had none before each.
function phaseRows(timeline) {
  const phases = [...timeline.phases.values()].sort((one, other) => one.start - other.start);
  const found = phases.map((phase, index) => {
    const before = phases[index - 1];
    const gap = before && before.end !== null ? phase.start - before.end : null;
    const took = (phase.end ?? timeline.now) - phase.start;
    return { ...phase, gap, took, ago: timeline.now - phase.start };
  });
  return found.reverse().slice(0, LISTED);
}

function showRecent(job) {
  const place = at("job-recent");
  if (!differs(place, [job.id, job.recent_s, room()])) return;
  if (!job.recent_s.length) {
    place.replaceChildren(make("p", "None yet, or the job has ended.", "none"));
    return;
  }
  const most = Math.max(...job.recent_s.map(([rollout, train]) => rollout + train));
  const chart = svg("svg", { viewBox: `0 0 ${room()} 110`, role: "img" });
  const step = room() / REMEMBERED;
  job.recent_s.forEach(([rollout, train], index) => {
    const low = (100 * rollout) / most, high = (100 * train) / most;
    const box = { x: index * step, width: step - 3, fill: colour(job.id) };
    const one = svg("rect", { ...box, y: 105 - low, height: low });
    one.append(svg("title", {}, `rollout ${seconds(rollout)}, training ${seconds(train)}`));
    chart.append(one, svg("rect", { ...box, y: 105 - low - high, height: high, opacity: 0.5 }));
  });
  place.replaceChildren(chart);
}

const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : value);

function show(job, timeline) {
  at("job-name").textContent = job.id;
  tiles(at("job-tiles"), standing(job));
  rows(at("job-place"), placeRows(job), ([name]) => name, (row) => row, "");
  gantt.draw([...job.rollout_nodes, ...job.train_nodes], timeline);
  rows(at("job-phases"), phaseRows(timeline), (phase) => phase.token, (phase) => [
    phase.phase, spaced(phase.nodes.map(nodeLink)), `${seconds(phase.ago)} ago`,
    seconds(phase.gap), seconds(phase.took),
    { text: phase.outcome, className: phase.outcome === "lost" ? "bad" : "" }, phase.token,
  ], "None in this time.");
  showRecent(job);
  rows(at("job-spec"), Object.entries(job.spec), ([name]) => name,
    ([name, value]) => [name, value === null || value === "" ? NONE : plain(value)], "");
}

export const job = {
  main: "job",
  asks: (name) => `/v1/jobs/${encodeURIComponent(name)}`,
  only: (name) => `job=${encodeURIComponent(name)}`,
  show,
};
