"use strict";
// Who ran where: one lane for each node, one bar for each phase.

const SVG = "http://www.w3.org/2000/svg";
const LANE = 24, LEFT = 60, TOP = 20, WIDTH = 1160;

function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// The same job has the same colour everywhere; neighbours by arrival differ most.
const numbers = new Map();

function colour(job) {
  const number = numbers.get(job) ?? 0;
  return `hsl(${(number * 137.508 + 210) % 360} ${50 + (number % 3) * 12}% ${38 + (number % 2) * 8}%)`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 120) return `${value.toFixed(size < 10 ? 1 : 0)} s`;
  if (size < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function lanes(nodes, phases) {
  const names = new Set(nodes.map((node) => node.name));
  for (const phase of phases) for (const node of phase.nodes) names.add(node);
  const number = (name) => Number(name.slice(1)) || 0;
  return [...names].sort((a, b) => a[0].localeCompare(b[0]) || number(a) - number(b));
}

function axis(chart, now, windowS, height) {
  for (let part = 0; part <= 4; part += 1) {
    const x = LEFT + ((WIDTH - LEFT) * part) / 4;
    chart.append(svg("line", { class: "grid", x1: x, x2: x, y1: TOP - 4, y2: height }));
    const ago = windowS * (1 - part / 4);
    const anchor = part === 4 ? "end" : "middle";
    chart.append(svg("text", { x, y: 12, "text-anchor": anchor }, ago ? `-${seconds(ago)}` : "now"));
  }
}

function bar(phase, now, windowS, y) {
  const scale = (WIDTH - LEFT) / windowS;
  const from = Math.max(phase.start, now - windowS);
  const to = phase.end === null ? now : phase.end;
  const x = LEFT + (from - (now - windowS)) * scale;
  const width = Math.max((to - from) * scale, 1);
  const link = svg("a", { href: `#/job/${encodeURIComponent(phase.job)}` });
  const box = { x, y: y + 2, width, height: LANE - 4, rx: 2, fill: colour(phase.job) };
  const shape = svg("rect", { ...box, class: `phase ${phase.outcome}` });
  const took = seconds(to - phase.start);
  const title = `${phase.job}, ${phase.phase}, ${took}, permit ${phase.token}, ${phase.outcome}`;
  shape.append(svg("title", {}, title));
  link.append(shape);
  if (width > 12 + 6.5 * phase.job.length) {
    link.append(svg("text", { class: "in", x: x + 6, y: y + LANE - 8 }, phase.job));
  }
  return link;
}

function gantt(place, nodes, timeline, windowS) {
  const names = lanes(nodes, timeline.phases);
  if (!names.length) {
    place.replaceChildren(line("No node is held."));
    return;
  }
  const height = TOP + names.length * LANE;
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img" });
  chart.append(svg("title", {}, "Phases of every node"));
  axis(chart, timeline.now, windowS, height);
  const row = new Map();
  names.forEach((name, index) => {
    const y = TOP + index * LANE;
    row.set(name, y);
    const lane = { x: LEFT, y: y + 1, width: WIDTH - LEFT, height: LANE - 2 };
    chart.append(svg("rect", { class: "lane", ...lane }));
    chart.append(svg("text", { x: 0, y: y + LANE - 8 }, name));
  });
  for (const phase of timeline.phases) {
    if (phase.end !== null && phase.end < timeline.now - windowS) continue;
    for (const node of phase.nodes) {
      chart.append(bar(phase, timeline.now, windowS, row.get(node)));
    }
  }
  place.replaceChildren(chart);
}

function line(text) {
  const paragraph = document.createElement("p");
  paragraph.className = "none";
  paragraph.textContent = text;
  return paragraph;
}
