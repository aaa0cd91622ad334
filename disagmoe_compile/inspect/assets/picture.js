// The stages as boxes. A block (one attention stage and the experts it feeds) is one box until it is opened. ELK lays out,
// Cytoscape draws; here stands only which elements there are, and the translation of ELK's result.

const ROLE = {
  attention: { fill: "#cfe3fb", edge: "#3473b7", label: "attention" },
  ffn: { fill: "#fde0bd", edge: "#c46f10", label: "experts (FFN)" },
  head: { fill: "#d9efd8", edge: "#3d8b46", label: "head: final norm, logits, loss" },
};
const LINK_COLOR = { dispatch: "#3473b7", combine: "#c46f10", residual: "#7b61a8" };
const OPEN_AT_FIRST = 6; // blocks; a longer model starts with all of them closed

const LAYOUT = {
  "elk.algorithm": "layered",
  "elk.direction": "RIGHT",
  "elk.edgeRouting": "ORTHOGONAL",
  "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
  "elk.layered.wrapping.strategy": "SINGLE_EDGE",
  "elk.layered.wrapping.additionalEdgeSpacing": "16",
  "elk.layered.spacing.nodeNodeBetweenLayers": "92",
  "elk.layered.spacing.edgeNodeBetweenLayers": "24",
  "elk.spacing.nodeNode": "30",
};
const INSIDE = {
  "elk.portConstraints": "FIXED_SIDE",
  "elk.algorithm": "layered",
  "elk.direction": "RIGHT",
  "elk.padding": "[top=42,left=16,bottom=42,right=16]",
  "elk.layered.spacing.nodeNodeBetweenLayers": "96",
};

function roleOf(stage, data) {
  return stage.role === "attention" && stage.boundary === data.blocks.length - 1 && data.links.length ? "head" : stage.role;
}

