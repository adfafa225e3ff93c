// The icicle: one rectangle for each module, under the module that contains it, as wide as what it saves.
// Siblings whose names are numbers and that are equal, down to their last child, are one rectangle "× 24".

const rows = given.modules ?? [];
const inside = rows.map(() => []);
rows.forEach((row, position) => { if (row.parent >= 0 && position > 0) inside[row.parent].push(position); });
const LOCAL = rows.map((row) => row.module.slice(row.module.lastIndexOf(".") + 1));
const ROW_HEIGHT = 37;

const MEASURES = {
  saved: { title: "Bytes", text: bytes, what: "saves" },
  flops: { title: "FLOPs", text: flops, what: "computes" },
  seconds: { title: "Time", text: seconds, what: "takes" },
};

// The amount of each module with the modules inside it, and the part that is its own. The document has bytes of both
// kinds; its flops and seconds are a module's own.
const amounts = Object.fromEntries(Object.keys(MEASURES).map((name) => [name, amountsOf(name)]).filter(([name, found]) => name === "saved" || found.whole[0] > 0));

function amountsOf(name) {
  const own = rows.map((row) => (name === "saved" ? row.own ?? 0 : sum(Object.values(row[name] ?? {}))));
  const whole = [...own];
  for (let at = rows.length - 1; at > 0; at--) if (rows[at].parent >= 0) whole[rows[at].parent] += whole[at];
  return { whole, own };
}

// Modules with the same number have the same class, bytes and modules inside.
const known = new Map();
const signature = rows.map(() => 0);
for (let at = rows.length - 1; at >= 0; at--) {
  const text = [rows[at].class, rows[at].own, rows[at].whole, ...inside[at].map((each) => `${LOCAL[each]}:${signature[each]}`)].join("|");
  if (!known.has(text)) known.set(text, known.size);
  signature[at] = known.get(text);
}

// The classes that save most have a colour each; a module that saves nothing itself is grey.
const tints = new Map();
{
  const totals = new Map();
  rows.forEach((row, at) => totals.set(row.class, (totals.get(row.class) ?? 0) + (amounts.saved?.own[at] ?? 0)));
  const sorted = [...totals].filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  sorted.forEach(([name], rank) => tints.set(name, `var(--m${Math.min(rank, 7)})`));
}

function runs(numbers) {
  const parts = [];
  for (const each of numbers) {
    const last = parts.at(-1);
    if (last && each === last[1] + 1) last[1] = each;
    else parts.push([each, each]);
  }
  const text = parts.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return text.length > 4 ? `${text.slice(0, 3).join(", ")}, … ${text.at(-1)}` : text.join(", ");
}

// --- The tree that is drawn. -----------------------------------------------------------------------------------------

function nodeOf(members, label, title, up) {
  const first = members[0];
  const node = { id: `m${first}`, members, first, label, title, up, group: null, children: [] };
  node.value = sum(members.map((at) => amounts[chosen.measure].whole[at]));
  node.own = sum(members.map((at) => amounts[chosen.measure].own[at]));
  const groups = new Map();
  inside[first].forEach((at, place) => {
    const isNumber = /^\d+$/.test(LOCAL[at]);
    const group = `${first}/${signature[at]}`;
    const key = chosen.folded && isNumber && !chosen.opened.has(group) ? group : `alone ${at}`;
    const found = groups.get(key) ?? { key, places: [] };
    found.places.push(place);
    groups.set(key, found);
  });
  for (const { key, places } of groups.values()) {
    const all = members.flatMap((member) => places.map((place) => inside[member][place]));
    const name = places.length > 1 ? runs(places.map((place) => Number(LOCAL[inside[first][place]]))) : LOCAL[inside[first][places[0]]];
    const child = nodeOf(all, name, title ? `${title}.${places.length > 1 ? `[${name}]` : name}` : name, node);
    child.equal = places.length;
    if (places.length > 1) child.group = key;
    else if (chosen.opened.has(`${first}/${signature[all[0]]}`)) child.fold = `${first}/${signature[all[0]]}`;
    node.children.push(child);
  }
  return node;
}

let drawn = []; // the nodes that have a rectangle, in the order in which Tab and arrows meet them
const cells = new Map(); // id -> the element of the rectangle
let view = null; // the node at the top

