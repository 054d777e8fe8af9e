// `zero report`: runs over their steps. page.h has the form of the document.
"use strict";

// Of metrics.jsonl, in the order of the charts.
const CHARTS = [
  {name: "loss", title: "Loss", noisy: true},
  {name: "validation_loss", title: "Validation loss", marked: true},
  {name: "grad_norm", title: "Gradient norm", noisy: true},
  {name: "lr", title: "Learning rate"},
  {name: "tokens_per_second", title: "Tokens per second", noisy: true, positive: true},
  {name: "mfu", title: "MFU", unit: "% of the peak FLOP/s", percent: true, noisy: true, positive: true},
  {name: "communication.exposed_ms", title: "Exposed communication", unit: "ms per step", noisy: true, positive: true},
  {name: "loss_scale", title: "Loss scale"}];

const percent = (value) => number(100 * value) + " %";

// A figure of a summary, by its name.
function figureText(name, value) {
  if (typeof value !== "number") return String(value ?? "–");
  if (/bytes/.test(name)) return byteUnit(value).text(value);
  if (/^(mfu|hfu)/.test(name)) return percent(value);
  return number(value);
}

function drawMemoryOverSteps(grid, runs, last) {
  const total = (run) => run.predicted?.total;
  const largest = Math.max(0, ...runs.flatMap((run) =>
    [total(run) ?? 0, ...(run.series["peak_bytes.total"] ?? []).map(([, y]) => y)]));
  if (largest === 0) return;
  const unit = byteUnit(largest);
  const scaled = (points) => points.map(([x, y]) => [x, unit.scale(y)]);
  const lines = [];
  runs.forEach((run, i) => {
    const points = run.series["peak_bytes.total"];
    if (!points) return;
    const name = runs.length > 1 ? run.name + ", " : "";
    const tint = runs.length > 1 ? nth(i) : color("text");
    lines.push({label: name + "total", points: scaled(points), color: tint});
    if (total(run)) {
      const ends = [points[0], points.at(-1)].map(([x]) => [x, total(run)]);
      lines.push({label: name + "predicted", points: scaled(ends), color: tint, dashed: true});
    }
    if (runs.length > 1) return;
    CATEGORIES.forEach((category, c) => {
      const own = run.series["peak_bytes." + category];
      if (own) lines.push({label: words(category), points: scaled(own), color: nth(c)});
    });
  });
  lineChart(grid, "Peak memory of a rank", `${unit.unit} so far`, lines,
    {last, format: unit.format, positive: true});
}

// What a rank held when it held the most: as it was predicted, as the engine
// booked it, and the process as the operating system counts it.
function drawMemoryByCategory(grid, runs) {
  const known = runs.filter((run) => run.predicted || run.peak);
  const names = [...CATEGORIES, "total"].filter((name) => known.some(
    (run) => run.predicted?.[name] > 0 || run.peak?.[name] > 0));
  if (names.length === 0) return;
  const resident = known.some((run) => run.resident > 0);
  const labels = [...names.map(words), ...(resident ? ["process, resident"] : [])];
  const largest = Math.max(...known.flatMap((run) => [
    run.predicted?.total ?? 0, run.peak?.total ?? 0, run.resident ?? 0]));
  const unit = byteUnit(largest);
  const datasets = known.flatMap((run, i) => {
    const name = runs.length > 1 ? run.name + ", " : "";
    const of = (bytes) => names.map((each) => unit.scale(bytes?.[each] ?? 0));
    const tint = nth(runs.indexOf(run));
    return [
      {label: name + "predicted", data: of(run.predicted), backgroundColor: tint},
      {label: name + "booked", backgroundColor: hatched(tint), borderColor: tint, borderWidth: 1,
        data: [...of(run.peak), ...(resident ? [unit.scale(run.resident ?? 0)] : [])]}];
  });
  const {canvas} = figure(grid, "Memory by category", `${unit.unit} of a rank, at its peak`,
    labels.length * (10 * datasets.length + 10) + 90);
  new Chart(canvas, {
    type: "bar",
    data: {labels, datasets: datasets.map((one) => ({...one, categoryPercentage: 0.8, barPercentage: 0.95}))},
    options: {
      indexAxis: "y",
      interaction: {mode: "index", axis: "y", intersect: false},
      scales: {
        x: axis(unit.unit, number, {scale: {beginAtZero: true}}),
        y: {grid: {display: false}, ticks: {autoSkip: false}},
      },
      plugins: {
        legend,
        tooltip: {callbacks: {
          label: (item) => `${item.dataset.label}: ${unit.format(item.raw)} ${unit.unit}`}},
      },
    },
  });
}

function drawCharts(grid, runs, weight) {
  const last = Math.max(1, ...runs.flatMap(
    (run) => Object.values(run.series).map((points) => points.at(-1)[0])));
  for (const {name, title, unit = "", noisy, percent: isShare, marked, positive} of CHARTS) {
    const lines = [];
    runs.forEach((run, i) => {
      const points = run.series[name];
      if (!points) return;
      lines.push({label: run.name, marked, color: nth(i),
        points: isShare ? points.map(([x, y]) => [x, y === null ? null : 100 * y]) : points});
    });
    if (lines.length > 0) {
      lineChart(grid, title, unit, lines, {last, weight: noisy ? weight : 0, positive});
    }
  }
  drawMemoryOverSteps(grid, runs, last);
  drawMemoryByCategory(grid, runs);
}

function drawReport(page, data) {
  const runs = data.runs;
  add(page, "h2", "Over the steps");
  const line = add(page, "p");
  const label = add(line, "label", "smoothing ");
  const slider = add(label, "input", "", {type: "range", min: 0, max: 0.98, step: 0.02, value: 0});
  const grid = add(page, "div", "", {class: "grid"});
  const show = () => {
    for (const canvas of grid.querySelectorAll("canvas")) Chart.getChart(canvas)?.destroy();
    grid.textContent = "";
    drawCharts(grid, runs, Number(slider.value));
  };
  slider.addEventListener("change", show);
  show();

  const names = runs.map((run) => run.name);
  const figures = data.summary.filter(({name}) => !/peak_bytes\.(?!total)/.test(name));
  if (figures.length > 0) {
    add(page, "h2", "Summary");
    table(page, ["", ...names], figures.map(
      ({name, values}) => [name, ...values.map((value) => figureText(name, value))]));
  }
  if (data.config.length > 0) {
    let place = page;
    if (runs.length > 1) {
      add(page, "h2", "Where the configs differ");
    } else {
      place = add(page, "details");
      add(place, "summary", "Config");
    }
    table(place, ["key", ...names], data.config.map(
      ({key, values}) => [key, ...values.map((value) => value ?? "–")]));
  }
}
