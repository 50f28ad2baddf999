// A line chart in SVG: several series, smoothing, log axis, zoom by dragging, values under the pointer or by arrow keys.
// All charts of a view share the zoom and the cursor.

const MARGIN = { left: 52, right: 12, top: 10, bottom: 26 };
const MOST_POINTS = 1500;
// With more curves than this, values are shown only at the pointer.
const MOST_SAID = 4;
const shared = { zoom: null, cursor: null, charts: new Set() };

class Chart {
  // series: [{name, color, x: [], y: [], low: [], high: []}], options: {title, note, percent, stacked, line: {value, name}}
  constructor(series, options) {
    this.series = series.filter((s) => s.y.some((v) => v !== null));
    this.options = options;
    this.smooth = 0;
    this.log = false;
    this.node = el("figure", { class: "chart", "data-title": options.title });
    this.node.chart = this;
    this.readout = el("span", { class: "readout", "aria-live": "polite" });
    this.holder = el("div", { class: "plot" });
    this.node.append(el("figcaption", {}, el("b", {}, options.title), this.readout), this.holder);
    if (options.note) this.node.append(el("p", { class: "note" }, options.note));
    shared.charts.add(this);
    this.watchPointer();
  }

  get words() {
    return this.series.map((s) => {
      const last = s.y.findLastIndex((v) => v !== null);
      const first = s.y.findIndex((v) => v !== null);
      return `${s.name}: ${this.format(s.y[first])} at ${s.x[first]}, ${this.format(s.y[last])} at ${s.x[last]}`;
    }).join("; ");
  }

  format(value) { return this.options.percent ? percent(value) : number(value); }

