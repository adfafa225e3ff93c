// The page of an explanation: what is chosen, and every part but the two pictures (icicle.js, curve.js).

function flops(count) {
  for (const [unit, size] of [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(count)} FLOP`;
}

// The text of a value whose meaning only its key tells: plan{} and fits{} may grow.
function anything(key, value) {
  if (value === true) return "yes";
  if (value === false) return "no";
  if (Array.isArray(value)) return value.map((each) => anything(key, each)).join(", ");
  if (value && typeof value === "object") return Object.entries(value).map(([k, v]) => `${words(k)} ${anything(k, v)}`).join(", ");
  if (typeof value !== "number") return String(value);
  if (/seconds/.test(key)) return seconds(value);
  return /bytes|limit|peak|saved|host|disk|memory|free|room/.test(key) ? bytes(value) : value.toLocaleString("en");
}

const called = (module) => module || given.model || "the model";

// --- The document. --------------------------------------------------------------------------------------------------

// The colour of each category, and the colour of a text on it.
const COLOURS = {
  parameters: ["var(--c0)", "#ffffff"],
  buffers: ["var(--c1)", "#ffffff"],
  "master weights": ["var(--c2)", "#14181f"],
  gradients: ["var(--c3)", "#ffffff"],
  "optimizer state": ["var(--c4)", "#14181f"],
  inputs: ["var(--c5)", "#ffffff"],
  "gathered parameters": ["var(--c6)", "#ffffff"],
  communication: ["var(--c7)", "#14181f"],
  "saved for backward": ["var(--c8)", "#14181f"],
  temporary: ["var(--c9)", "#14181f"],
};
const CATEGORIES = given.curve?.categories ?? Object.keys(COLOURS);
const fits = given.fits ?? {};
const limit = typeof fits.limit === "number" ? fits.limit : null;
// The step without a plan, the plan that was given with the figures that it has, and the plans to compare with.
const planned = given.plan?.peak ? [{ name: "The plan that was given", ...given.plan }] : [];
const plans = [
  { name: given.plan ? "Without a plan" : "No plan", saved: given.saved, held: given.held, peak: given.peak, curve: given.curve,
    seconds: given.seconds, weight_copies: given.weight_copies, host: given.host, disk: given.disk },
  ...planned,
  ...(given.what_if ?? []),
];
const asked = planned.length; // the position of what was asked for: fits{} is about it
const highest = Math.max(1, ...plans.map((each) => each.peak?.range?.[1] ?? 0), ...plans.map((each) => each.peak?.nbytes ?? 0));
// Every bar and curve has this width or height, so that plans can be compared; a limit far above them is only named.
const scale = limit !== null && limit <= 1.6 * highest ? Math.max(limit * 1.04, highest) : highest;

const chosen = { plan: asked, measure: "saved", folded: true, opened: new Set(), root: null, query: "" };
const current = () => plans[chosen.plan];

const colour = (category) => (COLOURS[category] ?? ["var(--c10)"])[0];
const textOn = (category) => (COLOURS[category] ?? ["", "#14181f"])[1];

// --- The head. ------------------------------------------------------------------------------------------------------

const PHASES = { before: "before the forward", forward: "in the forward", backward: "in the backward", optimizer: "in the optimizer's step" };

function showHead() {
  const plan = current();
  byId("head").replaceChildren(
    element("h1", {}, given.model ?? "A model"),
    chips(),
    element("p", { class: "sentence" }, ...sentence(plan)),
    tileGrid(tiles(plan)),
    ...(plan.peak?.categories ? [stack(plan.peak), legend(plan.peak)] : []),
    ...(given.warnings ?? []).map((each) => element("p", { class: "note warning" }, each)),
  );
}

function chips() {
  const known = Object.entries(given.situation ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = (value) => (typeof value === "number" ? value.toLocaleString("en") : typeof value === "object" ? value.name ?? anything("", value) : String(value));
  return element("ul", { class: "chips", "aria-label": "How the step runs" },
    ...known.map(([key, value]) => element("li", {}, `${words(key)} `, element("b", {}, text(value)))));
}

function sentence(plan) {
  const peak = plan.peak;
  const parts = [];
  if (plan.saved !== undefined && !peak) parts.push("Autograd saves ", element("b", {}, bytes(plan.saved)), " for backward.");
  if (!peak) return parts;
  parts.push(chosen.plan ? `With ${chosen.plan === asked ? "the plan" : `“${plan.name}”`}, one training step needs ` : "One training step needs ",
    element("b", {}, bytes(peak.nbytes)), ` at its peak, ${PHASES[peak.phase] ?? "at a moment"}`, ...(isOfModule(peak) ? [" of ", element("b", {}, called(peak.module))] : []), ". ");
  const [first, second] = Object.entries(peak.categories ?? {}).sort((a, b) => b[1] - a[1]).filter(([, count], rank) => !rank || count > 0.04 * peak.nbytes);
  if (first) parts.push(`Of it, ${percent(first[1], peak.nbytes)} is ${owned(first[0])}`, second ? ` and ${percent(second[1], peak.nbytes)} is ${owned(second[0])}. ` : ". ");
  if (limit !== null) parts.push(element("b", { class: fit(plan) ? "good" : "bad" }, fit(plan) ? `It fits in ${bytes(limit)}.` : `It does not fit in ${bytes(limit)}.`));
  const best = (given.advice ?? []).find((each) => each.nbytes < peak.nbytes);
  if (best && chosen.plan === asked) parts.push(element("span", { class: "best" }, `${limit === null || fit(plan) ? "To need less" : "What to do"}: `,
    element("a", { href: "#advice" }, best.title), ` (about ${bytes(best.nbytes)} at the peak).`));
  return parts;
}

// A module runs in the forward and in the backward alone.
const isOfModule = (peak) => !["before", "optimizer"].includes(peak.phase);

const owned = (category) => ({ "saved for backward": "what autograd saved for backward", temporary: "temporary memory" })[category] ?? category;

function fit(plan) {
  if (chosen.plan === asked && typeof fits.does_fit === "boolean") return fits.does_fit;
  return needed(plan) <= limit;
}

// What must fit: what was compared with the limit, or the upper end of the range.
function needed(plan) {
  return (chosen.plan === asked ? fits.nbytes : null) ?? plan.peak?.range?.[1] ?? plan.peak?.nbytes ?? 0;
}

function tiles(plan) {
  const found = [];
  const { peak } = plan;
  if (typeof plan.saved === "number") {
    found.push(tile("Saved for backward", bytes(plan.saved), against("saved", plan.saved),
      plan.weight_copies ? `${bytes(plan.weight_copies)} of it is copies of weights that autocast made` : null));
  }
  else if (typeof plan.held === "number") found.push(tile("Held when the backward begins", bytes(plan.held), against("held", plan.held)));
  if (peak) {
    const range = peak.range;
    found.push(tile("Most memory at one moment", bytes(peak.nbytes), against("peak", peak.nbytes), range && range[0] < range[1] ? `between ${bytes(range[0])} and ${bytes(range[1])}` : null));
    found.push(tile("Where that is", peak.phase ?? "unknown", isOfModule(peak) ? `in ${called(peak.module)}` : null, peak.operator ? `while ${peak.operator} runs` : null));
  }
  if (limit !== null && peak) {
    const room = limit - needed(plan);
    found.push(tile(`In ${bytes(limit)}?`, fit(plan) ? "It fits" : "Too large", room >= 0 ? `${bytes(room)} are free` : `${bytes(-room)} are missing`, null, fit(plan) ? "good" : "bad"));
  }
  if (chosen.plan === asked) found.push(...fitTiles());
  if (plan.seconds) {
    const whole = sum(Object.values(plan.seconds));
    if (whole) found.push(tile("Time of a step, roughly", seconds(whole), Object.entries(plan.seconds).map(([key, value]) => `${key} ${seconds(value)}`).join(", ")));
  }
  if (given.state && !limit) {
    const state = Object.entries(given.state).filter(([, value]) => value);
    found.push(tile("Model and optimizer", bytes(sum(state.map(([, value]) => value))), state.map(([key, value]) => `${key} ${bytes(value)}`).join(", ")));
  }
  return found;
}

// The largest batch, the longest sequence, the cheapest change, and what else fits{} may come to have.
function fitTiles() {
  const titles = { batch: "Largest batch that fits", seq: "Longest sequence that fits", change: "Cheapest change" };
  return Object.entries(fits).filter(([key, value]) => !["limit", "nbytes", "does_fit"].includes(key) && value !== null).map(([key, value]) => {
    const title = titles[key] ?? sentenceCase(words(key));
    if (typeof value !== "object") return tile(title, anything(key, value), null, null, typeof value === "number" ? null : "words");
    if (value.title) return tile(title, sentenceCase(value.title), value.saves ? `saves ${bytes(value.saves)}` : null, null, "words");
    if (typeof value.size !== "number") return null;
    const next = value.next_size && value.next_nbytes ? `${grouped(value.next_size)} would need ${bytes(value.next_nbytes)}` : value.text;
    return tile(title, value.size ? grouped(value.size) : "none", value.size ? `needs ${bytes(value.nbytes)}` : null, next);
  }).filter(Boolean);
}

function against(key, now) {
  const base = key === "peak" ? plans[0].peak?.nbytes : plans[0][key];
  if (!chosen.plan || !base) return null;
  const difference = now - base;
  if (!difference) return "as without the plan";
  return `${bytes(Math.abs(difference))} ${difference < 0 ? "less" : "more"} than without (${difference < 0 ? "−" : "+"}${percent(Math.abs(difference), base)})`;
}

// What the peak has beside the tensors of its categories.
const OTHER = "workspaces, rounding"; // as Explanation.to_dict() calls it
const besides = (peak) => (peak?.categories ? peak.categories[OTHER] ?? Math.max(0, peak.nbytes - sum(Object.values(peak.categories))) : 0);

function stack(peak) {
  const room = (byId("head").clientWidth || 1000) / 6.8; // letters
  const width = (count) => `${(100 * count) / scale}%`;
  const counts = [...CATEGORIES.map((each) => [each, peak.categories[each] ?? 0]), [OTHER, besides(peak)]].filter(([, count]) => count > 0);
  const parts = counts.map(([each, count]) => {
    const share = count / scale;
    return element("span", { title: `${each}: ${bytes(count)}`, style: { width: width(count), background: colour(each), color: textOn(each) } },
      share * room > each.length + 2 ? each : share * room > 10 ? bytes(count) : "");
  });
  const label = counts.map(([each, count]) => `${each} ${bytes(count)}`).join(", ");
  const line = limit !== null && limit <= scale
    ? element("div", { class: limit > 0.7 * scale ? "limit late" : "limit", style: { left: width(limit) } }, element("span", {}, bytes(limit))) : null;
  return element("div", { class: line ? "stack limited" : "stack", role: "img", "aria-label": `The peak: ${label}` }, element("div", { class: "whole" }, ...parts), line);
}

function legend(peak) {
  const pairs = [...Object.entries(peak.categories).filter(([each]) => each !== OTHER), [OTHER, besides(peak)]].filter(([, count]) => count > 0);
  return element("ul", { class: "legend", "aria-label": "The peak by category" }, ...pairs.map(([category, count]) =>
    element("li", {}, element("i", { style: { background: colour(category) } }), `${category} `, element("b", {}, bytes(count)), ` ${percent(count, peak.nbytes)}`)));
}

// --- Plans, advice, and what stands in tables. -----------------------------------------------------------------------

function showPlans() {
  if (plans.length < 2 && !plans[0].yaml) return;
  byId("plans").hidden = false;
  document.querySelector(".plans").append(...plans.map((plan, number) => element("label", {},
    element("input", { type: "radio", name: "plan", value: number, checked: number === chosen.plan, onchange: () => { chosen.plan = number; showAll(); } }),
    element("b", {}, sentenceCase(plan.name ?? `Plan ${number}`)),
    element("small", {}, plan.peak ? `peak ${bytes(plan.peak.nbytes)}` : "", plan.saved !== undefined ? `, saves ${bytes(plan.saved)}` : plan.held !== undefined ? `, holds ${bytes(plan.held)}` : ""),
    element("span", { class: "gauge" }, element("span", { style: { width: `${(100 * (plan.peak?.nbytes ?? 0)) / highest}%` } })))));
}

function showPlan() {
  const plan = current();
  const costs = [
    plan.host && `${bytes(plan.host)} go to the host's memory`,
    plan.disk && `${bytes(plan.disk)} go to the disk`,
  ].filter(Boolean);
  byId("plan").replaceChildren(...[
    costs.length ? element("p", { class: "costs" }, `${sentenceCase(costs.join("; "))}.`) : null,
    plan.yaml ? yamlBlock(plan.yaml) : null,
    plan.modules?.length ? planTable(plan.modules) : null,
  ].filter(Boolean));
}

