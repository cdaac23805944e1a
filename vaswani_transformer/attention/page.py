"""Attention weights as a page for a browser: one file that needs no network, to choose heads and hover over tokens."""

import base64
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..files import write_text
from ..model.local_attention_vaswani import reach
from .weights import KINDS, AttentionWeights, check_choice

PAGE_BYTES = 48 * 2**20  # of weights: what a browser opens at once
_LEVELS = 65_535  # steps of a weight in the page: two bytes each


def write_attention_page(
    weights: AttentionWeights,
    page: str | Path,
    kinds: Sequence[str] = tuple(KINDS),
    layer: int = 1,
    head: int | None = None,
) -> None:
    """Write the page. It holds all layers and heads, each weight to within 1/131,070.

    Args:
        weights: of a sentence pair.
        page: the HTML file to write.
        kinds: those of `KINDS` that can be chosen in it, the one shown first in front; those without layers are left
            out.
        layer: shown first, from 1.
        head: shown first, from 1; the mean of the heads when not given.

    Raises:
        UserError: for sentences so long that a browser could hardly open the page, a layer or head that is not there,
            or if there is nothing to show.
    """
    given = {kind: weights.of(kind) for kind in kinds}
    given = {kind: sides for kind, sides in given.items() if sides[0].size}
    if not given:
        raise UserError("there are no layers to show: give another --kind")
    first, (array, _, _) = next(iter(given.items()))
    check_choice("layer", [layer], array.shape[0], KINDS[first])
    check_choice("head", None if head is None else [head], array.shape[1], KINDS[first])
    size = sum(2 * sides[0].size for sides in given.values())
    if size > PAGE_BYTES:
        longest = max(len(side) for _, *sides in given.values() for side in sides)
        mend = "give shorter sentences" + (", or one --kind" if len(given) > 1 else "")
        raise UserError(
            f"{longest} tokens make a page of {size / 2**20:.0f} MB of weights, at most {PAGE_BYTES >> 20}: {mend}"
        )
    data = {
        "source": weights.source,
        "target": weights.target,
        "start": {"layer": layer, "head": head or 0},
        "window": None if weights.window is None else reach(weights.window),  # tokens seen to each side
        "kinds": [_as_data(kind, *sides) for kind, sides in given.items()],
    }
    # Nothing in a sentence may end the element that the data stands in.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    title = html.escape(" ".join(weights.source.split())[:80])
    first, second, third = re.split("@TITLE@|@DATA@", _PAGE)  # at once: a sentence may hold a mark too
    write_text(Path(page), "".join([first, title, second, text, third]))


def _as_data(kind: str, array: np.ndarray, queries: list[str], keys: list[str]) -> dict:
    levels = np.rint(array.astype(np.float64) * _LEVELS).clip(0, _LEVELS).astype("<u2")
    return {
        "kind": kind,
        "name": KINDS[kind],
        "layers": array.shape[0],
        "heads": array.shape[1],
        "queries": queries,
        "keys": keys,
        "weights": base64.b64encode(levels.tobytes()).decode("ascii"),
    }


_PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Attention: @TITLE@</title>
<style>
body { font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 68rem; margin: 1rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.25rem; margin: 0 0 .3rem; }
h2 { font-size: 1rem; margin: 0 0 .4rem; }
.pair { margin: 0; color: #333; max-height: 6em; overflow: auto; }
.choices { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; margin: .8rem 0; align-items: center; }
select { font: inherit; padding: .15rem .3rem; }
#told { min-height: 3em; margin: .6rem 0; padding: .4rem .6rem; background: #f2f5f9; border-left: 4px solid #08519c;
  position: sticky; top: 0; z-index: 1; }
.sides.lines { display: grid; grid-template-columns: auto minmax(3rem, 14rem) auto; justify-content: start; }
.sides.text svg { display: none; }
.sides.text section { margin-bottom: 1rem; }
.lines .tokens { display: flex; flex-direction: column; }
.lines .query { text-align: right; }
.lines .query .tokens { align-items: flex-end; }
.lines .key .tokens { align-items: flex-start; }
.token { font: inherit; color: inherit; background: none; border: 1px solid transparent; border-radius: 4px;
  padding: 0 .3rem; height: 1.6rem; white-space: pre; cursor: pointer; scroll-margin-top: 5rem; }
