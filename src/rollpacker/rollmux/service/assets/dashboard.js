// Chooses a view by the address, asks the daemon and shows what it says; nothing comes from
// elsewhere.

import { ask, hasToken, keepToken, takeToken } from "./api.js";
import { cluster } from "./cluster.js";
import { at } from "./dom.js";
import { remember } from "./format.js";
import { job } from "./job.js";
import { node } from "./node.js";
import { nodes } from "./nodes.js";
import { queue } from "./queue.js";
import { teams } from "./teams.js";
import { Timeline } from "./timeline.js";

const ROUTES = [
  [/^#\/queue$/, queue],
  [/^#\/teams$/, teams],
  [/^#\/nodes$/, nodes],
  [/^#\/nodes\/([^/]+)$/, node],
  [/^#\/jobs\/([^/]+)$/, job],
];
const PAUSE_MS = 1000;
// At most a tenth of the daemon's and the browser's time goes into looking.
const SHARE = 9;

let page = null;
let timer = 0;
let turn = 0;
let shownAt = "";

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function open() {
  const matches = ROUTES.map(([pattern, view]) => [pattern.exec(location.hash), view]);
  const found = matches.find(([match]) => match);
  const [match, view] = found ?? [[], cluster];
  const name = decoded(match[1] ?? "");
  const timeline = view.only ? new Timeline(Number(at("window").value), view.only(name)) : null;
  page = { view, name, timeline, arrived: page !== null };
  document.title = `RollMux: ${name || view.main}`;
  at("span").hidden = !timeline;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.main === view.main) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  refresh();
}

function reveal(name) {
  for (const main of document.querySelectorAll("main, #login")) main.hidden = main.id !== name;
}

function show(found) {
  const start = performance.now();
  for (const phase of page.timeline?.phases.values() ?? []) remember(phase.job, phase.number);
  const jobs = found.jobs ?? (found.spec ? [found] : []);
  for (const each of [...jobs, ...(found.ended ?? [])]) remember(each.id, each.number);
  if (found.jobs) at("waiting").textContent = found.jobs.filter((each) => each.queue).length || "";
  page.view.show(found, page.timeline);
  reveal(page.view.main);
  at("banner").hidden = true;
  shownAt = new Date().toLocaleTimeString();
  // Whoever followed a link by keyboard goes on from the page's heading.
  if (page.arrived) document.querySelector("main:not([hidden]) h2").focus();
  page.arrived = false;
  performance.clearMeasures("show");
  performance.measure("show", { start });
}

async function refresh() {
  clearTimeout(timer);
  turn += 1;
  const mine = turn;
  const began = performance.now();
  try {
    const answers = await Promise.all([ask(page.view.asks(page.name)), page.timeline?.update()]);
    if (mine !== turn) return;
    show(answers[0]);
  } catch (error) {
    if (mine !== turn) return;
    complain(error);
  }
  const took = performance.now() - began;
  if (!document.hidden) timer = setTimeout(refresh, Math.max(PAUSE_MS, SHARE * took));
}

function complain(error) {
  if (error.status === 401) {
    at("login-error").textContent = hasToken() ? "This token is not valid." : "";
    reveal("login");
    return;
  }
  const gone = error.status === 404;
  if (gone) reveal("");
  const since = shownAt && !gone ? ` Shown: the state of ${shownAt}.` : "";
  const what = error instanceof TypeError ? "No answer from the daemon." : `${error.message}.`;
  at("banner").textContent = what + since;
  at("banner").hidden = false;
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(at("token").value.trim());
  refresh();
});
at("window").addEventListener("change", open);
addEventListener("hashchange", () => { takeToken(); open(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
takeToken();
open();
