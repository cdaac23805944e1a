"use strict";

// Everything that comes from users or the server becomes text nodes, never markup.
const $ = (id) => document.getElementById(id);
const make = (name, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};

const WAIT = 300, PATIENCE = 400; // milliseconds: after the last key; before “Working …” is shown
const NBEST = 4; // as many as the search of the paper has beams, so that asking for them does not change the first
const LONG = 5000; // characters of a text whose sentences get their details when they are looked into
const state = {
  languages: [],
  limit: Infinity, // characters
  sentences: [], // of the translation that is shown
  known: null, // the text that was translated last: its languages, what is behind its sentences, and their places
  tries: 0, // since the server last answered
  now: 0, // the sentence that is looked into
  request: null, // the AbortController of what is under way
  details: null, // by pair: what is asked about each translation, as options of a request
};
let storage = {}; // of this tab, or of this page where a browser lets it keep nothing
try { storage = sessionStorage; } catch { /* as in a frame of another site */ }
const pair = () => ({source: $("from").value, target: $("to").value});
const nameOf = ({source, target}) => `${source}-${target}`;
const percent = (share) => `${Math.round(100 * share)} %`;

// The server

async function ask(path, {signal, body} = {}) {
  const headers = {}, key = storage.apiKey;
  if (body) headers["Content-Type"] = "application/json";
  // As bytes of UTF-8, since headers have no other letters.
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  let response;
  try {
    const send = globalThis.answer || fetch; // a site has the model beside the page, in a worker
    response = await send(path, {method: body ? "POST" : "GET", body: body && JSON.stringify(body), headers, signal});
  } catch (error) {
    throw signal?.aborted ? error : passing("The server cannot be reached.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const message = sentenceOf(answer.error || `The server answers with status ${response.status}`);
  if (response.status > 501 && !answer.error) throw passing(message); // a proxy's, whose server is away
  const error = new Error(message);
  error.isRefusal = response.status === 400;
  error.seconds = response.status === 503 && Number(response.headers.get("Retry-After"));
  if (error.seconds) error.message = "The server is overloaded.";
  throw error;
}

/** An error of which one may hope that it is over after some seconds, more with each try. */
const passing = (message) => Object.assign(new Error(message), {seconds: Math.min(30, 2 ** state.tries++)});

/** Shows an error, and tries again later if that may help. */
function failed(error, again) {
  if (error.seconds) timer = setTimeout(again, 1000 * error.seconds);
  else if (!error.isLate) clear(); // else what has come stays
  fail(error.message + (error.seconds ? ` The next try is in ${error.seconds} s.` : ""));
}

/** Asks for the details that the model gives, and for fewer or none if it refuses them for this text. */
async function withDetails(languages, attempt) {
  const all = state.details[nameOf(languages)];
  for (const details of all.alignments ? [all, {confidence: true}] : [all]) {
    try {
      return await attempt(details);
    } catch (error) {
      if (!error.isRefusal || !Object.keys(details).length) throw error;
    }
  }
  return attempt({});
}

const sentenceOf = (words) => words[0].toUpperCase() + words.slice(1).replace(/\.?$/, ".");

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {done, value} = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : passing("The answer broke off. The text may be too long.");
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, name, data] = /^event: (\w+)\ndata: ([^]*)$/.exec(part);
      yield [name, JSON.parse(data)];
    }
  }
}

// What is typed

let timer;
function later(milliseconds) {
  clearTimeout(timer);
  state.request?.abort();
  $("output").classList.add("old");
  timer = setTimeout(work, milliseconds);
}

async function work() {
  clearTimeout(timer);
  state.request?.abort();
  if (!state.details) return start(); // which has failed, or has not ended
  const request = state.request = new AbortController(), text = $("text").value, size = [...text].length;
  $("clear").hidden = !text;
  $("count").textContent = `${size.toLocaleString("en")} of ${state.limit.toLocaleString("en")} characters`;
  $("count").className = size > state.limit ? "over" : "";
  fail("");
  if (!text.trim()) return clear();
  if (!$("key-form").hidden && !storage.apiKey) {
    clear();
    return fail("Give the API key above first.");
  }
  if (size > state.limit) {
    clear();
    return fail(`The text is ${(size - state.limit).toLocaleString("en")} characters too long.`);
  }
  const patience = setTimeout(() => $("status").textContent = "Working …", PATIENCE);
  $("output").classList.add("old");
  try {
    await translate(text, request.signal);
  } catch (error) {
    if (!request.signal.aborted) failed(error, work);
  }
  clearTimeout(patience);
  if (request.signal.aborted) return;
  $("status").textContent = "";
  if (!$("error").hidden) return;
  state.tries = 0;
  $("output").classList.remove("old");
}

