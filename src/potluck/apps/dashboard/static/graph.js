// The nodes in ring order and the links between them, as a drawing that can be walked by keyboard.

import { keyed, s, say, set } from "./dom.js";
import { rate, seconds } from "./format.js";
import { labels } from "./store.js";

const HEIGHT = 380;

/** Where each node stands: members round the ring, those who are gone below. */
function places(members, gone, width) {
  const found = new Map();
  const deep = gone.length ? HEIGHT - 74 : HEIGHT;
  const x = width / 2;
  const y = deep / 2;
  const rx = Math.min(width / 2 - 74, 210);
  const ry = deep / 2 - 66;
  const size = members.length;
  members.forEach((node, index) => {
    const turn = size === 2 ? Math.PI : -Math.PI / 2;
    const angle = turn + (2 * Math.PI * index) / Math.max(1, size);
    const reach = size === 1 ? 0 : 1;
    found.set(node.key, {
      x: x + rx * Math.cos(angle) * reach,
      y: y + ry * Math.sin(angle) * reach,
      angle,
    });
  });
  const step = Math.min(120, width / (gone.length + 1));
  gone.forEach((node, index) => {
    const offset = index - (gone.length - 1) / 2;
    found.set(node.key, { x: x + offset * step, y: HEIGHT - 62, angle: Math.PI / 2 });
  });
  return found;
}

function inRing(job) {
  const present = job.nodes.filter((node) => node.gone === null);
  const order = new Map(job.ring.map((key, index) => [key, index]));
  const place = (node) => order.get(node.key) ?? order.size + present.indexOf(node);
  return [...present].sort((one, other) => place(one) - place(other));
}

function radius(count) {
  return count > 24 ? 11 : count > 12 ? 15 : 22;
}

/** Both directions of a link as one line, with the worse health of the two. */
function joined(job, spots) {
  const ring = new Map();
  job.ring.forEach((key, index) => ring.set(key, job.ring[(index + 1) % job.ring.length]));
  const severity = ["healthy", "degraded", "suspect", "dead"];
  const found = new Map();
  for (const link of job.links) {
    if (!spots.has(link.from) || !spots.has(link.to)) continue;
    const follows = ring.get(link.from) === link.to;
    const [one, other] = [link.from, link.to].sort();
    const name = `${one} ${other}`;
    const known = found.get(name);
    const merged = known ?? { name, from: link.from, to: link.to, status: "healthy", times: [] };
    if (follows) Object.assign(merged, { from: link.from, to: link.to, ring: true });
    if (severity.indexOf(link.status) > severity.indexOf(merged.status)) merged.status = link.status;
    const trip = link.latency ?? (link.round_trip === null ? null : link.round_trip / 2);
    if (trip !== null) merged.times.push(trip);
    found.set(name, merged);
  }
  return [...found.values()].sort((a, b) => Number(a.ring ?? false) - Number(b.ring ?? false));
}

/** From rim to rim, bent a little outwards where it is part of the ring. */
function path(link, spots, width, rim) {
  const [a, b] = [spots.get(link.from), spots.get(link.to)];
  const middle = { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 };
  const out = { x: middle.x - width / 2, y: middle.y - HEIGHT / 2 };
  const length = Math.hypot(out.x, out.y) || 1;
  const bend = link.ring ? 0.16 : 0;
  const knee = { x: middle.x + out.x * bend, y: middle.y + out.y * bend };
  const cut = (from, to) => {
    const span = Math.hypot(to.x - from.x, to.y - from.y) || 1;
    const share = (rim + 5) / span;
    return { x: from.x + (to.x - from.x) * share, y: from.y + (to.y - from.y) * share };
  };
  const [start, end] = [cut(a, knee), cut(b, knee)];
  const shift = link.ring && length > 1 ? 12 : 0;
  return {
    d: `M${start.x.toFixed(1)} ${start.y.toFixed(1)}Q${knee.x.toFixed(1)} ${knee.y.toFixed(1)} ${end.x.toFixed(1)} ${end.y.toFixed(1)}`,
    label: {
      x: (middle.x + knee.x) / 2 + (out.x / length) * shift,
      y: (middle.y + knee.y) / 2 + (out.y / length) * shift,
    },
  };
}

const mean = (times) => times.reduce((sum, time) => sum + time, 0) / times.length;

export class Graph {
  #selected = null;

