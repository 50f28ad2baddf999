// Browsing what was sampled: by step, problem, group, verdict, reward and words; token by token; one problem over steps.

const MOST_ROWS = 200, MOST_SPANS = 6000, MOST_FOUND = 500;
const browse = {
  run: 0, source: null, key: null, place: null, verdict: "", low: "", high: "", problem: "", search: "", everywhere: false,
  color: setting("color", "logprob"), rows: [], shown: MOST_ROWS, busy: 0, found: null,
};

function completions(root) {
  const run = store.data.runs[browse.run];
  const sources = [...new Set(run.chunks.map((chunk) => chunk.source))];
  if (!sources.length) {
    root.append(el("section", { class: "card" }, el("h2", {}, "No completions yet"), el("p", {}, "Reinforcement stages and evaluations sample completions; supervised stages do not.")));
    return;
  }
  if (!sources.includes(browse.source)) { browse.source = sources[0]; browse.key = null; }
  const own = run.chunks.filter((chunk) => chunk.source === browse.source);
  if (!own.some((chunk) => chunk.key === browse.key)) browse.key = own.at(-1).key;
  const list = el("div", { id: "list", class: "list", role: "region", "aria-label": "Completions" });
  const detail = el("article", { id: "detail", class: "detail", "aria-label": "One completion", tabindex: "-1" });
  root.append(filters(run, sources, own), el("div", { class: "browser" }, list, detail));
  refresh();
}

function filters(run, sources, own) {
  const again = () => show("completions");
  const field = (label, key, attributes) => el("label", { class: "field" }, el("span", {}, label), el("input", { value: browse[key], ...attributes,
    oninput: (event) => { browse[key] = event.target.value; browse.place = 0; browse.found = null; refresh(); } }));
  const at = own.findIndex((chunk) => chunk.key === browse.key);
  const move = (by) => { const next = own[at + by]; if (next) { browse.key = next.key; browse.place = 0; browse.found = null; again(); } };
  return el("form", { class: "controls", role: "search", onsubmit: (event) => { event.preventDefault(); searchAll(); } },
    store.data.runs.length > 1 ? select("Run", store.data.runs.map((r, i) => [i, r.name]), browse.run, (v) => { browse.run = Number(v); browse.key = null; browse.found = null; again(); }) : null,
    select("Where", sources.map((s) => [s, s]), browse.source, (v) => { browse.source = v; browse.key = null; browse.place = 0; browse.found = null; again(); }),
    own.length > 1 ? el("div", { class: "steps" }, el("button", { type: "button", "aria-label": "Previous step", disabled: at <= 0, onclick: () => move(-1) }, "‹"),
      select("Step", own.map((chunk) => [chunk.key, String(chunk.step)]), browse.key, (v) => { browse.key = v; browse.place = 0; browse.found = null; again(); }),
      el("button", { type: "button", "aria-label": "Next step", disabled: at >= own.length - 1, onclick: () => move(1) }, "›")) : null,
    select("Verdict", [["", "any"], ["right", "right"], ["wrong", "wrong"], ["unknown", "unknown"], ["cut", "cut off"], ["format", "format broken"]], browse.verdict, (v) => { browse.verdict = v; browse.place = 0; browse.found = null; refresh(); }),
    field("Reward from", "low", { type: "number", step: "any", class: "small" }), field("to", "high", { type: "number", step: "any", class: "small" }),
    field("Problem", "problem", { type: "search", id: "problem", placeholder: "id" }),
    field("Search", "search", { type: "search", id: "search", placeholder: "words" }),
    el("button", { type: "submit", id: "everywhere" }, "Search all steps"));
}

// A live page does not redraw what someone reads; it says that there is more.
function offerNewer() {
  const run = store.data.runs[browse.run], own = run.chunks.filter((chunk) => chunk.source === browse.source);
  const last = own.at(-1), form = document.querySelector("form.controls");
  if (!form || !last || last.key === browse.key || document.getElementById("newer")?.dataset.key === last.key) return;
  document.getElementById("newer")?.remove();
  form.append(el("button", { type: "button", id: "newer", "data-key": last.key, onclick: () => { Object.assign(browse, { key: last.key, place: 0, found: null }); show("completions"); } }, `Newest: step ${last.step}`));
}

function matches(sample, prompt) {
  if (browse.verdict === "cut" ? sample.finish !== "length" : browse.verdict === "format" ? sample.format : browse.verdict && sample.verdict !== browse.verdict) return false;
  if (browse.low !== "" && !(sample.reward >= Number(browse.low))) return false;
  if (browse.high !== "" && !(sample.reward !== null && sample.reward <= Number(browse.high))) return false;
  if (browse.problem && !sample.problem.includes(browse.problem.trim())) return false;
  const words = browse.search.toLowerCase();
  return !words || textOf(sample).toLowerCase().includes(words) || prompt.toLowerCase().includes(words) || (sample.answer ?? "").toLowerCase().includes(words);
}

