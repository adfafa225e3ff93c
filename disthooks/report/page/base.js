"use strict";
// What all pages share: their document, elements, numbers as text, tiles, tables, and the hint at the pointer.
// Names come from the user's model, so they become text nodes, and nothing here writes HTML.

const given = JSON.parse(document.getElementById("document").textContent);
const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, each) => total + (each || 0), 0);

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false && each !== ""));
  return node;
}

// --- Numbers as text. -----------------------------------------------------------------------------------------------

// As Python rounds, so that the page and the terminal say the same: a half goes to the even digit.
function tenths(size) {
  return (Math.abs(size) % 1 === 0.25 ? size - Math.sign(size) * 0.01 : size).toFixed(1);
}

function bytes(count) {
  if (typeof count !== "number") return "unknown";
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${Math.round(size)} B` : `${tenths(size)} ${unit}`;
    size /= 1024;
  }
  return `${tenths(size)} TiB`;
}

function seconds(count) {
  if (typeof count !== "number") return "unknown";
  if (count >= 100) return `${count.toFixed(0)} s`;
  if (count >= 1) return `${count.toPrecision(3)} s`;
  return count >= 1e-3 ? `${(count * 1e3).toPrecision(3)} ms` : `${(count * 1e6).toPrecision(3)} µs`;
}

const grouped = (count) => Math.round(count).toLocaleString("en");

function percent(part, whole) {
  if (!whole) return "0%";
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "<1%" : `${Math.round(share)}%`;
}

const words = (key) => key.replaceAll("_", " ");
function tileGrid(children) {
  const grid = element("div", { class: "tiles" }, ...children);
  grid.style.setProperty("--columns", children.length <= 5 ? children.length : children.length === 6 ? 3 : 4);
  return grid;
}

const sentenceCase = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function tile(title, figure, first, second, kind) {
  const [number, unit] = /^-?[\d.,]+ \S+$/.test(figure) ? figure.split(" ") : [figure, null];
  return element("div", { class: "tile" }, element("h2", {}, title),
    figure ? element("div", { class: `figure ${kind ?? ""}` }, number, unit ? element("small", {}, ` ${unit}`) : null) : null,
    first ? element("p", {}, first) : null, second ? element("p", {}, second) : null);
}

function fill(id, inside, children) {
  byId(id).hidden = !children.length;
  byId(id).querySelector(inside).replaceChildren(...children);
}

function list(title, items) {
  return items.length ? [element("h3", {}, title), element("ul", {}, ...items.map((each) => element("li", {}, ...each)))] : [];
}

function yamlBlock(text) {
  const code = element("code", {}, text);
  const button = element("button", { type: "button", onclick: () => copy(text, code, button) }, "Copy");
  return element("div", { class: "yaml" }, element("pre", { tabindex: 0, "aria-label": "YAML" }, code), button);
}

async function copy(text, code, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A browser that gives a file no clipboard copies what is selected.
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// --- The hint that follows the pointer or the focus. ------------------------------------------------------------------

function showHint(children, x, y) {
  const hint = byId("hint");
  hint.replaceChildren(...children);
  hint.hidden = false;
  const box = hint.getBoundingClientRect();
  hint.style.left = `${Math.max(8, x + 16 + box.width > innerWidth - 8 ? Math.min(x - 16 - box.width, innerWidth - 8 - box.width) : x + 16)}px`;
  hint.style.top = `${Math.max(8, Math.min(y + 16, innerHeight - box.height - 8))}px`;
}

function hideHint() {
  byId("hint").hidden = true;
}

function hintTable(rows) {
  return element("table", {}, element("tbody", {}, ...rows.map(([label, value, kind, fill]) => element("tr", { class: kind || null },
    element("td", {}, fill ? element("i", { style: { background: fill } }) : null, label), element("td", {}, value)))));
}
