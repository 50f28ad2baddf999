// The views of numbers over steps: curves, and where the time went.

const curveState = { stage: null, smooth: Number(setting("smooth", 0)), log: false, filter: "", hidden: new Set() };

// [title, [[name or pattern, title, options], ...]]; numbers that no section names come at the end.
const SECTIONS = [
  ["Reward and accuracy", [
    ["reward/mean", "Reward"], [/^rewards\/(.+)\/mean$/, "Reward: $1"], ["right", "Right answers", { percent: true }],
    [/^evaluation\/(.*)answer_accuracy$/, "Evaluation: $1accuracy", { percent: true, axis: "eval", interval: true }],
    ["format", "Format followed", { percent: true }], [/^evaluation\/(.*)(pass@\d+|maj@\d+)$/, "Evaluation: $1$2", { percent: true, axis: "eval" }],
    ["reward/std", "Standard deviation of rewards"],
  ]],
  ["Preferences", [["margin", "Margin"], ["accuracy", "Pairs ranked correctly", { percent: true }], [/^rewards\/(chosen|rejected)$/, "Implicit reward: $1"]]],
  ["Loss", [["loss", "Loss"], ["validation/loss", "Validation loss", { axis: "eval" }], ["grad_norm", "Gradient norm"], ["lr", "Learning rate"]]],
  ["Length", [["length/mean", "Tokens per sample"], [/^length\/(right|wrong)$/, "Tokens of $1 samples"], ["truncated", "Cut off", { percent: true }], ["length/max", "Longest sample"]]],
  ["Policy", [
    ["entropy/sampled", "Entropy of samples"], ["entropy", "Entropy"], ["kl", "KL to the reference"], ["kl/old", "KL to the policy that sampled"],
    [/^clip\/(.+)$/, "Clipped: $1", { percent: true }], ["ratio/max", "Largest ratio"], ["mismatch/mean", "Engine and learner differ, mean"],
    ["mismatch/max", "Engine and learner differ, largest"],
  ]],
  ["Groups", [
    ["groups/live", "Live groups", { percent: true }], ["groups/dead", "Dead groups", { percent: true }],
    ["groups/all_right", "Groups with only right answers", { percent: true }], ["groups/none_right", "Groups with no right answer", { percent: true }],
    ["groups/varied", "Groups whose rewards vary", { percent: true }], ["unscored", "Samples without a reward"],
  ]],
  ["Critic", [[/^critic\/(.+)$/, "Critic: $1"]]],
  ["A teacher's samples", [[/^off_policy\/(.+)$/, "Teacher: $1"], [/^off\/(.+)$/, "Teacher's tokens: $1"], [/^on\/(.+)$/, "Own tokens: $1"]]],
];

const stagesOf = () => [...new Set(store.data.runs.flatMap((run) => run.stages.map((s) => s.name).filter((name) => run.curves[`${name}/train`] || run.curves[`${name}/eval`])))];

function stagePicker(redraw) {
  const stages = stagesOf();
  if (!stages.includes(curveState.stage)) curveState.stage = stages.at(-1) ?? null;
  return select("Stage", stages.map((name) => [name, name]), curveState.stage, (value) => { curveState.stage = value; zoomTo(null); redraw(); });
}

function runPicker(redraw) {
  if (store.data.runs.length < 2) return null;
  return el("fieldset", { class: "runs" }, el("legend", {}, "Runs"), store.data.runs.map((run, i) =>
    el("label", {}, el("input", { type: "checkbox", checked: !curveState.hidden.has(i), onchange: (event) => {
      curveState.hidden[event.target.checked ? "delete" : "add"](i); redraw();
    } }), dot(colorOf(i)), clipped(run.name))));
}

