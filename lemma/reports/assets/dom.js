// Building elements. Text is only ever set as text.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A name that may be long, on one line; the tooltip shows all of it.
const clipped = (name) => el("span", { class: "clipped", title: name }, name);

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`);

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? seconds.toFixed(1) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// Characters that would be invisible, or turn the text around, are shown by their names.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;
function visible(text) {
  return text.replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return code === 127 ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function table(head, rows, caption, quiet = false) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: quiet ? "unseen" : null }, caption),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
        i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))))));
}

function select(label, options, value, change) {
  const id = `s${Math.random().toString(36).slice(2)}`;
  const box = el("select", { id, onchange: (event) => change(event.target.value) },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text)));
  return el("label", { class: "field", for: id }, el("span", {}, label), box);
}

function setting(key, fallback) {
  try { return localStorage.getItem(`lemma.${key}`) ?? fallback; } catch { return fallback; }
}
function remember(key, value) {
  try { localStorage.setItem(`lemma.${key}`, value); } catch { /* a page from disk may have no storage */ }
}