function showIcicle() {
  if (!rows.length) return;
  byId("modules").hidden = false;
  const root = nodeOf([0], rows[0].module || given.model || "the model", rows[0].module, null);
  view = find(root, (node) => node.members.includes(chosen.root ?? 0)) ?? root;
  drawn = [];
  const width = byId("icicle").clientWidth || 1000;
  place(view, 0, 1, 0, width);
  const gone = new Set(cells.keys());
  drawn.forEach((node) => { drawCell(node); gone.delete(node.id); });
  gone.forEach((id) => { cells.get(id).remove(); cells.delete(id); });
  byId("icicle").style.height = `${ROW_HEIGHT * (1 + Math.max(...drawn.map((node) => node.depth)))}px`;
  if (!drawn.some((node) => cells.get(node.id).tabIndex === 0)) cells.get(view.id).tabIndex = 0;
  showCrumbs();
  showLead();
  search();
}

function find(node, test) {
  if (test(node)) return node;
  for (const child of node.children) {
    const found = find(child, test);
    if (found) return found;
  }
  return null;
}

function place(node, left, width, depth, pixels) {
  Object.assign(node, { left, width, depth, pixels: width * pixels });
  drawn.push(node);
  let at = left;
  const parts = node.children.filter((child) => child.value > 0);
  if (parts.length && node.own > 0) {
    parts.push({ id: `${node.id} itself`, itself: true, up: node, members: node.members, first: node.first, children: [], value: node.own, own: node.own,
      label: "itself", title: node.title });
  }
  for (const child of parts) {
    const share = node.value ? (width * child.value) / node.value : 0;
    if (share * pixels >= 1.2) place(child, at, share, depth + 1, pixels);
    at += share;
  }
}

function drawCell(node) {
  let cell = cells.get(node.id);
  if (!cell) {
    cell = element("div", { class: "cell", role: "treeitem", tabindex: -1 }, element("span"), element("span"));
    cell.addEventListener("click", (event) => { event.preventDefault(); enter(cell.node); });
    cell.addEventListener("pointermove", (event) => showHint(about(cell.node), event.clientX, event.clientY));
    cell.addEventListener("pointerleave", hideHint);
    cell.addEventListener("focus", () => focused(cell));
    cell.addEventListener("blur", hideHint);
    cell.addEventListener("keydown", keys);
    cells.set(node.id, cell);
  }
  if (!cell.isConnected) byId("icicle").append(cell);
  cell.node = node;
  const row = rows[node.first];
  const tint = node.own > 0 ? tints.get(row.class) : undefined;
  // A module that contains others is grey: what it saves itself stands under it, as a rectangle of its own.
  const isTinted = tint && (node.itself || !node.children.some((child) => child.value > 0));
  cell.className = `cell${isTinted ? " tinted" : ""}${node.itself ? " itself" : ""}${node.pixels < 60 ? " narrow" : ""}`;
  Object.assign(cell.style, { left: `${100 * node.left}%`, width: `${100 * node.width}%`, top: `${ROW_HEIGHT * node.depth}px`, background: isTinted ? tint : "" });
  const count = node.equal > 1 ? ` × ${node.equal}` : "";
  const amount = MEASURES[chosen.measure].text(node.value);
  const label = node.itself ? `${topOperator(row) ?? "itself"}` : `${node.label}${count}`;
  // A few letters say nothing: a narrow rectangle shows its name and its amount if they fit, and the hint says the rest.
  const fitting = (text) => 7 * text.length + 6 <= node.pixels || node.pixels >= 60;
  const hasLabel = fitting(label) || node.pixels >= 36;
  const more = `${amount} · ${row.class}`;
  cell.children[0].textContent = hasLabel ? label : "";
  cell.children[1].textContent = !hasLabel || !fitting(amount) ? "" : node.itself || 6.4 * more.length > node.pixels + 26 ? amount : more;
  cell.dataset.module = node.itself ? "" : row.module;
  cell.dataset.times = node.members.length;
  cell.setAttribute("aria-label", `${node.itself ? `${called(node.title)} itself` : called(node.title)}${count}, ${row.class}, ${amount}`);
  cell.setAttribute("aria-level", node.depth + 1);
  if (node.children.length) cell.setAttribute("aria-expanded", drawn.some((each) => each.up === node));
  else cell.removeAttribute("aria-expanded");
}

const topOperator = (row) => Object.keys(row.operators ?? {})[0]?.replace(/^aten\._*/, "");