function curves(root) {
  const charts = el("div", { id: "charts" });
  const redraw = () => drawCurves(charts);
  root.append(el("div", { class: "controls", role: "group", "aria-label": "How curves are drawn" },
    stagePicker(redraw),
    el("label", { class: "field" }, el("span", {}, "Smoothing"), el("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: curveState.smooth,
      oninput: (event) => { curveState.smooth = Number(event.target.value); remember("smooth", curveState.smooth); restyle(charts); } })),
    el("label", { class: "check" }, el("input", { type: "checkbox", id: "log", checked: curveState.log,
      onchange: (event) => { curveState.log = event.target.checked; restyle(charts); } }), "Log axis"),
    el("label", { class: "field" }, el("span", {}, "Name contains"), el("input", { type: "search", id: "filter", value: curveState.filter,
      oninput: (event) => { curveState.filter = event.target.value.toLowerCase(); redraw(); } })),
    el("button", { type: "button", id: "unzoom", disabled: shared.zoom === null, onclick: () => zoomTo(null) }, "Whole range"),
    runPicker(redraw)), charts);
  root.append(el("p", { class: "note" }, "Drag across a chart to zoom, double-click to reset. With the keyboard: tab to a chart, arrow keys read its values, + and - zoom."));
  redraw();
}

function restyle(charts) {
  for (const node of charts.querySelectorAll(".chart")) {
    node.chart.smooth = curveState.smooth; node.chart.log = curveState.log;
    if (node.chart.root) node.chart.draw();
  }
}

function seriesOf(name, how, stage) {
  const found = [];
  store.data.runs.forEach((run, i) => {
    if (curveState.hidden.has(i)) return;
    for (const axis of how.axis ? [how.axis] : ["train", "eval"]) {
      const own = run.curves[`${stage}/${axis}`], y = own?.values[name] ?? own?.timings[name];
      if (!y) continue;
      const series = { name: store.data.runs.length > 1 ? run.name : axis, color: colorOf(i), dash: i < COLORS.length ? "" : "5 3", x: own.steps, y };
      if (how.interval) { series.low = own.values[`${name}_low`]; series.high = own.values[`${name}_high`]; }
      found.push(series);
      break;
    }
  });
  return found;
}

function drawCurves(holder) {
  forgetCharts();
  const stage = curveState.stage, names = new Set();
  for (const run of store.data.runs) {
    for (const axis of ["train", "eval"]) Object.keys(run.curves[`${stage}/${axis}`]?.values ?? {}).forEach((name) => names.add(name));
  }
  const used = new Set(), out = [];
  const wanted = (name, title) => !curveState.filter || `${name} ${title}`.toLowerCase().includes(curveState.filter);
  for (const [title, entries] of SECTIONS) {
    const charts = [];
    for (const [pattern, words, how = {}] of entries) {
      for (const name of [...names].filter((n) => (pattern instanceof RegExp ? pattern.test(n) : n === pattern))) {
        if (used.has(name)) continue;
        used.add(name);
        if (how.interval) { used.add(`${name}_low`); used.add(`${name}_high`); }
        const called = pattern instanceof RegExp ? name.replace(pattern, words).replace(/\/(?=\S)/g, " ") : words;
        if (wanted(name, called)) charts.push(chartOf(name, called, how, stage));
      }
    }
    if (charts.some(Boolean)) out.push(section(title, charts));
  }
  const rest = [...names].filter((name) => !used.has(name) && wanted(name, name)).sort();
  const others = rest.map((name) => chartOf(name, name, {}, stage)).filter(Boolean);
  if (others.length) {
    out.push(el("details", { open: Boolean(curveState.filter), ontoggle: () => drawVisible() },
      el("summary", {}, el("h2", {}, `${others.length} more numbers`)), el("div", { class: "grid" }, others)));
  }
  holder.replaceChildren(...(out.length ? out : [el("p", {}, stage ? "No number has this name." : "Nothing measured yet.")]));
  observe(holder);
}

function chartOf(name, title, how, stage) {
  const series = seriesOf(name, how, stage);
  if (!series.some((s) => s.y.some((v) => v !== null))) return null;
  const chart = new Chart(series, { ...how, title });
  chart.node.dataset.name = name;
  chart.smooth = curveState.smooth; chart.log = curveState.log;
  return chart.node;
}