.text .token { padding: 0 .15rem; }
.token:focus-visible, .thumb:focus-visible { outline: 3px solid #d95f02; outline-offset: 1px; }
.token.chosen { border-color: #1a1a1a; font-weight: 600; }
.token.pinned { background: #fff3bf; }
.share { display: inline-block; min-width: 3.4em; color: #333; font-size: .85rem; }
.text .share { display: none; }
svg { width: 100%; display: block; }
details { margin-top: 1rem; }
.overview { overflow-x: auto; }
.overview th { font-weight: normal; font-size: .85rem; text-align: left; padding: 0 .3rem; white-space: nowrap; }
.thumb { padding: 2px; border: 2px solid #ccc; background: #fff; border-radius: 3px; cursor: pointer; line-height: 0; }
.thumb[aria-pressed=true] { border-color: #d95f02; }
.thumb canvas { width: 56px; height: 56px; image-rendering: pixelated; }
.help { font-size: .9rem; color: #333; }
</style>
</head>
<body>
<h1>What attention looks at</h1>
<p class="pair"><b>Source:</b> <bdi id="source"></bdi></p>
<p class="pair"><b>Target:</b> <bdi id="target"></bdi></p>
<noscript><p><b>This page needs JavaScript, which it has inside; it loads nothing.</b></p></noscript>
<div class="choices">
<label>Attention <select id="kind"></select></label>
<label>Layer <select id="layer"></select></label>
<label>Head <select id="head"></select></label>
<label>Show as <select id="view"><option value="lines">lines</option><option value="text">text</option></select></label>
</div>
<p id="told" aria-live="polite"></p>
<div class="sides lines" id="sides">
<section class="query"><h2 id="query-name"></h2><div class="tokens" id="query" role="group"></div></section>
<svg id="lines" aria-hidden="true"></svg>
<section class="key"><h2 id="key-name"></h2><div class="tokens" id="key" role="group"></div></section>
</div>
<details open><summary>All layers and heads (rows: tokens that look; columns: tokens looked at)</summary>
<div class="overview"><table id="overview"></table></div></details>
<p class="help">Hover over a token, or move to it with Tab and the arrow keys, to see what it attends to; on the other
side, to see what attends to it. Click or Enter keeps it, Escape lets it go. Layers and heads count from 1.
“·” begins a piece that goes on with a word; &lt;s&gt; and &lt;/s&gt; are the start and the end of a sentence; “␣” is a
space. Colours and lines grow with the square root of the weight; grey is what a token cannot see.</p>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const SIDES = {
  "encoder": ["source token that looks", "source token looked at"],
  "decoder": ["target token just read", "target token looked at"],
  "encoder-decoder": ["target token predicted", "source token looked at"],
};
const LONG = 60, FAINT = 0.02, ROW = 1.6;
const state = {kind: 0, layer: data.start.layer, head: data.start.head, chosen: null, pinned: null};
const el = (name, properties = {}) => Object.assign(document.createElement(name), properties);

for (const kind of data.kinds) {
  const bytes = Uint8Array.from(atob(kind.weights), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  kind.numbers = Float32Array.from({length: bytes.length / 2}, (_, place) => view.getUint16(2 * place, true) / 65535);
  kind.hides = (query, key) => (kind.kind === "decoder" && key > query)
    || (data.window !== null && kind.kind !== "encoder-decoder" && Math.abs(key - query) > data.window);
}
const now = () => data.kinds[state.kind];

function weightOf(kind, layer, head, query, key) {
  const at = (one) => kind.numbers[(((layer - 1) * kind.heads + one - 1) * kind.queries.length + query)
    * kind.keys.length + key];
  if (head) return at(head);
  let sum = 0;
  for (let one = 1; one <= kind.heads; one++) sum += at(one);
  return sum / kind.heads;
}
const weight = (query, key) => weightOf(now(), state.layer, state.head, query, key);

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => el("option", {value, textContent: text})));
  select.value = chosen;
}

function makeTokens(side, labels) {
  $(side).replaceChildren(...labels.map((label, index) => {
    const button = el("button", {type: "button", className: "token", tabIndex: index ? -1 : 0});
    button.dataset.index = index;
    const text = el("bdi", {textContent: label}), share = el("span", {className: "share"});
    button.append(...(side === "query" ? [share, text] : [text, share]));
    const choose = () => show({side, index});
    button.addEventListener("mouseenter", choose);
    button.addEventListener("focus", choose);
    button.addEventListener("mouseleave", () => show(state.pinned));
    button.addEventListener("blur", () => show(state.pinned));
    button.addEventListener("click", () => {
      const same = state.pinned && state.pinned.side === side && state.pinned.index === index;
      state.pinned = same ? null : {side, index};
      show(state.pinned);
    });
    return button;
  }));
}

function moveFocus(event) {
  const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
  const from = event.target.closest(".token");
  if (!step || !from) return;
  const to = from.parentElement.children[Number(from.dataset.index) + step];
  if (!to) return;
  event.preventDefault();
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

const apart = (label) => `\u2068${label}\u2069`;  // or words written from right to left would change places
const percent = (share) => `${(100 * share).toFixed(share < 0.01 ? 2 : 1)}%`;

function show(chosen) {
  state.chosen = chosen;
  const kind = now();
  const other = chosen && (chosen.side === "query" ? "key" : "query");
  const weightTo = (index) => chosen.side === "query" ? weight(chosen.index, index) : weight(index, chosen.index);
  for (const side of ["query", "key"]) {
    for (const button of $(side).children) {
      const index = Number(button.dataset.index);
      const is = (one) => Boolean(one) && one.side === side && one.index === index;
      button.classList.toggle("chosen", is(chosen));
      button.classList.toggle("pinned", is(state.pinned));
      button.setAttribute("aria-pressed", is(state.pinned));
      const share = side === other ? weightTo(index) : 0;
      button.style.background = share ? `rgba(8, 81, 156, ${Math.sqrt(share).toFixed(3)})` : "";
      button.style.color = share > 0.55 ? "#fff" : "";
      const told = share >= 0.005 ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%` : "";
      button.querySelector(".share").textContent = told;
      button.querySelector(".share").style.color = button.style.color;
    }
  }
  drawLines();
  if (!chosen) {
    $("told").textContent = "Hover over a token, or move to it by keyboard.";
    return;
  }
  const labels = kind[chosen.side === "query" ? "keys" : "queries"];
  const own = kind[chosen.side === "query" ? "queries" : "keys"][chosen.index];
  const best = labels.map((label, index) => [weightTo(index), label, index]).sort((a, b) => b[0] - a[0]);
  const list = best.slice(0, 6).filter(([share], place) => share >= 0.005 || (place < 3 && share >= 0.0001))
    .map(([share, label, index]) => `${apart(label)} (${index + 1}) ${percent(share)}`).join(", ");
  const verb = chosen.side === "query" ? "looks at" : "is looked at by";
  $("told").textContent = `Token ${chosen.index + 1}, “${apart(own)}”, ${verb}: ${list || "none"}`;
}

function drawLines() {
  const svg = $("lines"), kind = now();
  if ($("view").value !== "lines") return;
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const top = $("query").getBoundingClientRect().top - svg.getBoundingClientRect().top;
  const height = Math.max(kind.queries.length, kind.keys.length) * ROW * rem + top, width = svg.clientWidth || 200;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const lines = [];
  const y = (index) => (top + (index + 0.5) * ROW * rem).toFixed(1);
  const only = state.chosen;
  for (let query = 0; query < kind.queries.length; query++) {
    if (only && only.side === "query" && only.index !== query) continue;
    for (let key = 0; key < kind.keys.length; key++) {
      if (only && only.side === "key" && only.index !== key) continue;
      const share = weight(query, key);
      if (share < (only ? 0.005 : FAINT)) continue;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const strength = Math.sqrt(share);
      const attributes = {x1: 2, y1: y(query), x2: width - 2, y2: y(key), stroke: "#08519c",
        "stroke-width": (1 + 3 * strength).toFixed(2), "stroke-opacity": (only ? strength : 0.7 * strength).toFixed(3)};
      for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
      lines.push(line);
    }
  }
  svg.replaceChildren(...lines);
}

function drawThumb(canvas, kind, layer, head) {
  const queries = kind.queries.length, keys = kind.keys.length;
  canvas.width = keys;
  canvas.height = queries;
  const context = canvas.getContext("2d"), image = context.createImageData(keys, queries);
  for (let query = 0; query < queries; query++) {
    for (let key = 0; key < keys; key++) {
      const strength = Math.sqrt(weightOf(kind, layer, head, query, key));
      const colour = kind.hides(query, key) ? [224, 224, 224]
        : [255 - 247 * strength, 255 - 174 * strength, 255 - 99 * strength];
      image.data.set([...colour, 255], 4 * (query * keys + key));
    }
  }
  context.putImageData(image, 0, 0);
}

function makeOverview() {
  const kind = now(), table = $("overview");
  const head = el("tr");
  head.append(el("td"), ...Array.from({length: kind.heads}, (_, one) => el("th", {textContent: `head ${one + 1}`})));
  table.replaceChildren(head);
  for (let layer = 1; layer <= kind.layers; layer++) {
    const row = el("tr");
    row.append(el("th", {textContent: `layer ${layer}`}));
    for (let one = 1; one <= kind.heads; one++) {
      const button = el("button", {type: "button", className: "thumb"}), cell = el("td");
      button.setAttribute("aria-label", `layer ${layer}, head ${one}`);
      button.dataset.layer = layer;
      button.dataset.head = one;
      const canvas = el("canvas");
      drawThumb(canvas, kind, layer, one);
      button.append(canvas);
      button.addEventListener("click", () => choose({layer, head: one}));
      cell.append(button);
      row.append(cell);
    }
    table.append(row);
  }
}

function choose(changes) {
  const otherKind = "kind" in changes;
  Object.assign(state, changes);
  const kind = now();
  if (otherKind) {
    state.layer = Math.min(state.layer, kind.layers);
    state.pinned = null;
    const numbered = (length) => Array.from({length}, (_, one) => [one + 1, `${one + 1} of ${length}`]);
    fill($("layer"), numbered(kind.layers), state.layer);
    fill($("head"), [[0, "mean of all"], ...numbered(kind.heads)], state.head);
    ["query", "key"].forEach((side, place) => {
      $(side + "-name").textContent = SIDES[kind.kind][place];
      $(side).setAttribute("aria-label", SIDES[kind.kind][place]);
      makeTokens(side, kind[side === "query" ? "queries" : "keys"]);
    });
    makeOverview();
  }
  $("layer").value = state.layer;
  $("head").value = state.head;
  for (const button of document.querySelectorAll(".thumb")) {
    const is = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
    button.setAttribute("aria-pressed", is);
  }
  show(state.pinned);
}

$("source").textContent = data.source;
$("target").textContent = data.target;
fill($("kind"), data.kinds.map((kind, place) => [place, kind.name]), 0);
const longest = Math.max(...data.kinds.flatMap((kind) => [kind.queries.length, kind.keys.length]));
$("view").value = longest > LONG ? "text" : "lines";
$("sides").className = "sides " + $("view").value;
$("kind").addEventListener("change", () => choose({kind: Number($("kind").value)}));
$("layer").addEventListener("change", () => choose({layer: Number($("layer").value)}));
$("head").addEventListener("change", () => choose({head: Number($("head").value)}));
$("view").addEventListener("change", () => {
  $("sides").className = "sides " + $("view").value;
  show(state.chosen);
});
for (const side of ["query", "key"]) $(side).addEventListener("keydown", moveFocus);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    state.pinned = null;
    show(null);
  }
});
window.addEventListener("resize", drawLines);
choose({kind: 0});
</script>
</body>
</html>
"""