async function refresh() {
  const turn = ++browse.busy;
  const list = document.getElementById("list");
  try {
    if (browse.found === null) {
      const chunk = await store.chunk(browse.run, browse.key);
      if (turn !== browse.busy) return;
      const meta = store.data.runs[browse.run].chunks.find((c) => c.key === browse.key);
      browse.rows = rowsOf(chunk, meta);
      browse.note = chunk.all ? `This report contains ${chunk.samples.length} of the step's ${number(chunk.all)} samples; lemma watch shows all.` : "";
    } else browse.rows = browse.found;
  } catch (error) {
    list?.replaceChildren(el("p", { class: "worse" }, `The samples cannot be read: ${error.message}`));
    return;
  }
  const isFirst = browse.place === null;
  browse.place = Math.min(browse.place ?? firstMixed(browse.rows), Math.max(0, browse.rows.length - 1));
  browse.shown = Math.max(MOST_ROWS, browse.place + 1);
  drawList(); drawDetail();
  const current = isFirst && list?.querySelector("[aria-current]");
  if (current) list.scrollTop = current.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 2;
}

// A group to begin with: its samples were not all graded alike, so there are advantages to see.
function firstMixed(rows) {
  const first = new Map();
  for (const { sample } of rows) {
    if (!first.has(sample.group)) first.set(sample.group, sample.verdict);
    else if (first.get(sample.group) !== sample.verdict) return rows.findIndex((row) => row.sample.group === sample.group);
  }
  return 0;
}

const rowsOf = (chunk, meta) => chunk.samples.filter((s) => matches(s, chunk.prompts[s.prompt])).map((sample) => ({ sample, chunk, meta }));

// Every step that the page has, one after the other; stops at so many finds.
async function searchAll() {
  const run = store.data.runs[browse.run], turn = ++browse.busy, found = [];
  const status = document.getElementById("found");
  for (const [i, meta] of run.chunks.entries()) {
    if (browse.problem && meta.problems && !meta.problems.some((id) => id.includes(browse.problem.trim()))) continue;
    try { found.push(...rowsOf(await store.chunk(browse.run, meta.key), meta)); } catch { continue; }
    if (turn !== browse.busy) return;
    if (status) status.textContent = `${found.length} found in ${i + 1} of ${run.chunks.length} steps …`;
    if (found.length >= MOST_FOUND) break;
  }
  browse.found = found.slice(0, MOST_FOUND);
  browse.place = 0;
  browse.note = `In all steps${found.length >= MOST_FOUND ? `, the first ${MOST_FOUND}` : ""}.`;
  await refresh();
}

async function showProblem(problem) {
  Object.assign(browse, { problem, search: "", verdict: "", low: "", high: "", place: 0 });
  await show("completions");
  await searchAll();
}

function drawList() {
  const list = document.getElementById("list");
  if (!list) return;
  const right = browse.rows.filter((r) => r.sample.verdict === "right").length;
  const items = browse.rows.slice(0, browse.shown).map((row, i) => el("button", {
    type: "button", class: "row", "aria-current": i === browse.place ? "true" : null, onclick: () => pick(i, true) },
    el("span", { class: `mark ${row.sample.verdict ?? ""}`, title: row.sample.verdict ?? "not graded" }, { right: "✓", wrong: "✗", unknown: "?" }[row.sample.verdict] ?? "·"),
    el("span", { class: "short" }, short(row)), el("span", { class: "muted" }, row.sample.reward === null || row.sample.reward === undefined ? "" : number(row.sample.reward))));
  if (browse.rows.length > browse.shown) items.push(el("button", { type: "button", onclick: () => { browse.shown += MOST_ROWS; drawList(); } }, `${number(browse.rows.length - browse.shown)} more`));
  list.replaceChildren(el("p", { id: "found", class: "muted", role: "status" }, `${number(browse.rows.length)} completions, ${number(right)} right. ${browse.note ?? ""}`), ...items);
}

function short({ sample, meta }) {
  const text = sample.parts.map((part) => (part.text ?? part.pieces.join("")).trim()).join(" · "), words = browse.search.toLowerCase(), at = words ? text.toLowerCase().indexOf(words) : -1;
  const piece = at > 20 ? `…${text.slice(at - 15, at + 80)}` : text.slice(0, 95);
  return `${browse.found ? `${meta.source} ${meta.step}: ` : ""}${visible(piece.replace(/\s+/g, " "))}`;
}