const section = (title, charts) => el("section", {}, el("h2", {}, title), el("div", { class: "grid" }, charts.filter(Boolean)));

// Charts are drawn when they scroll into view.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && !entry.target.chart.root) entry.target.chart.draw();
}, { rootMargin: "400px" });
function observe(holder) { for (const node of holder.querySelectorAll(".chart")) seen.observe(node); }
function drawVisible(all = false) {
  for (const node of document.querySelectorAll(".chart")) if (node.chart && (all || node.offsetParent) && !node.chart.root) node.chart.draw();
}
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { for (const chart of shared.charts) if (chart.root && chart.node.isConnected) chart.draw(); }, 100);
});
addEventListener("beforeprint", () => drawVisible(true));

// --- time ------------------------------------------------------------------------------------------------------

const RATES = [
  ["tokens_per_second", "Tokens trained on per second"], ["generated_per_second", "Tokens sampled per second"],
  ["mfu", "Model FLOPs utilisation (MFU)", { percent: true }], ["peak_memory_gib", "Peak memory, GiB"],
];

function time(root) {
  const body = el("div");
  const redraw = () => { forgetCharts(); body.replaceChildren(); timeBody(body); observe(body); };
  root.append(el("div", { class: "controls" }, stagePicker(redraw), runPicker(redraw)), body);
  redraw();
}

function timeBody(body) {
  const stage = curveState.stage;
  store.data.runs.forEach((run, i) => {
    const own = run.curves[`${stage}/train`];
    if (!own?.timings.seconds || curveState.hidden.has(i)) return;
    const parts = partsOf(own);
    const chart = new Chart(parts.map((p) => ({ ...p, x: own.steps })), { title: "Seconds per row, by part", stacked: true, height: 240, note: "A row of metrics covers the steps since the one before it." });
    body.append(el("section", { class: "card" }, el("h2", {}, run.name), chart.node,
      el("div", { class: "two" }, partTable(parts, own), heldTable(own))));
  });
  const planned = store.data.runs[0].stages.find((one) => one.name === stage)?.planned_gib;
  const line = planned && store.data.runs.length === 1 ? { value: planned, name: "plan of an update" } : undefined;
  const rates = RATES.map(([name, title, how = {}]) => chartOf(name, title, name === "peak_memory_gib" ? { line } : how, stage)).filter(Boolean);
  if (rates.length) body.append(section("Rates and memory", rates));
  if (!body.childElementCount) body.append(el("p", {}, "No timings measured yet."));
}

function partsOf(own) {
  const names = Object.keys(own.timings).filter((name) => name.endsWith("_seconds"));
  const parts = names.map((name, i) => ({ name: name.replace("_seconds", ""), color: colorOf(i), y: own.timings[name].map((v) => v ?? 0) }));
  const rest = own.timings.seconds.map((v, i) => Math.max(0, (v ?? 0) - parts.reduce((sum, p) => sum + p.y[i], 0)));
  return [...parts, { name: "else", color: "var(--muted)", y: rest }].filter((p) => p.y.some((v) => v > 0));
}

function partTable(parts, own) {
  const whole = own.timings.seconds.reduce((sum, v) => sum + (v ?? 0), 0);
  const rows = parts.map((p) => [p, p.y.reduce((sum, v) => sum + v, 0)]).sort((a, b) => b[1] - a[1]);
  return table(["part", "time", "share"], rows.map(([p, sum]) => [el("span", {}, dot(p.color), p.name), duration(sum), percent(sum / whole)]), "Where the time went");
}

function heldTable(own) {
  const counts = new Map();
  for (const name of own.held_by) if (name) counts.set(name, (counts.get(name) ?? 0) + 1);
  if (!counts.size) return null;
  const total = [...counts.values()].reduce((a, b) => a + b, 0);
  return table(["bottleneck", "rows", "share"], [...counts].sort((a, b) => b[1] - a[1]).map(([name, n]) => [name, number(n), percent(n / total)]), "Bottlenecks of the steps");
}