// --- What a rectangle says. -------------------------------------------------------------------------------------------

function about(node) {
  const row = rows[node.first];
  const count = node.members.length;
  const table = [];
  const each = (value) => (count > 1 ? ` (${count} × ${bytes(value)})` : "");
  if (row.whole !== undefined && !node.itself) table.push(["saved, with the modules inside", `${bytes(row.whole * count)}${each(row.whole)}`, "sum"]);
  if (row.own !== undefined) table.push(["saved in its own forward", `${bytes(row.own * count)}${each(row.own)}`]);
  for (const [name, value] of Object.entries(row.operators ?? {}).slice(0, 5)) table.push([name, bytes(value * count), "part"]);
  for (const name of ["flops", "seconds"]) {
    for (const [phase, value] of Object.entries(row[name] ?? {})) if (value) table.push([`${MEASURES[name].title}, ${phase}`, MEASURES[name].text(value * count)]);
  }
  if (row.whole !== undefined && rows[0].whole) table.push(["of all that is saved", percent((node.itself ? row.own : row.whole) * count, rows[0].whole)]);
  return [element("b", {}, called(node.title), node.itself ? " itself" : ""),
    element("span", { class: "class" }, row.class, count > 1 ? `, ${count} equal ones` : ""), hintTable(table)];
}

function focused(cell) {
  cells.forEach((each) => { each.tabIndex = each === cell ? 0 : -1; });
  if (!cell.matches(":focus-visible")) return;
  const box = cell.getBoundingClientRect();
  showHint(about(cell.node), box.left + Math.min(box.width / 2, 240), box.bottom - 8);
}

// --- Zoom. ------------------------------------------------------------------------------------------------------------

function enter(node) {
  const to = node.itself ? node.up : node;
  goTo(to === view ? to.up ?? to : to);
}

function goTo(node) {
  hideHint();
  chosen.root = node.first;
  showIcicle();
  const cell = cells.get(view.id);
  if (document.activeElement?.closest("#icicle, #crumbs") || document.activeElement === document.body) cell.focus({ preventScroll: true });
}

function setOpened(group, isOpen) {
  if (isOpen) chosen.opened.add(group);
  else chosen.opened.delete(group);
  showIcicle();
}

function keys(event) {
  const node = event.currentTarget.node;
  const level = drawn.filter((each) => each.depth === node.depth).sort((a, b) => a.left - b.left);
  const beside = level.findIndex((each) => each.id === node.id);
  const to = {
    ArrowLeft: () => level[beside - 1],
    ArrowRight: () => level[beside + 1],
    ArrowUp: () => (node === view ? null : node.up),
    ArrowDown: () => drawn.find((each) => each.up === node),
    Home: () => level[0],
    End: () => level.at(-1),
  }[event.key];
  if (to) cells.get(to()?.id)?.focus();
  else if (event.key === "Enter" || event.key === " ") enter(node);
  else if (event.key === "Escape" && view.up) goTo(view.up);
  else if (event.key.toLowerCase() === "u" && !event.ctrlKey && !event.metaKey && (node.group || node.fold)) {
    setOpened(node.group ?? node.fold, Boolean(node.group));
    cells.get(node.id)?.focus();
  } else return;
  event.preventDefault();
}

function showCrumbs() {
  const path = [];
  for (let node = view; node; node = node.up) path.unshift(node);
  const text = (node) => `${node.label}${node.equal > 1 ? ` × ${node.equal}` : ""}`;
  const parts = path.flatMap((node, number) => [
    number ? element("span", { class: "sign", "aria-hidden": "true" }, "›") : null,
    node === view ? element("span", { "aria-current": "true" }, text(node)) : element("button", { type: "button", onclick: () => goTo(node) }, text(node)),
  ]);
  // A folded group inside the view can be unfolded by the pointer, too.
  const groups = view.group ? [view] : groupsIn(view).slice(0, 3);
  const open = path.find((node) => node.fold) ?? find(view, (node) => node.fold);
  for (const node of groups) {
    const names = node.title.split(/\.(?![^[]*\])/);
    const name = names.slice(names.slice(-4, -1).some((each) => /^\d+$/.test(each)) ? -4 : -2).join(".");
    parts.push(element("button", { type: "button", class: "unfold", onclick: () => setOpened(node.group, true) }, `Unfold ${name} × ${node.equal}`));
  }
  if (open) parts.push(element("button", { type: "button", class: "unfold", onclick: () => { if (path.includes(open)) chosen.root = open.up.first; setOpened(open.fold, false); } }, "Fold again"));
  byId("crumbs").replaceChildren(...parts.filter(Boolean));
}

