// What each team is guaranteed, has and has borrowed.

import { at, bar, fill, keyed, make } from "./dom.js";
import { NONE, count } from "./format.js";

const POOLS = ["rollout", "train"];
const PARTS = ["team", "rollout", "train", "jobs"];

// Bars of a pool have one scale: the most that a team has or is guaranteed.
const scaleOf = (teams, pool) =>
  Math.max(1, ...teams.map((team) => Math.max(team.used[pool], team.guaranteed[pool])));

function create() {
  const row = make("tr");
  for (const part of PARTS) {
    const cell = make("td");
    if (POOLS.includes(part)) cell.append(make("div", null, "bar"), make("span"));
    row.append(cell);
  }
  return row;
}

function showPool(cell, team, pool, scale) {
  const used = team.used[pool], borrowed = team.borrowed[pool], owned = team.guaranteed[pool];
  bar(cell.firstChild, [
    { share: (used - borrowed) / scale, className: "own", title: `own: ${count(used - borrowed)}` },
    { share: borrowed / scale, className: "borrowed", title: `borrowed: ${count(borrowed)}` },
  ], owned / scale);
  const more = borrowed ? `, ${count(borrowed)} borrowed` : "";
  fill(cell.lastChild, [`${count(used)} used of ${count(owned)} guaranteed${more}`]);
}

function shareOf(team) {
  const owns = POOLS.some((pool) => team.guaranteed[pool] > 0);
  return owns ? `${count(100 * team.share)}% of its share` : "no guarantee";
}

function standing(team) {
  if (!team.jobs.waiting) return NONE;
  const owed = team.owed ? "owed nodes" : "would borrow";
  return `${owed}; highest waiting priority ${team.priority}`;
}

function show(status) {
  const scales = POOLS.map((pool) => scaleOf(status.teams, pool));
  at("teams-none").hidden = status.teams.length > 0;
  at("teams-table").hidden = status.teams.length === 0;
  keyed(at("teams-rows"), status.teams, (team) => team.name, create, (row, team) => {
    const name = { text: team.name || "jobs of no team", className: "name" };
    fill(row.cells[0], [name, { text: shareOf(team), className: "under" }]);
    POOLS.forEach((pool, index) => showPool(row.cells[1 + index], team, pool, scales[index]));
    const jobs = `${team.jobs.placed} with nodes, ${team.jobs.waiting} waiting`;
    fill(row.cells[3], [{ text: jobs }, { text: standing(team), className: "under" }]);
  });
}

export const teams = { main: "teams", asks: () => "/v1/status", show };
