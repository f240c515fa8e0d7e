"use strict";
// Asks the daemon once a second and shows what it says; nothing comes from elsewhere.

const at = (id) => document.getElementById(id);
let timer = 0;
let shown = "";

function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function takeToken() {
  const found = /^#token=([\x21-\x7e]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem("token", decodeURIComponent(found[1]));
  history.replaceState(null, "", "/#/");
}

async function ask(path) {
  const token = sessionStorage.getItem("token") || "";
  const headers = { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new Error("token");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function tiles(place, pairs) {
  place.replaceChildren(...pairs.map(([name, value, className]) => {
    const tile = make("div", null, "tile");
    tile.append(make("b", value, className), make("span", name));
    return tile;
  }));
}

function jobLink(job) {
  const link = make("a", job);
  link.href = `#/job/${encodeURIComponent(job)}`;
  const dot = make("span", null, "dot");
  dot.style.background = colour(job);
  const both = make("span");
  both.append(dot, link);
  return both;
}

function rows(place, items, cells, empty) {
  const made = items.map((item) => {
    const row = make("tr");
    for (const cell of cells(item)) {
      const data = make("td");
      data.append(cell instanceof Node ? cell : String(cell));
      row.append(data);
    }
    return row;
  });
  if (!made.length) {
    const row = make("tr");
    const data = make("td", empty, "none");
    data.colSpan = 8;
    row.append(data);
    made.push(row);
  }
  place.replaceChildren(...made);
}

const money = (value) => `$${value.toFixed(2)}/h`;
const times = (value) => (value === null ? "–" : `${value.toFixed(2)}×`);
const ofTotal = (job) => (job.spec.iterations ? `${job.done} / ${job.spec.iterations}` : job.done);

const SLO_CLASSES = { kept: "good", near: "warn", behind: "warn", missed: "bad" };
const slack = (job) =>
  make("span", `${seconds(job.slo_slack_s)} ${job.slo_state}`, SLO_CLASSES[job.slo_state]);

function showCluster(status, timeline, windowS) {
  const cost = status.cost_per_h;
  const saved = cost.solo > 0 ? `${(cost.solo / Math.max(cost.now, 0.01)).toFixed(2)}×` : "–";
  const held = (pool) => status.nodes.filter((node) => node.pool === pool).length;
  tiles(at("tiles"), [
    ["cost now", money(cost.now)],
    ["every job alone", money(cost.solo)],
    ["cheaper by", saved, cost.solo > cost.now ? "good" : ""],
    ["live jobs", status.jobs.length],
    ["groups", status.groups.length],
    ["rollout nodes", held("rollout")],
    ["training nodes", held("train")],
    ...(status.draining ? [["no new jobs", "draining", "warn"]] : []),
  ]);
  gantt(at("gantt"), status.nodes, timeline, windowS);
  rows(at("jobs"), status.jobs, (job) => [
    jobLink(job.id), job.state, job.group ?? "–",
    [...job.rollout_nodes, ...job.train_nodes].join(" "), ofTotal(job),
    times(job.slowdown), times(job.spec.slo), slack(job),
  ], "No live jobs: rollpacker mux submit job.json");
  rows(at("groups"), status.groups, (group) => {
    const names = make("span");
    for (const job of group.jobs) names.append(jobLink(job), " ");
    return [group.id, group.epoch, names, group.rollout.join(" "), group.train.join(" ")];
  }, "No groups.");
  showResidency(status);
  rows(at("ended"), [...status.ended].reverse(), (job) => [
    jobLink(job.id), ofTotal(job), seconds(job.elapsed_s), seconds(job.solo_s),
    make("span", times(job.slowdown), job.slowdown > job.spec.slo ? "bad" : "good"), times(job.spec.slo),
  ], "None yet.");
}

function showResidency(status) {
  const lines = status.nodes.map((node) => {
    const row = make("div", null, "node");
    const memory = make("div", null, "memory");
    let total = 0;
    for (const [job, gb] of Object.entries(node.memory_gb)) {
      const part = make("i");
      part.style.width = `${(100 * gb) / status.memory_cap_gb}%`;
      part.style.background = colour(job);
      part.title = `${job}: ${gb.toFixed(0)} GB`;
      memory.append(part);
      total += gb;
    }
    const state = node.state === "held" ? "" : `, ${node.state}`;
    row.append(make("span", node.name), memory,
      make("span", `${total.toFixed(0)} of ${status.memory_cap_gb.toFixed(0)} GB${state}`, "none"));
    return row;
  });
  at("residency").replaceChildren(...(lines.length ? lines : [line("No node is held.")]));
}

function showJob(job, timeline, windowS) {
  at("job-name").textContent = job.id;
  tiles(at("job-tiles"), [
    ["state", job.state],
    ["iterations", ofTotal(job)],
    ["group", job.group ?? "–"],
    ["since its arrival", seconds(job.elapsed_s)],
    ["alone so far", seconds(job.solo_s)],
    ["slowdown", times(job.slowdown)],
    ["promised", times(job.spec.slo)],
    ["SLO slack", `${seconds(job.slo_slack_s)} ${job.slo_state}`, SLO_CLASSES[job.slo_state]],
    ...(job.permit ? [["permit", `${job.permit.token} (${job.permit.phase})`]] : []),
    ...(job.move ? [["move", job.move.reason, "warn"]] : []),
  ]);
  const nodes = [...job.rollout_nodes, ...job.train_nodes].map((name) => ({ name }));
  const own = timeline.phases.filter((phase) => phase.job === job.id);
  gantt(at("job-gantt"), nodes, { now: timeline.now, phases: own }, windowS);
  showRecent(job);
  rows(at("job-spec"), Object.entries(job.spec), ([name, value]) => [name, value ?? "–"], "");
}

function showRecent(job) {
  if (!job.recent_s.length) {
    at("job-recent").replaceChildren(line("None yet, or the job has ended."));
    return;
  }
  const most = Math.max(...job.recent_s.map(([r, t]) => r + t));
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} 110`, role: "img" });
  const step = WIDTH / 60;
  job.recent_s.forEach(([rollout, train], index) => {
    const x = index * step;
    const low = (100 * rollout) / most, high = (100 * train) / most;
    const one = svg("rect", { x, y: 105 - low, width: step - 3, height: low, fill: colour(job.id) });
    one.append(svg("title", {}, `rollout ${seconds(rollout)}, training ${seconds(train)}`));
    const two = { x, y: 105 - low - high, width: step - 3, height: high, opacity: 0.5 };
    chart.append(one, svg("rect", { ...two, fill: colour(job.id) }));
  });
  at("job-recent").replaceChildren(chart);
}

function view(name) {
  for (const id of ["login", "cluster", "job"]) at(id).hidden = id !== name;
}

async function refresh() {
  clearTimeout(timer);
  const windowS = Number(at("window").value);
  const page = /^#\/job\/(.+)$/.exec(location.hash);
  try {
    const what = page ? `/v1/jobs/${page[1]}` : "/v1/status";
    const [found, timeline] = await Promise.all([ask(what), ask(`/v1/timeline?window_s=${windowS}`)]);
    for (const phase of timeline.phases) numbers.set(phase.job, phase.number);
    for (const job of [...(found.jobs ?? [found]), ...(found.ended ?? [])]) numbers.set(job.id, job.number);
    (page ? showJob : showCluster)(found, timeline, windowS);
    view(page ? "job" : "cluster");
    at("banner").hidden = true;
    shown = new Date().toLocaleTimeString();
  } catch (error) {
    complain(error);
  }
  timer = setTimeout(refresh, 1000);
}

function complain(error) {
  if (error.message === "token") {
    at("login-error").textContent = sessionStorage.getItem("token") ? "This token is not valid." : "";
    view("login");
    return;
  }
  const since = shown ? ` Shown: the state of ${shown}.` : "";
  const what = error instanceof TypeError ? "No answer from the daemon." : `${error.message}.`;
  at("banner").textContent = what + since;
  at("banner").hidden = false;
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value.trim());
  refresh();
});
at("window").addEventListener("change", refresh);
addEventListener("hashchange", () => { takeToken(); refresh(); });
takeToken();
refresh();
