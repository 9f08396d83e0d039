// The stream of server-sent events: reconnects by itself, and says when it is cut off.

const STALE = 5000; // milliseconds without a word, of a server that speaks every second
const AGAIN = 2000; // milliseconds until the next try after a refusal, which ends an EventSource

export function listen({ whole, light, news, state }) {
  let source = null;
  let heard = 0;

  function open() {
    source = new EventSource("/api/events");
    const on = (kind, handle) =>
      source.addEventListener(kind, (event) => {
        heard = Date.now();
        state("live");
        handle(JSON.parse(event.data), event.lastEventId.split(".")[0]);
      });
    on("whole", whole);
    on("light", light);
    on("news", news);
    source.onerror = () => {
      state("lost");
      if (source.readyState === EventSource.CLOSED) setTimeout(open, AGAIN);
    };
  }

  setInterval(() => heard && Date.now() - heard > STALE && state("lost"), 1000);
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && open());
  open();
}