function pick(place, focus = false) {
  if (place < 0 || place >= browse.rows.length) return;
  browse.place = place;
  if (place >= browse.shown) browse.shown = place + MOST_ROWS;
  drawList(); drawDetail();
  const detail = document.getElementById("detail");
  if (focus && matchMedia("(max-width: 760px)").matches) detail.scrollIntoView({ block: "start" });
  document.querySelector("#list [aria-current]")?.scrollIntoView({ block: "nearest" });
}

function drawDetail() {
  const detail = document.getElementById("detail");
  if (!detail) return;
  const row = browse.rows[browse.place];
  if (!row) { detail.replaceChildren(el("p", { class: "muted" }, "No completion matches the filters.")); return; }
  const { sample, chunk, meta } = row;
  const siblings = chunk.samples.filter((s) => s.group === sample.group);
  detail.replaceChildren(
    el("header", {}, el("h2", {}, `${meta.source}, step ${meta.step}, group ${String(sample.group).slice(0, 40)}, sample ${sample.number}`), verdictBadge(sample)),
    groupStrip(siblings, sample),
    facts(sample),
    el("details", { open: true }, el("summary", {}, "Prompt"), el("div", { class: "text prompt", dir: "auto", tabindex: "0" }, visible(chunk.prompts[sample.prompt]))),
    el("div", { class: "between" }, el("h3", {}, "Completion"), colours(sample, chunk)), completionText(sample), legend(sample),
    el("div", { id: "history" }, el("button", { type: "button", onclick: () => drawHistory(sample.problem) }, "How this problem's answers changed")));
}

function verdictBadge(sample) {
  if (!sample.verdict) return el("span", { class: "badge" }, "not graded");
  return el("span", { class: `badge ${sample.verdict}` }, sample.verdict, sample.reason ? `: ${visible(sample.reason)}` : "");
}

function groupStrip(siblings, sample) {
  if (siblings.length < 2) return null;
  return el("div", { class: "strip", role: "group", "aria-label": "The samples of this group" }, siblings.map((s) => el("button", {
    type: "button", class: s.verdict ?? "", "aria-current": s === sample ? "true" : null, "aria-label": `sample ${s.number}, ${s.verdict ?? "not graded"}, reward ${number(s.reward)}`,
    onclick: () => { const at = browse.rows.findIndex((r) => r.sample === s); if (at >= 0) pick(at); else { Object.assign(browse, { verdict: "", low: "", high: "", search: "", problem: "", found: null }); show("completions").then(() => pick(browse.rows.findIndex((r) => r.sample === s))); } },
  }, s.reward === null || s.reward === undefined ? "–" : number(s.reward))));
}

function facts(sample) {
  const rows = [
    ["answer", sample.answer === null || sample.answer === undefined ? "none found" : visible(sample.answer)],
    ["gold", sample.gold?.length ? visible(sample.gold.join(" or ")) : null],
    ["reward", sample.reward === null || sample.reward === undefined ? null : number(sample.reward)],
    ...Object.entries(sample.rewards ?? {}).map(([name, value]) => [`reward: ${name}`, number(value)]),
    ["advantage", advantageWords(sample)],
    ["tokens", `${number(sample.tokens)}, ${{ stop: "ended by itself", length: "cut off", given: "given by a teacher", cancelled: "cancelled" }[sample.finish] ?? sample.finish}`],
    ["format", sample.format ? "kept" : `broken${sample.faults?.length ? `: ${visible(sample.faults.join(", "))}` : ""}`],
    ["problem", el("button", { type: "button", class: "link", onclick: () => showProblem(sample.problem) }, sample.problem)],
  ];
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value !== null).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function advantageWords(sample) {
  const pulls = new Set(sample.parts.filter((part) => part.pull !== undefined).flatMap((part) => part.pull).filter((pull) => pull !== null));
  const used = pulls.size === 1 ? number([...pulls][0] / 1000) : pulls.size ? "differs from token to token" : null;
  const from = sample.advantage ?? null, mean = "the group's mean";
  const reward = from === null ? null : from === 0 ? `reward equal to ${mean}` : `reward ${number(Math.abs(from))} ${from < 0 ? "below" : "above"} ${mean}`;
  return [used, reward].filter(Boolean).join("; ") || null;
}

function completionText(sample) {
  return el("div", { class: "text completion", dir: "auto", tabindex: "0" }, sample.parts.map((part) => {
    const named = part.kind === "sampled" ? null : el("span", { class: "kind" }, { given: "given by a teacher", observation: "observation" }[part.kind] ?? part.kind);
    return el("div", { class: `part ${part.kind}` }, named, part.pieces && browse.color && part.pieces.length <= MOST_SPANS ? tokens(part, sample) : visible(part.text ?? part.pieces.join("")));
  }));
}

