// The memory over the step: areas by category, one above the other, with the phases, the peak and the limit.

const MARGIN = { left: 74, right: 14, top: 26, bottom: 30 };
const HEIGHT = 340;
let curve = null; // what is drawn now: points, x(), y(), at

function phaseOf(found, point) {
  return point[1] < 0 ? "before" : found.phases?.[point[1]] ?? "";
}

const totalOf = (point) => sum(point.slice(3));

// The moments at which phases begin, with where they end.
function spans(found) {
  if (found.begins) {
    const ends = [...found.begins.slice(1), found.moments];
    return found.phases.map((name, number) => ({ name, begin: found.begins[number], end: Math.max(ends[number], found.begins[number]) }));
  }
  const parts = [];
  for (const point of found.points) {
    const name = phaseOf(found, point);
    if (parts.at(-1)?.name !== name) parts.push({ name, begin: point[0] });
    parts.at(-1).end = point[0];
  }
  parts.forEach((part, number) => { if (parts[number + 1]) part.end = parts[number + 1].begin; });
  return parts;
}

// The same height for every plan, so that they can be compared. What is far above the curves does not flatten them.
function ceiling() {
  const most = Math.max(1, ...plans.flatMap((plan) => (plan.curve?.points ?? []).map(totalOf)));
  const above = [limit, ...plans.map((plan) => plan.peak?.range?.[1])].filter((each) => each > most && each <= 1.6 * most);
  return Math.max(most, ...above);
}

// Where a moment stands, from 0 to 1. An optimizer may run more operators than all else, or ten for all parameters, so
// it gets a quarter of the width at most and a twelfth at least.
function scaleOf(parts) {
  const counts = parts.map((part) => Math.max(part.end - part.begin, 0));
  const others = sum(parts.map((part, number) => (part.name === "optimizer" ? 0 : counts[number])));
  const widths = parts.map((part, number) => (part.name === "optimizer" && others && counts[number] ? Math.max(Math.min(counts[number], others / 3), others / 11) : counts[number]));
  const whole = sum(widths) || 1;
  const along = (moment) => {
    let before = 0;
    let number = 0;
    while (number < parts.length - 1 && moment >= parts[number + 1].begin) before += widths[number++];
    const { begin } = parts[number];
    return (before + (counts[number] ? (widths[number] * (moment - begin)) / counts[number] : 0)) / whole;
  };
  return [along, sum(counts) !== sum(widths)];
}

