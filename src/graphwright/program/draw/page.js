// Opens and closes groups of a Graphwright picture: the sums of layout.py, then the shapes of output.py. No request leaves the page.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("gw-data").textContent);
  const { PAD, TITLE, GAP, STEP, PIN, LINE, ROUND } = data.sizes;
  const { modules, nodes, arrangements } = data;
  const picture = document.getElementById("gw-picture"), details = document.getElementById("gw-details");
  const open = new Set(data.open), first = [...data.open];
  const byPath = new Map(modules.map((m, at) => [m.path, at]));
  const nodeOf = new Map(nodes.map((n, i) => [n.path, i]));

  // -- sums -------------------------------------------------------------------------------------------------------------
  const pin = (size, [kind, , b]) => size.pins ? size.pins[kind][b] : kind === 0 ? b * PIN / 2 : 0;
  const closed = (m) => {
    const a = arrangements[m.arrangement];
    return { left: m.half, right: m.half, height: m.height, pins: a.steps.map((side) => side.map((s) => s * PIN)) };
  };
  const columns = (a, sizes) => {
    const wide = new Map([[0, [0, 0]]]), laneX = new Map([[0, 0]]), trackX = new Map(), reach = [0, 0];
    a.lane.forEach((lane, k) => {
      const w = wide.get(lane) ?? [0, 0];
      wide.set(lane, [Math.max(w[0], sizes[k].left), Math.max(w[1], sizes[k].right)]);
    });
    [reach[0], reach[1]] = wide.get(0);
    for (const [side, sign] of [[1, 1], [0, -1]]) {
      let cursor = reach[side];
      const ends = [...wide.keys()].map((l) => sign * l).concat(Object.keys(a.channels).map((c) => sign * c + (sign > 0 ? 1 : 0)));
      for (let k = 1; k <= Math.max(...ends); k++) {
        const channel = sign > 0 ? k - 1 : -k, tracks = a.channels[channel] ?? 0, used = wide.get(sign * k);
        for (let t = 0; t < tracks; t++) trackX.set(`${channel} ${t}`, sign * (cursor + STEP * t + PIN));
        cursor += tracks ? (used ? 2 * PIN : PIN / 2) + STEP * tracks : used ? GAP : 0;
        if (used) {
          laneX.set(sign * k, sign * (cursor + used[1 - side]));
          cursor += used[0] + used[1];
        }
      }
      reach[side] = cursor;
    }
    return { laneX, trackX, reach };
  };
  const rows = (a, sizes, head) => {
    const heights = new Array(a.rows).fill(0), rowY = [], gutterY = [head + STEP];
    a.rank.forEach((row, k) => { heights[row] = Math.max(heights[row], sizes[k].height); });
    let y = head + (a.gutters[0] ? 2 * STEP + STEP * a.gutters[0] : GAP - STEP);
    heights.forEach((tall, row) => {
      rowY.push(y);
      y += tall;
      gutterY.push(y + STEP);
      const tracks = a.gutters[row + 1];
      y += row + 1 < a.rows ? Math.max(GAP, 2 * STEP + STEP * tracks) : PAD + STEP * tracks;
    });
    return { rowY, gutterY, height: y };
  };
  const layOut = (m, sizes) => {
    const a = arrangements[m.arrangement], { laneX, trackX, reach } = columns(a, sizes);
    const { rowY, gutterY, height } = rows(a, sizes, m.titleWidth ? TITLE : 0);
    const left = reach[0] + PAD, right = Math.max(reach[1] + PAD, m.titleWidth + 2 * PAD - left);
    const middles = a.lane.map((l) => laneX.get(l)), tops = a.rank.map((r) => rowY[r]);
    const across = (x) => x[0] === 3 ? laneX.get(x[1]) ?? 0 : x[0] === 2 ? trackX.get(`${x[1]} ${x[2]}`) : middles[x[1]] + pin(sizes[x[1]], x);
    const wires = a.wires.map(([source, target, xs, bends]) => {
      const points = [[across(xs[0]), source < 0 ? 0 : tops[source] + sizes[source].height]];
      bends.forEach(([gutter, track], k) => {
        const level = gutterY[gutter + 1] + track * STEP;
        points.push([points.at(-1)[0], level], [across(xs[k + 1]), level]);
      });
      points.push([points.at(-1)[0], target < 0 ? height : tops[target]]);
      return points;
    });
    return { size: { left, right, height, pins: a.ends.map((side) => side.map(across)) }, middles, tops, wires };
  };

  // -- shapes -----------------------------------------------------------------------------------------------------------
  const make = (name, attributes, ...inside) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    e.append(...inside);
    return e;
  };
  const haloed = (given, text) => {
    const { "data-path": _, ...rest } = given;
    const halo = { ...rest, class: `${given.class} gw-halo`, "aria-hidden": "true" };
    return [make("text", halo, text), make("text", given, text)];
  };
  const outline = (p) => {
    let d = `M${p[0].join(" ")}`;
    for (let k = 1; k + 1 < p.length; k++) {
      const [[ax, ay], [bx, by], [cx, cy]] = p.slice(k - 1, k + 2);
      const one = Math.abs(bx - ax) + Math.abs(by - ay), two = Math.abs(cx - bx) + Math.abs(cy - by);
      const r = Math.min(ROUND, Math.floor(one / 2), Math.floor(two / 2));
      const s = Math.sign;
      d += `L${bx - r * s(bx - ax)} ${by - r * s(by - ay)}Q${bx} ${by} ${bx + r * s(cx - bx)} ${by + r * s(cy - by)}`;
    }
    return `${d}L${p.at(-1).join(" ")}`;
  };
  const straight = (points) => {
    const kept = [];
    for (const p of points) {
      const a = kept.at(-1), b = kept.at(-2);
      if (a && a[0] === p[0] && a[1] === p[1]) continue;
      if (b && ((b[0] === a[0] && a[0] === p[0]) || (b[1] === a[1] && a[1] === p[1]))) kept[kept.length - 1] = p;
      else kept.push(p);
    }
    return kept;
  };
  const box = (b, x, y, w, h) => {
    const round = b.kind === "junction" || b.kind === "input" ? Math.floor(h / 2) : b.kind === "group" ? 8 : 4;
    const none = data.overlay && !b.colour ? " gw-none" : "", mark = b.mark ? ` gw-${b.mark}` : "";
    const rect = (d) => make("rect", { x: x + d, y: y + d, width: w, height: h, rx: round, ...(b.colour && !d ? { style: `fill:${b.colour[0]}` } : {}) });
    const words = b.lines.map((text, k) => make("text", {
      class: k ? "gw-s" : "gw-n", x: x + w / 2, y: y + 17 + LINE * k - (b.kind === "junction" ? 1 : 0), "text-anchor": "middle",
      ...(b.colour ? { style: `fill:${b.colour[1]}` } : {}),
    }, text));
    return make("g", { class: `gw-b gw-${b.family}-box${mark}${none}`, "data-path": b.path },
      make("title", {}, b.tip), ...(b.repeat > 1 ? [rect(4)] : []), rect(0), ...words);
  };
  const wire = (points, [kind, count, mark], pointed, middle) => {
    const e = make("g", { class: `gw-e gw-${kind}${mark ? ` gw-${mark}` : ""}` });
    e.append(make("path", { d: outline(straight(points)), ...(pointed ? { "marker-end": `url(#gw-tip-${mark || kind})` } : {}) }));
    if (pointed && count > 1) {
      const [x, y] = points.at(-1), [dx, anchor] = x <= middle ? [-5, "end"] : [5, "start"];
      e.append(...haloed({ class: "gw-s gw-c", x, y: y - 7, dx, "text-anchor": anchor }, `×${count}`));
    }
    return e;
  };
  const merged = (m, a) => {
    const kept = new Map();  // wires between the same two boxes are drawn once, with their number
    a.wires.forEach(([source, target], k) => {
      const boxes = [source, target].every((c) => c >= 0 && (m.children[c] >= 0 || !open.has(~m.children[c])));
      const key = boxes ? `${source} ${target}` : `wire ${k}`, known = kept.get(key);
      if (!known) kept.set(key, [k, [...m.wires[k]]]);
      else {
        known[1][1] += m.wires[k][1];
        if (known[1][0] !== m.wires[k][0]) known[1][0] = "data";
        if (known[1][2] !== m.wires[k][2]) known[1][2] = "changed";
      }
    });
    return kept.values();
  };
  const redraw = () => {
    const visible = (at) => { for (; at; at = modules[at].parent) if (!open.has(at)) return false; return true; };
    const shown = modules.map((_, at) => visible(at)), placed = new Array(modules.length);
    for (let at = modules.length - 1; at >= 0; at--) {
      if (!shown[at]) continue;
      placed[at] = layOut(modules[at], modules[at].children.map((c) => c < 0 ? placed[~c]?.size ?? closed(modules[~c])
        : { left: nodes[c].half, right: nodes[c].half, height: nodes[c].height }));
    }
    const frames = [], heads = [], boxes = [], origin = [[placed[0].size.left, 0]];
    const unchanged = make("g", { class: "gw-unchanged" }), marked = make("g", {});
    modules.forEach((m, at) => {
      if (!shown[at]) return;
      const [x0, y0] = origin[at], p = placed[at];
      m.children.forEach((c, k) => {
        const x = x0 + p.middles[k], y = y0 + p.tops[k];
        if (c >= 0) boxes.push(box(nodes[c], x - nodes[c].half, y, 2 * nodes[c].half, nodes[c].height));
        else if (shown[~c]) {
          const { left, right, height } = placed[~c].size, inner = modules[~c];
          origin[~c] = [x, y];
          const tint = inner.tint && inner.colour ? { style: `fill:${inner.colour[0]};fill-opacity:.3` } : {};
          frames.push(make("g", { class: "gw-f", "data-path": inner.path },
            make("title", {}, inner.path), make("rect", { x: x - left, y, width: left + right, height, rx: 8, ...tint })));
          heads.push(...haloed({ class: "gw-n gw-s gw-h", "data-path": inner.path, x: x - left + 10, y: y + 16 }, inner.title));
        } else boxes.push(box(modules[~c], x - modules[~c].half, y, 2 * modules[~c].half, modules[~c].height));
      });
      for (const [k, style] of merged(m, arrangements[m.arrangement])) {
        const target = arrangements[m.arrangement].wires[k][1];
        const pointed = target >= 0 && (m.children[target] >= 0 || !open.has(~m.children[target]));
        (style[2] ? marked : unchanged).append(wire(p.wires[k].map(([x, y]) => [x + x0, y + y0]), style, pointed, x0 + (p.middles[target] ?? 0)));
      }
    });
    const svg = picture.querySelector("svg"), all = svg.querySelector(".gw-all"), legend = svg.querySelector(".gw-legend");
    const { left, right, height } = placed[0].size, width = Math.max(left + right, data.legend[0]), tall = height + data.legend[1];
    svg.setAttribute("width", width);
    svg.setAttribute("height", tall);
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    const paper = svg.querySelector(".gw-paper");
    paper.setAttribute("width", width);
    paper.setAttribute("height", tall);
    all.setAttribute("transform", `translate(${Math.floor((width - left - right) / 2)} 0)`);
    legend.setAttribute("transform", `translate(0 ${height})`);
    all.replaceChildren(...frames, unchanged, marked, ...heads, ...boxes);
  };

  // -- the reader ---------------------------------------------------------------------------------------------------------
  const toggle = (path) => {
    const at = byPath.get(path);
    if (!at) return;
    if (!open.delete(at)) open.add(at);
    redraw();
  };
  const describe = (path) => {
    const b = nodes[nodeOf.get(path)] ?? modules[byPath.get(path)];
    if (!b) return;
    const history = (b.blame ?? []).map((k) => data.entries[k]);
    details.textContent = [b.tip, ...(history.length ? ["", "edits:", ...history] : [])].join("\n");
  };
  const pathAt = (event) => event.target.closest?.("[data-path]")?.getAttribute("data-path");
  picture.addEventListener("click", (event) => {
    const path = pathAt(event);
    if (path !== undefined && path !== null && !String(getSelection())) {
      const isNode = nodeOf.has(path) && !event.target.closest(".gw-group-box, .gw-f, .gw-h");
      if (isNode) describe(path); else toggle(path);
    }
  });
  picture.addEventListener("mouseover", (event) => { const path = pathAt(event); if (path) describe(path); });
  const button = (id, change) => document.getElementById(id).addEventListener("click", () => { change(); redraw(); });
  button("gw-close", () => { open.clear(); open.add(0); });
  button("gw-open", () => modules.forEach((_, at) => open.add(at)));
  button("gw-reset", () => { open.clear(); first.forEach((at) => open.add(at)); });
  window.graphwright = { toggle, redraw, open };
})();
