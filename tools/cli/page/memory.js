// `zero memory --html`: what each stage takes, by category. page.h has the form
// of the document.
"use strict";

const CATEGORIES = [
  "parameters", "gradients", "optimizer", "gathered_parameters",
  "reduce_buffers", "activations", "workspace", "inputs", "fragmentation",
  "fixed", "snapshot", "host_bytes"];
const words = (name) => name === "host_bytes" ? "states on the host" : name.replaceAll("_", " ");

// The row's place among those of its config.
const offloads = (row) => row.offload !== "-";
const own = (row) => row.as_configured ? "* " : "";
const rowName = (row) => [
  `${own(row)}stage ${row.stage}`, `recompute ${row.recompute}`,
  ...(offloads(row) ? [`offload ${row.offload}`] : [])].join(", ");
// The same on a chart's axis, in lines.
const rowLabel = (row) => [
  `${own(row)}stage ${row.stage}`, row.recompute,
  ...(offloads(row) ? [`offload ${row.offload}`] : [])];
// Bytes of a category in the row's memory: `bytes` are the row or its "measured".
// The host's count if its memory is the device's.
const hostApart = (row) => row.host_memory_bytes !== null;
const inMemory = (row, bytes, name) => name === "host_bytes" && hostApart(row) ? 0 : bytes[name];
const predictedPeak = (row) => row.peak_bytes + inMemory(row, row, "host_bytes");
const measuredPeak = (row) => row.measured?.total ?? 0;

// Dashes across a horizontal bar chart, at every row's limit.
function limitLines(rows, unit) {
  return {
    id: "limits",
    afterDatasetsDraw(chart) {
      const {ctx: pen, scales: {x, y}, chartArea: area} = chart;
      const half = y.height / rows.length / 2;
      pen.save();
      pen.strokeStyle = color("limit");
      pen.lineWidth = 2;
      pen.setLineDash([5, 4]);
      rows.forEach((row, i) => {
        const at = x.getPixelForValue(unit.scale(row.memory_bytes));
        if (at > area.right) return;
        const middle = y.getPixelForValue(i);
        pen.beginPath();
        pen.moveTo(at, middle - half);
        pen.lineTo(at, middle + half);
        pen.stroke();
      });
      pen.restore();
    },
  };
}

// The sum of each stack, at its end.
function totals(unit) {
  return {
    id: "totals",
    afterDatasetsDraw(chart) {
      const pen = chart.ctx;
      const ends = new Map();
      for (const meta of chart.getSortedVisibleDatasetMetas()) {
        meta.data.forEach((bar, i) => {
          const value = meta._parsed[i].x;
          if (!value) return;
          const key = meta.stack + i;
          const end = ends.get(key) ?? {x: 0, total: 0};
          ends.set(key, {
            x: Math.max(end.x, bar.x), y: bar.y, total: end.total + value});
        });
      }
      pen.save();
      pen.fillStyle = color("text");
      pen.strokeStyle = color("panel");
      pen.lineWidth = 4;
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      for (const {x, y, total} of ends.values()) {
        pen.strokeText(unit.format(total), x + 5, y);
        pen.fillText(unit.format(total), x + 5, y);
      }
      pen.restore();
    },
  };
}