// What an update recorded of a token, in thousandths in the data: one number for all tokens, one for each, or nothing.
function noted(part, name, i) {
  const value = Array.isArray(part[name]) ? part[name][i] : part[name];
  return value === null || value === undefined ? null : value / 1000;
}

const RATIOS = { ratio: "the old policy", engine: "the engine" };
const FULL_RATIO = Math.log(1.5);
// Most ratios are within a few percent of 1: the root of their logarithm makes them distinguishable.
const rooted = (log) => (log === null ? null : Math.sign(log) * Math.sqrt(Math.abs(log) / FULL_RATIO));

function tokens(part, sample) {
  return part.pieces.map((piece, i) => {
    const lp = logprobOf(part.levels[i]), pull = part.pull === undefined ? (sample.advantage ?? null) : noted(part, "pull", i);
    const words = [`probability ${percent(Math.exp(lp))}`, `log-probability ${lp.toFixed(2)}`];
    if (pull !== null) words.push(`advantage ${number(pull)}`);
    for (const [name, whose] of Object.entries(RATIOS)) if (noted(part, name, i) !== null) words.push(`ratio to ${whose} ${Math.exp(noted(part, name, i)).toFixed(3)}`);
    const node = el("span", { class: "token", title: words.join(", ") }, visible(piece));
    if (browse.color === "logprob") {
      node.style.setProperty("--heat", Math.min(1, -lp / 4).toFixed(3));
      node.dataset.by = "heat";
    } else {
      const size = (browse.color === "advantage" ? pull : rooted(noted(part, browse.color, i))) ?? 0;
      node.style.setProperty("--pull", Math.max(-1, Math.min(1, size)).toFixed(3));
      node.dataset.by = size < 0 ? "loss" : "gain";
    }
    return node;
  });
}

function colours(sample, chunk) {
  if (!sample.parts.some((part) => part.pieces)) return null;
  const ratios = Object.entries(RATIOS).filter(([name]) => chunk.noted?.includes(name)).map(([name, whose]) => [name, `ratio to ${whose}`]);
  const kinds = [["logprob", "log-probability"], ["advantage", "advantage"], ...ratios, ["", "nothing"]];
  if (!kinds.some(([kind]) => kind === browse.color)) browse.color = "logprob";
  return select("Tokens coloured by", kinds, browse.color, (v) => { browse.color = v; remember("color", v); drawDetail(); });
}

function legend(sample) {
  if (!browse.color || !sample.parts.some((part) => part.pieces)) return null;
  return el("p", { class: "note" }, legendWords(sample));
}

function legendWords(sample) {
  const known = (name) => sample.parts.some((part) => part[name] !== undefined);
  if (browse.color === "logprob") return "The stronger the colour, the less likely the token was when it was sampled.";
  if (browse.color === "advantage") return known("pull") ? "Green: the advantage is positive, so the update makes the token more likely; red: less likely." : "Green: the reward is above the mean of its group, red: below. All tokens of a sample share it.";
  if (!known(browse.color)) return "No update was computed on this sample, so it has no ratio: its group's rewards do not differ, or its tokens are masked.";
  if (sample.parts.every((part) => [part[browse.color] ?? 0].flat().every((log) => !log))) {
    return browse.color === "ratio" ? "All of its ratios are 1: the sample was used in the step's first update, before the weights changed." : "Engine and learner agree on every token: all ratios are 1.";
  }
  const when = browse.color === "ratio" ? "at its last update in the step than before the step" : "to the learner than to the engine that sampled it";
  return `Green: the token was more likely ${when}, red: less likely. Full colour is a ratio of 1.5 or 2/3, no colour is 1.`;
}

// One line per step: how many of the problem's samples were right, and what they answered.
async function drawHistory(problem) {
  const holder = document.getElementById("history"), run = store.data.runs[browse.run], rows = [];
  holder.replaceChildren(el("p", { class: "muted", role: "status" }, "Reading …"));
  for (const meta of run.chunks) {
    if (meta.problems && !meta.problems.includes(problem)) continue;
    let chunk;
    try { chunk = await store.chunk(browse.run, meta.key); } catch { continue; }
    const own = chunk.samples.filter((s) => s.problem === problem);
    if (own.length) rows.push([`${meta.source}, step ${meta.step}`, `${own.filter((s) => s.verdict === "right").length} of ${own.length}`, number(mean(own.map((s) => s.tokens))),
      el("span", { class: "answers" }, own.slice(0, 8).map((s) => el("span", { class: `answer ${s.verdict ?? ""}`, title: visible(textOf(s).slice(0, 400)) }, visible((s.answer ?? "–").slice(0, 40)))))]);
  }
  holder.replaceChildren(el("h3", {}, "This problem over time"), table(["where", "right", "tokens", "answers"], rows, "Answers to this problem"));
}
