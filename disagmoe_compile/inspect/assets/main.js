// Joins picture, panel, timeline and search.

const data = JSON.parse(document.getElementById("data").textContent);
const stageByName = new Map(data.stages.map((stage) => [stage.name, stage]));
const searchInput = document.getElementById("search"), resultBox = document.getElementById("results");
const picture = new Picture(document.getElementById("picture"), data, select);
const panel = new Panel(document.getElementById("panel"), data, select);
const timeline = data.timeline ? new Timeline(data.timeline, select) : null;
const MOST_RESULTS = 60;
let results = [], chosen = 0;

function select(name) {
  const query = searchInput.value.trim();
  panel.stage(stageByName.get(name), query);
  if (timeline) timeline.select(name);
  return picture.select(name);
}

// What a query can hit of a stage, the best first: [kind, text].
function searchable(stage) {
  return [
    ["stage", stage.name],
    ...stage.layers.flatMap((layer) => [["layer", String(layer)], ["layer", `layer ${layer}`]]),
    ["role", ROLE[roleOf(stage, data)].label],
    ...stage.params.map((name) => ["parameter", name]),
    ...Object.keys(stage.operations).map((name) => ["operation", name]),
    ...[...stage.inputs, ...stage.outputs].map((tensor) => ["tensor", tensor.name]),
  ];
}

const searchIndex = data.stages.map((stage) => [stage.name, searchable(stage).map(([kind, text]) => [kind, text, text.toLowerCase()])]);

// One result a stage: exact for what is short (names, numbers), anywhere inside for the rest.
function search(query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return [];
  const isShort = /^([af]?\d+|layer \d+)$/.test(wanted);
  const found = [];
  for (const [name, texts] of searchIndex) {
    const hit = texts.find(([kind, , text]) => text === wanted || (!isShort && text.includes(wanted)));
    if (hit) found.push({ name, kind: hit[0], text: hit[1], exact: hit[2] === wanted && hit[0] === "stage" });
  }
  return found.sort((a, b) => b.exact - a.exact);
}

function showResults() {
  const query = searchInput.value;
  results = search(query);
  chosen = 0;
  picture.hits(query.trim() ? new Set(results.map((one) => one.name)) : null);
  resultBox.hidden = !query.trim();
  const count = element("div", { class: "count" }, results.length ? `${results.length} of ${data.stages.length} stages` : "no stage has it");
  const line = (one, i) => element("button", { class: "result", onmousedown: () => choose(i) }, element("b", {}, one.name), element("span", {}, `${one.kind} `), one.text);
  resultBox.replaceChildren(count, ...results.slice(0, MOST_RESULTS).map(line));
  markChosen();
}

function markChosen() {
  resultBox.querySelectorAll(".result").forEach((one, i) => one.classList.toggle("chosen", i === chosen));
}

function choose(i) {
  if (!results[i]) return;
  resultBox.hidden = true;
  select(results[i].name);
}

searchInput.addEventListener("input", showResults);
searchInput.addEventListener("focus", () => searchInput.value && showResults());
searchInput.addEventListener("blur", () => (resultBox.hidden = true));
searchInput.addEventListener("keydown", (event) => {
  const shown = Math.min(results.length, MOST_RESULTS);
  if (event.key === "ArrowDown") chosen = Math.min(chosen + 1, shown - 1);
  else if (event.key === "ArrowUp") chosen = Math.max(chosen - 1, 0);
  else if (event.key === "Enter") return choose(chosen);
  else if (event.key === "Escape") { searchInput.value = ""; return showResults(); }
  else return;
  event.preventDefault();
  markChosen();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || document.activeElement === searchInput) return;
  event.preventDefault();
  searchInput.focus();
});

document.getElementById("title").textContent = data.title;
document.getElementById("summary").textContent = summary();
document.getElementById("expand-all").onclick = () => picture.openAll(true);
document.getElementById("collapse-all").onclick = () => picture.openAll(false);
document.getElementById("fit").onclick = () => picture.fit();
document.getElementById("legend").replaceChildren(...legend());
if (!timeline) {
  document.getElementById("timeline-title").textContent = data.no_plan ? `No plan: ${data.no_plan}` : "No plan";
  document.getElementById("timeline-body").hidden = true;
  document.querySelector("#timeline-pane .buttons").hidden = true;
}

function summary() {
  const layers = new Set(data.stages.flatMap((stage) => stage.layers)).size;
  const groups = data.timeline ? ", " + data.timeline.groups.map((group) => `${group.name} on ranks ${group.ranks}`).join(", ") : "";
  return `${layers} layers, ${data.stages.length} stages${groups}`;
}

function legend() {
  const used = new Set(data.stages.map((stage) => roleOf(stage, data)));
  const roles = Object.keys(ROLE).filter((role) => used.has(role)).map((role) =>
    element("span", {}, element("i", { class: "swatch", style: `background:${ROLE[role].fill};border-color:${ROLE[role].edge}` }), ROLE[role].label));
  const toggle = (name, text) => {
    const box = element("input", { type: "checkbox", id: `show-${name}`, onchange: (event) => { picture.shown[name] = event.target.checked; picture.show(); } });
    box.checked = picture.shown[name];
    return element("label", {}, box, " ", text);
  };
  const toggles = [];
  if (data.links.some((link) => link.gradient_bytes !== null)) toggles.push(toggle("gradients", "gradients"));
  if (data.links.some((link) => link.kind === "residual")) toggles.push(toggle("residuals", "residuals (several groups)"));
  const edges = data.links.length ? [element("span", {}, "on edges: bytes a token")] : [];
  return [...roles, ...edges, ...toggles];
}

window.report = { picture, panel, timeline, search, select };
picture.show().then(() => (document.body.dataset.ready = "yes"));