function stageBars(parent, title, rows, unit, largest) {
  const measured = rows.some((row) => row.measured);
  const limits = [...new Set(rows.map((row) => row.memory_bytes))];
  const seen = limits.some((limit) => limit <= largest);
  const says = limits.length === 1
    ? `a rank may take ${unit.text(limits[0])}${seen ? " (dashes)" : ", far beyond this axis"}`
    : "dashes: what a rank may take";
  const {canvas} = figure(
    parent, title, says, rows.length * (measured || rows.some(offloads) ? 46 : 32) + 130);
  const used = CATEGORIES.filter(
    (name) => rows.some((row) => [row, row.measured].some(
      (bytes) => bytes && inMemory(row, bytes, name) > 0)));
  const bars = (name, stack, of, fill) => ({
    label: words(name) + (stack === "measured" ? ", measured" : ""),
    stack,
    data: rows.map((row) => of(row) === undefined ? null : unit.scale(of(row))),
    backgroundColor: fill,
    borderColor: color("panel"),
    borderWidth: {left: 0, top: 0, bottom: 0, right: 1},
    borderSkipped: false,
    categoryPercentage: 0.82,
    barPercentage: 0.94,
  });
  const datasets = used.map((name) => bars(
    name, "predicted", (row) => inMemory(row, row, name), nth(CATEGORIES.indexOf(name))));
  if (measured) {
    for (const name of used) {
      datasets.push(bars(name, "measured",
        (row) => row.measured && inMemory(row, row.measured, name),
        hatched(nth(CATEGORIES.indexOf(name)))));
    }
  }
  new Chart(canvas, {
    type: "bar",
    data: {labels: rows.map(rowLabel), datasets},
    plugins: [limitLines(rows, unit), totals(unit)],
    options: {
      indexAxis: "y",
      layout: {padding: {right: 28}},
      interaction: {mode: "index", axis: "y", intersect: false},
      scales: {
        x: axis(unit.unit, (value) => number(value), {
          scale: {stacked: true, max: unit.scale(largest) * 1.12},
          ticks: {includeBounds: false}}),
        y: {stacked: true, grid: {display: false}, ticks: {autoSkip: false}},
      },
      plugins: {
        legend: {
          ...legend,
          labels: {...legend.labels, filter: (item) => item.datasetIndex < used.length},
          onClick(event, item, {chart}) {
            const i = item.datasetIndex;
            const shown = chart.isDatasetVisible(i);
            chart.setDatasetVisibility(i, !shown);
            if (measured) chart.setDatasetVisibility(i + used.length, !shown);
            chart.update();
          },
        },
        tooltip: {
          filter: (item) => item.raw > 0,
          callbacks: {
            label: (item) =>
              `${item.dataset.label}: ${unit.format(item.raw)} ${unit.unit}`,
            footer: (items) => {
              const row = rows[items[0].dataIndex];
              const lines = [`predicted peak: ${unit.text(predictedPeak(row))} in ${row.peak_action}`];
              if (row.measured) lines.push(`measured: ${unit.text(measuredPeak(row))}`);
              return lines;
            },
          },
        },
      },
    },
  });
  if (measured) {
    const key = add(canvas.parentNode.parentNode, "div", "", {class: "legend"});
    add(key, "span", "Above: predicted. Below, hatched: measured.");
  }
}

// The purposes of actions, as PurposeOf (memory_rows.cc) names them: their lane
// below the chart and their color.
const PURPOSES = {
  "forward": {lane: 0, tint: 0},
  "backward": {lane: 0, tint: 5},
  "norm and update": {lane: 0, tint: 2},
  "gather parameters": {lane: 1, tint: 3},
  "reduce gradients": {lane: 1, tint: 1},
  "release": {lane: 1, tint: 8},
  "host and disk": {lane: 2, tint: 6}};
const LANE = 14;

// Bytes of a category at every action, of its changes: [[action, bytes], ...].
function everyAction(changes, size) {
  const bytes = [];
  changes.forEach(([from, value], i) => {
    const to = changes[i + 1]?.[0] ?? size;
    while (bytes.length < to) bytes.push(value);
  });
  return bytes;
}

// The step's actions below the axis: computation, communication, and copies
// and files.
function actionLanes(purposes, starts, lanes) {
  return {
    id: "lanes",
    afterDraw(chart) {
      const {ctx: pen, scales: {x}} = chart;
      purposes.forEach(({lane, tint}, i) => {
        const left = x.getPixelForValue(starts[i]);
        const width = x.getPixelForValue(starts[i + 1]) - left;
        pen.fillStyle = nth(tint);
        pen.fillRect(left, chart.height - (lanes - lane) * (LANE + 3),
          Math.max(width - (width > 4 ? 1 : 0), 1), LANE);
      });
    },
  };
}

