// Charts of numbers over steps. All of them show the same steps, and a cursor at the same step.

const LINE = { left: 64, right: 12, top: 8, bottom: 22, height: 150 };
const INKS = ["var(--c0)", "var(--c8)", "var(--c3)", "var(--c6)"];
// The places of the first and the last step that are shown, of those in given.steps.
const view = { from: 0, to: Math.max(0, (given.steps?.length ?? 1) - 1), log: true };
const charts = [];
const follow = []; // what else is drawn anew when the view changes

function numberText(value, unit) {
  if (typeof value === "string") return value;
  if (typeof value !== "number") return "";
  if (unit === "bytes") return bytes(value);
  if (unit === "seconds") return seconds(value);
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(4)));
}

function setView(from, to) {
  const last = (given.steps?.length ?? 1) - 1;
  if (to - from < 1) return;
  view.from = Math.max(0, Math.round(from));
  view.to = Math.min(last, Math.round(to));
  const whole = view.from === 0 && view.to === last;
  document.querySelectorAll(".whole-run").forEach((button) => { button.hidden = whole; });
  drawCharts();
  follow.forEach((draw) => draw());
}

const wholeRun = () => setView(0, (given.steps?.length ?? 1) - 1);

// A chart of one or more lines: {title, unit, lines: [{label, values, dashed}]}.
function chart(made) {
  const box = element("figure", { class: "chart" });
  const one = { ...made, box };
  charts.push(one);
  drawChart(one);
  return box;
}

function drawCharts() {
  for (let at = charts.length - 1; at >= 0; at--) {
    if (charts[at].box.isConnected) drawChart(charts[at]);
    else charts.splice(at, 1);
  }
}

// The logarithmic scale is for numbers of several orders; a share or a learning rate of one order is read better without,
// and bytes from 0 on.
function isLogarithmic(low, high) {
  return view.log && low > 0 && high / low > 5;
}

function drawChart(one) {
  const width = Math.max(260, one.box.clientWidth || 560);
  const shown = one.lines.map((line) => line.values.slice(view.from, view.to + 1));
  const finite = shown.flat().filter((value) => typeof value === "number");
  let low = finite.reduce((least, value) => Math.min(least, value), Infinity);
  let high = finite.reduce((most, value) => Math.max(most, value), -Infinity);
  const positive = finite.filter((value) => value > 0).reduce((least, value) => Math.min(least, value), Infinity);
  const isBytes = one.unit === "bytes";
  const log = !isBytes && isLogarithmic(positive, high);
  if (!finite.length) { low = 0; high = 1; }
  if (isBytes) low = 0;
  if (log) low = positive;
  if (low === 0 && high === 0) high = 1;
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  const shape01 = log ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
  const inner = LINE.height - LINE.top - LINE.bottom;
  const y = (value) => LINE.top + inner * (1 - Math.min(1, Math.max(0, shape01(Math.max(value, log ? low : -Infinity)))));
  const x = (place) => LINE.left + ((width - LINE.left - LINE.right) * (place - view.from)) / Math.max(1, view.to - view.from);
  one.x = x;
  one.place = (left) => Math.round(view.from + ((left - LINE.left) * (view.to - view.from)) / (width - LINE.left - LINE.right));

  const svg = shape("svg", { viewBox: `0 0 ${width} ${LINE.height}`, role: "slider", tabindex: 0, "aria-label": `${one.title}, by step`,
    "aria-valuemin": given.steps?.[view.from] ?? 0, "aria-valuemax": given.steps?.[view.to] ?? 0 });
  for (const tick of lineTicks(low, high, log, isBytes)) {
    svg.append(shape("line", { class: "grid", x1: LINE.left, x2: width - LINE.right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: LINE.left - 7, y: y(tick) + 4, "text-anchor": "end" }, numberText(tick, one.unit).replace(/\.0+ /, " ")));
  }
  for (const mark of marks()) {
    if (mark.place < view.from || mark.place > view.to) continue;
    svg.append(shape("line", { class: "mark", x1: x(mark.place), x2: x(mark.place), y1: LINE.top, y2: LINE.height - LINE.bottom }));
  }
  one.lines.forEach((line, number) => {
    svg.append(shape("path", { class: "line", d: linePath(shown[number], x, y, log), stroke: line.ink ?? INKS[number % INKS.length],
      "stroke-dasharray": line.dashed ? "4 4" : null }));
    for (const place of line.bad ?? badPlaces(line)) {
      if (place >= view.from && place <= view.to) svg.append(shape("path", { class: "not-finite", d: `M${x(place) - 4},${LINE.top}h8l-4,7z` }));
    }
  });
  const first = given.steps?.[view.from];
  const last = given.steps?.[view.to];
  svg.append(shape("text", { x: LINE.left, y: LINE.height - 5 }, `step ${grouped(first ?? 0)}`),
    shape("text", { x: width - LINE.right, y: LINE.height - 5, "text-anchor": "end" }, grouped(last ?? 0)));
  one.cross = shape("line", { class: "cross", y1: LINE.top, y2: LINE.height - LINE.bottom, visibility: "hidden" });
  one.brush = shape("rect", { class: "brush", y: LINE.top, height: inner, visibility: "hidden" });
  svg.append(one.brush, one.cross);
  listen(svg, one);
  const caption = element("figcaption", {}, element("b", {}, one.title), ...inCaption(one.lines).map((line) =>
    element("span", {}, element("i", { style: { background: line.ink ?? INKS[one.lines.indexOf(line) % INKS.length] } }), line.label)));
  one.box.replaceChildren(caption, svg);
}

