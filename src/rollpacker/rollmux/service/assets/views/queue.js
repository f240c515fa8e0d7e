// Jobs that wait for nodes, the next one first.

import { at, rows, tiles } from "./dom.js";
import { NONE, about, jobLink, seconds, start, wants } from "./format.js";

function show(status) {
  const waiting = status.jobs.filter((job) => job.queue);
  waiting.sort((one, other) => one.queue.position - other.queue.position);
  const since = waiting.map((job) => status.now - job.queue.since_s);
  const starts = waiting.map((job) => job.queue.starts_in_s).filter((value) => value !== null);
  tiles(at("queue-tiles"), [
    ["jobs waiting", waiting.length],
    ["longest wait", since.length ? seconds(Math.max(...since)) : NONE],
    ["next start expected in", starts.length ? about(Math.min(...starts)) : NONE],
  ]);
  rows(at("queue-jobs"), waiting, (job) => job.id, (job) => [
    job.queue.position, jobLink(job.id), job.spec.team || NONE, job.spec.priority,
    wants(job.spec), seconds(status.now - job.queue.since_s),
    start(job.queue),
    job.queue.reason,
  ], "No job waits.");
}

export const queue = { main: "queue", asks: () => "/v1/status", show };