function fail(message) {
  $("error").hidden = !message;
  $("error").textContent = message;
}

function clear() {
  state.sentences = [];
  state.known = null;
  $("output").replaceChildren();
  $("output").classList.remove("old");
  $("inside").hidden = $("copy").hidden = true;
  $("status").textContent = "";
}

// The translation

async function translate(text, signal) {
  const languages = pair(), name = nameOf(languages), output = $("output"), {known} = state;
  const {head, tail, start, end} = changes(text, name), part = text.slice(start, end);
  const of = (places) => places.map((one) => one.sentence), kept = new Set(of([...head, ...tail]));
  const old = state.sentences.filter((one) => !kept.has(one));
  const attempt = async (details) => {
    const fresh = [], body = {text: part, ...languages, stream: true, ...details};
    let after = tail.length ? known.after : "";
    for await (const [event, data] of eventsOf(await ask("v1/translations", {signal, body}))) {
      signal.throwIfAborted(); // what had come before may still be read
      if (event === "error") {
        const come = [...of(head), ...of(fresh)], isRefusal = data.status !== 504; // not the limit of time
        if (come.length) show((state.sentences = come).map((one) => one.box));
        throw Object.assign(new Error(sentenceOf(data.error)), {isRefusal, isLate: come.length > 0});
      }
      if (event === "end") {
        if (!tail.length) after = data.after[0];
        else if (data.after[0]) { // the sentence behind begins elsewhere now
          state.known = null;
          return translate(text, signal);
        }
        continue;
      }
      if (head.length && !fresh.length) data.before = known.places[head.length].sentence.before + data.before;
      const sentence = sentenceFrom(data, old[fresh.length], languages), last = fresh.at(-1) || head.at(-1);
      fresh.push({sentence, ...placeOf(sentence, text, last ? last.end : 0)});
      state.sentences = [...of(head), ...of(fresh), ...old.slice(fresh.length), ...of(tail)];
      show(state.sentences.map((one) => one.box));
      if (!tail.length) state.known = {text: text.slice(0, fresh.at(-1).end), name, after, places: [...head, ...fresh]};
      if (head.length + fresh.length <= state.now + 1) lookInside(state.now);
    }
    const by = tail.length && text.length - known.text.length;
    const moved = tail.map((one) => ({...one, start: one.start + by, end: one.end + by}));
    state.known = {text, name, after, places: [...head, ...fresh, ...moved]};
  };
  await (part.length > LONG ? attempt({}) : withDetails(languages, attempt));
  const {places, after} = state.known;
  state.sentences = of(places);
  show([...state.sentences.map((one) => one.box), ...(after ? [document.createTextNode(after)] : [])]);
  output.classList.toggle("several", state.sentences.length > 1);
  $("copy").hidden = !(output.textContent && navigator.clipboard); // which browsers give to secure pages only
  lookInside(Math.min(state.now, state.sentences.length - 1));
}

/**
 * The part of a text that differs from the last one, with the sentences around it whose neighbours differ: they may end
 * elsewhere now. `head` and `tail` are the places of the other sentences, in the last text.
 */
function changes(text, name) {
  const {known} = state, all = {head: [], tail: [], start: 0, end: text.length};
  if (known?.name !== name || Number.isNaN(known.places.at(-1)?.end)) return all;
  const before = known.text, most = Math.min(text.length, before.length);
  let same = 0, behind = 0;
  while (same < most && text[same] === before[same]) same++;
  while (behind < most - same && text.at(-1 - behind) === before.at(-1 - behind)) behind++;
  const head = known.places.slice(0, Math.max(0, known.places.filter(({end}) => end <= same).length - 1));
  const number = known.places.filter(({start}) => start >= before.length - behind).length;
  const tail = number > 1 ? known.places.slice(1 - number) : [];
  const first = known.places[head.length], last = known.places.at(-1 - tail.length);
  return {head, tail, start: head.length ? first.start : 0,
    end: tail.length ? last.end + text.length - before.length : text.length};
}

const UNSEEN = /[\s\p{Cc}\p{Cf}]/u; // which the server may have changed

/** Where in a text a sentence begins and ends, from a place on; NaN if it is not there. */
function placeOf({before, source}, text, from) {
  const pass = (part, at) => {
    for (const character of part) {
      if (UNSEEN.test(character)) continue;
      while (UNSEEN.test(text[at])) at++;
      if (!text.startsWith(character, at)) return NaN;
      at += character.length;
    }
    return at;
  };
  let start = pass(before, from);
  while (UNSEEN.test(text[start])) start++;
  return {start, end: pass(source, start)};
}

