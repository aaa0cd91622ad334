// The plan's schedule: three lanes a group (compute, send, wait), one column a slot. Only what is in view is drawn, so the number
// of actions does not matter.

const LOOK = {
  forward: ["#5b9bd5", "forward"], backward: ["#e08a3c", "backward (B, I)"], weight: ["#f2c14e", "weight gradient (W)"],
  reduce: ["#8e6bbf", "reduce gradients"], dispatch: ["#2f6db0", "dispatch"], combine: ["#b35f0e", "combine"],
  residual: ["#7b61a8", "residual"], wait: ["#aab4be", "wait"], post: ["#dbe1e7", "post receive"], free: ["#eceff2", "free buffer"],
};
const LANES = ["compute", "send", "wait"], LANE_HEIGHT = [24, 16, 12], HEAD = 18, GAP = 8;
const VERB = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", SEND: "sends", RECV: "posts a receive", WAIT: "waits", FREE: "frees buffers of", REDUCE_GRAD: "sums gradients over replicas" };

class Timeline {
  constructor(data, onSelect) {
    this.data = data;
    this.slotWidth = 44; // five letters, 101F0
    this.canvas = document.getElementById("timeline");
    this.scroll = document.getElementById("timeline-scroll");
    this.height = HEAD + data.groups.length * (LANE_HEIGHT.reduce((a, b) => a + b) + GAP);
    this.groups = data.groups.map((group) => index(group.actions));
    this.labels();
    this.scroll.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.scroll);
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => (document.getElementById("tip").hidden = true));
    this.canvas.addEventListener("click", (event) => {
      const action = this.at(event);
      if (action) onSelect(data.stage_names[action[2]]);
    });
    document.getElementById("zoom-in").onclick = () => this.zoom(1.5);
    document.getElementById("zoom-out").onclick = () => this.zoom(1 / 1.5);
    this.draw();
  }

  labels() {
    const { data } = this;
    document.getElementById("timeline-title").textContent = `Plan: ${data.schedule}, ${data.n_microbatches} micro-batches, ${data.n_slots} slots`;
    const used = new Set(data.groups.flatMap((group) => group.actions.map((action) => action[1])));
    document.getElementById("timeline-legend").replaceChildren(...Object.entries(LOOK).filter(([look]) => used.has(look)).map(([, [color, text]]) =>
      element("span", {}, element("i", { class: "swatch", style: `background:${color};border-color:${color}` }), text)));
    const lane = (name, height) => element("div", { style: `height:${height}px;line-height:${height}px;padding:0 8px;text-align:right;color:#667380;font-size:${Math.min(11, height - 2)}px` }, name);
    document.getElementById("timeline-labels").replaceChildren(element("div", { style: `height:${HEAD}px` }), ...data.groups.map((group) =>
      element("div", { style: `display:flex;height:${LANE_HEIGHT.reduce((a, b) => a + b) + GAP}px` },
        element("div", { style: "padding:2px 4px 0 10px;white-space:nowrap" }, element("b", {}, group.name), element("br"), `ranks ${group.ranks}`),
        element("div", { style: "margin-left:auto" }, ...LANES.map((name, i) => lane(name, LANE_HEIGHT[i]))))));
  }

  zoom(factor) {
    const middle = (this.scroll.scrollLeft + this.scroll.clientWidth / 2) / this.slotWidth;
    this.slotWidth = Math.min(90, Math.max(3, this.slotWidth * factor));
    this.draw();
    this.scroll.scrollLeft = middle * this.slotWidth - this.scroll.clientWidth / 2;
    this.draw();
  }

  // Marks the actions of a stage; scrolls to the first of them where none is in view.
  select(name) {
    this.selected = this.data.stage_names.indexOf(name);
    const slots = this.data.groups.flatMap((group) => group.actions.filter((action) => action[2] === this.selected).map((action) => action[3]));
    const from = this.scroll.scrollLeft / this.slotWidth, to = from + this.scroll.clientWidth / this.slotWidth;
    if (slots.length && !slots.some((slot) => slot >= from && slot + 1 <= to)) this.scroll.scrollLeft = (Math.min(...slots) - 2) * this.slotWidth;
    this.draw();
  }

  draw() {
    const width = this.scroll.clientWidth, scale = window.devicePixelRatio || 1;
    document.getElementById("timeline-size").style.width = `${this.data.n_slots * this.slotWidth + 8}px`;
    if (this.canvas.width !== width * scale || this.canvas.height !== this.height * scale) {
      Object.assign(this.canvas, { width: width * scale, height: this.height * scale });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${this.height}px` });
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, this.height);
    pen.textBaseline = "middle";
    const first = Math.floor(this.scroll.scrollLeft / this.slotWidth), last = first + Math.ceil(width / this.slotWidth) + 1;
    this.ruler(pen, first, last);
    this.groups.forEach((cells, i) => {
      for (let slot = first; slot <= last; slot++) for (const cell of cells.get(slot) || []) this.cell(pen, cell, i);
    });
  }

  ruler(pen, first, last) {
    const every = [1, 2, 5, 10, 20, 50].find((n) => n * this.slotWidth >= 34) || 100;
    pen.font = "11px system-ui, DejaVu Sans, sans-serif";
    for (let slot = first; slot <= Math.min(last, this.data.n_slots); slot++) {
      const x = this.x(slot);
      pen.fillStyle = slot % every ? "#f1f4f6" : "#dfe5ea";
      if (this.slotWidth > 8 || slot % every === 0) pen.fillRect(x, HEAD, 1, this.height);
      pen.fillStyle = "#667380";
      if (slot % every === 0 && slot < this.data.n_slots) pen.fillText(String(slot), x + 3, HEAD / 2);
    }
  }

  cell(pen, { action, part, of }, group) {
    const { x, y, width, height } = this.box(action, part, of, group);
    pen.globalAlpha = this.selected === undefined || this.selected === action[2] ? 1 : 0.35;
    pen.fillStyle = LOOK[action[1]][0];
    pen.fillRect(x, y, width, height);
    const text = shortText(action);
    pen.font = `${action[4] === 0 ? 12 : 10}px system-ui, DejaVu Sans, sans-serif`;
    if (text && pen.measureText(text).width < width - 3) {
      pen.fillStyle = ["dispatch", "combine", "residual", "reduce"].includes(action[1]) ? "#fff" : "#13202c";
      pen.fillText(text, x + 3, y + height / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }

  x(slot) {
    return slot * this.slotWidth - this.scroll.scrollLeft;
  }

  box(action, part, of, group) {
    const [, , , slot, lane] = action, share = (this.slotWidth - 1) / of;
    const y = HEAD + group * (LANE_HEIGHT.reduce((a, b) => a + b) + GAP) + LANE_HEIGHT.slice(0, lane).reduce((a, b) => a + b, 0);
    return { x: this.x(slot) + 1 + part * share, y: y + 1, width: Math.max(1, share - (share > 3 ? 1 : 0)), height: LANE_HEIGHT[lane] - 2 };
  }

  at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const px = event.clientX - bounds.left, py = event.clientY - bounds.top;
    const group = Math.floor((py - HEAD) / (LANE_HEIGHT.reduce((a, b) => a + b) + GAP));
    const slot = Math.floor((px + this.scroll.scrollLeft) / this.slotWidth);
    for (const cell of this.groups[group]?.get(slot) || []) {
      const { x, y, width, height } = this.box(cell.action, cell.part, cell.of, group);
      if (px >= x && px <= x + width + 1 && py >= y && py <= y + height) return cell.action;
    }
    return null;
  }

  hover(event) {
    const tip = document.getElementById("tip"), action = this.at(event);
    tip.hidden = !action;
    if (!action) return;
    const [text, , stage, slot] = action, found = /^\d+([A-Z_]+)(?:\[(.*)\])?(\d*)/.exec(text);
    const of = found[2] ? " " + (/^[FBIW]$/.test(found[2]) ? "for " + VERB[found[2]] : found[2]) : "";
    const batch = found[3] === "" ? "" : `, micro-batch ${found[3]}`;
    tip.textContent = `${text}\n${this.data.stage_names[stage]} ${VERB[found[1]]}${of}${batch}, slot ${slot}`;
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 330)}px`;
    tip.style.top = `${event.clientY - 48}px`;
  }
}

// As in schedule.txt: 0F1, 0R; D0.1, C0.1, P0.1 for messages, with ' for their gradients.
function shortText([text, look, , , lane]) {
  if (lane === 0) return text.replace(/REDUCE_GRAD.*/, "R");
  const found = lane === 1 ? /\[\w*?(_bwd)?\.(\d+)\](\d+)/.exec(text) : null;
  return found ? `${{ dispatch: "D", combine: "C", residual: "P" }[look]}${found[2]}${found[1] ? "'" : ""}.${found[3]}` : "";
}

// Slot -> its actions, each with its part of the column's width in its lane.
function index(actions) {
  const slots = new Map();
  for (const action of actions) {
    const slot = action[3];
    if (!slots.has(slot)) slots.set(slot, []);
    slots.get(slot).push({ action });
  }
  for (const cells of slots.values())
    for (const lane of LANES.keys()) {
      const mine = cells.filter((cell) => cell.action[4] === lane);
      mine.forEach((cell, part) => Object.assign(cell, { part, of: mine.length }));
    }
  return slots;
}