function showCurve() {
  const found = current().curve ?? (chosen.plan ? null : given.curve);
  byId("time").hidden = !plans.some((plan) => plan.curve?.points?.length);
  if (byId("time").hidden) return;
  if (!found?.points?.length) {
    curve = null;
    byId("curve").replaceChildren(element("p", { class: "note" }, "This plan comes without a curve."));
    byId("categories").replaceChildren();
    return;
  }
  const width = Math.max(280, byId("curve").clientWidth || 1000);
  const narrow = width < 520;
  const left = narrow ? 58 : MARGIN.left;
  const parts = spans(found);
  const first = Math.min(parts[0].begin, found.points[0][0]);
  const last = Math.max(parts.at(-1).end, found.points.at(-1)[0], first + 1);
  const top = ceiling() * 1.05;
  const [along, isSqueezed] = scaleOf(parts);
  const x = (moment) => left + (width - left - MARGIN.right) * along(moment);
  const y = (count) => HEIGHT - MARGIN.bottom - ((HEIGHT - MARGIN.top - MARGIN.bottom) * count) / top;
  const order = found.categories ?? CATEGORIES;
  curve = { found, x, y, order, at: null, points: found.points, width };

  const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "slider", tabindex: 0, "aria-label": "A moment of the step",
    "aria-valuemin": first, "aria-valuemax": last });
  for (const tick of ticks(top)) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, bytes(tick).replace(/\.0 /, " ")));
  }
  // Memory stays as it is until the next point, so each point is there twice: where it begins and where it ends.
  const ends = [...found.points.slice(1).map((point) => point[0]), last];
  const xs = found.points.flatMap((point, at) => [x(point[0]), x(ends[at])]);
  const bounds = xs.map(() => 0);
  const line = (ys) => ys.map((count, at) => `${xs[at].toFixed(1)},${y(count).toFixed(1)}`);
  const labels = [];
  order.forEach((category, number) => {
    const lower = [...bounds];
    bounds.forEach((_, at) => { bounds[at] += found.points[at >> 1][3 + number] ?? 0; });
    if (!bounds.some((bound, at) => bound > lower[at])) return;
    const path = `M${line(bounds).join("L")}L${line(lower).reverse().join("L")}Z`;
    svg.append(shape("path", { class: "area", d: path, fill: colour(category), stroke: colour(category), "data-category": category }));
    labels.push(labelOf(category, xs, lower.map(y), bounds.map(y)));
  });
  svg.append(shape("path", { class: "total", d: `M${line(bounds).join("L")}` }));
  for (const part of parts) {
    if (part.begin > first) svg.append(shape("line", { class: "phase", x1: x(part.begin), x2: x(part.begin), y1: 4, y2: HEIGHT - MARGIN.bottom }));
    if (x(part.end) - x(part.begin) > 7 * part.name.length) svg.append(shape("text", { class: "phase-name", x: x(part.begin) + 7, y: 15 }, part.name));
  }
  svg.append(...labels.filter(Boolean));
  if (chosen.plan && plans[0].curve?.points?.length) svg.append(ghost(plans[0].curve, parts, x, y));
  if (limit !== null && limit <= top) {
    svg.append(shape("line", { class: "limit-back", x1: left, x2: width - MARGIN.right, y1: y(limit), y2: y(limit) }), shape("line", { class: "limit", x1: left, x2: width - MARGIN.right, y1: y(limit), y2: y(limit) }),
      shape("text", { class: "limit-name", x: left + 8, y: y(limit) - 6 }, `limit ${bytes(limit)}`));
  }
  svg.append(...peakMark(found, x, y, width));
  svg.append(shape("text", { x: left, y: HEIGHT - 9 }, narrow ? "operators, in order" : `operators, in the order in which they run${isSqueezed ? "; the optimizer's on a scale of their own" : ""}`),
    shape("text", { x: width - MARGIN.right, y: HEIGHT - 9, "text-anchor": "end" }, grouped(last)));
  curve.cross = shape("line", { class: "cross", y1: MARGIN.top - 6, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  svg.append(curve.cross);
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) showMoment(curve.at ?? peakAt(found)); });
  svg.addEventListener("keydown", curveKeys);
  byId("curve").replaceChildren(svg);
  say(peakAt(found));
  byId("time-lead").textContent = "What is in memory after each operator. Point at the curve to see the moment, the module that runs, and the bytes."
    + (besides(current().peak) > 0.01 * current().peak?.nbytes ? ` The peak above has ${bytes(besides(current().peak))} more: ${OTHER}.` : "");
  byId("categories").replaceChildren(...order.filter((_, number) => found.points.some((point) => point[3 + number])).map((category) =>
    element("li", {}, element("i", { style: { background: colour(category) } }), category)),
  ...(chosen.plan && plans[0].curve ? [element("li", {}, "– – without the plan")] : []));
}

function ticks(top) {
  let unit = 1;
  while (unit * 1024 <= top) unit *= 1024;
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((each) => top / (each * unit) <= 6) * unit;
  const fine = top / step < 2 ? step / 4 : step;
  return Array.from({ length: Math.floor(top / fine) + 1 }, (_, number) => number * fine);
}

// The category's name inside its area, where the area is highest over the width of the name; nothing if it is too flat.
function labelOf(category, xs, lower, upper) {
  const half = 3.9 * category.length;
  let best = null;
  for (let part = 1; part < 30; part++) {
    const middle = xs[0] + ((xs.at(-1) - xs[0]) * part) / 30;
    if (middle - half < xs[0] || middle + half > xs.at(-1)) continue;
    const within = xs.map((_, at) => at).filter((at) => Math.abs(xs[at] - middle) <= half + 4);
    if (!within.length) continue;
    const room = Math.min(...within.map((at) => lower[at])) - Math.max(...within.map((at) => upper[at]));
    if (room >= 17 && (!best || room > best.room + 1)) best = { room, middle, y: Math.min(...within.map((at) => lower[at])) - room / 2 + 4.5 };
  }
  return best && shape("text", { class: "inside", x: best.middle, y: best.y, "text-anchor": "middle", style: { fill: textOn(category) } }, category);
}

