(() => {
  "use strict";
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const CONFIG = { displayModeBar: false, responsive: true };
  const STATES = [["kept", "#3f7fbf"], ["aborted", "#d9822b"], ["dropped", "#9aa0a6"],
    ["failed", "#b03a5b"], ["moved", "#8cb9e2"], ["carried", "#e8c468"]];
  const TASKS = [["accumulate", "gradients", "#4b9b72"], ["apply", "update", "#8663a8"],
    ["sync", "weight sync", "#8d99ae"]];
  // Of an environment: lighter than any response, and hatched.
  const WAIT = { color: "rgba(126,107,158,.16)", line: { width: 0 },
    pattern: { shape: "/", size: 5, solidity: 0.25, fgcolor: "rgba(126,107,158,.75)", fgopacity: 1,
      bgcolor: "rgba(126,107,158,.16)" } };
  const HATCHED = "repeating-linear-gradient(135deg, rgba(126,107,158,.75) 0 1px, " +
    "rgba(126,107,158,.16) 1px 4px)";

  const GAP = 0.12;

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  function themed(layout) {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"),
      linecolor: colour("line"), automargin: true };
    const out = Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "inherit", size: 12.5, color: colour("soft") },
      margin: { l: 56, r: 16, t: 30, b: 44 }, hovermode: "x unified",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"),
        font: { color: colour("text") } },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
    }, layout);
    for (const key of Object.keys(out).concat(["xaxis", "yaxis"])) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      const given = Object.assign({}, out[key]);
      if (typeof given.title === "string") given.title = { text: given.title };
      out[key] = Object.assign({}, axis, given);
    }
    return out;
  }

  function bars(rows, name, color, y, height, text) {
    return { type: "bar", orientation: "h", name, showlegend: false, cliponaxis: true,
      base: rows.map((r) => r[1]), x: rows.map((r) => Math.max(r[2] - r[1], 0)),
      y: rows.map((r) => y(r[0]) + height / 2), width: rows.map(() => height),
      customdata: rows.map(text), hovertemplate: "%{customdata}<extra></extra>",
      marker: { color, line: { width: 0 } } };
  }

  const time = (s) => (s < 1 ? (s * 1e3).toFixed(0) + " ms" : s.toFixed(2) + " s");
  const percent = (x) => (100 * x).toFixed(0) + "%";
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

  // Each worker is a block of height 1: gradient lane on top, attempts below it. A replica that has
  // devices of its own is all gradients.
  function workerTraces(worker, prompts, top) {
    const strip = worker.kind === "replica" ? 0.8 : 0.15;
    const taskHeight = strip / worker.task_lanes, laneHeight = 0.8 / worker.lanes;
    const laneY = (lane) => top - 0.98 + laneHeight * lane;
    const taskY = (lane) => top - strip - 0.005 + taskHeight * lane;
    const about = (r) => `${worker.kind} ${worker.worker} · ${STATES[r[3]][0]}<br>` +
      `${escaped(prompts[r[6]])} response ${r[7]}<br>${r[4]} tokens` +
      (r[5] === null ? "" : ` · reward ${r[5]}`) + `<br>${time(r[1])} to ${time(r[2])}`;
    const traces = STATES.map(([name, color], i) =>
      bars(worker.attempts.filter((r) => r[3] === i), name, color, laneY,
        laneHeight * (worker.lanes > 60 ? 1 : 0.88), about));
    const waits = bars(worker.waits, "environment", WAIT.color, laneY, laneHeight * 0.88, (r) =>
      `${worker.kind} ${worker.worker} · waits for its environment<br>` +
      `${escaped(prompts[r[3]])} response ${r[4]}<br>${time(r[1])} to ${time(r[2])}`);
    traces.push({ ...waits, marker: WAIT });
    for (const [kind, name, color] of TASKS) {
      traces.push(bars(worker.tasks.filter((r) => r[3] === kind), name, color, taskY,
        taskHeight * 0.9, (r) => `${worker.kind} ${worker.worker} · ${name}` +
          (r[4] ? ` of ${r[4]} group${r[4] > 1 ? "s" : ""}` : "") +
          `<br>${time(r[1])} to ${time(r[2])}`));
    }
    return traces.filter((trace) => trace.y.length);
  }

  function ganttLayout(chart, limit, least) {
    // Workers are lower where there are many of them.
    const row = Math.min(160, Math.max(least, (15 * least) / chart.workers.length));
    const shapes = [], annotations = [], ticks = [], labels = [];
    chart.workers.forEach((worker, i) => {
      const top = -i * (1 + GAP);
      ticks.push(top - 0.5);
      labels.push(`${worker.kind} ${worker.worker}${row < 40 ? "," : "<br>"} idle ${percent(worker.bubble)}`);
      for (const [cause, fill] of [["idle", "idle"], ["tools", "by-tools"]]) {
        for (const [from, to] of worker[cause]) {
          if (to - from < 0.002 * chart.end) continue;
          shapes.push({ type: "rect", x0: from, x1: to, y0: top - 0.98, y1: top, layer: "below",
            fillcolor: colour(fill), line: { width: 0.5, color: colour(fill + "-edge") } });
          if (to - from > 0.06 * limit) {
            annotations.push({ x: (from + to) / 2, y: top - 0.5, text: cause, showarrow: false,
              font: { size: 12, color: colour("soft") } });
          }
        }
      }
    });
    shapes.push({ type: "line", x0: chart.rollout_end, x1: chart.rollout_end, yref: "paper",
      y0: 0, y1: 1, line: { color: colour("soft"), width: 1, dash: "dot" } });
    annotations.push({ x: chart.rollout_end, y: 1, yref: "paper", yanchor: "bottom",
      text: "rollout ends", showarrow: false, font: { size: 11.5, color: colour("soft") } });
    const bottom = -(chart.workers.length - 1) * (1 + GAP) - 1;
    return themed({ barmode: "overlay", hovermode: "closest", shapes, annotations,
      height: 70 + row * chart.workers.length,
      margin: { l: row < 40 ? 128 : 76, r: 16, t: 22, b: 40 },
      xaxis: { title: "seconds since the step began", range: [0, limit * 1.01], zeroline: false },
      yaxis: { range: [bottom - 0.03, 0.03], tickvals: ticks, ticktext: labels, showgrid: false,
        zeroline: false, fixedrange: true, ticks: "" } });
  }

  function drawChart(target, chart, limit, least) {
    const traces = chart.workers.flatMap((worker, i) => workerTraces(worker, chart.prompts, -i * (1 + GAP)));
    Plotly.react(target, traces, ganttLayout(chart, limit, least), CONFIG);
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text) made.textContent = text;
    return made;
  }

  function legend(charts) {
    const chips = [], seen = (test) => charts.some((c) => c.workers.some(test));
    STATES.forEach(([name, color], i) => {
      if (seen((w) => w.attempts.some((r) => r[3] === i))) chips.push([name + " response", color]);
    });
    if (seen((w) => w.waits.length)) chips.push(["waits for its environment", HATCHED]);
    for (const [kind, name, color] of TASKS) {
      if (seen((w) => w.tasks.some((r) => r[3] === kind))) chips.push([name, color]);
    }
    const together = seen((w) => w.kind === "worker");
    chips.push([together ? "worker idle (bubble)" : "idle (bubble)", "rgba(222,168,48,.6)"]);
    if (seen((w) => w.tools.length)) chips.push(["idle by tools (bubble)", "rgba(126,107,158,.45)"]);
    return chips.map(([name, color]) => {
      const chip = element("span", "chip"), box = element("i");
      box.style.background = color;
      chip.append(box, name);
      return chip;
    });
  }

  function describe(chart) {
    const thinned = chart.drawn < chart.attempts_total
      ? `; drawn: ${chart.drawn} of ${chart.attempts_total} responses, ` +
        `${chart.workers.length} of ${chart.workers_total} workers` : "";
    return ` ${chart.kind} round, ${time(chart.end)}, bubble ${percent(chart.bubble)} ` +
      `(${percent(chart.rollout_bubble)} of the rollout` +
      (chart.tools_bubble > 0 ? `, ${percent(chart.tools_bubble)} by tools` : "") + `)${thinned}`;
  }

  // One chart chosen by its step, or several under each other on one time axis.
  function setUpGantt(root, gantt) {
    const controls = element("div", "controls"), draws = [];
    root.append(controls);
    if (gantt.select) {
      const select = element("select"), plot = element("div", "figure");
      select.setAttribute("aria-label", "step");
      gantt.charts.forEach((chart, i) => {
        const marks = Object.keys(gantt.marked).filter((m) => gantt.marked[m] === chart.step);
        const option = element("option", "",
          `step ${chart.step}${marks.length ? " (" + marks.join(", ") + ")" : ""}`);
        option.value = i;
        option.selected = chart.step === gantt.shown;
        select.append(option);
      });
      const note = element("span", "chip");
      controls.append(select, note);
      root.append(plot);
      const draw = () => {
        const chart = gantt.charts[select.value];
        note.textContent = describe(chart);
        drawChart(plot, chart, chart.end, 60);
      };
      select.addEventListener("change", draw);
      draws.push(draw);
    } else {
      const limit = Math.max(...gantt.charts.map((chart) => chart.end));
      for (const chart of gantt.charts) {
        const title = element("div", "chart-title", chart.name + " ");
        title.append(element("span", "", `step ${chart.step},` + describe(chart)));
        const plot = element("div", "figure");
        root.append(title, plot);
        draws.push(() => drawChart(plot, chart, limit, 24));
      }
    }
    controls.append(...legend(gantt.charts));
    return draws;
  }

  const draws = [];
  for (const root of document.querySelectorAll("[data-figure]")) {
    const figure = DATA.figures[root.dataset.figure];
    draws.push(() => Plotly.react(root, figure.data, themed(figure.layout), CONFIG));
  }
  for (const root of document.querySelectorAll("[data-gantt]")) {
    draws.push(...setUpGantt(root, DATA.gantts[root.dataset.gantt]));
  }
  const drawAll = () => draws.forEach((draw) => draw());
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