function amount(value, unit, step = 1000) {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let i = 0;
  for (; value >= step && i < prefixes.length - 1; i++) value /= step;
  const digits = i === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${prefixes[i]}${unit}`;
}

class Picture {
  constructor(container, data, onSelect) {
    this.data = data;
    this.stages = new Map(data.stages.map((stage) => [stage.name, stage]));
    this.blockOf = new Map(data.blocks.flatMap((block) => block.stages.map((name) => [name, block])));
    this.open = new Set(data.blocks.length <= OPEN_AT_FIRST ? data.blocks.map((block) => block.id) : []);
    this.shown = { gradients: false, residuals: data.timeline !== null && data.timeline.groups.length > 2 };
    this.elk = new ELK();
    this.cy = cytoscape({ container, style: this.style(), minZoom: 0.05, maxZoom: 3, boxSelectionEnabled: false });
    this.cy.autoungrabify(true);
    this.cy.on("tap", "node", (event) => {
      const id = event.target.id();
      if (this.stages.has(id)) onSelect(id);
      else this.toggle(id);
    });
  }

  toggle(id) {
    if (!this.open.delete(id)) this.open.add(id);
    return this.show(id);
  }

  openAll(isOpen) {
    this.open = new Set(isOpen ? this.data.blocks.map((block) => block.id) : []);
    return this.show();
  }

  // Opens the block of a stage if need be, marks the stage and brings it into view.
  async select(name) {
    this.selected = name;
    const block = this.blockOf.get(name);
    if (block.stages.length > 1 && !this.open.has(block.id)) {
      this.open.add(block.id);
      await this.show(name);
    } else {
      this.mark();
      this.reveal(name);
    }
  }

  // Dims every box without a hit; `names` is null for no search.
  hits(names) {
    this.found = names;
    this.mark();
  }

  mark() {
    this.cy.elements().removeClass("selected dim hit");
    if (this.selected) this.cy.getElementById(this.visible(this.selected)).addClass("selected");
    if (!this.found) return;
    const boxes = new Set([...this.found].map((name) => this.visible(name)));
    for (const node of this.cy.nodes()) if (!node.isParent()) node.addClass(boxes.has(node.id()) ? "hit" : "dim");
    for (const edge of this.cy.edges()) if (!boxes.has(edge.source().id()) && !boxes.has(edge.target().id())) edge.addClass("dim");
  }

  // The box that stands for a stage: its own, or its closed block's.
  visible(name) {
    const block = this.blockOf.get(name);
    return block.stages.length === 1 || this.open.has(block.id) ? name : block.id;
  }

  elements() {
    const nodes = [];
    for (const block of this.data.blocks) {
      if (block.stages.length > 1) nodes.push(this.open.has(block.id) ? this.frame(block) : this.closed(block));
      if (block.stages.length === 1 || this.open.has(block.id)) nodes.push(...block.stages.map((name) => this.box(name, block)));
    }
    const pairs = new Map();
    for (const link of this.data.links) {
      if (link.kind === "residual" && !this.shown.residuals) continue;
      const source = this.visible(link.src), target = this.visible(link.dst);
      if (source === target) continue;
      const id = source + ">" + target;
      if (!pairs.has(id)) pairs.set(id, { data: { id, source, target, kind: link.kind, labels: [], color: LINK_COLOR[link.kind] } });
      pairs.get(id).data.labels.push(this.linkLabel(link));
    }
    for (const edge of pairs.values()) edge.data.label = edge.data.labels.flat().join("\n");
    return { nodes, edges: [...pairs.values()] };
  }

  linkLabel(link) {
    const lines = [link.kind, amount(link.bytes_per_token, "B")];
    if (this.shown.gradients && link.gradient_bytes !== null) lines.push(`back ${amount(link.gradient_bytes, "B")}`);
    return lines;
  }

  frame(block) {
    return { data: { id: block.id, label: block.label + "  (close)" }, classes: "frame" };
  }

  closed(block) {
    const roles = block.stages.map((name) => roleOf(this.stages.get(name), this.data));
    const fills = roles.map((role) => ROLE[role].fill);
    const label = block.label + "\n" + block.stages.join("  |  ");
    return { data: { id: block.id, label, width: 126, height: 62, fills: `${fills[0]} ${fills[0]} ${fills[1]} ${fills[1]}`, edge: "#52606d" }, classes: "closed" };
  }

  box(name, block) {
    const stage = this.stages.get(name), role = ROLE[roleOf(stage, this.data)];
    const what = stage.role === "ffn" ? "experts" : roleOf(stage, this.data) === "head" ? "head" : "attention";
    const label = `${name}  ${what}\n${stage.nodes} ops, ${amount(stage.forward_flops, "FLOPs")}\n${stage.params.length} params, ${amount(stage.param_bytes, "B")}`;
    const parent = block.stages.length > 1 ? block.id : undefined;
    return { data: { id: name, parent, label, width: 196, height: 84, fill: role.fill, edge: role.edge }, classes: "stage" };
  }

  async show(focus) {
    const turn = (this.turn = (this.turn || 0) + 1);
    document.getElementById("busy").hidden = false;
    await new Promise((resolve) => setTimeout(resolve)); // let the browser paint that
    const { nodes, edges } = this.elements();
    const laid = await this.elk.layout(this.elkGraph(nodes, edges));
    if (turn !== this.turn) return; // a later change overtook this one
    place(nodes, edges, laid);
    this.cy.batch(() => {
      this.cy.elements().remove();
      this.cy.add([...nodes, ...edges]);
    });
    this.mark();
    document.getElementById("busy").hidden = true;
    if (focus) this.reveal(this.stages.has(focus) ? this.visible(focus) : focus);
    else this.home();
  }

  elkGraph(nodes, edges) {
    const top = new Map(), inside = new Map();
    const within = this.shown.gradients ? { ...INSIDE, "elk.layered.spacing.nodeNodeBetweenLayers": "124" } : INSIDE;
    for (const { data } of nodes) {
      const box = { id: data.id, width: data.width, height: data.height };
      if (data.parent) {
        top.get(data.parent).children.push(box);
        inside.set(data.id, data.parent);
      } else {
        top.set(data.id, data.width ? box : { id: data.id, layoutOptions: within, children: [], edges: [], ports: [] });
      }
    }
    // An edge that leaves an open block does so through a port of it: one piece inside, one outside, one inside of the next.
    const between = [];
    for (const { data } of edges) {
      const from = inside.get(data.source), to = inside.get(data.target);
      if (from && from === to) top.get(from).edges.push(piece(data.id, 1, data.source, data.target));
      else between.push(piece(data.id, 1, leave(top.get(from), data, "source", 0), leave(top.get(to), data, "target", 2)));
    }
    const { width, height } = this.cy.container().getBoundingClientRect();
    const options = { ...LAYOUT, "elk.aspectRatio": String(Math.max(0.4, width / Math.max(height, 1))) };
    if (this.shown.gradients || this.shown.residuals) options["elk.spacing.nodeNode"] = "46"; // room for longer labels
    if (this.shown.gradients) options["elk.layered.spacing.nodeNodeBetweenLayers"] = "124";
    if (nodes.length <= 4) options["elk.layered.wrapping.strategy"] = "OFF";
    return { id: "root", layoutOptions: options, children: [...top.values()], edges: between };
  }

  fit() {
    this.cy.resize();
    this.cy.fit(undefined, 30);
    this.cy.panBy({ x: 0, y: 14 }); // below the legend
    if (this.cy.zoom() > 1.25) { this.cy.zoom(1.25); this.cy.center(); }
  }

  // Everything where it can be read; else the chosen stage, or the beginning, large enough.
  home() {
    this.fit();
    if (this.cy.zoom() > 0.4) return;
    this.cy.zoom(0.65);
    if (this.selected) return this.cy.center(this.cy.getElementById(this.visible(this.selected)));
    const { x1, y1 } = this.cy.elements().boundingBox();
    this.cy.pan({ x: 20 - x1 * 0.65, y: 50 - y1 * 0.65 });
  }

  reveal(id) {
    const box = this.cy.getElementById(id);
    if (box.empty()) return;
    const seen = this.cy.extent(), at = box.boundingBox();
    const isInView = at.x1 >= seen.x1 && at.x2 <= seen.x2 && at.y1 >= seen.y1 && at.y2 <= seen.y2;
    if (isInView && this.cy.zoom() > 0.5) return;
    const zoom = Math.min(1.25, Math.max(this.cy.zoom(), 0.7));
    this.cy.animate({ zoom, center: { eles: box } }, { duration: 250 });
  }

  style() {
    const text = { "font-family": "system-ui, DejaVu Sans, sans-serif", color: "#1f2933", "text-wrap": "wrap", "font-size": 15.5 };
    const box = { shape: "round-rectangle", width: "data(width)", height: "data(height)", "text-valign": "center", "border-width": 1.5, "border-color": "data(edge)" };
    return [
      { selector: "node", style: { ...text, label: "data(label)" } },
      { selector: "node.stage", style: { ...box, "background-color": "data(fill)", "line-height": 1.25 } },
      { selector: "node.closed", style: { ...box, "background-fill": "linear-gradient", "background-gradient-stop-colors": "data(fills)", "background-gradient-stop-positions": "0 50 50 100", "background-gradient-direction": "to-right", "font-size": 19, "line-height": 1.3 } },
      { selector: "node.frame", style: { shape: "round-rectangle", "background-color": "#f7f9fb", "border-color": "#9aa5b1", "border-width": 1, padding: 16, "text-valign": "top", "text-halign": "center", "text-margin-y": -5, "font-size": 17, "font-weight": 600 } },
      { selector: "node.dim", style: { opacity: 0.25 } },
      { selector: "node.hit", style: { "border-width": 3, "border-color": "#c2185b" } },
      { selector: "node.selected", style: { "border-width": 4, "border-color": "#c2185b" } },
      { selector: "edge", style: { ...text, label: "data(label)", "font-size": 15, width: 2.5, "line-color": "data(color)", "target-arrow-color": "data(color)", "target-arrow-shape": "triangle", "curve-style": "straight", "source-endpoint": (edge) => edge.data("start"), "target-endpoint": (edge) => edge.data("end"), "text-background-color": "#fff", "text-background-opacity": 0.92, "text-background-padding": 2, "line-height": 1.15 } },
      { selector: "edge.routed", style: { "curve-style": "segments", "segment-weights": "data(weights)", "segment-distances": "data(distances)", "edge-distances": "endpoints", label: "", "source-label": "data(label)", "source-text-offset": "data(labelAt)" } },
      { selector: "edge.dim", style: { opacity: 0.25 } },
    ];
  }
}

function piece(id, part, source, target) {
  return { id: `${id}#${part}`, sources: [source], targets: [target] };
}