/** A sentence that has come, or the one that was in its place if that is the same. */
function sentenceFrom({source, code, source_words, before, translations}, old, languages) {
  const isSame = old && nameOf(old.languages) === nameOf(languages) && old.source === source && old.code === code
    && old.before === before;
  if (isSame) return old;
  const sentence = {source, code, source_words, before, languages, shown: translations[0], others: null};
  sentence.box = make("span", {className: "sentence", lang: languages.target});
  sentence.box.addEventListener("click", () => lookInside(state.sentences.indexOf(sentence)));
  fill(sentence);
  return sentence;
}

/** Puts nodes into the output, and takes away and moves no more than is needed. */
function show(nodes) {
  const output = $("output"), wanted = new Set(nodes);
  for (const node of [...output.childNodes]) if (!wanted.has(node)) node.remove();
  nodes.forEach((node, number) => {
    if (output.childNodes[number] !== node) output.insertBefore(node, output.childNodes[number] || null);
  });
}

function fill(sentence) {
  const facts = factsOf(sentence);
  const children = pieces(sentence.shown.text, facts.words.target).map(([text, number]) => {
    if (number < 0) return text;
    return makeWord("span", sentence, facts, "target", number, text);
  });
  sentence.box.replaceChildren(sentence.before, make("span", {className: "body"}, ...children));
}

/** The words of a text with their numbers, and what is between them with -1. */
function pieces(text, words) {
  let end = 0;
  const parts = words.flatMap((word, number) => {
    const start = text.indexOf(word, end), before = text.slice(end, start);
    end = start + word.length;
    return [[before, -1], [word, number]];
  });
  return [...parts, [text.slice(end), -1]].filter(([part]) => part);
}
/** What a word is, the server says along with alignments. */
const wordsOf = (text, words) => words || text.split(/\s+/).filter(Boolean);

/** The words of both sides, which of them belong together, and how sure the model is of those of the target. */
function factsOf({source, source_words, shown}) {
  const words = {source: wordsOf(source, source_words), target: wordsOf(shown.text, shown.target_words)};
  const links = {source: [], target: []};
  for (const [from, to] of shown.alignment || []) {
    (links.source[from] ||= []).push(to);
    (links.target[to] ||= []).push(from);
  }
  return {words, links, sure: surenessOf(shown, words.target)};
}

/** Calibrated confidences where the server has them; else the probability of each word's tokens. */
function surenessOf(shown, words) {
  if (shown.words?.length === words.length) return shown.words.map((word) => word.confidence);
  if (!shown.tokens) return [];
  const sums = words.map(() => 0), numbers = words.flatMap((word, number) => Array(word.length).fill(number));
  let end = 0; // of the tokens, in letters without white space
  for (const {text, log_probability} of shown.tokens.slice(0, -1)) { // the last one is the end
    const start = text ? end : end - 1; // without a text it is a part of the letter before
    end += text.replace(/\s/g, "").length;
    for (const number of new Set(numbers.slice(start, Math.max(start + 1, end)))) sums[number] += log_probability;
  }
  return end === numbers.length ? sums.map(Math.exp) : [];
}

function describe(facts, side, number) {
  const other = side === "source" ? "target" : "source", linked = facts.links[side][number] || [];
  const sure = (place) => facts.sure[place] === undefined ? "" : `${percent(facts.sure[place])} sure`;
  const names = linked.map((place) => {
    const note = side === "source" && sure(place);
    return `“\u2068${facts.words[other][place]}\u2069”${note ? ` (${note})` : ""}`;
  });
  const hasLinks = facts.links.target.length > 0;
  const parts = names.length ? [`${side === "source" ? "becomes" : "from"} ${names.join(", ")}`]
    : side === "source" && hasLinks ? ["no word of its own in the translation"] : [];
  if (side === "target" && sure(number)) parts.push(sure(number));
  return parts.join(", ");
}

function makeWord(name, sentence, facts, side, number, text) {
  const sure = side === "target" ? facts.sure[number] : undefined, about = describe(facts, side, number);
  const word = make(name, {className: "word", textContent: text, title: about});
  if (sure < 0.8) word.classList.add(sure < 0.5 ? "very-unsure" : "unsure");
  Object.assign(word.dataset, {side, number});
  word.addEventListener("pointerenter", () => highlight(sentence, facts, side, number));
  word.addEventListener("pointerleave", (event) => event.pointerType === "touch" || highlight(null));
  return word;
}

// A sentence looked into

