// What is said in words and tables: the story, the figures, the ranks, the views, the events.

import { byId, h, keyed, say, set } from "./dom.js";
import { ago, bytes, count, number, percent, rate, seconds, time } from "./format.js";
import { labels } from "./store.js";

const STATES = { active: "ok", paused: "warn", joining: "wait", left: "wait" };
const HEALTH = { healthy: "ok", degraded: "warn", suspect: "warn", silent: "warn", dead: "bad", gone: "bad", left: "wait" };

const isHere = (node) => node.gone === null;
const last = (samples) => samples.at(-1) ?? null;

export function drawStory(store) {
  const { picture, current } = store;
  const paragraphs = picture.story; // one for each job that is under way, then one for all else
  const running = picture.jobs.filter((job) => !job.ended);
  const index = running.indexOf(current);
  const rest = paragraphs.slice(running.length).flat();
  const [first, ...remarks] = index >= 0 ? [...paragraphs[index], ...rest] : rest.length ? rest : [`${picture.namespace}, "${current?.job}" has ended`];
  const unwell = current?.nodes.some((node) => node.health && node.health !== "healthy" && isHere(node));
  const mood = !current ? "wait" : unwell ? "warn" : (STATES[current.state] ?? "wait");
  set(byId("story"), { "data-mood": mood });
  say(byId("headline"), first);
  keyed(byId("remarks"), remarks, {
    key: (text) => text,
    create: (text) => h("li", {}, text),
  });
  say(byId("namespace"), picture.namespace);
  document.title = current ? `${current.job} · ${current.state} · Potluck` : "Potluck";
}

export function drawJobs(store, choose) {
  const nav = byId("jobs");
  const { jobs } = store.picture;
  nav.hidden = jobs.length < 2;
  keyed(nav, jobs, {
    key: (job) => job.job,
    create: (job) => {
      const button = h("button", { type: "button" }, job.job);
      button.addEventListener("click", () => choose(job.job));
      return button;
    },
    update: (element, job) => set(element, { "aria-pressed": job === store.current ? "true" : "false" }),
  });
}

/** The figures of the whole job; those that nobody tells are left out. */
function figures(store) {
  const job = store.current;
  if (!job) return [];
  const here = job.nodes.filter(isHere);
  const well = here.filter((node) => node.health === "healthy").length;
  const all = (name) => here.map((node) => node.figures[name]).filter((value) => value !== undefined);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const samples = here.map((node) => last(store.samples(node.key))).filter(Boolean);
  const found = [
    ["nodes", String(here.length), here.length === 0 ? "all gone" : well === here.length ? "all healthy" : `${well} healthy`],
    ["view", String(job.epoch), job.state],
  ];
  const steps = all("training.step");
  if (steps.length) {
    const pace = all("training.step_ms");
    found.push(["step", count(Math.max(...steps)), Math.max(...pace, 0) ? `${seconds(Math.max(...pace) / 1e3)} per step` : ""]);
  }
  const losses = all("training.loss");
  if (losses.length) found.push(["loss", number(sum(losses) / losses.length), "mean of ranks"]);
  const speed = all("training.samples_per_second");
  // Every rank tells what all of them do together; the slowest to tell is a step behind.
  if (speed.length) found.push(["samples", `${count(Math.max(...speed))}/s`, "all ranks"]);
  if (samples.length) {
    found.push(["throughput", rate(sum(samples.map((each) => each[1])) / samples.length), "per rank"]);
    found.push(["waiting", percent(sum(samples.map((each) => each[2])) / samples.length), "of the time"]);
  }
  const [raw, sent] = [sum(all("compression.raw_bytes")), sum(all("compression.sent_bytes"))];
  if (raw > 0) found.push(["compression", `${(raw / Math.max(1, sent)).toFixed(1)}×`, `${bytes(raw - sent)} saved`]);
  const failed = sum(all("collectives.failed"));
  if (failed) found.push(["failed", count(failed), failures(here), "#events-title"]);
  return found.map(([name, value, note, href]) => ({ name, value, note, href }));
}

/** Which operations failed, most often first; why is among the events. */
function failures(nodes) {
  const counts = new Map();
  for (const node of nodes) {
    for (const [name, value] of Object.entries(node.figures)) {
      const [kind, what] = name.split(".");
      if (what === "failed" && kind !== "collectives" && kind !== "checkpoints") counts.set(kind, (counts.get(kind) ?? 0) + value);
    }
  }
  const kinds = [...counts].sort((one, other) => other[1] - one[1]).slice(0, 3);
  return kinds.length ? `${kinds.map(([kind, value]) => `${count(value)} ${kind}`).join(", ")}: why?` : "operations: why?";
}

export function drawFacts(store) {
  keyed(byId("facts"), figures(store), {
    key: (fact) => fact.name,
    create: (fact) => h("div", {}, h("dt", {}, fact.name), h("dd", { class: "value" }), h("dd", { class: "note" }, fact.href ? h("a", { href: fact.href }) : h("span"))),
    update: (element, fact) => {
      say(element.children[1], fact.value);
      say(element.children[2].firstChild, fact.note);
    },
  });
}

