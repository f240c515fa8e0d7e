// Numbers as people read them, and the colours of jobs.

export const NONE = "–";

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 120) return `${value.toFixed(size < 10 ? 1 : 0)} s`;
  if (size < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

// When a job that waits is expected to start, and what chance makes of it.
export function start(queue) {
  if (queue.starts_in_s === null) return "unknown";
  const when = `in ${about(queue.starts_in_s)}`;
  if (queue.starts_between_s === null) return when;
  const [least, most] = queue.starts_between_s;
  const from = about(least), to = most === null ? "never" : about(most);
  return from === to ? when : `${when} (${from} to ${to})`;
}

// What is only expected has no seconds.
export function about(value) {
  return value < 7200 ? `${Math.max(Math.round(value / 60), 1)} min` : seconds(value);
}

export const money = (value) => `$${value.toFixed(2)}/h`;
export const times = (value) => (value === null ? NONE : `${value.toFixed(2)}×`);
export const count = (value) => String(Math.round(value * 10) / 10);

// The same job has the same colour everywhere; neighbours by arrival differ most. White text is
// readable on all of them.
const numbers = new Map();

export const remember = (job, number) => numbers.set(job, number);

export function colour(job) {
  const number = numbers.get(job) ?? 0;
  const hue = (number * 137.508 + 210) % 360;
  return `oklch(${46 + (number % 2) * 10}% ${0.1 + (number % 3) * 0.03} ${hue})`;
}

// What a view shows of a job in a table: text and links, see dom.js.
export const jobLink = (job) => ({
  text: job, href: `#/jobs/${encodeURIComponent(job)}`, dot: colour(job),
});
export const nodeLink = (node) => ({ text: node, href: `#/nodes/${encodeURIComponent(node)}` });

export function spaced(parts) {
  return parts.length ? parts.flatMap((part, index) => (index ? [" ", part] : [part])) : [NONE];
}

export function ofTotal(job) {
  const { iterations, expected_iterations: expected } = job.spec;
  if (iterations) return `${job.done} / ${iterations}`;
  return expected ? `${job.done} / about ${expected}` : `${job.done}`;
}
export const placeOf = (job) => spaced([...job.rollout_nodes, ...job.train_nodes].map(nodeLink));

const SLO_CLASSES = { kept: "good", near: "warn", behind: "warn", missed: "bad" };
export const slack = (job) => ({
  text: `${seconds(job.slo_slack_s)}, ${job.slo_state}`, className: SLO_CLASSES[job.slo_state],
});

// How a job ended, and its program's exit code where that says why.
export function outcome(job) {
  const code = job.program?.attempts.at(-1)?.code;
  const failed = job.outcome === "failed";
  const className = { failed: "bad", done: "good" }[job.outcome] ?? "";
  return { text: job.outcome + (failed && code ? ` (exit code ${code})` : ""), className };
}

// What a job asks for, and what its nodes must have.
export function wants(spec) {
  const labels = (found) =>
    Object.entries(found).map(([key, value]) => ` ${key}=${value}`).join("");
  const devices = spec.node_devices > 1 ? `, of ${spec.node_devices} devices` : "";
  const rollout = `${spec.rollout_nodes} rollout${labels(spec.rollout_labels)}`;
  return `${rollout} + ${spec.train_nodes} train${labels(spec.train_labels)}${devices}`;
}
