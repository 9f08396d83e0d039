// What the page knows: the last picture, the curves of the last minutes, and the events.

const SAMPLES = 300;
const LOSSES = 512;
const EVENTS = 400;

export class Store {
  picture = null;
  events = []; // newest last
  job = null; // the one that is shown; null for the first
  start = ""; // names the start of the dashboard whose numbers these are
  #samples = new Map(); // process -> [[time, throughput, waiting], …]
  #losses = new Map(); // job -> [[step, loss], …]
  #tones = new Map(); // process -> its colour, for as long as the page is open

  whole(picture, start) {
    if (start !== this.start) {
      this.start = start;
      this.events = [];
    }
    this.#samples.clear();
    this.#losses.clear();
    this.light(picture);
  }

  light(picture) {
    this.picture = picture;
    for (const job of picture.jobs) {
      append(this.#losses, job.job, job.loss, LOSSES);
      for (const node of job.nodes) append(this.#samples, node.key, node.samples, SAMPLES);
    }
  }

  news(event) {
    const last = this.events.at(-1)?.number ?? 0;
    if (event.number <= last) return;
    this.events.push(event);
    if (this.events.length > EVENTS) this.events.splice(0, this.events.length - EVENTS);
  }

  get current() {
    const jobs = this.picture?.jobs ?? [];
    return jobs.find((job) => job.job === this.job) ?? jobs[0] ?? null;
  }

  samples(key) {
    return this.#samples.get(key) ?? [];
  }

  /** The colour of a node stays when ranks change. */
  tone(key) {
    if (!this.#tones.has(key)) this.#tones.set(key, this.#tones.size % 8);
    return `tone-${this.#tones.get(key)}`;
  }

  losses(job) {
    return this.#losses.get(job) ?? [];
  }
}

/** Add points to a curve; where the first number falls back, the curve goes on from there. */
function append(curves, name, points, most) {
  const known = curves.get(name) ?? [];
  for (const point of points) {
    const last = known.at(-1)?.[0] ?? -Infinity;
    if (point[0] === last) continue;
    while (known.length && known.at(-1)[0] > point[0]) known.pop();
    known.push(point);
  }
  if (known.length > most) known.splice(0, known.length - most);
  curves.set(name, known);
}

/** A short name that tells nodes of one machine apart. */
export function labels(nodes) {
  const seen = new Map();
  for (const node of nodes) seen.set(node.name, (seen.get(node.name) ?? 0) + 1);
  return new Map(
    nodes.map((node) => {
      const port = node.address?.split(":").at(-1);
      return [node.key, seen.get(node.name) > 1 && port ? `${node.name}:${port}` : node.name];
    }),
  );
}