// Of several ranks in one colour the caption has one entry.
function inCaption(lines) {
  const alike = lines.filter((line) => line.is_rank && line.ink === "var(--faint)");
  const others = alike.length > 1 ? [{ ...alike[0], label: alike.length === lines.length ? "each rank" : "the other ranks" }] : alike;
  return [...lines.filter((line) => line.label && !alike.includes(line)), ...others];
}

const badPlaces = (line) => (line.bad = line.values.flatMap((value, place) => (typeof value === "string" ? [place] : [])));

// The steps at which something went wrong.
function marks() {
  return (given.verdict?.culprits ?? []).map((each) => ({ ...each, place: placeOf(each.step) }));
}

function placeOf(step) {
  const steps = given.steps ?? [];
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

// With more numbers than pixels, the least and the largest of each pixel are drawn.
function linePath(values, x, y, log) {
  const wide = Math.max(1, Math.ceil(values.length / Math.max(1, x(view.to) - x(view.from))));
  let path = "";
  let isOpen = false;
  for (let begin = 0; begin < values.length; begin += wide) {
    const part = values.slice(begin, begin + wide).filter((value) => typeof value === "number" && (!log || value > 0));
    if (!part.length) { if (wide > 1 || values[begin] !== null) isOpen = isOpen && wide > 1; continue; }
    const left = x(view.from + begin).toFixed(1);
    path += `${isOpen ? "L" : "M"}${left},${y(Math.min(...part)).toFixed(1)}`;
    if (part.length > 1) path += `V${y(Math.max(...part)).toFixed(1)}`;
    isOpen = true;
  }
  return path || "M0,0";
}

// Ticks of bytes are powers of 2 apart, so that they are whole KiB, MiB or GiB.
function lineTicks(low, high, log, isBytes) {
  if (log) {
    const from = Math.floor(Math.log10(low));
    const decades = Array.from({ length: Math.floor(Math.log10(high)) - from + 1 }, (_, at) => from + at);
    const within = (each) => decades.flatMap((decade) => each.map((digit) => Number(`${digit}e${decade}`))).filter((tick) => tick >= low && tick <= high);
    const powers = within([1]);
    const every = Math.max(1, Math.ceil(powers.length / 4));
    return powers.length > 1 ? powers.filter((_, at) => at % every === 0) : within([1, 2, 5]);
  }
  const rough = (high - low) / 3;
  if (isBytes) return multiples(low, high, Math.max(1, 2 ** Math.floor(Math.log2(rough))));
  const unit = 10 ** Math.floor(Math.log10(rough));
  const several = [5, 2, 1, 0.5].map((each) => multiples(low, high, each * unit));
  return several.find((ticks) => ticks.length >= 3) ?? several[3];
}

function multiples(low, high, step) {
  return Array.from({ length: 7 }, (_, at) => (Math.ceil(low / step) + at) * step).filter((tick) => tick <= high);
}

// --- The cursor, zoom and keys. ---------------------------------------------------------------------------------------

function listen(svg, one) {
  const left = (event) => ((event.clientX - svg.getBoundingClientRect().left) * svg.viewBox.baseVal.width) / svg.getBoundingClientRect().width;
  svg.addEventListener("pointerdown", (event) => { one.from = left(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", (event) => {
    const at = left(event);
    if (one.from !== undefined && Math.abs(at - one.from) > 5) {
      setAll(one.brush, { x: Math.min(at, one.from), width: Math.abs(at - one.from), visibility: "visible" });
    }
    showCursor(one.place(at), one, event.clientX, event.clientY);
  });
  svg.addEventListener("pointerup", (event) => {
    const { from } = one;
    one.from = undefined;
    one.brush.setAttribute("visibility", "hidden");
    if (from !== undefined && Math.abs(left(event) - from) > 5) {
      const ends = [one.place(from), one.place(left(event))].sort((a, b) => a - b);
      hideHint();
      setView(...ends);
    }
  });
  svg.addEventListener("dblclick", wholeRun);
  svg.addEventListener("pointerleave", hideCursor);
  svg.addEventListener("blur", hideCursor);
  svg.addEventListener("keydown", (event) => viewKeys(event, (place) => {
    const box = svg.getBoundingClientRect();
    showCursor(place, one, box.left + (one.x(place) * box.width) / svg.viewBox.baseVal.width, box.top + 30);
  }));
}

const setAll = (node, attributes) => Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));