// The folded groups below a node that have a rectangle, without those inside another group.
const groupsIn = (node) => (node.group ? [node] : node.children.filter((each) => drawn.includes(each)).flatMap(groupsIn));

// The modules of this node and below it that have something.
function sizeOf(node) {
  return node.value > 0 ? node.members.length + sum(node.children.map(sizeOf)) : 0;
}

function showLead() {
  const measure = MEASURES[chosen.measure];
  const silent = rows.filter((_, at) => !amounts[chosen.measure].whole[at]).length;
  const thin = sizeOf(view) - sum(drawn.filter((node) => !node.itself).map((node) => node.members.length));
  byId("modules-lead").textContent = [
    `A rectangle is a module, as wide as ${chosen.measure === "saved" ? "the bytes that autograd saves in it" : chosen.measure === "flops" ? "its floating-point operations" : "the time that it takes"}; below it are the modules inside.`,
    `${called("")} ${measure.what} ${measure.text(amounts[chosen.measure].whole[0])}.`,
    silent ? `${grouped(silent)} of ${grouped(rows.length)} modules ${silent === 1 ? "has" : "have"} nothing and ${silent === 1 ? "is" : "are"} not drawn.` : "",
    thin ? `${grouped(thin)} ${thin === 1 ? "is" : "are"} too thin to be drawn here.` : "",
    chosen.plan && chosen.measure === "saved" ? "These are the bytes without the plan." : "",
  ].filter(Boolean).join(" ");
  const shown = [...tints].slice(0, 8).map(([name, tint], rank) => element("li", {}, element("i", { style: { background: tint } }), rank === 7 && tints.size > 8 ? "other classes" : name));
  byId("classes").replaceChildren(...shown);
}

// --- Search. ----------------------------------------------------------------------------------------------------------

function search() {
  const query = chosen.query.trim();
  const pattern = new RegExp(query.split("*").map((each) => each.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*") + (query.includes("*") ? "$" : ""), "i");
  const isHit = rows.map((row) => query !== "" && (pattern.test(row.module) || pattern.test(row.class)));
  cells.forEach((cell) => {
    const hit = !cell.node.itself && cell.node.members.some((at) => isHit[at]);
    cell.classList.toggle("hit", hit);
    cell.classList.toggle("dim", query !== "" && !hit);
  });
  if (!query) {
    byId("found").textContent = "";
    return;
  }
  const isInside = (at) => { for (let up = rows[at].parent; up >= 0; up = rows[up].parent) if (isHit[up]) return true; return false; };
  const outermost = rows.map((_, at) => at).filter((at) => isHit[at] && !isInside(at));
  const count = isHit.filter(Boolean).length;
  const measure = MEASURES[chosen.measure];
  const total = sum(outermost.map((at) => amounts[chosen.measure].whole[at]));
  byId("found").textContent = count
    ? `${grouped(count)} ${count === 1 ? "module matches" : "modules match"}: ${measure.text(total)}, ${percent(total, amounts[chosen.measure].whole[0])} of all.`
    : `No module's name or class contains “${query}”.`;
}

// The rectangle of the module that runs where the pointer is on the curve.
function markRunning(position) {
  let seen = false;
  for (let at = position; at >= 0 && !seen; at = rows[at]?.parent ?? -1) {
    cells.forEach((cell) => { if (!cell.node.itself && cell.node.members.includes(at)) seen = true; });
    if (seen) position = at;
  }
  cells.forEach((cell) => cell.classList.toggle("running", seen && !cell.node.itself && cell.node.members.includes(position)));
}

function beginIcicle() {
  const names = Object.keys(amounts);
  byId("measure").hidden = names.length < 2;
  byId("measure").append(...names.map((name) => element("label", {}, element("input", { type: "radio", name: "measure", value: name, checked: name === "saved",
    onchange: () => { chosen.measure = name; showIcicle(); } }), MEASURES[name].title)));
  byId("fold").addEventListener("change", (event) => { chosen.folded = event.target.checked; chosen.opened.clear(); showIcicle(); });
  byId("search").addEventListener("input", (event) => { chosen.query = event.target.value; search(); });
}
