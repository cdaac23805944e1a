// The model in a worker, by transformers.js, from the files of this folder alone.
import { env, pipeline } from "./lib/transformers.min.js";

Object.assign(env, {allowRemoteModels: false, allowLocalModels: true, localModelPath: new URL("./", location).pathname,
  useBrowserCache: false, useWasmCache: false}); // the service worker keeps all files
env.backends.onnx.wasm.wasmPaths = new URL("lib/", location).href;
const stopped = new Set();
let loading, turn = Promise.resolve();

async function load() {
  const site = await (await fetch("site.json")).json();
  const translate = await pipeline("translation", "model", {dtype: site.dtype, device: "wasm"});
  return {site, translate, sentences: new Intl.Segmenter(site.source, {granularity: "sentence"})};
}

async function work(number, text) {
  const {site, translate, sentences} = await (loading ??= load().catch((error) => {
    loading = undefined; // a file that did not arrive may arrive later
    throw error;
  }));
  let before = "";
  for (const {segment} of sentences.segment(text)) {
    const [, head, source, tail] = /^(\s*)([^]*?)(\s*)$/.exec(segment);
    before += head;
    if (source) {
      const limit = translate.tokenizer(source).input_ids.dims[1] + site.extra;
      if (limit - site.extra > site.positions) throw new Error("a sentence is too long for the model");
      const options = {max_new_tokens: Math.min(limit, site.positions)};
      const answer = /[\p{L}\p{N}]/u.test(source) ? (await translate(source, options))[0].translation_text : source;
      if (stopped.has(number)) return;
      postMessage({number, sentence: {text: 0, source, before, translations: [{text: answer}]}});
      before = "";
    }
    before += tail;
  }
  postMessage({number, end: {after: [before]}});
}

addEventListener("message", ({data: {number, stop, text}}) => {
  if (stop) return stopped.add(number);
  turn = turn.then(() => stopped.has(number) || work(number, text)).catch((error) => {
    postMessage({number, error: `the model does not work here: ${error.message}`});
  });
});