function lookInside(number) {
  state.now = Math.max(0, number);
  const sentence = state.sentences[state.now];
  $("inside").hidden = !sentence;
  $("alternatives").hidden = Boolean(globalThis.answer); // whose search is greedy
  if (!sentence) return;
  for (const one of state.sentences) one.box.classList.toggle("now", one === sentence);
  $("steps").hidden = state.sentences.length < 2;
  $("number").textContent = `${state.now + 1} of ${state.sentences.length}`;
  $("previous").disabled = state.now === 0;
  $("next").disabled = state.now === state.sentences.length - 1;
  if (state.inside === sentence && state.insideShown === sentence.shown) return;
  Object.assign(state, {inside: sentence, insideShown: sentence.shown});
  const facts = factsOf(sentence), {languages} = sentence;
  const {side: focused, number: at} = document.activeElement.dataset; // of a word that is made anew
  for (const side of ["source", "target"]) {
    const row = $(`${side}-words`);
    row.lang = languages[side];
    row.replaceChildren(...facts.words[side].map((text, place) => {
      const word = makeWord("button", sentence, facts, side, place, text);
      word.type = "button";
      word.tabIndex = place ? -1 : 0;
      if (word.title) word.setAttribute("aria-label", `${text}: ${word.title}`);
      word.addEventListener("focus", () => highlight(sentence, facts, side, place));
      word.addEventListener("blur", () => highlight(null));
      return word;
    }));
  }
  highlight(null);
  if (focused) $(`${focused}-words`).children[at]?.focus();
  $("repeats").hidden = !sentence.shown.repeats;
  showAlternatives();
  if (!sentence.shown.words) addDetails(sentence);
}

/** Asks for the details of a sentence of a long text. */
async function addDetails(sentence) {
  if (sentence.isAsked || !state.details[nameOf(sentence.languages)].confidence) return;
  sentence.isAsked = true;
  const answer = await sentenceAlone(sentence, {}).catch(() => null);
  if (answer?.translations[0].text !== sentence.shown.text) return;
  Object.assign(sentence, {shown: answer.translations[0], source_words: answer.source_words});
  fill(sentence);
  if (sentence === state.inside) lookInside(state.now);
}

/** What is answered of a sentence by itself; it may stay while one types at another. */
async function sentenceAlone({source, code, languages}, options) {
  const body = {text: (code ? `${code} ` : "") + source, ...languages, split_sentences: false, ...options};
  const answer = await withDetails(languages, async (details) =>
    (await ask("v1/translations", {body: {...body, ...details}})).json());
  return answer.translations[0].sentences[0];
}

function highlight(sentence, facts, side, number) {
  for (const word of document.querySelectorAll(".word.chosen, .word.linked")) word.classList.remove("chosen", "linked");
  $("hint").classList.toggle("away", Boolean(sentence));
  $("about").textContent = "";
  if (!sentence) return;
  const isInside = sentence === state.inside;
  const rows = {source: isInside ? [$("source-words")] : [], target: [sentence.box, ...(isInside ? [$("target-words")] : [])]};
  const mark = (where, place, name) => {
    for (const row of rows[where]) row.querySelector(`[data-number="${place}"]`)?.classList.add(name);
  };
  mark(side, number, "chosen");
  for (const place of facts.links[side][number] || []) mark(side === "source" ? "target" : "source", place, "linked");
  $("about").textContent = `“\u2068${facts.words[side][number]}\u2069”: ${describe(facts, side, number)}`;
}

function moveFocus(event) {
  const row = event.currentTarget, words = [...row.children], at = words.indexOf(event.target);
  const forward = getComputedStyle(row).direction === "rtl" ? -1 : 1;
  const to = {ArrowRight: at + forward, ArrowLeft: at - forward, Home: 0, End: words.length - 1}[event.key];
  if (at < 0 || !words[to]) return;
  event.preventDefault();
  words[at].tabIndex = -1;
  words[to].tabIndex = 0;
  words[to].focus();
}