let cursor = 0;

function viewKeys(event, show) {
  const wide = view.to - view.from;
  if (event.key === "Escape") { wholeRun(); return true; }
  if (event.key === "+" || event.key === "-") {
    const half = Math.max(1, Math.round(event.key === "+" ? wide / 4 : wide));
    setView(Math.max(0, cursor - half), cursor + half);
  } else {
    const to = { ArrowLeft: cursor - 1, ArrowRight: cursor + 1, PageUp: cursor - 25, PageDown: cursor + 25, Home: view.from, End: view.to }[event.key];
    if (to === undefined) return false;
    cursor = Math.max(view.from, Math.min(view.to, to));
  }
  event.preventDefault();
  show(cursor);
  return true;
}

function showCursor(place, one, clientX, clientY) {
  cursor = Math.max(view.from, Math.min(view.to, place));
  for (const each of charts) {
    if (each.cross) setAll(each.cross, { x1: each.x(cursor), x2: each.x(cursor), visibility: "visible" });
  }
  const step = given.steps?.[cursor] ?? 0;
  const rows = one.lines.map((line, number) => [line.label || one.title, numberText(line.values[cursor], one.unit) || "none", "", line.ink ?? INKS[number % INKS.length]]);
  const wrong = marks().filter((mark) => mark.place === cursor).map((mark) => element("span", { class: "class" }, mark.text));
  showHint([element("b", {}, `step ${grouped(step)}`), hintTable(rows), ...wrong], clientX, clientY);
  const svg = one.box.querySelector("svg");
  setAll(svg, { "aria-valuenow": step, "aria-valuetext": `step ${step}: ${rows.map(([label, value]) => `${label} ${value}`).join(", ")}` });
}

function hideCursor() {
  charts.forEach((each) => each.cross?.setAttribute("visibility", "hidden"));
  hideHint();
}