// A line where the most is taken, one for what there is, and one where the step
// ends: what follows evaluates and samples.
function peakLines(peak, limit, unit, end) {
  return {
    id: "peak",
    afterDatasetsDraw(chart) {
      const {ctx: pen, scales: {x, y}, chartArea: area} = chart;
      const line = (x1, y1, x2, y2, tint) => {
        pen.strokeStyle = color(tint);
        pen.beginPath();
        pen.moveTo(x1, y1);
        pen.lineTo(x2, y2);
        pen.stroke();
      };
      pen.save();
      pen.lineWidth = 1.5;
      pen.setLineDash([4, 4]);
      const at = x.getPixelForValue(peak);
      line(at, area.top, at, area.bottom, "text");
      if (end !== null) {
        const left = x.getPixelForValue(end);
        line(left, area.top, left, area.bottom, "faint");
        pen.fillStyle = color("faint");
        pen.font = "11px system-ui, sans-serif";
        pen.textBaseline = "top";
        pen.fillText("evaluation, sample", left + 4, area.top + 2);
      }
      if (unit.scale(limit) <= y.max) {
        const high = y.getPixelForValue(unit.scale(limit));
        line(area.left, high, area.right, high, "limit");
      }
      pen.restore();
    },
  };
}

function stepChart(parent, row) {
  const actions = row.timeline.actions;
  const purposes = row.timeline.purposes.map((name) => PURPOSES[name]);
  const lanes = Math.max(...purposes.map(({lane}) => lane)) + 1;
  // States on the host stay there.
  const changes = {
    ...row.timeline.bytes, host_bytes: [[0, inMemory(row, row, "host_bytes")]]};
  const bytes = Object.fromEntries(Object.entries(changes).map(
    ([name, of]) => [name, everyAction(of, actions.length)]));
  const used = CATEGORIES.filter((name) => bytes[name]?.some((n) => n > 0));
  // What lies longest lies lowest.
  const order = ["fixed", "inputs", "host_bytes", ...CATEGORIES].filter(
    (name, i, all) => used.includes(name) && all.indexOf(name) === i);
  const sums = actions.map((_, i) => used.reduce((all, name) => all + bytes[name][i], 0));
  const peak = sums.indexOf(Math.max(...sums));
  const unit = byteUnit(sums[peak]);
  // Moving and releasing run beside computation, which gets most of the width.
  const starts = [0];
  for (const {lane} of purposes) starts.push(starts.at(-1) + (lane === 0 ? 1 : 0.1));
  const last = actions.findLastIndex(
    (action) => /^(Norm|Update|WriteStates|Upload|GatherUpdated)\b/.test(action)) + 1;
  const end = last > 0 && last < actions.length ? starts[last] : null;
  const {box, canvas} = figure(parent, "Action by action",
    `peak ${unit.text(sums[peak])} in ${actions[peak]}`, 400);
  const at = (items) => Math.min(items[0].dataIndex, actions.length - 1);
  new Chart(canvas, {
    type: "line",
    data: {
      datasets: order.map((name, i) => ({
        label: words(name),
        data: starts.map((x, n) =>
          ({x, y: unit.scale(bytes[name][Math.min(n, actions.length - 1)])})),
        stepped: true,
        fill: i === 0 ? "origin" : "-1",
        borderColor: nth(CATEGORIES.indexOf(name)),
        backgroundColor: nth(CATEGORIES.indexOf(name)),
        borderWidth: 0,
        pointRadius: 0,
      })),
    },
    plugins: [
      actionLanes(purposes, starts, lanes),
      peakLines((starts[peak] + starts[peak + 1]) / 2, row.memory_bytes, unit, end)],
    options: {
      layout: {padding: {bottom: lanes * (LANE + 3) + 4}},
      interaction: {mode: "index", axis: "x", intersect: false},
      scales: {
        x: {type: "linear", min: 0, max: starts.at(-1), display: false},
        y: axis(unit.unit, number, {scale: {stacked: true, beginAtZero: true}}),
      },
      plugins: {
        legend: {...legend, position: "top", reverse: true},
        tooltip: {
          itemSort: (a, b) => b.datasetIndex - a.datasetIndex,
          filter: (item) => item.raw.y > 0,
          callbacks: {
            title: (items) => items.length ? actions[at(items)] : "",
            label: (item) => `${item.dataset.label}: ${unit.format(item.raw.y)} ${unit.unit}`,
            footer: (items) => items.length ? "together: " + unit.text(sums[at(items)]) : "",
          },
        },
      },
    },
  });
  const key = add(box, "div", "", {class: "legend"});
  for (const [name, purpose] of Object.entries(PURPOSES)) {
    if (!purposes.includes(purpose)) continue;
    const item = add(key, "span");
    add(item, "i").style.background = nth(purpose.tint);
    item.append(name);
  }
}

