// The first view: what the run is, its progress, its main numbers, what needs attention, the recipe in words.

const COLORS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)"];
const colorOf = (i) => COLORS[i % COLORS.length];
const STATES = {
  running: "A process is working on it.", stopped: "Stopped after saving; the same command resumes it.",
  finished: "All of its stages are done.", dead: "Its process ended without finishing or saving; the same command resumes from the last checkpoint.",
  new: "Nothing measured yet.",
};
// Numbers that a tile shows, in this order, as many as there is room for; `good` is the desired direction.
const TILES = [
  ["right", "Right answers", { percent: true, good: 1 }], ["reward/mean", "Reward", { good: 1 }],
  ["margin", "Margin", { good: 1 }], ["validation/loss", "Validation loss", { good: -1 }],
  ["loss", "Loss", { good: -1, unless: "reward/mean" }], ["length/mean", "Tokens per sample", {}],
  ["entropy/sampled", "Entropy", {}], ["groups/live", "Live groups", { percent: true }],
  ["truncated", "Cut off", { percent: true, good: -1 }], ["grad_norm", "Gradient norm", {}],
];

const badge = (state) => el("span", { class: `badge ${state}`, title: STATES[state] }, state);

function overview(root) {
  const { runs, differences } = store.data;
  if (runs.length > 1) root.append(sideBySide(runs));
  runs.forEach((run, i) => root.append(runCard(run, i)));
  if (runs.length > 1) {
    root.append(el("section", { class: "card" }, el("h2", {}, "Where the recipes differ"),
      differences.length
        ? table(["option", ...runs.map((run) => run.name)], differences.map((d) => [el("code", {}, d.key), ...d.values]), "Options that differ", true)
        : el("p", {}, "They do not.")));
  }
}

// Several runs at a glance: their progress, and their last main numbers.
function sideBySide(runs) {
  const ends = (run, name) => { const values = run.curves[`${lastStage(run)}/train`]?.values[name]?.filter((v) => v !== null); return values?.length ? mean(values.slice(-3)) : null; };
  const shown = TILES.filter(([name, , how]) => runs.some((run) => ends(run, name) !== null && !(how.unless && ends(run, how.unless) !== null))).slice(0, 5);
  return el("section", { class: "card tall" }, el("h2", {}, "Side by side"),
    table(["run", "state", "stage", "step", ...shown.map(([, title]) => title)], runs.map((run, i) => {
      const stage = lastStage(run);
      return [el("span", { class: "named" }, dot(colorOf(i)), clipped(run.name)), badge(run.state), stage ?? "–", number(run.curves[`${stage}/train`]?.steps.at(-1)),
        ...shown.map(([name, , how]) => { const v = ends(run, name); return v === null ? "–" : how.percent ? percent(v) : number(Number(v.toPrecision(3))); })];
    }), "Each number is the mean of the last three rows of metrics."));
}

function runCard(run, i) {
  const colored = store.data.runs.length > 1 ? dot(colorOf(i)) : null;
  return el("section", { class: "card", "aria-labelledby": `run-${i}` },
    el("h2", { id: `run-${i}` }, ...(colored ? [el("span", {}, colored, run.name), badge(run.state)] : ["Progress"])),
    el("p", { class: "muted" }, `${STATES[run.state]} Started ${run.created.replace("T", " ")}; last sign of life: ${run.heard || "never"}.`),
    el("ol", { class: "stages" }, run.stages.map((stage) => stageRow(run, stage))),
    lastStage(run) ? el("p", { class: "note" }, `Stage ${lastStage(run)}: the mean of its last three rows of metrics, compared with its first three.`) : null,
    el("div", { class: "tiles" }, tiles(run, i)),
    latestScores(run),
    attention(run),
    el("details", { open: store.data.runs.length === 1 }, el("summary", {}, el("h3", {}, "The recipe in words")), inWords(run.words)),
    el("details", {}, el("summary", {}, el("h3", {}, "The whole recipe")), el("pre", { class: "code", tabindex: "0" }, run.recipe)),
    el("details", {}, el("summary", {}, el("h3", {}, "The machine")),
      el("dl", { class: "facts" }, Object.entries({ folder: run.folder, ...run.facts }).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))));
}

