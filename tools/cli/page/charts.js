// What both pages are made of: elements, numbers, tables and charts.
"use strict";

const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue("--" + name);
const nth = (i) => color("c" + (i % 12));

function add(parent, tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  return parent.appendChild(element);
}

const digits = new Intl.NumberFormat("en-US", {maximumSignificantDigits: 4});
const commas = new Intl.NumberFormat("en-US", {maximumFractionDigits: 0});

function number(value) {
  if (typeof value !== "number") return String(value ?? "–");
  if (Number.isInteger(value)) return commas.format(value);
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(2);
  return size < 1e4 ? digits.format(value) : commas.format(value);
}

// How to write bytes of which `largest` is the largest.
function byteUnit(largest) {
  const [unit, size] = largest >= 0.5 * 2 ** 30 ? ["GiB", 2 ** 30]
    : largest >= 0.5 * 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
  const scale = (bytes) => bytes / size;
  const format = (value) => {
    if (value === 0) return "0";
    return value < 0.005 ? "< 0.01" : value.toFixed(value < 10 ? 2 : 1);
  };
  return {unit, scale, format, text: (bytes) => format(scale(bytes)) + " " + unit};
}

// `rows`: cells that are text, or [text, class].
function table(parent, columns, rows) {
  const element = add(add(parent, "div", "", {class: "scroll", tabindex: 0}), "table");
  const head = add(add(element, "thead"), "tr");
  for (const name of columns) add(head, "th", name, {scope: "col"});
  const body = add(element, "tbody");
  for (const row of rows) {
    const line = add(body, "tr");
    for (const cell of row) {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      add(line, "td", text, {class: kind, title: text});
    }
  }
}

// An empty chart of `height` pixels with words above it.
function figure(parent, title, words, height) {
  const box = add(parent, "figure");
  const caption = add(box, "figcaption");
  add(caption, "b", title);
  if (words) add(caption, "span", words);
  const holder = add(box, "div", "", {class: "canvas"});
  holder.style.height = height + "px";
  const canvas = add(holder, "canvas", "", {role: "img", "aria-label": title});
  return {box, caption, canvas};
}

// Diagonal lines: what is not a measured value.
function hatched(of) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.globalAlpha = 0.35;
  pen.fillStyle = of;
  pen.fillRect(0, 0, 8, 8);
  pen.globalAlpha = 1;
  pen.strokeStyle = of;
  pen.lineWidth = 1.7;
  for (const x of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(x, 8);
    pen.lineTo(x + 8, 0);
    pen.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

const legend = {
  position: "bottom",
  align: "start",
  labels: {boxWidth: 11, boxHeight: 11, padding: 9},
};

function axis(title, format, more = {}) {
  return {
    ticks: {callback: (value) => format(value), maxRotation: 0, ...more.ticks},
    title: {display: title !== "", text: title},
    grid: {color: color("grid")},
    ...more.scale,
  };
}

// An average over the last values, each weighing `weight` of the one after it.
function smoothed(points, weight) {
  let sum = 0, weights = 0;
  return points.map(([x, y]) => {
    if (y === null) return {x, y};
    sum = weight * sum + y;
    weights = weight * weights + 1;
    return {x, y: sum / weights};
  });
}

// The scale of values that are all the same: they lie in its middle.
function flatScale(lines) {
  const values = lines.flatMap((line) => line.points.map(([, y]) => y)).filter((y) => y !== null);
  if (values.length === 0 || values.some((y) => y !== values[0])) return {};
  const room = Math.abs(values[0]) / 2 || 1;
  return {min: values[0] - room, max: values[0] + room};
}

// Lines over steps. Each: {label, points: [[step, value or null], ...], color,
// dashed, marked}.
function lineChart(parent, title, unit, lines, {last, format = number, weight = 0, positive = false}) {
  const {caption, canvas} = figure(parent, title, unit, 250);
  const chart = new Chart(canvas, {
    type: "line",
    data: {
      datasets: lines.map((line) => ({
        label: line.label,
        data: smoothed(line.points, line.marked ? 0 : weight),
        borderColor: line.color,
        backgroundColor: line.color,
        borderDash: line.dashed ? [5, 4] : [],
        borderWidth: 1.6,
        pointRadius: line.marked || line.points.length === 1 ? 3 : 0,
        pointHitRadius: 8,
        pointStyle: line.marked ? "circle" : "line",
        clip: line.marked ? 4 : 1,  // a point at the edge is drawn whole
      })),
    },
    options: {
      interaction: {mode: "nearest", axis: "x", intersect: false},
      scales: {
        x: axis("", number, {scale: {type: "linear", min: 0, max: last}, ticks: {maxTicksLimit: 8, precision: 0}}),
        y: axis("", format, {scale: {beginAtZero: positive, ...flatScale(lines)}, ticks: {maxTicksLimit: 6}}),
      },
      plugins: {
        legend: {
          ...legend,
          display: lines.length > 1,
          labels: {
            ...legend.labels,
            usePointStyle: !lines.some((line) => line.marked),
            pointStyleWidth: 22,
          },
        },
        tooltip: {
          callbacks: {
            title: (items) => items.length ? "step " + number(items[0].parsed.x) : "",
            label: (item) => `${item.dataset.label}: ${format(item.parsed.y)}`,
          },
        },
      },
    },
  });
  const label = add(caption, "label", "", {});
  const box = add(label, "input", "", {type: "checkbox"});
  label.append(" log");
  box.addEventListener("change", () => {
    chart.options.scales.y.type = box.checked ? "logarithmic" : "linear";
    chart.update();
  });
}

function drawPage() {
  const data = JSON.parse(document.getElementById("document").textContent);
  const page = document.getElementById("page");
  const draw = () => {
    for (const canvas of page.querySelectorAll("canvas")) {
      Chart.getChart(canvas)?.destroy();
    }
    page.textContent = "";
    Object.assign(Chart.defaults, {
      animation: false,
      maintainAspectRatio: false,
      color: color("text"),
      borderColor: color("grid"),
    });
    Chart.defaults.font.family = "system-ui, sans-serif";
    document.title = data.title;
    add(page, "h1", data.title);
    for (const note of data.notes) add(page, "p", note);
    ({memory: drawMemory, report: drawReport})[data.kind](page, data);
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