  constructor(host, detail, store) {
    this.store = store;
    this.host = host;
    this.detail = detail;
    const tip = s("path", { d: "M0 0 8 4 0 8z" });
    const arrow = s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, tip);
    this.links = s("g", { class: "links" });
    this.nodes = s("g", { class: "nodes" });
    this.svg = s("svg", { role: "group", "aria-label": "Nodes in ring order" }, s("defs", {}, arrow), this.links, this.nodes);
    host.append(this.svg);
  }

  draw() {
    const job = this.store.current;
    const width = Math.max(280, this.host.clientWidth);
    set(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT });
    if (!job) {
      this.links.replaceChildren();
      this.nodes.replaceChildren();
      say(this.detail, "Nobody is here yet.");
      return;
    }
    const left = job.nodes.filter((node) => node.gone !== null);
    const present = job.ended ? left : inRing(job);
    const gone = job.ended ? [] : left.slice(-6);
    const spots = places(present, gone, width);
    const rim = radius(present.length);
    const links = joined(job, spots);
    this.#drawLinks(links, spots, width, rim);
    this.#drawNodes([...present, ...gone], labels(job.nodes), spots, rim);
    this.#describe(job, links);
  }

  #drawLinks(links, spots, width, rim) {
    keyed(this.links, links, {
      key: (link) => link.name,
      create: () => s("g", {}, s("path", {}), s("text", {})),
      update: (element, link) => {
        const [line, text] = element.children;
        const drawn = path(link, spots, width, rim);
        const near = this.#selected === link.from || this.#selected === link.to;
        set(element, {
          class: `link ${link.ring ? "ring" : ""} ${near ? "near" : ""}`,
          "data-status": link.status,
        });
        set(line, { d: drawn.d, "marker-end": link.ring ? "url(#arrow)" : null });
        set(text, { x: drawn.label.x.toFixed(1), y: drawn.label.y.toFixed(1) });
        say(text, link.times.length ? seconds(mean(link.times)) : "");
      },
    });
  }

  #drawNodes(nodes, names, spots, rim) {
    keyed(this.nodes, nodes, {
      key: (node) => node.key,
      create: (node) => this.#make(node.key),
      update: (element, node) => {
        const { x, y, angle } = spots.get(node.key);
        const [halo, , rank, badge, label, note] = element.children;
        const status = node.health || "silent";
        set(element, {
          class: `node ${this.store.tone(node.key)} ${this.#selected === node.key ? "chosen" : ""}`,
          transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
          "data-status": status,
          "aria-label": `${node.rank === null ? "no rank" : `rank ${node.rank}`}, ${names.get(node.key)}, ${status}, ${node.state}`,
        });
        set(halo, { r: rim + 5 });
        set(element.children[1], { r: rim });
        say(rank, node.rank === null ? "–" : String(node.rank));
        set(badge, { transform: `translate(${rim * 0.74} ${-rim * 0.74})` });
        const below = Math.sin(angle) > -0.3;
        set(label, { y: below ? rim + 19 : -rim - 22 });
        set(note, { y: below ? rim + 33 : -rim - 8 });
        say(label, rim > 12 ? names.get(node.key) : "");
        const speed = node.up > 0 ? `↑ ${rate(node.up)}` : "";
        say(note, rim > 12 ? (node.gone === null ? (node.rank === 0 ? ["leads", speed].filter(Boolean).join(" · ") : speed) : node.health) : "");
      },
    });
  }

  #make(key) {
    const element = s(
      "g",
      { tabindex: 0, role: "img" },
      s("circle", { class: "halo" }),
      s("circle", { class: "body" }),
      s("text", { class: "rank", dy: "0.36em" }),
      s("g", { class: "badge" }, s("circle", { r: 6 }), s("path", { d: "M-2.5 -2.5 2.5 2.5M2.5 -2.5-2.5 2.5" })),
      s("text", { class: "name" }),
      s("text", { class: "note" }),
    );
    const choose = () => {
      this.#selected = key;
      this.draw();
    };
    const release = () => {
      this.#selected = null;
      this.draw();
    };
    element.addEventListener("focus", choose);
    element.addEventListener("blur", release);
    element.addEventListener("pointerenter", choose);
    element.addEventListener("pointerleave", () => document.activeElement !== element && release());
    return element;
  }

  /** The chosen node in words, with its links. */
  #describe(job, links) {
    const node = job.nodes.find((each) => each.key === this.#selected);
    if (!node) {
      say(this.detail, "Point at a node, or move to it with the Tab key, to see its links.");
      return;
    }
    const names = labels(job.nodes);
    const found = links
      .filter((link) => link.from === node.key || link.to === node.key)
      .map((link) => {
        const other = link.from === node.key ? link.to : link.from;
        return `${names.get(other)} ${link.times.length ? seconds(mean(link.times)) : link.status}`;
      });
    const words = node.gone === null ? node.health_reason || node.reason : node.reason;
    const speeds = node.up > 0 ? ` It sends ${rate(node.up)} and receives ${rate(node.down)}.` : "";
    const ways = found.length ? ` Links: ${found.join(", ")}.` : "";
    const state = node.health === "left" ? "has left" : `is ${node.health || node.state}`;
    say(this.detail, `${names.get(node.key)} ${state}: ${words}.${speeds}${ways}`);
  }
}
