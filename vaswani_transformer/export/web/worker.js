// The model in a worker, by transformers.js, from the files of this folder alone.
import { env, pipeline } from "./lib/transformers.min.js";

Object.assign(env, {allowRemoteModels: false, allowLocalModels: true, localModelPath: new URL("./", location).pathname,
  useBrowserCache: false, useWasmCache: false}); // the service worker keeps all files
const [mjs, wasm] = ["js", "wasm"].map((kind) => new URL(`lib/ort-wasm-simd-threaded.asyncify.${kind}`, location).href);
env.backends.onnx.wasm.wasmPaths = {mjs, wasm};
const stopped = new Set(), TOO_LONG = new Error("a sentence is too long for the model");
// What errors of transformers.js, of onnxruntime and of browsers mean.
const REASONS = [
  [/SIMD|WebAssembly is not defined/, "this browser lacks WebAssembly with SIMD: update it, or use another"],
  [/not found locally|fetch|network|magic word|protobuf/i, "one of its files did not arrive"],
];
let loading, turn = Promise.resolve();

async function load() {
  const site = await (await fetch("site.json")).json();
  const from = (device) => pipeline("translation", "model", {dtype: site.dtype, device});
  const gpu = site.dtype === "fp32" && await navigator.gpu?.requestAdapter(); // in int8 it is untried
  const hasOne = gpu && !gpu.info.isFallbackAdapter; // which a program would only imitate
  const translate = await (hasOne ? from("webgpu").catch(() => from("wasm")) : from("wasm"));
  return {site, translate, sentences: new Intl.Segmenter(site.source, {granularity: "sentence"})};
}

async function work(number, text) {
  const {site, translate, sentences} = await (loading ??= load());
  const parts = [];
  const cells = text.split(/(\t+)/).flatMap((cell) => [...sentences.segment(cell)]);
  for (const {segment} of cells) { // which also ends one in .NET, torch.nn.Module
    if (parts.length && /[!-~]$/.test(parts.at(-1)) && /^[ -~]/.test(segment)) parts.push(parts.pop() + segment);
    else parts.push(segment);
  }
  let before = "", last = "", code = site.code; // one may be typed, for all behind it
  for (const segment of parts) {
    const [, head, whole, tail] = /^(\s*)([^]*?)(\s*)$/.exec(segment);
    const own = (site.code.startsWith("__") ? /^__[a-z]{2,3}(_\w+)?__\s*/ : /^(>>[\w-]+<<|<2[\w-]+>)\s*/).exec(whole);
    const source = whole.slice(own?.[0].length || 0);
    if (own) code = `${own[0].trim()} `;
    before += head;
    if (source) {
      const inputs = translate.tokenizer(code + source), length = inputs.input_ids.dims[1];
      if (length > site.positions) throw TOO_LONG;
      const most = Math.min(length + site.extra, site.positions);
      const answer = /\p{L}/u.test(source) ? await translated(translate, source, inputs, most) : {text: source};
      if (stopped.has(number)) return;
      before = last ? spaceBehind(last, before) : before;
      postMessage({number, sentence: {text: 0, source, before, source_words: wordsOf(source), translations: [answer]}});
      [before, last] = ["", answer.text || " "];
    }
    before += tail;
  }
  postMessage({number, end: {after: [before]}});
}

/** The white space behind a translation; none behind Chinese and Japanese, some behind others, as on a server. */
function spaceBehind(translation, space) {
  const isWide = /[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}ー\u3000-\u303f\uff01-\uff60]["'”’]*$/u.test(translation);
  return isWide ? space.replace(/^ +$/, "") : space || " ";
}

/** The translation of a sentence, how sure the model is of its tokens, and which words they come from. */
async function translated({model, tokenizer}, source, inputs, max_new_tokens) {
  const sure = [];
  const watch = (_, logits) => {
    const best = logits.data.reduce((one, other) => Math.max(one, other));
    sure.push(-Math.log(logits.data.reduce((sum, one) => sum + Math.exp(one - best), 0)));
    return logits;
  };
  const {sequences, past_key_values, cross_attentions: steps} = await model.generate({...inputs, max_new_tokens,
    return_dict_in_generate: true, output_attentions: true, logits_processor: [watch]});
  await past_key_values.dispose();
  const ids = sequences.tolist()[0].slice(1), text = tokenizer.decode(ids, {skip_special_tokens: true});
  const [from, to] = [[source, inputs.input_ids.tolist()[0]], [text, ids]].map(([of, all]) => placesOf(tokenizer, of, all));
  const target_words = wordsOf(text), sums = target_words.map(() => []); // attention of a word to each of the source's
  steps.forEach(([{data, dims: [, heads, , length]}], step) => {
    for (let at = 0; at < heads * length; at++) {
      for (const word of to.words[step]) for (const other of from.words[at % length]) {
        sums[word][other] = (sums[word][other] || 0) + data[at];
      }
    }
  });
  const alignment = sums.map((all, word) => [all.reduce((best, one, at) => one > (all[best] || 0) ? at : best, -1), word]);
  const tokens = to.texts.map((piece, at) => ({text: piece, log_probability: sure[at]}));
  return {text, target_words, alignment: alignment.filter(([best]) => best >= 0), tokens};
}

// Chinese, Japanese, Thai, Lao, Khmer, Burmese: each character is a word, with the punctuation beside it.
const LETTER = "[\\p{sc=Han}\\p{sc=Hiragana}\\p{sc=Katakana}ー\\p{sc=Thai}\\p{sc=Laoo}\\p{sc=Khmr}\\p{sc=Mymr}]";
const SIGN = "[^\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}\\s\u200c\u200d", BEFORE = `(?:(?<!\\S)${SIGN}]{1,3}|[\\p{Ps}\\p{Pi}]{0,3})`;
const WORD = new RegExp(
  `${BEFORE}${LETTER}[\\p{M}\u200c\u200dー]*${SIGN}\\p{Ps}\\p{Pi}]*|(?:(?!${BEFORE}${LETTER})\\S)+`, "gu");
const wordsOf = (text) => text.match(WORD) || [];

/** The text of each token, and the numbers of the words that it has a part in; no offsets come from tokenizers here. */
function placesOf(tokenizer, text, ids) {
  const number = wordsOf(text).flatMap((word, at) => Array(word.replace(/\s/g, "").length).fill(at)); // of each letter
  const texts = ids.map((_, at) => tokenizer.decode(ids.slice(0, at + 1), {skip_special_tokens: true}));
  const ends = texts.map((one) => one.replace(/[\s\ufffd]/g, "").length), starts = [0, ...ends];
  const isSame = ends.at(-1) === number.length; // which unknown characters and other forms of letters are not
  return {texts: texts.map((one, at) => one.slice((texts[at - 1] || "").length)),
    words: ends.map((end, at) => { // a space belongs to the word behind it
      return isSame ? [...new Set(number.slice(starts[at], Math.max(end, starts[at] + 1)))] : [];
    })};
}

addEventListener("message", ({data: {number, stop, text}}) => {
  if (stop) return stopped.add(number);
  turn = turn.then(() => stopped.has(number) || work(number, text)).catch((error) => {
    if (error === TOO_LONG) return postMessage({number, error: error.message});
    const reason = REASONS.find(([pattern]) => pattern.test(error.message))?.[1] || error.message;
    postMessage({number, error: `the model does not work here: ${reason}`, isBroken: true});
  });
});
