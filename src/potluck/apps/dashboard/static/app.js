// The page: listens to the stream, and draws what is new, at most once per frame.

import { Chart } from "./charts.js";
import { byId, say, set } from "./dom.js";
import { number, percent, rate } from "./format.js";
import { Graph } from "./graph.js";
import { drawEpochs, drawEvents, drawFacts, drawJobs, drawLinks, drawNodes, drawStory } from "./panels.js";
import { labels, Store } from "./store.js";
import { listen } from "./stream.js";

const WINDOW = 300; // seconds that the charts of time show

const store = new Store();
const graph = new Graph(byId("graph"), byId("detail"), store);

const sinceNow = (value, now) => {
  const span = Math.round(now - value);
  return span < 1 ? "now" : span < 90 ? `−${span} s` : `−${Math.round(span / 6) / 10} min`;
};
const throughput = new Chart(byId("throughput"), {
  label: "Throughput of each rank over the last minutes",
  y: rate,
  x: sinceNow,
  nothing: "Nothing has been exchanged yet.",
  backwards: true,
});
const waiting = new Chart(byId("waiting"), {
  label: "Share of the time that each rank waited for the bytes of others",
  y: percent,
  x: sinceNow,
  nothing: "Nobody has waited for anybody yet.",
  high: 1,
  backwards: true,
});
const loss = new Chart(byId("loss"), {
  label: "Loss by step",
  y: number,
  x: (value) => Math.round(value).toLocaleString("en"),
  nothing: "No loss has been told: trainer.note_loss(loss) does that.",
  low: null,
});

function drawCharts() {
  const job = store.current;
  const nodes = (job?.nodes ?? []).filter((node) => node.gone === null);
  const names = labels(nodes);
  const now = store.picture.time;
  const lines = (column) =>
    nodes.map((node) => ({
      key: node.key,
      name: node.rank === null ? names.get(node.key) : `rank ${node.rank}`,
      tone: store.tone(node.key),
      points: store.samples(node.key).map((sample) => [sample[0], sample[column]]),
    }));
  const first = Math.min(now - 30, ...nodes.flatMap((node) => store.samples(node.key).slice(0, 1).map((sample) => sample[0])));
  const range = [Math.max(first, now - WINDOW), now];
  throughput.draw(lines(1), range);
  waiting.draw(lines(2), range);
  loss.draw(job ? [{ key: job.job, name: "loss", tone: "tone-0", points: store.losses(job.job) }] : []);
}

function draw() {
  if (!store.picture) return;
  drawStory(store);
  drawJobs(store, (job) => {
    store.job = job;
    schedule();
  });
  drawFacts(store);
  graph.draw();
  drawNodes(store);
  drawLinks(store);
  drawCharts();
  drawEpochs(store);
  drawEvents(store);
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  const paint = () => {
    scheduled = false;
    draw();
  };
  if (document.hidden) setTimeout(paint, 1000);
  else requestAnimationFrame(paint);
}

const WORDS = { live: "live", lost: "no connection, trying again", wait: "connecting" };

listen({
  whole(picture, start) {
    store.whole(picture, start);
    schedule();
  },
  light(picture) {
    store.light(picture);
    schedule();
  },
  news(event) {
    store.news(event);
    schedule();
  },
  state(word) {
    set(byId("live"), { "data-state": word });
    say(byId("live"), WORDS[word]);
  },
});

byId("grave").addEventListener("change", schedule);
new ResizeObserver(schedule).observe(byId("main"));
