// What is known about one stage, or about the whole model while none is chosen. Text goes in as text, never as markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function rows(pairs) {
  return element("table", {}, ...pairs.map(([name, value]) => element("tr", {}, element("th", {}, name), element("td", {}, value))));
}

function tensorTable(tensors) {
  const dtype = (text) => text.replace("bfloat", "bf").replace("float", "f").replace(/^u?int/, (m) => m[0] === "u" ? "u" : "i");
  const line = (t) => element("tr", {}, element("td", {}, t.name), element("td", { class: "number" }, `${dtype(t.dtype)}[${t.shape.join(", ")}]`));
  return element("table", {}, ...tensors.map(line));
}

class Panel {
  constructor(container, data, onSelect) {
    this.container = container;
    this.data = data;
    this.onSelect = onSelect;
    this.overview();
  }

  fill(...parts) {
    this.container.replaceChildren(...parts.filter(Boolean));
    this.container.scrollTop = 0;
  }

  overview() {
    const { data } = this;
    const total = (field) => data.stages.reduce((sum, stage) => sum + stage[field], 0);
    this.fill(
      element("h2", {}, data.title),
      ...data.breaks.map((one) => element("div", { class: "note" }, `graph break at ${one.where}: ${one.reason}`)),
      ...data.batch_coupled.map((one) => element("div", { class: "note" }, `mixes samples, so micro-batches compute something else than the whole batch: ${one}`)),
      ...data.experts.filter((one) => one.opaque).map((one) => element("div", { class: "note" }, `experts not recognised: ${one.reason}`)),
      data.stages.length ? element("p", {}, "Click a block to open it, a stage for its code, an action of the timeline for its stage.") : null,
      rows([
        ["stages", String(data.stages.length)],
        ["parameters", amount(total("param_bytes"), "B")],
        ["forward", amount(total("forward_flops"), "FLOPs")],
        ["fingerprint", data.fingerprint || "-"],
        ...(data.timeline ? [["plan", data.timeline.fingerprint]] : []),
      ]),
      element("h3", {}, "Stages"),
      element("div", {}, ...data.stages.map((stage) => this.link(stage.name))),
      element("h3", {}, "Passes"),
      ...data.passes.map((one) => element("details", {}, element("summary", {}, `${one.name}: ${one.report.split("\n")[0]}`), element("pre", {}, one.report))),
    );
  }

  link(name) {
    return element("button", { class: "chip", onclick: () => this.onSelect(name) }, name);
  }

  stage(stage, search = "") {
    const role = ROLE[roleOf(stage, this.data)];
    const experts = this.data.experts.find((one) => !one.opaque && stage.role === "ffn" && stage.layers.includes(one.layer));
    const chip = element("span", { class: "role", style: `background:${role.fill};border-color:${role.edge}` }, role.label);
    const copy = element("button", { class: "chip", onclick: () => navigator.clipboard?.writeText(stage.code) }, "copy");
    this.fill(
      element("button", { class: "chip", onclick: () => this.overview() }, "< all stages"),
      element("h2", { id: "stage-name" }, stage.name, chip),
      rows([
        ["layers", stage.layers.join(", ") || "-"],
        ...(stage.group ? [["runs on", `${stage.group}, ranks ${stage.ranks}`]] : []),
        ["operations", String(stage.nodes)],
        ["forward", amount(stage.forward_flops, "FLOPs")],
        ["parameters", `${stage.params.length}, ${amount(stage.param_bytes, "B")}`],
        ...(experts ? [["experts", `${experts.num_experts}, top ${experts.top_k}, style ${experts.style}`]] : []),
      ]),
      element("h3", {}, "Sent and received, bytes a token"),
      this.transfers(stage),
      element("h3", {}, "Code ", copy),
      this.code(stage.code, search),
      element("h3", {}, "Inputs"),
      tensorTable(stage.inputs),
      element("h3", {}, "Outputs"),
      tensorTable(stage.outputs),
      element("h3", {}, `Parameters (${stage.params.length})`),
      element("div", { id: "stage-params" }, ...stage.params.map((name) => element("div", {}, name))),
      element("h3", {}, "Operations"),
      element("div", {}, ...Object.entries(stage.operations).map(([name, count]) => element("span", { class: "chip" }, `${count} ${name}`))),
    );
  }

  transfers(stage) {
    const near = this.data.links.filter((link) => link.src === stage.name || link.dst === stage.name);
    if (!near.length) return element("div", {}, "nothing");
    const line = (link) => {
      const isOut = link.src === stage.name;
      const only = link.several_groups_only ? ", several pipeline groups only" : "";
      const back = link.gradient_bytes === null ? "" : `, gradient back ${amount(link.gradient_bytes, "B")}`;
      return element("tr", {}, element("th", {}, link.name),
        element("td", {}, isOut ? "to " : "from ", this.link(isOut ? link.dst : link.src), `${amount(link.bytes_per_token, "B")}${back}${only}: ${link.tensors.join(", ")}`));
    };
    return element("table", {}, ...near.map(line));
  }

  code(text, search) {
    const block = element("pre", { id: "stage-code" });
    if (!text) block.append("not recorded");
    const wanted = search.toLowerCase();
    for (const line of text.split("\n")) {
      const at = wanted ? line.toLowerCase().indexOf(wanted) : -1;
      if (/^\s*#/.test(line)) block.append(element("span", { class: "comment" }, line));
      else if (at >= 0) block.append(line.slice(0, at), element("mark", {}, line.slice(at, at + wanted.length)), line.slice(at + wanted.length));
      else block.append(line);
      block.append("\n");
    }
    return block;
  }
}
