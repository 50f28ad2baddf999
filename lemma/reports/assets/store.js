// The data of the page: unpacking it, asking a live server for more, and the samples, loaded on demand.

const isLive = document.documentElement.dataset.live === "yes";
const DEEPEST = 16, LEVELS = 90, FIRST_LEVEL = 35;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const store = {
  data: null,
  chunks: new Map(),

  async load() {
    this.data = isLive ? await this.ask("data", {}) : await unpack(document.getElementById("data").textContent);
  },

  async ask(what, body) {
    const answer = await fetch(what, { method: "POST", body: JSON.stringify(body), cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  },

  // Adds new rows; returns whether anything on the page changes.
  async update() {
    const seen = this.data.runs.map((run) => ({
      generation: run.generation,
      counts: Object.fromEntries(Object.entries(run.curves).map(([key, c]) => [key, c.steps.length])),
    }));
    const fresh = await this.ask("data", { seen });
    const before = this.signature(this.data);
    fresh.runs.forEach((run, i) => {
      for (const [key, added] of Object.entries(run.curves)) {
        if (added.from > 0) run.curves[key] = joined(this.data.runs[i].curves[key], added);
      }
    });
    this.data = fresh;
    return this.signature(fresh) !== before;
  },

  signature(data) {
    return JSON.stringify(data.runs.map((run) => [
      run.state, run.generation, run.remarks.length, run.chunks.length, run.evaluations.length,
      Object.values(run.curves).map((c) => c.steps.length), run.stages.map((s) => s.done),
    ])) + data.comparisons.length;
  },

  // Whether a step is still being sampled or trained on.
  isGrowing(run, key) {
    const { state, chunks } = this.data.runs[run], own = chunks.find((chunk) => chunk.key === key);
    return state === "running" && own !== undefined && !chunks.some((chunk) => chunk.source === own.source && chunk.step > own.step);
  },

  async chunk(run, key) {
    const name = `${run}:${key}`;
    if (!this.chunks.has(name)) {
      let content;
      if (isLive) content = await this.ask("samples", { run, key });
      else content = await unpack(document.querySelector(`script.chunk[data-key="${CSS.escape(name)}"]`).textContent);
      if (isLive && this.isGrowing(run, key)) return content;
      this.chunks.set(name, content);
      if (this.chunks.size > 400) this.chunks.delete(this.chunks.keys().next().value);
    }
    return this.chunks.get(name);
  },
};

function joined(old, added) {
  const count = old.steps.length, more = added.steps.length;
  const columns = (kind) => {
    const names = new Set([...Object.keys(old[kind]), ...Object.keys(added[kind])]);
    const gap = (n) => Array(n).fill(null);
    return Object.fromEntries([...names].map((name) =>
      [name, [...(old[kind][name] ?? gap(count)), ...(added[kind][name] ?? gap(more))]]));
  };
  return {
    steps: [...old.steps, ...added.steps], held_by: [...old.held_by, ...added.held_by],
    values: columns("values"), timings: columns("timings"),
  };
}

const logprobOf = (level) => -DEEPEST * ((level.charCodeAt(0) - FIRST_LEVEL) / LEVELS) ** 2;

const textOf = (sample) => sample.parts.map((part) => part.text ?? part.pieces.join("")).join("");
