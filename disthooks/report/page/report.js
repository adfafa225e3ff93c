// The page of a run: the verdict, and every part but the charts (lines.js) and the heat map (heat.js).

const about = given.about ?? {};
const verdict = given.verdict ?? {};

function showHead() {
  const culprits = verdict.culprits ?? [];
  const headline = verdict.headline ?? "No step is logged yet.";
  const first = culprits.find((each) => each.text === headline);
  const more = culprits.filter((each) => each !== first);
  byId("head").replaceChildren(
    element("p", { class: "file" }, given.name ?? "A run"),
    element("h1", { class: "verdict", id: "verdict" }, headline),
    ...(first?.evidence?.length ? [element("ul", { class: "evidence" }, ...first.evidence.map((text) => element("li", {}, text)))] : []),
    ...(first?.advice ? [element("p", { class: "advice" }, element("b", {}, "What to do: "), first.advice)] : []),
    ...more.slice(0, 4).map((each) => element("p", { class: "then" }, each.text)),
    ...(more.length > 4 ? [element("p", { class: "then" }, `${more.length - 4} more are in the table of what happened.`)] : []),
    ...(verdict.sentences ?? []).map((text) => element("p", { class: "then" }, text)),
    ...(given.notes ?? []).map((text) => element("p", { class: "note warning" }, text)),
    element("ul", { class: "chips", "aria-label": "What ran" }, ...chipsOf()),
    tileGrid((given.tiles ?? []).map((each) => tile(each.title, each.figure, each.note))),
    ...(given.other ? [element("p", { class: "note" }, "The dashed lines are of ", element("b", {}, given.other.name ?? "the other run"), ".")] : []),
  );
}

function chipsOf() {
  const steps = given.steps ?? [];
  const known = [
    ["engine", about.engine],
    ["ranks", about.ranks],
    ["parameters", about.parameters],
    ["logged steps", given.logged === undefined ? null : `${grouped(given.logged)}, ${grouped(steps[0] ?? 0)} to ${grouped(steps.at(-1) ?? 0)}`],
    ["from", given.began],
    ["for", typeof given.seconds === "number" ? seconds(given.seconds) : null],
    ["restarts", given.restarts || null],
    ["run", given.run],
  ];
  return known.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([key, value]) => element("li", {}, `${key} `, element("b", {}, String(value))));
}

// The lines of the other run stand at the same steps, dashed.
function withOther(made) {
  const other = (given.other?.curves ?? []).find((each) => each.title === made.title);
  const hasNamed = made.lines.some((line) => line.is_named);
  const ink = (line, number) => (line.is_named ? "var(--bad)" : line.is_rank && (hasNamed || made.lines.length > INKS.length) ? "var(--faint)" : INKS[number % INKS.length]);
  const lines = made.lines.map((line, number) => ({ ...line, ink: ink(line, number) })).sort((one, other) => Number(Boolean(one.is_named)) - Number(Boolean(other.is_named)));
  if (!other) return { ...made, lines };
  const places = new Map((given.other.steps ?? []).map((step, place) => [step, place]));
  const dashed = other.lines.slice(0, 1).map((line) => ({ label: "the other run", dashed: true, ink: "var(--text)",
    values: given.steps.map((step) => (places.has(step) ? line.values[places.get(step)] : null)) }));
  return { ...made, lines: [...lines, ...dashed] };
}

function showSection(id) {
  const found = (given.curves ?? []).filter((each) => each.section === id);
  const box = document.querySelector(`#${id} .charts`);
  if (found.length) byId(id).hidden = false;
  for (const made of found.filter((each) => each.lines)) box.append(chart(withOther(made)));
  const sentences = found.filter((each) => each.sentence).map((each) => each.sentence);
  if (sentences.length) box.after(element("p", { class: "note" }, sentences.join(" ")));
}

function tableOf(heads, rows) {
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell))))));
}

function showTables() {
  const ranks = given.ranks ?? [];
  if (ranks.length) {
    byId("ranks").hidden = false;
    document.querySelector("#ranks .wide").append(tableOf(["Which rank had the", "in how many of the logged steps"], ranks.map((each) =>
      [each.title, each.ranks.map(([rank, count]) => `rank ${rank}: ${percent(count, each.of)}`).join(", ")])));
  }
  const saved = given.saved ?? [];
  if (saved.length) {
    byId("saved").hidden = false;
    for (const predicted of [true, false]) {
      const rows = saved.filter((each) => Boolean(each.predicted) === predicted).map((each) => [each.name, each.text]);
      if (rows.length) document.querySelector(predicted ? "#saved .wide" : "#saved details .wide").append(tableOf(["On the first rank", ""], rows));
      if (rows.length && !predicted) document.querySelector("#saved details").hidden = false;
    }
  }
  const events = given.events ?? [];
  if (events.length) {
    byId("events").hidden = false;
    const go = (each) => element("button", { type: "button", class: "go", onclick: () => look(each.step) }, grouped(each.step));
    document.querySelector("#events .wide").append(tableOf(["Step", "Rank", "What"], events.map((each) => [go(each), each.rank ?? "", each.text])));
  }
  const rows = Object.entries(about).filter(([, value]) => value !== null && value !== "").map(([key, value]) => [words(key), textOf(value)]);
  if (rows.length) {
    byId("about").hidden = false;
    const other = given.other?.about;
    const heads = other ? ["", "this run", "the other run"] : ["", ""];
    document.querySelector("#about .wide").append(tableOf(heads, other ? rows.map(([key, text]) => [key, text, textOf(other[key.replaceAll(" ", "_")] ?? "")]) : rows));
  }
}

function textOf(value) {
  if (Array.isArray(value)) return value.length ? value.map(textOf).join(", ") : "none";
  if (value && typeof value === "object") return Object.entries(value).map(([key, each]) => `${key} ${textOf(each)}`).join(", ");
  return String(value);
}

// Twenty steps on both sides of a step.
function look(step) {
  const place = placeOf(step);
  setView(Math.max(0, place - 20), place + 20);
  byId("norms").scrollIntoView({ block: "start" });
}

showHead();
byId("log").addEventListener("change", (event) => { view.log = event.target.checked; drawCharts(); });
document.querySelectorAll(".whole-run").forEach((button) => button.addEventListener("click", wholeRun));
for (const id of ["norms", "ranks", "saved", "also"]) showSection(id);
drawCharts();
showTables();
beginHeat();
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnWidth) return;
  drawnWidth = innerWidth;
  drawCharts();
  follow.forEach((draw) => draw());
});
addEventListener("scroll", hideHint, { passive: true });