// What a plan does with the tensors that each module saves; modules whose names differ in numbers are one row.
function planTable(modules) {
  const columns = ["stored", "moved", "recomputed", "recast", "shared", "kept"].filter((key) => modules.some((each) => each[key]));
  const merged = new Map();
  for (const each of modules) {
    const key = `${starred(each.module)}\n${each.to}`;
    const row = merged.get(key) ?? { name: starred(each.module), to: each.to, count: 0, tensors: 0 };
    row.count += 1;
    for (const name of ["tensors", ...columns]) row[name] = (row[name] ?? 0) + (each[name] ?? 0);
    merged.set(key, row);
  }
  return element("div", { class: "wide" }, element("table", {},
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Module"), element("th", { scope: "col" }, "To"),
      ...columns.map((name) => element("th", { scope: "col", class: "number" }, sentenceCase(name))))),
    element("tbody", {}, ...[...merged.values()].map((row) => element("tr", {}, element("td", {}, called(row.name), row.count > 1 ? ` × ${row.count}` : ""),
      element("td", {}, row.to ?? ""), ...columns.map((name) => element("td", { class: "number" }, bytes(row[name]))))))));
}

const starred = (module) => (module ?? "").split(".").map((each) => (/^\d+$/.test(each) ? "*" : each)).join(".");