function memoryTable(parent, rows) {
  const unit = byteUnit(Math.max(...rows.map(predictedPeak)));
  const bytes = (size) => unit.format(unit.scale(size));
  const used = CATEGORIES.filter((name) => rows.some((row) => inMemory(row, row, name) > 0));
  const columns = [
    ["stage", (row) => own(row) + row.stage],
    ["recompute", (row) => row.recompute],
    ["offload", (row) => row.offload],
    ["peak", (row) => bytes(predictedPeak(row))],
    ["host", (row) => row.host_bytes ? bytes(row.host_bytes) : "–"],
    ["measured", (row) => row.measured ? bytes(measuredPeak(row)) : "–"],
    ["limit", (row) => bytes(row.memory_bytes)],
    ["fits", (row) => !row.fits ? ["no", "no"]
      : [row.fits_barely ? "barely" : "yes", "yes"]],
    ["sent/step", (row) => byteUnit(row.sent_bytes_per_step).text(row.sent_bytes_per_step)],
    ["peak in", (row) => row.peak_action],
    ...used.map((name) => [words(name), (row) => row[name] ? bytes(row[name]) : "–"])];
  const shown = columns.filter(
    ([name]) => ({
      measured: rows.some((row) => row.measured),
      offload: rows.some(offloads),
      host: rows.some((row) => row.host_bytes > 0 && hostApart(row)),
    })[name] ?? true);
  table(parent, shown.map(([name]) => name),
    rows.map((row) => shown.map(([, cell]) => cell(row))));
}

// What tells the rows of one config from those of another.
const settings = (row) => [
  `${number(row.ranks)} ranks on ${row.device}`, row.dtype,
  `micro-batch ${row.micro_batch} × ${number(row.sequence_length)} tokens`,
  `${row.micro_steps} micro-step${row.micro_steps === 1 ? "" : "s"}`].join(", ");

// Rows of `zero memory A.json B.json`, a list for each file that was named.
function byConfig(rows) {
  const groups = [];
  for (const row of rows) (groups[row.config_index] ??= []).push(row);
  return groups;
}

function drawMemory(page, data) {
  const configs = byConfig(data.rows);
  add(page, "h2", "At the peak of a step, on each rank");
  add(page, "p", "*: the config's own settings");
  const grid = add(page, "div", "", {class: "grid"});
  for (const rows of configs) {
    const highest = Math.max(...rows.flatMap((row) => [predictedPeak(row), measuredPeak(row)]));
    // A limit far above all bars would make them invisible.
    const limit = Math.max(...rows.map((row) => row.memory_bytes));
    const largest = limit <= 4 * highest ? Math.max(limit, highest) : highest;
    stageBars(grid, rows[0].config, rows, byteUnit(highest), largest);
  }

  const drawn = data.rows.filter((row) => row.timeline);
  if (drawn.length > 0) {
    add(page, "h2", "Over one step");
    const line = add(page, "p");
    const select = add(line, "select", "", {"aria-label": "row"});
    for (const row of drawn) {
      add(select, "option", (configs.length > 1 ? row.config + ", " : "") + rowName(row));
    }
    const holder = add(page, "div");
    const show = () => {
      for (const canvas of holder.querySelectorAll("canvas")) Chart.getChart(canvas)?.destroy();
      holder.textContent = "";
      stepChart(holder, drawn[select.selectedIndex]);
    };
    select.selectedIndex = Math.max(drawn.findIndex((row) => row.as_configured), 0);
    select.addEventListener("change", show);
    show();
  }

  for (const rows of configs) {
    const unit = byteUnit(Math.max(...rows.map(predictedPeak)));
    add(page, "h2", `${rows[0].config}, in ${unit.unit}`);
    add(page, "p", settings(rows[0]));
    memoryTable(page, rows);
  }
}