export function drawNodes(store) {
  const job = store.current;
  const nodes = job?.nodes ?? [];
  const names = labels(nodes);
  keyed(byId("nodes").tBodies[0], nodes, {
    key: (node) => node.key,
    create: nodeRow,
    update: (row, node) => fillRow(row, node, names.get(node.key), store),
  });
  const unwell = nodes.filter((node) => node.health !== "healthy" && node.health_reason);
  keyed(byId("reasons"), unwell, {
    key: (node) => node.key,
    create: () => h("li"),
    update: (element, node) => {
      const when = node.gone === null ? "" : ` (${ago(store.picture.time - node.gone)})`;
      set(element, { "data-mood": HEALTH[node.health] ?? "wait" });
      const state = node.health === "left" ? "has left" : `is ${node.health}`;
      say(element, `${names.get(node.key)} ${state}${when}: ${node.health_reason}`);
    },
  });
}

function nodeRow() {
  const cells = [h("td", { class: "rank" }), h("th", { scope: "row" }, h("span", { class: "swatch" }), h("span"), h("small", {}, "", h("span")))];
  const bar = h("span", { class: "bar" }, h("span"));
  cells.push(h("td", {}, h("span", { class: "health" })), h("td", { class: "number" }));
  cells.push(h("td", { class: "number" }, h("span"), bar, h("small")), h("td", { class: "number" }));
  return h("tr", {}, ...cells);
}

function fillRow(row, node, name, store) {
  const [rank, title, health, throughput, waiting, step] = row.children;
  const sample = isHere(node) ? last(store.samples(node.key)) : null;
  set(row, { class: store.tone(node.key), "data-gone": !isHere(node) });
  say(rank, node.rank === null ? "–" : String(node.rank));
  say(title.children[1], name);
  const [address, process] = title.children[2].childNodes;
  address.data = node.address ?? "";
  say(process, node.pid ? ` · pid ${node.pid}` : "");
  set(health.firstChild, { "data-mood": HEALTH[node.health] ?? "wait" });
  const state = isHere(node) && node.state !== "active" ? ` · ${node.state}` : "";
  say(health.firstChild, (node.health || "unknown") + state);
  say(throughput, sample ? rate(sample[1]) : "–");
  say(waiting.children[0], sample ? percent(sample[2]) : "–");
  waiting.children[1].firstChild.style.width = `${100 * (sample ? sample[2] : 0)}%`;
  say(waiting.children[2], node.waits_for === null ? "" : `mostly for ${node.waits_for}`);
  const at = node.figures["training.step"];
  say(step, at === undefined ? "–" : count(at));
}

/** How fast, and how long ago that was measured by what. */
function sends(link) {
  if (link.is_local) return "same machine";
  if (!link.up) return "–";
  return `${rate(link.up)} (${link.rate_source}, ${seconds(link.rate_age)} ago)`;
}

export function drawLinks(store) {
  const job = store.current;
  const names = labels(job?.nodes ?? []);
  const shown = (job?.links ?? []).filter((link) => names.has(link.from) && names.has(link.to));
  keyed(byId("links").tBodies[0], shown, {
    key: (link) => `${link.from} ${link.to}`,
    create: () => h("tr", {}, ...[0, 1, 2, 3, 4, 5, 6].map((place) => h(place ? "td" : "th", place ? {} : { scope: "row" }))),
    update: (row, link) => {
      const texts = [
        names.get(link.from),
        names.get(link.to),
        link.round_trip === null ? "–" : seconds(link.round_trip),
        link.latency === null ? "–" : seconds(link.latency),
        sends(link),
        link.status,
        link.reason,
      ];
      texts.forEach((text, place) => say(row.children[place], text));
    },
  });
}

export function drawEpochs(store) {
  const job = store.current;
  const epochs = job?.epochs ?? [];
  const tones = (members) => members.map((key) => h("span", { class: `dot ${store.tone(key)}` }));
  keyed(byId("epochs"), [...epochs].reverse(), {
    key: (epoch) => `${epoch.lineage} ${epoch.epoch}`,
    create: (epoch) =>
      h(
        "li",
        {},
        h("p", { class: "epoch-head" }, h("b", {}, `View ${epoch.epoch}`), h("span", { class: "dots", role: "img", "aria-label": `${epoch.members.length} members` }, ...tones(epoch.members)), h("time", {}, time(epoch.time))),
        h("p", {}, epoch.reason),
      ),
    update: (element, epoch) => set(element, { "data-now": epoch.epoch === job.epoch && epoch.lineage === job.lineage }),
  });
}

export function drawEvents(store) {
  const grave = byId("grave").checked;
  const job = store.current?.job;
  const shown = store.events
    .filter((event) => (job === undefined || event.job === job) && event.level !== "debug")
    .filter((event) => !grave || event.level !== "info")
    .sort((one, other) => other.time - one.time || other.number - one.number);
  keyed(byId("events"), shown.slice(0, 200), {
    key: (event) => event.number,
    create: (event) =>
      h("li", { "data-level": event.level }, h("time", {}, time(event.time)), h("p", {}, h("span", { class: "level" }, event.level === "info" ? "" : event.level), event.text), h("span", { class: "who" }, event.name)),
  });
}
