// The heat map: a row for each layer, a column for each step, in the order of the model.

const HEAT = { left: 190, bottom: 24, most: 620 };
// Colours that people who do not see all colours tell apart, dark for small numbers: stops of the scheme "cividis".
const STOPS = [[0, 32, 76], [0, 62, 110], [66, 78, 108], [107, 110, 117], [139, 138, 120], [176, 165, 105], [214, 194, 79], [255, 233, 69]];
const NOT_FINITE = [214, 30, 92];
const ZERO = [120, 20, 40];
const heat = { map: null, codes: null, rows: [], query: "", at: null };
const decoded = new Map();

const PALETTE = Array.from({ length: 256 }, (_, code) => {
  if (code === 0) return null;
  if (code === 1) return ZERO;
  if (code === 255) return NOT_FINITE;
  const at = ((code - 2) / 252) * (STOPS.length - 1);
  const low = STOPS[Math.floor(at)];
  const high = STOPS[Math.ceil(at)];
  return low.map((part, index) => Math.round(part + (high[index] - part) * (at % 1)));
});

// The bytes of a heat map, a row after the other: they are kept as differences, compressed.
async function codesOf(map) {
  if (!decoded.has(map)) {
    const packed = Uint8Array.from(atob(map.data), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const codes = new Uint8Array(await new Response(stream).arrayBuffer());
    for (let row = 0; row < map.rows.length; row++) {
      for (let at = row * map.columns + 1; at < (row + 1) * map.columns; at++) codes[at] = (codes[at] + codes[at - 1]) & 255;
    }
    decoded.set(map, codes);
  }
  return decoded.get(map);
}

function valueOf(map, code) {
  if (code === 0) return "none";
  if (code === 255) return "not finite";
  if (code === 1) return "0";
  const part = (code - 2) / 252;
  if (map.share) return percent(part, 1);
  const text = numberText(10 ** (map.low + part * (map.high - map.low)));
  return code === 254 ? `${text} or more` : code === 2 ? `${text} or less` : `about ${text}`;
}

async function showHeat() {
  const { map } = heat;
  if (!map) return;
  heat.codes = await codesOf(map);
  const query = heat.query.trim().toLowerCase();
  heat.rows = map.rows.map((_, row) => row).filter((row) => !query || map.rows[row].toLowerCase().includes(query));
  drawHeat();
  drawScale();
}

// Columns of the map: several logged steps may be one column, and given.steps may be joined, too.
function columnsShown() {
  const scale = heat.map.columns / Math.max(1, given.steps.length);
  return [Math.floor(view.from * scale), Math.min(heat.map.columns, Math.max(Math.floor(view.from * scale) + 1, Math.ceil((view.to + 1) * scale)))];
}

function drawHeat() {
  const { map, rows } = heat;
  const box = byId("heat");
  const width = Math.max(280, box.clientWidth || 1000);
  const left = width < 620 ? 96 : HEAT.left;
  const wide = width - left;
  const each = Math.max(2, Math.min(18, Math.floor(HEAT.most / Math.max(1, rows.length))));
  const high = Math.max(1, Math.min(HEAT.most, each * rows.length));
  const [from, to] = columnsShown();
  const canvas = element("canvas", { width: wide, height: high, tabindex: 0, role: "slider", "aria-label": `${map.title}, by layer and step`,
    "aria-valuemin": 0, "aria-valuemax": Math.max(0, rows.length - 1) });
  canvas.style.marginLeft = `${left}px`;
  const context = canvas.getContext("2d");
  const image = context.createImageData(wide, high);
  for (let down = 0; down < high; down++) {
    const [first, last] = [Math.floor((down * rows.length) / high), Math.max(Math.floor((down * rows.length) / high) + 1, Math.floor(((down + 1) * rows.length) / high))];
    for (let right = 0; right < wide; right++) {
      const begin = from + Math.floor((right * (to - from)) / wide);
      const end = Math.max(begin + 1, from + Math.floor(((right + 1) * (to - from)) / wide));
      let code = 0; // of several numbers in one pixel the largest is shown
      for (let row = first; row < last && row < rows.length; row++) {
        for (let at = begin; at < end; at++) code = Math.max(code, heat.codes[rows[row] * map.columns + at]);
      }
      const ink = PALETTE[code];
      if (ink) image.data.set([...ink, 255], 4 * (down * wide + right));
    }
  }
  context.putImageData(image, 0, 0);
  heat.canvas = canvas;
  heat.geometry = { left, wide, high, from, to };
  const cross = element("div", { class: "cell-at", hidden: true });
  heat.cross = cross;
  box.replaceChildren(...rowNames(left, high), canvas, cross, ...heatMarks(), element("div", { class: "steps", style: { marginLeft: `${left}px` } },
    element("span", {}, `step ${grouped(given.steps[view.from] ?? 0)}`), element("span", {}, grouped(given.steps[view.to] ?? 0))));
  if (!rows.length) box.prepend(element("p", { class: "note" }, "No layer has this name."));
  listenToHeat(canvas);
}

// The name of the block that a layer is in: up to the first number in it.
function blockOf(name) {
  const parts = name.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  return number < 0 ? parts[0] : parts.slice(0, number + 1).join(".");
}

// The beginning of a name: its block, and what more tells it from the name above and from the labels that there are.
function labelOf(name, above, labels) {
  const [parts, others] = [name.split("."), above.split(".")];
  const first = parts.findIndex((part, at) => part !== others[at]);
  for (let many = Math.max(first + 1, blockOf(name).split(".").length); many < parts.length; many++) {
    const label = parts.slice(0, many).join(".");
    if (!labels.has(label)) return label;
  }
  return name;
}

// As many names as there is room for: each row's, or the beginnings of some.
function rowNames(left, high) {
  const { map, rows } = heat;
  const each = high / Math.max(1, rows.length);
  const found = [];
  let last = -Infinity;
  let block = "";
  let above = "";
  const labels = new Set();
  rows.forEach((row, place) => {
    const name = map.rows[row];
    const own = blockOf(name);
    const top = place * each;
    if (top - last < 13 || (each < 12 && own === block && top - last < 40)) return;
    last = top;
    block = own;
    const label = each < 12 ? labelOf(name, above, labels) : name;
    labels.add(label);
    above = name;
    found.push(element("button", { type: "button", class: "row-name", title: name, "data-row": row, style: { top: `${top + each / 2 - 8}px`, width: `${left - 8}px` },
      onclick: () => showRow(row) }, element("bdi", { dir: "ltr" }, label)));
  });
  return found;
}

function heatMarks() {
  const { left, wide, from, to } = heat.geometry;
  const scale = heat.map.columns / Math.max(1, given.steps.length);
  return marks().flatMap((mark) => {
    const at = Math.floor(mark.place * scale);
    if (at < from || at >= to) return [];
    const place = left + (wide * (at - from + 0.5)) / (to - from);
    return [element("div", { class: "heat-mark", title: mark.text, style: { left: `${place}px` } })];
  });
}

function cellAt(right, down) {
  const { wide, high, from, to } = heat.geometry;
  const place = Math.max(0, Math.min(heat.rows.length - 1, Math.floor((down * heat.rows.length) / high)));
  const column = Math.max(from, Math.min(to - 1, from + Math.floor((right * (to - from)) / wide)));
  return { place, column };
}

function showCell(cell, clientX, clientY) {
  const { map } = heat;
  const { left, wide, high, from, to } = heat.geometry;
  if (!heat.rows.length) return;
  heat.at = cell;
  const row = heat.rows[cell.place];
  const code = heat.codes[row * map.columns + cell.column];
  const place = Math.min(given.steps.length - 1, Math.round((cell.column * given.steps.length) / map.columns));
  const step = given.steps[place];
  const tall = high / heat.rows.length;
  Object.assign(heat.cross.style, { left: `${left + (wide * (cell.column - from)) / (to - from)}px`, width: `${Math.max(2, wide / (to - from))}px`,
    top: `${cell.place * tall}px`, height: `${Math.max(2, tall)}px` });
  heat.cross.hidden = false;
  cursor = place;
  for (const each of charts) {
    if (each.cross) setAll(each.cross, { x1: each.x(place), x2: each.x(place), visibility: place >= view.from && place <= view.to ? "visible" : "hidden" });
  }
  const text = valueOf(map, code);
  const wrong = marks().filter((mark) => mark.place === place).map((mark) => element("span", { class: "class" }, mark.text));
  showHint([element("b", {}, map.rows[row]), element("span", { class: "class" }, `step ${grouped(step)}`), hintTable([[map.title, text]]), ...wrong], clientX, clientY);
  setAll(heat.canvas, { "aria-valuenow": cell.place, "aria-valuetext": `${map.rows[row]}, step ${step}: ${text}` });
}

function listenToHeat(canvas) {
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let begun = null;
  canvas.addEventListener("pointerdown", (event) => { begun = place(event)[0]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => showCell(cellAt(...place(event)), event.clientX, event.clientY));
  canvas.addEventListener("pointerup", (event) => {
    const ended = place(event)[0];
    const from = begun;
    begun = null;
    if (from === null || Math.abs(ended - from) < 6) { showRow(heat.rows[heat.at?.place ?? 0]); return; }
    const { wide } = heat.geometry;
    const steps = [from, ended].sort((a, b) => a - b).map((right) => view.from + (Math.max(0, Math.min(wide, right)) * (view.to - view.from)) / wide);
    hideHint();
    setView(...steps);
  });
  canvas.addEventListener("dblclick", wholeRun);
  for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => { hideCursor(); heat.cross.hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const box = canvas.getBoundingClientRect();
    const { wide, high, from, to } = heat.geometry;
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const cell = heat.at ?? { place: 0, column: from };
    const show = (next) => showCell(next, box.left + (wide * (next.column - from)) / (to - from), box.top + (high * next.place) / heat.rows.length);
    if (down) {
      event.preventDefault();
      show({ ...cell, place: Math.max(0, Math.min(heat.rows.length - 1, cell.place + down)) });
    } else if (viewKeys(event, (at) => show({ ...cell, column: Math.min(heat.map.columns - 1, Math.floor((at * heat.map.columns) / given.steps.length)) }))) {
      if (["Escape", "+", "-"].includes(event.key)) byId("heat").querySelector("canvas")?.focus();
    } else if (event.key === "Enter") showRow(heat.rows[cell.place]);
  });
}

// The numbers of one row as a curve, to a hundredth of the scale.
function showRow(row) {
  const { map, codes } = heat;
  if (row === undefined || !codes) return;
  const values = given.steps.map((_, place) => {
    const code = codes[row * map.columns + Math.min(map.columns - 1, Math.floor((place * map.columns) / given.steps.length))];
    if (code === 0) return null;
    if (code === 255) return "not finite";
    if (code === 1) return 0;
    const part = (code - 2) / 252;
    return map.share ? part : 10 ** (map.low + part * (map.high - map.low));
  });
  byId("row").replaceChildren();
  byId("row").append(chart({ title: `${map.title} of ${map.rows[row]}`, unit: "", lines: [{ label: "", values }] }));
}

function drawScale() {
  const { map } = heat;
  const ramp = element("span", { class: "ramp" });
  ramp.style.background = `linear-gradient(90deg, ${STOPS.map((ink) => `rgb(${ink.join()})`).join()})`;
  const end = (level) => (map.share ? percent(level, 1) : numberText(10 ** level));
  const key = (ink, label) => element("span", {}, element("i", { style: { background: `rgb(${ink.join()})` } }), label);
  const codes = new Set(heat.codes);
  byId("scale").replaceChildren(element("span", {}, end(map.low)), ramp, element("span", {}, end(map.high)),
    ...(codes.has(1) ? [key(ZERO, "zero")] : []), ...(codes.has(255) ? [key(NOT_FINITE, "infinite or NaN")] : []));
}

function beginHeat() {
  const maps = given.heats ?? [];
  byId("layers").hidden = !maps.length || !given.steps?.length;
  if (byId("layers").hidden) return;
  byId("statistic").append(...maps.map((map, number) => element("label", {}, element("input", { type: "radio", name: "statistic", value: number, checked: number === 0,
    onchange: () => choose(map) }), map.title)));
  byId("layer").addEventListener("input", (event) => { heat.query = event.target.value; showHeat(); });
  follow.push(() => { if (heat.codes) drawHeat(); });
  choose(maps[0]);
}

function choose(map) {
  heat.map = map;
  heat.at = null;
  byId("row").replaceChildren();
  const joined = map.stride > 1 ? ` A column is ${map.stride} logged steps, and shows the largest number of them.` : "";
  byId("layers-lead").textContent = `${grouped(map.rows.length)} ${map.of === "param" ? "parameters" : "modules"} in the order of the model, from the input at the top.${joined}`;
  showHeat();
}