function stageRow(run, stage) {
  const curves = run.curves[`${stage.name}/train`];
  const step = curves?.steps.at(-1) ?? 0, total = stage.total ?? (stage.done ? step : null);
  const seconds = curves?.timings.seconds?.reduce((sum, v) => sum + (v ?? 0), 0) ?? 0;
  const share = stage.done ? 1 : total ? step / total : 0;
  const bar = el("span", { class: "bar", "aria-hidden": "true" }, el("span"));
  bar.firstChild.style.width = `${100 * share}%`;
  return el("li", {}, el("b", {}, stage.name), el("span", { class: "muted" }, stage.kind), bar,
    el("span", {}, step || stage.done ? `${number(step)}${total ? ` of ${number(total)}` : ""} steps` : "not started"),
    el("span", { class: "muted" }, seconds ? duration(seconds) : ""));
}

const lastStage = (run) => run.stages.map((s) => s.name).filter((name) => run.curves[`${name}/train`]).at(-1);

function tiles(run, index) {
  const stage = lastStage(run), curves = run.curves[`${stage}/train`];
  if (!curves) return [];
  return TILES.filter(([name, , how]) => curves.values[name] && !(how.unless && curves.values[how.unless])).slice(0, 6).map(([name, title, how]) => {
    const values = curves.values[name].filter((v) => v !== null);
    const [first, last] = [mean(values.slice(0, 3)), mean(values.slice(-3))];
    const show = (v) => (how.percent ? percent(v) : number(Number(v.toPrecision(3))));
    const way = how.good && Math.abs(last - first) > 1e-9 ? ((last > first) === (how.good > 0) ? "better" : "worse") : "";
    return el("div", { class: "tile" }, el("span", { class: "muted" }, title),
      el("strong", {}, show(last)),
      el("span", { class: `change ${way}` }, values.length > 3 ? `from ${show(first)}` : ""), sparkline(values, colorOf(index)));
  });
}

// The newest evaluation of each stage, or of a finished model, on each benchmark.
function latestScores(run) {
  const newest = new Map(run.evaluations.map((row) => [[row.stage || row.evaluation, row.benchmark, row.metric].join("\n"), row]));
  if (!newest.size) return null;
  return el("div", { class: "tall" }, el("h3", {}, "Latest evaluations"),
    table(["evaluation", "benchmark", "metric", "right, with 95% interval"],
      [...newest.values()].map((row) => [row.evaluation, row.benchmark, row.metric, intervalBar(row)]), "Latest evaluations", true));
}

const mean = (values) => values.reduce((sum, v) => sum + v, 0) / (values.length || 1);

function sparkline(values, color) {
  const [low, high] = [Math.min(...values), Math.max(...values)], step = Math.max(1, Math.floor(values.length / 120));
  const points = values.filter((_, i) => i % step === 0).map((v, i, all) =>
    [(100 * i) / Math.max(1, all.length - 1), 26 - (24 * (v - low)) / (high - low || 1)]);
  return svg("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { d: path(points), stroke: color, fill: "none" }));
}

function attention(run) {
  const byText = new Map();
  for (const one of run.remarks) {
    const key = one.text.replace(/\d[\d.,]*%?/g, "#");
    if (!byText.has(key)) byText.set(key, []);
    byText.get(key).push(one);
  }
  const items = [...byText.values()].reverse().map((all) => {
    const last = all.at(-1), steps = all.filter((one) => one.step !== null).map((one) => one.step);
    const where = [last.stage, steps.length ? `step ${[...new Set(steps)].slice(-5).join(", ")}` : "", all.length > 1 ? `${all.length} times` : ""];
    return el("li", { class: last.level }, el("span", { class: "muted" }, where.filter(Boolean).join(" · ")), " ", ...withCode(last.text));
  });
  return el("div", { class: "attention" }, el("h3", {}, "What needs attention"),
    items.length ? el("ul", {}, items) : el("p", { class: "muted" }, "Nothing: there are no warnings."));
}

const withCode = (text) => visible(text).split("`").map((piece, i) => (i % 2 ? el("code", {}, piece) : piece));

// Lines of `lemma plan`: headings at the margin, rows as `  name   text`.
function inWords(words) {
  const out = [];
  let list = null;
  for (const line of words.split("\n")) {
    const row = line.match(/^ {2}(.{12}) (.*)$/);
    if (row && row[1].trim()) {
      if (!list) out.push((list = el("dl", { class: "facts" })));
      list.append(el("dt", {}, row[1].trim()), el("dd", {}, row[2]));
    } else if (row && list) list.lastChild.append(" ", row[2]);
    else if (line.trim()) { list = null; out.push(el("h4", {}, line.trim())); }
  }
  return el("div", { class: "words" }, out);
}
