"use strict";

// Answers what the page asks a server, by a worker that has the model: no text leaves the browser.
const asked = new Map(); // by number who waits for an answer
let last = 0, worker = null;

function startWorker() {
  const own = worker = new Worker("worker.js", {type: "module"});
  /** Ends the worker: what failed is tried again, from the beginning, with the next text. */
  const end = (message) => {
    own.terminate();
    if (own !== worker) return;
    worker = null;
    asked.forEach((hear) => hear(message));
  };
  own.addEventListener("message", ({data: {number, isBroken, ...message}}) => {
    return isBroken ? end(message) : asked.get(number)?.(message);
  });
  own.addEventListener("error", () => end({error: "the model's program did not arrive, or this browser cannot run it"}));
}
startWorker();

const site = async () => (await fetch("site.json")).json();
const json = (value) => new Response(JSON.stringify(value));

async function languages() {
  const {source, target} = await site(), names = new Intl.DisplayNames(["en"], {type: "language"});
  const name = (code) => { try { return names.of(code); } catch { return code; } };
  return [source, target].map((code) => ({code, name: name(code), targets: code === source ? [target] : []}));
}

/** Lets the worker translate a text, each sentence as an event. */
function translated(body, signal) {
  const number = ++last, encoder = new TextEncoder();
  return new ReadableStream({
    start(controller) {
      const end = () => { asked.delete(number); controller.close(); };
      const send = (name, data) => controller.enqueue(encoder.encode(`event: ${name}\ndata: ${JSON.stringify(data)}\n\n`));
      signal?.addEventListener("abort", () => {
        if (asked.delete(number)) controller.error(signal.reason);
        worker?.postMessage({number, stop: true});
      });
      asked.set(number, (message) => {
        const [name] = Object.keys(message);
        send(name, name === "error" ? message : message[name]);
        if (name !== "sentence") { end(); keep(); }
      });
      if (!worker) startWorker();
      worker.postMessage({number, text: body.text});
    },
  });
}

globalThis.answer = async (path, {body, signal}) => {
  const {source, target, characters} = await site();
  signal?.throwIfAborted();
  if (path === "languages") return json(await languages());
  if (path === "frontend/settings") return json({charLimit: characters, details: {[`${source}-${target}`]: {}}});
  return new Response(translated(JSON.parse(body), signal));
};

/** Lets the service worker fetch all files once more, to keep: behind the first translation, or in half a minute. */
let keep = () => {
  keep = () => {};
  navigator.serviceWorker?.register("service-worker.js").catch(() => {}); // none in private windows of some browsers
};
setTimeout(() => keep(), 30_000);