function bar(label, note, count, most, fill) {
  return element("div", { class: "bar" }, element("span", {}, label, note ? element("em", {}, ` ${note}`) : null), element("b", {}, bytes(count)),
    element("span", { class: "gauge" }, element("span", { style: { width: `${(100 * count) / (most || 1)}%`, background: fill } })));
}

function showShares() {
  const peak = current().peak;
  const rows = new Map();
  for (const { module, category, nbytes } of peak?.shares ?? []) {
    const name = starred(module);
    const row = rows.get(`${name}\n${category}`) ?? { name, category, nbytes: 0, count: 0 };
    row.nbytes += nbytes;
    row.count += 1;
    rows.set(`${name}\n${category}`, row);
  }
  const sorted = [...rows.values()].sort((a, b) => b.nbytes - a.nbytes).slice(0, 12);
  byId("shares").hidden = !sorted.length;
  document.querySelector("#shares .bars").replaceChildren(...sorted.map((row) =>
    bar(called(row.name), `${row.category}${row.count > 1 ? ` × ${row.count}` : ""}`, row.nbytes, sorted[0].nbytes, colour(row.category))));
  const rest = peak ? peak.nbytes - sum(sorted.map((row) => row.nbytes)) : 0;
  document.querySelector("#shares .note").textContent = rest > 0 ? `The other ${bytes(rest)} are in smaller parts.` : "";
}

