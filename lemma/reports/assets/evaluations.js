// Evaluations: every number with its interval, and which problems were gained and lost.

function evaluations(root) {
  const { runs, comparisons } = store.data;
  const many = runs.length > 1;
  const rows = runs.flatMap((run, i) => run.evaluations.map((row) => ({ ...row, run, i })));
  if (!rows.length) {
    contamination(root);
    root.prepend(el("section", { class: "card" }, el("h2", {}, "No evaluation yet"),
      el("p", {}, "A stage evaluates if its recipe has ", el("code", {}, "eval.benchmarks"), "; ", el("code", {}, "lemma eval"), " measures a finished model.")));
    return;
  }
  const charts = overSteps(rows);
  if (charts.length) root.append(el("section", {}, el("h2", {}, "Over steps"), el("div", { class: "grid" }, charts)));
  const played = rows.some((row) => row.turns);
  root.append(el("section", { class: "card tall" }, el("h2", {}, "Results"),
    table(["evaluation", "benchmark", "metric", "right, with 95% interval", "problems", "format followed", "cut off", "tokens", ...(played ? ["turns"] : [])],
      rows.map((row) => [many ? el("span", { class: "named" }, dot(colorOf(row.i)), clipped(`${row.run.name}: ${row.evaluation}`)) : row.evaluation, row.benchmark, row.metric,
        intervalBar(row), `${number(row.n)}${row.k > 1 ? ` × ${row.k}` : ""}`, percent(row.format), percent(row.truncated), number(Math.round(row.tokens ?? 0)),
        ...(played ? [row.turns ? row.turns.toFixed(1) : ""] : [])]),
      "Evaluations", true)));
  comparisons.forEach((one) => root.append(comparison(one)));
  contamination(root);
  observe(root);
}

// What finished stages found about their data.
function contamination(root) {
  const { runs } = store.data, known = runs.filter((run) => run.contamination);
  if (!known.length) return;
  root.append(el("section", { class: "card" }, el("h2", {}, "Does the training data contain benchmark problems?"),
    known.map((run) => [runs.length > 1 ? el("h3", {}, run.name) : null,
      run.contamination.benchmarks.length ? el("p", {}, `Compared with ${run.contamination.benchmarks.join(", ")}.`) : null,
      el("dl", { class: "facts" }, Object.entries(run.contamination.stages).flatMap(([stage, found]) =>
        [el("dt", {}, stage), el("dd", { class: found.flagged ? "worse" : null }, ...withCode([found.words, ...(found.benchmarks ?? [])].join("; ")))]))]).flat()));
}

function intervalBar(row) {
  const scale = (v) => `${(100 * v).toFixed(2)}%`;
  const band = el("span", { class: "band" }), point = el("span", { class: "point" });
  band.style.left = scale(row.low); band.style.width = scale(row.high - row.low); point.style.left = scale(row.value);
  return el("span", { class: "interval" }, el("b", {}, percent(row.value)), ` ${percent(row.low)} to ${percent(row.high)}`,
    el("span", { class: "track", "aria-hidden": "true" }, band, point));
}

function overSteps(rows) {
  const kinds = new Map();
  for (const row of rows.filter((r) => r.stage)) {
    const key = `${row.stage}: ${row.benchmark}, ${row.metric}`;
    if (!kinds.has(key)) kinds.set(key, new Map());
    const series = kinds.get(key);
    if (!series.has(row.i)) series.set(row.i, { name: row.run.name, color: colorOf(row.i), x: [], y: [], low: [], high: [] });
    const own = series.get(row.i);
    own.x.push(row.step); own.y.push(row.value); own.low.push(row.low); own.high.push(row.high);
  }
  return [...kinds].map(([title, series]) => new Chart([...series.values()], { title, percent: true }).node);
}

function comparison(one) {
  return el("section", { class: "card" }, el("h2", {}, `${one.benchmark}: ${one.b} against ${one.a}`),
    el("p", {}, one.words.replace(/^A is/, `A (${one.a}) is`).replace(/^B is/, `B (${one.b}) is`).replace(/^not/, "Not"), "."),
    el("p", {}, `A ${percent(one.first)}, B ${percent(one.second)} on ${number(one.problems)} problems: `,
      el("b", { class: "better" }, `${number(one.gained)} gained`), ", ", el("b", { class: "worse" }, `${number(one.lost)} lost`), "."),
    el("div", { class: "two" }, changes("Gained", one.gained_list, one.gained), changes("Lost", one.lost_list, one.lost)));
}

function changes(title, list, all) {
  if (!list.length) return null;
  return el("details", {}, el("summary", {}, `${title}: ${number(all)}${all > list.length ? `, the first ${list.length}` : ""}`),
    el("ul", { class: "changes" }, list.map((change) => el("li", {},
      el("button", { type: "button", class: "link", onclick: () => showProblem(change.problem) }, visible(change.question) || change.problem),
      el("span", { class: "muted" }, ` ${percent(change.from, 0)} → ${percent(change.to, 0)}`)))));
}
