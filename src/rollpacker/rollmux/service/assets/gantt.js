// Who ran where: one lane for each node, one bar for each phase.

import { colour, seconds } from "./format.js";
import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE = 24, TOP = 20;

// A picture as wide as the page, so that its text has one size on every screen.
export const room = () => Math.min(document.documentElement.clientWidth - 40, 1160);

export function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function lanes(nodes, phases) {
  const names = new Set(nodes);
  for (const phase of phases) for (const node of phase.nodes) names.add(node);
  return [...names].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
}

// Bars stand at their times on a sheet that moves to the left; only what runs, or leaves the
// picture, is drawn again.
export class Gantt {
  constructor(place) {
    this.place = place;
    this.bars = new Map();
    this.drawnFor = "";
  }

  draw(nodes, timeline) {
    const phases = [...timeline.phases.values()];
    const names = lanes(nodes, phases);
    const drawnFor = `${timeline.windowS} ${room()} ${names.join(" ")}`;
    if (drawnFor !== this.drawnFor) this.frame(names, timeline, room());
    this.drawnFor = drawnFor;
    if (!names.length) return;
    this.left = timeline.now - timeline.windowS;
    this.sheet.setAttribute("transform", `translate(${-(this.left - this.origin) * this.scale} 0)`);
    const wanted = new Set();
    for (const phase of phases) {
      for (const node of phase.nodes) wanted.add(this.bar(phase, node, timeline.now));
    }
    for (const [key, bar] of this.bars) {
      if (wanted.has(key)) continue;
      bar.link.remove();
      this.bars.delete(key);
    }
  }

  frame(names, timeline, width) {
    this.bars.clear();
    if (!names.length) {
      this.place.replaceChildren(make("p", "Nothing ran here.", "none"));
      return;
    }
    const longest = Math.max(...names.map((name) => name.length));
    const side = Math.min(Math.max(60, 14 + 7 * longest), 240, width / 3);
    const height = TOP + names.length * LANE;
    this.origin = timeline.now;
    this.scale = (width - side) / timeline.windowS;
    this.rows = new Map(names.map((name, index) => [name, index * LANE]));
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    chart.append(svg("title", {}, "Phases of every node"));
    axis(chart, side, width, timeline.windowS, height);
    for (const [name, row] of this.rows) {
      const lane = { x: side, y: TOP + row + 1, width: width - side, height: LANE - 2 };
      chart.append(svg("rect", { class: "lane", ...lane }));
      chart.append(svg("text", { x: 0, y: TOP + row + LANE - 8 }, name));
    }
    const cut = svg("svg", { x: side, y: TOP, width: width - side, height: height - TOP });
    this.sheet = svg("g", {});
    cut.append(this.sheet);
    chart.append(cut);
    this.place.replaceChildren(chart);
  }

  // Draws a bar where it has to be; returns its key.
  bar(phase, node, now) {
    const key = `${phase.token} ${node}`;
    let bar = this.bars.get(key);
    if (!bar) this.bars.set(key, (bar = this.newBar(phase, node)));
    const goes = phase.end === null || phase.start < this.left;
    if (!goes && bar.outcome === phase.outcome) return key;
    bar.outcome = phase.outcome;
    const to = phase.end ?? now;
    const from = Math.max(phase.start, this.left);
    const x = (from - this.origin) * this.scale;
    const width = Math.max((to - from) * this.scale, 1);
    bar.shape.setAttribute("x", x);
    bar.shape.setAttribute("width", width);
    bar.shape.setAttribute("class", `phase ${phase.outcome}`);
    bar.label.setAttribute("x", x + 6);
    bar.label.textContent = width > 12 + 6.5 * phase.job.length ? phase.job : "";
    const took = `${phase.phase}, ${seconds(to - phase.start)}, permit ${phase.token}`;
    bar.title.textContent = `${phase.job}, ${took}, ${phase.outcome}`;
    return key;
  }

  newBar(phase, node) {
    const y = this.rows.get(node);
    const link = svg("a", { href: `#/jobs/${encodeURIComponent(phase.job)}` });
    const shape = svg("rect", { y: y + 2, height: LANE - 4, rx: 2, fill: colour(phase.job) });
    const label = svg("text", { class: "in", y: y + LANE - 8 });
    const title = svg("title", {});
    shape.append(title);
    link.append(shape, label);
    this.sheet.append(link);
    return { link, shape, label, title, outcome: "" };
  }
}

function axis(chart, side, width, windowS, height) {
  for (let part = 0; part <= 4; part += 1) {
    const x = side + ((width - side) * part) / 4;
    chart.append(svg("line", { class: "grid", x1: x, x2: x, y1: TOP - 4, y2: height }));
    const ago = windowS * (1 - part / 4);
    const where = { x, y: 12, "text-anchor": part === 4 ? "end" : "middle" };
    chart.append(svg("text", where, ago ? `-${seconds(ago)}` : "now"));
  }
}
