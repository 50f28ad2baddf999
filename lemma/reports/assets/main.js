// Views, keys, theme, and following a live run.

const VIEWS = { overview: ["Overview", overview], curves: ["Curves", curves], time: ["Time", time], evaluations: ["Evaluations", evaluations], completions: ["Completions", completions] };
const KEYS = [["1 to 5", "the views"], ["/", "search completions"], ["j, k", "next and previous completion"], ["n, p", "next and previous step"], ["← →", "values of the chart that has the focus"], ["+ −", "zoom that chart"], ["Esc", "whole range; close"], ["t", "dark or light"], ["?", "this list"]];
let current = null;

async function show(name) {
  current = name in VIEWS ? name : "overview";
  forgetCharts();
  const main = document.getElementById("main");
  main.replaceChildren();
  main.dataset.view = current;
  main.setAttribute("role", "tabpanel");
  main.setAttribute("aria-labelledby", `tab-${current}`);
  for (const tab of document.querySelectorAll("#tabs [role=tab]")) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === current));
    tab.tabIndex = tab.dataset.view === current ? 0 : -1;
  }
  document.getElementById(`tab-${current}`)?.scrollIntoView({ inline: "center", block: "nearest" });
  VIEWS[current][1](main);
  if (location.hash.slice(1) !== current) history.replaceState(null, "", `#${current}`);
  if (current === "completions" && browse.key) await store.chunk(browse.run, browse.key).catch(() => null);
}

function frame() {
  const { runs } = store.data;
  const title = document.getElementById("title");
  title.textContent = title.title = runs.map((run) => run.name).join(", ");
  document.getElementById("state").replaceChildren(...(runs.length === 1 ? [badge(runs[0].state)] : []));
  document.getElementById("foot").textContent = `Lemma ${store.data.lemma} · ${isLive ? "read" : "made"} ${store.data.made} · loads nothing from the network`;
}

function tabs() {
  const bar = document.getElementById("tabs");
  bar.replaceChildren(...Object.entries(VIEWS).map(([name, [title]]) => el("button", { type: "button", role: "tab", id: `tab-${name}`, "data-view": name, "aria-controls": "main", onclick: () => show(name) }, title)));
  bar.addEventListener("keydown", (event) => {
    const names = Object.keys(VIEWS), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    show(names[(names.indexOf(current) + by + names.length) % names.length]);
    document.getElementById(`tab-${current}`).focus();
  });
}

function theme(next) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = next ?? setting("theme", dark ? "dark" : "light");
  document.documentElement.dataset.theme = now;
  document.getElementById("theme").textContent = now === "dark" ? "Light" : "Dark";
  if (next) remember("theme", next);
}
const turnTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

function keys() {
  const box = document.getElementById("keys");
  box.append(el("h2", { id: "keys-title" }, "Keys"), el("dl", { class: "facts" }, KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("button", { type: "button", onclick: () => box.close() }, "Close"));
  document.getElementById("help").addEventListener("click", () => box.showModal());
  document.getElementById("theme").addEventListener("click", turnTheme);
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const view = Object.keys(VIEWS)[Number(event.key) - 1];
    if (view) show(view);
    else if (event.key === "?") box.showModal();
    else if (event.key === "t") turnTheme();
    else if (event.key === "/") { event.preventDefault(); show("completions").then(() => document.getElementById("search")?.focus()); }
    else if (current === "completions" && (event.key === "j" || event.key === "k")) pick(browse.place + (event.key === "j" ? 1 : -1));
    else if (current === "completions" && event.key === "n") document.querySelector('[aria-label="Next step"]')?.click();
    else if (current === "completions" && event.key === "p") document.querySelector('[aria-label="Previous step"]')?.click();
  });
}

// A view in which the user is typing or reading a completion is not redrawn.
async function follow() {
  const status = document.getElementById("connection");
  try {
    const changed = await store.update();
    status.textContent = "";
    frame();
    const busy = document.activeElement?.matches("input, select, textarea") || current === "completions" || shared.cursor !== null;
    if (changed && current === "completions") offerNewer();
    if (changed && !busy) {
      const place = scrollY;
      show(current);
      scrollTo(0, place);
    }
  } catch {
    status.textContent = "The server does not answer; is lemma watch still running?";
  }
  setTimeout(follow, document.hidden ? 10000 : 2000);
}

async function start() {
  theme();
  try {
    await store.load();
  } catch (error) {
    document.getElementById("loading").textContent = `This page cannot be shown: ${error.message}`;
    return;
  }
  tabs(); keys(); frame();
  await show(location.hash.slice(1) || "overview");
  document.documentElement.dataset.ready = "yes";
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== current) show(location.hash.slice(1)); });
  if (isLive) setTimeout(follow, 2000);
}
start();