function showOperators() {
  const rows = Object.entries(given.operators ?? {}).slice(0, 10);
  byId("operators").hidden = !rows.length;
  document.querySelector("#operators .bars").replaceChildren(...rows.map(([name, count]) =>
    bar(name, percent(count, given.saved), count, rows[0][1], "var(--c8)")));
  const rest = sum(Object.values(given.operators ?? {}).slice(10));
  document.querySelector("#operators .note").textContent = [rest ? `The others save ${bytes(rest)}.` : "",
    chosen.plan ? "These are the bytes without the plan." : ""].filter(Boolean).join(" ");
}

function showTexts() {
  const change = fits.change && !(given.advice ?? []).some((each) => each.title === fits.change.title) ? [fits.change] : [];
  fill("advice", ".cards", [...change, ...(given.advice ?? [])].map((each) => element("article", { class: "card" },
    each.saves ? element("span", { class: "saves" }, `saves ${bytes(each.saves)}`) : null,
    element("h3", {}, sentenceCase(each.title ?? "")), element("p", {}, each.text ? `${sentenceCase(each.text)}.` : ""), each.yaml || each.code ? yamlBlock(each.yaml || each.code) : null)));
  fill("unknown", "div", [
    ...list("What could not be known without running for real", (given.unknown ?? []).map((each) => [element("code", {}, each.what ?? ""),
      ` in ${called(each.module)}. Assumed: ${each.assumed ?? "nothing"}.`])),
    ...list("What is not counted", (given.not_counted ?? []).map((each) => [each])),
  ]);
}