// The total without the plan, each phase as wide as it is with the plan.
function ghost(found, parts, x, y) {
  const own = spans(found);
  const points = found.points.map((point) => {
    const name = phaseOf(found, point);
    const from = own.find((part) => part.name === name);
    const to = parts.find((part) => part.name === name);
    const moment = to ? to.begin + ((to.end - to.begin) * (point[0] - from.begin)) / Math.max(1, from.end - from.begin) : point[0];
    return [x(moment).toFixed(1), y(totalOf(point)).toFixed(1)];
  });
  const steps = points.map(([left, up], at) => (at ? `H${left}V${up}` : `M${left},${up}`));
  return shape("path", { class: "before", d: steps.join("") });
}

function peakAt(found) {
  const totals = found.points.map(totalOf);
  return totals.indexOf(Math.max(...totals));
}

function peakMark(found, x, y, width) {
  const point = found.points[peakAt(found)];
  const total = totalOf(point);
  const hasMore = besides(current().peak) > 0.01 * total;
  const range = hasMore ? null : current().peak?.range;
  const [left, up] = [x(point[0]), y(total)];
  const isLate = left > width - 150;
  const label = hasMore ? `${bytes(total)} of tensors` : `peak ${bytes(current().peak?.nbytes ?? total)}`;
  return [
    ...(range && y(range[0]) - y(range[1]) > 14 ? [shape("path", { class: "range", fill: "none", d: `M${left - 5},${y(range[1])}h10m-5,0V${y(range[0])}m-5,0h10` })] : []),
    shape("circle", { class: "peak", cx: left, cy: up, r: 4.5 }),
    shape("text", { class: "peak-name", x: left + (isLate ? -10 : 10), y: Math.max(30, up - 8), "text-anchor": isLate ? "end" : "start" }, label),
  ];
}

// --- The crosshair. ---------------------------------------------------------------------------------------------------

function pointed(event) {
  const box = byId("curve").firstChild.getBoundingClientRect();
  const at = event.clientX - box.left;
  let nearest = 0;
  curve.points.forEach((point, number) => { if (Math.abs(curve.x(point[0]) - at) < Math.abs(curve.x(curve.points[nearest][0]) - at)) nearest = number; });
  showMoment(nearest, event.clientX, event.clientY);
}

function showMoment(number, clientX, clientY) {
  const point = curve.points[number];
  curve.at = number;
  const left = curve.x(point[0]);
  for (const name of ["x1", "x2"]) curve.cross.setAttribute(name, left);
  curve.cross.setAttribute("visibility", "visible");
  const box = byId("curve").getBoundingClientRect();
  showHint(momentText(point), clientX ?? box.left + left, clientY ?? box.top + 60);
  say(number);
  markRunning(point[2]);
}

function momentText(point) {
  const found = curve.found;
  const rowsOf = curve.order.map((category, number) => [category, point[3 + number] ?? 0]).filter(([, count]) => count).reverse();
  return [
    element("b", {}, called(rows[point[2]]?.module ?? "")),
    element("span", { class: "class" }, `${phaseOf(found, point)}, operator ${grouped(point[0])} of ${grouped(found.moments ?? found.points.at(-1)[0])}`),
    hintTable([...rowsOf.map(([category, count]) => [category, bytes(count), "", colour(category)]), ["in memory", bytes(totalOf(point)), "sum"]]),
  ];
}

function say(number) {
  const point = curve.points[number];
  const svg = byId("curve").firstChild;
  svg.setAttribute("aria-valuenow", point[0]);
  svg.setAttribute("aria-valuetext", `operator ${point[0]}, ${phaseOf(curve.found, point)}, ${called(rows[point[2]]?.module ?? "")}, ${bytes(totalOf(point))}`);
}

function leave() {
  curve?.cross.setAttribute("visibility", "hidden");
  hideHint();
  markRunning(-1);
}

function curveKeys(event) {
  const last = curve.points.length - 1;
  const at = curve.at ?? peakAt(curve.found);
  const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageUp: at + 25, PageDown: at - 25, Home: 0, End: last, p: peakAt(curve.found) }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  showMoment(Math.max(0, Math.min(last, to)));
}

// --- All of it. -------------------------------------------------------------------------------------------------------

function showAll() {
  showHead();
  showPlan();
  showIcicle();
  showCurve();
  showShares();
  showOperators();
}

beginIcicle();
showPlans();
showTexts();
showAll();
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnWidth) return;
  drawnWidth = innerWidth;
  showHead();
  showIcicle();
  showCurve();
});
addEventListener("scroll", hideHint, { passive: true });