  draw() {
    const width = this.holder.clientWidth || 420, height = this.options.height ?? 190;
    this.width = width; this.height = height;
    const shown = this.series.map((s) => ({ ...s, z: this.options.stacked ? s.y : smoothed(s.y, this.smooth) }));
    if (this.options.stacked) stack(shown);
    const [x0, x1] = shared.zoom ?? this.extent();
    const [y0, y1] = this.valueRange(shown, x0, x1);
    const log = this.log && y1 > 0;
    const scale = (v) => (log ? Math.log10(Math.max(v, y0)) : v);
    const [s0, s1] = [scale(y0), scale(y1)];
    this.px = (x) => MARGIN.left + ((x - x0) / (x1 - x0 || 1)) * (width - MARGIN.left - MARGIN.right);
    this.py = (y) => height - MARGIN.bottom - ((scale(y) - s0) / (s1 - s0 || 1)) * (height - MARGIN.top - MARGIN.bottom);
    this.toX = (p) => x0 + ((p - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (x1 - x0);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: "0",
      "aria-label": `${this.options.title}. ${this.words}. Arrow keys read values.` });
    this.axes(root, x0, x1, y0, y1, log);
    const clip = `c${Math.random().toString(36).slice(2)}`;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left - 4, y: 0,
      width: Math.max(0, width - MARGIN.left - MARGIN.right + 8), height })));
    const lines = svg("g", { "clip-path": `url(#${clip})` });
    for (const s of shown) this.drawSeries(lines, s, x0, x1);
    if (this.options.line) this.drawLimit(lines);
    this.marker = svg("g", { class: "marker" });
    root.append(lines, this.marker);
    root.addEventListener("keydown", (event) => this.key(event));
    this.root = root;
    this.holder.replaceChildren(root);
    this.showCursor();
  }

  extent() {
    const all = this.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  valueRange(shown, x0, x1) {
    let low = Infinity, high = -Infinity, least = Infinity;
    const take = (v) => {
      if (v === null || v === undefined) return;
      if (v < low) low = v;
      if (v > high) high = v;
      if (v > 0 && v < least) least = v;
    };
    for (const s of shown) {
      s.x.forEach((x, i) => {
        if (x < x0 || x > x1) return;
        take(s.z[i]);
        if (s.low) { take(s.low[i]); take(s.high[i]); }
      });
    }
    if (low === Infinity) return [0, 1];
    if (this.options.line) take(this.options.line.value);
    if (this.log && high > 0) return [least === high ? least / 2 : least, high];
    if (this.options.stacked) low = 0;
    if (high - low <= 1e-9 * Math.abs(high)) {
      const pad = Math.abs(low) * 0.1 || 0.5, most = this.options.percent && high <= 1 ? 1 : Infinity;
      return [low >= 0 ? Math.max(0, low - pad) : low - pad, Math.min(most, high + pad)];
    }
    const pad = (high - low) * 0.06;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + (this.options.percent && high <= 1 ? Math.min(pad, 1 - high + 0.01) : pad)];
  }

  axes(root, x0, x1, y0, y1, log) {
    const axis = svg("g", { class: "axis" });
    const { width, height } = this;
    for (const y of log ? decades(y0, y1) : ticks(y0, y1, 4)) {
      const p = this.py(y);
      axis.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: p, y2: p }),
        label(MARGIN.left - 6, p + 4, this.options.percent ? percent(y, y1 - y0 < 0.04 ? 1 : 0) : number(y), "end"));
    }
    for (const x of ticks(x0, x1, Math.max(2, width / 90))) {
      if (Number.isInteger(x)) axis.append(label(this.px(x), height - 8, number(x), "middle"));
    }
    root.append(axis);
  }

  drawSeries(lines, s, x0, x1) {
    const points = thinned(s.x, s.z, x0, x1, this.py);
    if (s.low) {
      const band = s.x.map((x, i) => [x, s.low[i], s.high[i]]).filter((p) => p[1] !== null);
      if (band.length > 1) {
        lines.append(svg("path", { class: "band", fill: s.color, d: path([...band.map((p) => [p[0], p[2]]),
          ...band.reverse().map((p) => [p[0], p[1]])].map(([x, y]) => [this.px(x), this.py(y)])) + "Z" }));
      }
    }
    if (s.base) {
      const area = [...stairs(points), ...stairs(thinned(s.x, s.base, x0, x1, this.py)).reverse()];
      lines.append(svg("path", { class: "area", fill: s.color, d: path(area.map(([x, y]) => [this.px(x), this.py(y)])) + "Z" }));
      return;
    }
    if (this.smooth > 0) {
      lines.append(svg("path", { class: "raw", stroke: s.color, d: path(thinned(s.x, s.y, x0, x1, this.py).map(([x, y]) => [this.px(x), this.py(y)])) }));
    }
    lines.append(svg("path", { class: "line", stroke: s.color, "stroke-dasharray": s.dash ?? "", d: path(points.map(([x, y]) => [this.px(x), this.py(y)])) }));
    if (points.length <= 40) {
      for (const [x, y] of points) lines.append(svg("circle", { cx: this.px(x), cy: this.py(y), r: 2.4, fill: s.color }));
    }
  }

  drawLimit(lines) {
    const p = this.py(this.options.line.value);
    lines.append(svg("line", { class: "limit", x1: MARGIN.left, x2: this.width, y1: p, y2: p }),
      label(this.width - MARGIN.right - 4, p - 4, this.options.line.name, "end"));
  }

  // The rows at the cursor, or the last ones: [{name, color, x, y}].
  at(x) {
    return this.series.map((s) => {
      let best = -1;
      s.x.forEach((v, i) => {
        if (s.y[i] !== null && (best < 0 || x === null || Math.abs(v - x) < Math.abs(s.x[best] - x))) best = i;
      });
      return best < 0 ? null : { name: s.name, color: s.color, x: s.x[best], y: s.y[best], low: s.low?.[best], high: s.high?.[best], top: s.top?.[best] };
    }).filter(Boolean);
  }

  showCursor() {
    if (!this.marker) return;
    this.marker.replaceChildren();
    const rows = this.at(shared.cursor);
    const pieces = rows.map((row) => el("span", { class: "value" }, dot(row.color),
      this.series.length > 1 ? clipped(row.name) : null, this.format(row.y) +
      (row.low !== undefined && row.low !== null ? ` (${this.format(row.low)} to ${this.format(row.high)})` : "")));
    if (shared.cursor === null && !this.options.stacked && rows.length > MOST_SAID) pieces.length = 0;
    const where = shared.cursor === null ? [] : [el("span", { class: "at" }, `step ${number(rows[0]?.x)}`)];
    this.readout.replaceChildren(...where, ...pieces);
    if (shared.cursor === null || !rows.length) return;
    const x = this.px(rows[0].x);
    if (x < MARGIN.left - 1 || x > this.width) return;
    this.marker.append(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
    for (const row of rows) this.marker.append(svg("circle", { cx: this.px(row.x), cy: this.py(row.top ?? row.y), r: 3.5, fill: row.color }));
  }

  watchPointer() {
    let from = null, box = null;
    const place = (event) => event.clientX - this.holder.getBoundingClientRect().left;
    this.holder.addEventListener("pointermove", (event) => {
      if (!this.root) return;
      moveCursor(this.toX(place(event)));
      if (box) {
        const [a, b] = [from, place(event)].sort((p, q) => p - q);
        box.setAttribute("x", a); box.setAttribute("width", b - a);
      }
    });
    this.holder.addEventListener("pointerleave", () => moveCursor(null));
    this.holder.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || !this.root) return;
      from = place(event);
      box = svg("rect", { class: "selection", y: MARGIN.top, height: this.height - MARGIN.top - MARGIN.bottom, x: from, width: 0 });
      this.root.append(box);
      this.holder.setPointerCapture(event.pointerId);
    });
    this.holder.addEventListener("pointerup", (event) => {
      if (!box) return;
      const ends = [from, place(event)].sort((p, q) => p - q).map((p) => this.toX(p));
      const far = Math.abs(place(event) - from) > 8;
      box.remove(); box = null;
      if (far) zoomTo(ends);
    });
    this.holder.addEventListener("dblclick", () => zoomTo(null));
  }

  key(event) {
    const steps = [...new Set(this.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const now = shared.cursor === null ? steps.length : steps.findIndex((x) => x >= shared.cursor);
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") { zoomTo(null); moveCursor(null); return; }
    if (event.key === "Home") moveCursor(steps[0]);
    else if (event.key === "End") moveCursor(steps[steps.length - 1]);
    else if (move) moveCursor(steps[Math.max(0, Math.min(steps.length - 1, now + move))]);
    else if (event.key === "+" || event.key === "-") zoomTo(scaled(shared.zoom ?? this.extent(), shared.cursor, event.key === "+" ? 0.5 : 2, this.extent()));
    else return;
    event.preventDefault();
  }
}

function moveCursor(x) {
  shared.cursor = x;
  for (const chart of shared.charts) if (chart.node.isConnected) chart.showCursor();
}

function zoomTo(range) {
  shared.zoom = range;
  for (const chart of shared.charts) if (chart.root && chart.node.isConnected) chart.draw();
  document.getElementById("unzoom")?.toggleAttribute("disabled", range === null);
}

function scaled([low, high], middle, factor, whole) {
  const center = middle ?? (low + high) / 2, half = ((high - low) / 2) * factor;
  const range = [Math.max(whole[0], center - half), Math.min(whole[1], center + half)];
  return range[0] <= whole[0] && range[1] >= whole[1] ? null : range;
}

function forgetCharts() { shared.charts.clear(); shared.cursor = null; }

const dot = (color) => { const node = el("i", { class: "dot" }); node.style.background = color; return node; };
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
const label = (x, y, text, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);

// An exponential moving average with bias correction; `weight` of the past, 0 to 1.
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 0;
  return values.map((v) => {
    if (v === null) return null;
    mean = weight * mean + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

function stack(series) {
  let below = series[0]?.y.map(() => 0) ?? [];
  for (const s of series) {
    s.base = below;
    s.z = s.y.map((v, i) => below[i] + (v ?? 0));
    below = s.z;
  }
}

// The points of a range, with the smallest and the largest of each bin where there are more than a screen shows.
function thinned(xs, ys, x0, x1) {
  let points = [];
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || (xs[i + 1] ?? xs[i]) < x0 || (xs[i - 1] ?? xs[i]) > x1) continue;
    points.push([xs[i], ys[i]]);
  }
  if (points.length <= MOST_POINTS) return points;
  const bin = Math.ceil((2 * points.length) / MOST_POINTS), kept = [];
  for (let i = 0; i < points.length; i += bin) {
    const part = points.slice(i, i + bin).sort((a, b) => a[1] - b[1]);
    kept.push(...[part[0], part[part.length - 1]].sort((a, b) => a[0] - b[0]));
  }
  return kept;
}

// Each point as a level that lasts until half way to its neighbours.
function stairs(points) {
  const middle = (a, b) => (points[a] && points[b] ? (points[a][0] + points[b][0]) / 2 : (points[a] ?? points[b])[0]);
  return points.flatMap(([, y], i) => [[middle(i - 1, i), y], [middle(i, i + 1), y]]);
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? power;
  const found = [];
  const first = Math.ceil(low / step);
  for (let i = 0; i < 100 && (first + i) * step <= high + step * 1e-6; i++) found.push(Number(((first + i) * step).toPrecision(12)));
  return found;
}

function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power++) {
    for (const m of Math.log10(high / low) > 4 ? [1] : [1, 2, 5]) {
      const v = m * 10 ** power;
      if (v >= low * 0.999 && v <= high * 1.001) found.push(v);
    }
  }
  return found.length < 2 ? [low, high] : found;
}