// The end of an edge outside of the block that holds its stage: a port that an inner piece leads to, or the stage itself.
function leave(block, data, end, part) {
  if (!block) return data[end];
  const port = `${data.id}#${end}`, isSource = end === "source";
  block.ports.push({ id: port, width: 0, height: 0, layoutOptions: { "elk.port.side": isSource ? "EAST" : "WEST" } });
  block.edges.push(piece(data.id, part, isSource ? data.source : port, isSource ? port : data.target));
  return port;
}

// Puts ELK's places and routes on the elements.
function place(nodes, edges, laid) {
  const centers = new Map(), pieces = new Map();
  const visit = (parent, x, y) => {
    for (const edge of parent.edges || [])
      for (const section of edge.sections || [])
        pieces.set(edge.id, [section.startPoint, ...(section.bendPoints || []), section.endPoint].map((p) => ({ x: p.x + x, y: p.y + y })));
    for (const child of parent.children || []) {
      centers.set(child.id, { x: x + child.x + child.width / 2, y: y + child.y + child.height / 2 });
      visit(child, x + child.x, y + child.y);
    }
  };
  visit(laid, 0, 0);
  for (const node of nodes) if (node.data.width) node.position = { ...centers.get(node.data.id) };
  for (const edge of edges) {
    const points = [0, 1, 2].flatMap((part) => pieces.get(`${edge.data.id}#${part}`) || []);
    const from = points[0], to = points[points.length - 1];
    edge.data.start = offset(from, centers.get(edge.data.source));
    edge.data.end = offset(to, centers.get(edge.data.target));
    if (points.every((p) => Math.abs(p.y - from.y) < 1)) continue;
    edge.classes = "routed";
    edge.data.label = edge.data.labels.map(([kind, ...bytes]) => `${kind} ${bytes.join(", ")}`).join(", "); // there is room along it
    edge.data.labelAt = labelAt(points, edge.data.kind === "residual" ? 0.25 : 0.6);
    Object.assign(edge.data, segments(points.slice(1, -1), from, to));
  }
}

// How far along a route its longest straight part has gone by `share`: there is room for a label.
function labelAt(points, share) {
  let gone = 0, best = 0, longest = 0;
  for (let i = 1; i < points.length; i++) {
    const length = Math.hypot(points[i].x - points[i - 1].x, points[i].y - points[i - 1].y);
    if (length > longest) [longest, best] = [length, gone + share * length];
    gone += length;
  }
  return best;
}

function offset(point, center) {
  return `${point.x - center.x}px ${point.y - center.y}px`;
}

// Cytoscape wants a bend as its share of the way from end to end, and its distance from that line.
function segments(points, from, to) {
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  return {
    weights: points.map((p) => ((p.x - from.x) * dx + (p.y - from.y) * dy) / length ** 2),
    distances: points.map((p) => ((p.x - from.x) * -dy + (p.y - from.y) * dx) / length),
  };
}