async function showAlternatives() {
  const sentence = state.inside, isOpen = $("alternatives").getAttribute("aria-expanded") === "true";
  $("list").hidden = !isOpen;
  if (!isOpen) return;
  if (!sentence.others) {
    $("list").replaceChildren(make("li", {textContent: "Working …"}));
    try {
      sentence.others = (await sentenceAlone(sentence, {nbest: NBEST, scores: true})).translations;
    } catch (error) {
      if (sentence === state.inside) $("list").replaceChildren(make("li", {textContent: error.message}));
      return;
    }
    if (sentence !== state.inside) return;
  }
  $("list").lang = sentence.languages.target;
  $("list").replaceChildren(...sentence.others.map((other, place) => {
    const isShown = other.text === sentence.shown.text;
    const scores = other.score === null ? [] : [`score ${other.score.toFixed(2).replace("-", "−")}`];
    if (other.confidence !== undefined) scores.push(`${percent(other.confidence)} sure`);
    if (isShown) scores.push("shown above");
    const text = make("bdi", {className: "text", dir: "auto", textContent: other.text});
    const button = make("button", {type: "button"}, text, make("span", {className: "scores", lang: "en",
      textContent: scores.join(" · ")}));
    button.setAttribute("aria-pressed", isShown);
    button.addEventListener("click", () => {
      sentence.shown = other;
      fill(sentence);
      lookInside(state.sentences.indexOf(sentence));
      $("list").children[place]?.firstChild.focus();
    });
    return make("li", {}, button);
  }));
}

// Languages and the start

function fillSelect(select, codes) {
  const names = Object.fromEntries(state.languages.map((one) => [one.code, one.name])), before = select.value;
  select.replaceChildren(...codes.map((value) => make("option", {value, textContent: names[value]})));
  if (codes.includes(before)) select.value = before;
}

function chooseSource() {
  const own = state.languages.find((one) => one.code === $("from").value);
  fillSelect($("to"), own.targets);
  chooseTarget();
}

function chooseTarget() {
  const pairs = state.languages.reduce((sum, one) => sum + one.targets.length, 0);
  for (const side of ["from", "to"]) {
    $(`${side}-name`).textContent = $(side).selectedOptions[0].textContent;
    $(side).hidden = pairs < 2;
    $(`${side}-name`).className = $(side).hidden ? "" : "unseen";
  }
  const back = state.languages.find((one) => one.code === $("to").value);
  $("swap").hidden = !back?.targets.includes($("from").value);
  $("text").lang = $("from").value;
  $("output").lang = $("to").value;
  work();
}

function swap() {
  const {source, target} = pair(), text = $("output").textContent;
  $("from").value = target;
  fillSelect($("to"), state.languages.find((one) => one.code === target).targets);
  $("to").value = source;
  if (text) $("text").value = text;
  chooseTarget();
}

async function start() {
  clearTimeout(timer);
  let settings;
  try {
    [state.languages, settings] = await Promise.all(["languages", "frontend/settings"].map(
      async (path) => (await ask(path)).json()));
  } catch (error) {
    return failed(error, start);
  }
  state.tries = 0;
  Object.assign(state, {limit: settings.charLimit, details: settings.details});
  $("key-form").hidden = !settings.keyRequired;
  document.querySelector("footer").hidden = Boolean(globalThis.answer);
  const sources = state.languages.filter((one) => one.targets.length);
  fillSelect($("from"), sources.map((one) => one.code));
  const asked = new URLSearchParams(location.search), [to, from] = ["target", "source"].map((side) => asked.get(side));
  const fits = (one) => nearest(one.targets, to);
  const own = nearest(sources, from, (one) => one.code) || sources.find(fits);
  if (own) {
    $("from").value = own.code;
    fillSelect($("to"), own.targets);
    $("to").value = fits(own) || own.targets[0];
  }
  if (asked.has("q") && !$("text").value) $("text").value = asked.get("q");
  chooseSource();
}

/** The first of several with the code of a language, else one with that of the language in another region. */
function nearest(all, code, codeOf = (one) => one) {
  const parts = (one) => (one || "").toLowerCase().split(/[-_]/), [language] = parts(code);
  return all.find((one) => `${parts(codeOf(one))}` === `${parts(code)}`)
    || all.find((one) => parts(codeOf(one))[0] === language);
}

$("text").addEventListener("input", () => later(WAIT));
window.addEventListener("online", () => state.tries && work());
$("from").addEventListener("change", chooseSource);
$("to").addEventListener("change", chooseTarget);
$("swap").addEventListener("click", swap);
$("clear").addEventListener("click", () => { $("text").value = ""; $("text").focus(); work(); });
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("output").textContent);
  $("status").textContent = "Copied";
});
$("previous").addEventListener("click", () => lookInside(state.now - 1));
$("next").addEventListener("click", () => lookInside(state.now + 1));
$("source-words").addEventListener("keydown", moveFocus);
$("target-words").addEventListener("keydown", moveFocus);
$("alternatives").addEventListener("click", () => {
  $("alternatives").setAttribute("aria-expanded", $("alternatives").getAttribute("aria-expanded") !== "true");
  showAlternatives();
});
$("key").value = storage.apiKey || "";
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storage.apiKey = $("key").value.trim();
  work();
});
start();
