"""What heads are called: attention made by hand, measures of plain loops, a model whose weights were set by hand."""

import gzip
import json

import numpy as np
import pytest
import torch
from conftest import error_of, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import PAIRS, write_model
from position_study import offset_matrix

from vaswani_transformer import align, load_model, name_heads, pharaoh, train_tokenizer
from vaswani_transformer.attention.heads import MEASURES, HeadStatistics, delimiters, heads_as_markdown, read_links
from vaswani_transformer.cli.main import main

LENGTH = 12
NONE = np.zeros(LENGTH, bool)


def look_at(offset: int, length: int = LENGTH, even: float = 0.0) -> np.ndarray:
    """Each token looks at the one so far away, or at itself where there is none; a share is spread evenly."""
    weights = np.zeros((length, length))
    for row in range(length):
        weights[row, row + offset if 0 <= row + offset < length else row] = 1
    return (1 - even) * weights + even / length


def self_attention(weights: np.ndarray, is_delimiter: np.ndarray = NONE, kind: str = "encoder") -> dict:
    """The entry of a single head after one sentence."""
    statistics = HeadStatistics(kind, 1, 1)
    statistics.add_self_attention(weights[None, None], is_delimiter)
    return statistics.heads()[0]


WINDOW = sum(look_at(offset) for offset in (-2, -1, 0, 1, 2)) / 5
ENDS = np.arange(LENGTH) == LENGTH - 1


@pytest.mark.parametrize(
    ("weights", "kind", "name"),
    [
        (look_at(-1), "encoder", "previous token"),
        (look_at(1), "encoder", "next token"),
        (look_at(0), "encoder", "same token"),
        (np.tile(ENDS, (LENGTH, 1)).astype(float), "encoder", "delimiter"),
        (WINDOW, "encoder", "nearby"),
        (np.full((LENGTH, LENGTH), 1 / LENGTH), "encoder", "mixed"),
        ((look_at(5) + look_at(-5)) / 2, "encoder", "mixed"),
        (look_at(-1), "decoder", "previous token"),
        (look_at(0), "decoder", "same token"),
    ],
)
def test_heads_made_by_hand_are_called_what_they_do(weights, kind, name):
    assert self_attention(weights, ENDS, kind)["role"] == name


@settings(max_examples=50)
@given(st.integers(2, 9), st.sampled_from(["encoder", "decoder"]), st.integers(0, 10**6))
def test_measures_of_self_attention_are_those_of_plain_loops(length, kind, seed):
    rng = np.random.default_rng(seed)
    ends = rng.random(length) < 0.3
    weights = rng.random((length, length)) ** 4
    if kind == "decoder":
        weights = np.tril(weights)
    weights /= weights.sum(axis=1, keepdims=True)
    found: dict[str, list[float]] = {name: [] for name in MEASURES[kind]}
    for row in range(1 if kind == "decoder" else 0, length):
        seen = range(row + 1 if kind == "decoder" else length)
        if row - 1 in seen:
            found["previous token"].append(weights[row, row - 1])
        if row + 1 in seen:
            found["next token"].append(weights[row, row + 1])
        found["same token"].append(weights[row, row])
        found["nearby"].append(sum(weights[row, key] for key in seen if abs(key - row) <= 2))
        if not ends[row]:
            found["delimiter"].append(sum(weights[row, key] for key in seen if ends[key]))
    measures = self_attention(weights, ends, kind)["measures"]
    for name, values in found.items():
        assert measures[name] == (pytest.approx(np.mean(values), abs=1e-9) if values else None)


@settings(max_examples=30)
@given(st.integers(2, 9), st.sampled_from(["encoder", "decoder"]), st.integers(0, 511), st.none() | st.integers(1, 9))
def test_even_attention_is_its_own_chance(length, kind, bits, window):
    ends = np.array([bits >> place & 1 for place in range(length)], bool)
    visible = np.zeros((length, length))
    for query in range(length):
        for key in range(query + 1 if kind == "decoder" else length):
            visible[query, key] = window is None or abs(query - key) <= window / 2
    statistics = HeadStatistics(kind, 1, 1, window)
    statistics.add_self_attention((visible / visible.sum(axis=1, keepdims=True))[None, None], ends)
    measures, chances = statistics.heads()[0]["measures"], statistics.chances()
    assert measures == {name: None if chances[name] is None else pytest.approx(chances[name]) for name in chances}


def encoder_decoder(weights, links, source_words, target_words, source_ends=(-1,), target_ends=(-1,)) -> dict:
    """The entry of a single encoder-decoder head after one pair."""
    ends = [np.isin(np.arange(len(words)), np.array(at) % len(words)) for words, at in
            ((source_words, source_ends), (target_words, target_ends))]  # fmt: skip
    statistics = HeadStatistics("encoder-decoder", 1, 1)
    words = [
        [range(word, word + 1) if word >= 0 else range(0) for word in side] for side in (source_words, target_words)
    ]
    statistics.add_encoder_decoder(np.asarray(weights)[None, None], *ends, words, links)
    return statistics.heads()[0]


def test_encoder_decoder_heads_made_by_hand():
    # Source: three words, the last of two pieces, and the end. Target: three words and the end. Crossed links.
    source, target, links = [0, 1, 2, 2, -1], [0, 1, 2, -1], [(2, 0), (1, 1), (0, 2)]
    crossed = [[0, 0, 0.5, 0.5, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    head = encoder_decoder(crossed, links, source, target)
    assert head["role"] == "alignment" and head["measures"]["alignment"] == 1
    assert head["measures"]["delimiter"] == 0
    straight = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0.4, 0.6, 0], [0, 0, 0, 0, 1]]
    head = encoder_decoder(straight, links, source, target)
    assert head["role"] == "mixed" and head["measures"]["alignment"] == pytest.approx(1 / 3)
    # Pieces of a word count together: 0.3 + 0.3 is more than 0.4.
    pieces = [[0.4, 0, 0.3, 0.3, 0], *crossed[1:]]
    assert encoder_decoder(pieces, links, source, target)["measures"]["alignment"] == 1
    end = [[0.05, 0, 0, 0.05, 0.9]] * 4
    assert encoder_decoder(end, links, source, target)["role"] == "delimiter"
    # What of the words is looked at most says little where the end is looked at more.
    resting = 0.3 * np.array(crossed) + 0.7 * np.eye(5)[4]
    head = encoder_decoder(resting, links, source, target)
    assert head["role"] == "delimiter" and head["measures"]["alignment"] == 0
    assert encoder_decoder(np.full((4, 5), 0.2), [], source, target)["measures"]["alignment"] is None


def test_delimiters():
    ends = ["<s>", ",", "...", "»", "。", "—", "</s>"]
    words = ["Hund", "·e", "·", "␣", "5", "d'", "<unk>", "U+200B"]
    signs = ["$", "+", "😀", "\ufffd", "·ि"]  # the last one a vowel
    others = [*words, *signs]
    assert delimiters([*ends, *others]).tolist() == [True] * len(ends) + [False] * len(others)


# Models.


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((side for pair in PAIRS for side in pair), vocab_size=400)


def test_heads_of_a_model_set_by_hand_are_named(tokenizer):
    # With the same embedding for every token all that differs is the position; queries turned by the rotation of
    # Section 3.5 are most like the key that far away.
    model = tiny_model(vocab_size=len(tokenizer), d_k=24, d_v=8, max_position_embeddings=64)
    with torch.no_grad():
        model.model.shared.weight.zero_()
        for layers in (model.model.encoder.layers, model.model.decoder.layers):
            attention = layers[0].self_attn
            turns = [20 * torch.tensor(offset_matrix(offset, 24)) for offset in (-1, 1, 0)]
            attention.q_proj.weight.copy_(torch.cat(turns))
            attention.k_proj.weight.copy_(torch.eye(24).repeat(3, 1))
    report = name_heads(model, tokenizer, PAIRS[:20])
    roles = [head["role"] for head in report["kinds"]["encoder"]["heads"][:3]]
    assert roles == ["previous token", "next token", "same token"]
    masked = [head["role"] for head in report["kinds"]["decoder"]["heads"][:3]]
    assert masked[0] == "previous token" and masked[2] == "same token"
    assert (report["pairs"], report["blank"], report["long"]) == (20, 0, 0)


def test_batches_translations_and_alignments_change_nothing_that_they_should_not(tmp_path, tokenizer):
    model, tokenizer = load_model(write_model(tmp_path / "model"))
    sources, targets = ["the dog sleeps", "", "a very old cat", "my"], ["der Hund", "x", "die alte Katze schläft", " "]
    pairs = list(zip(sources, targets, strict=True))
    alone = name_heads(model, tokenizer, pairs, tokens_per_batch=1)
    together = name_heads(model, tokenizer, pairs)
    assert (alone["pairs"], alone["blank"]) == (2, 2)
    for kind, results in alone["kinds"].items():
        for one, other in zip(results["heads"], together["kinds"][kind]["heads"], strict=True):
            assert one["measures"] == pytest.approx(other["measures"], abs=1e-5)
    links = align(model, tokenizer, sources, targets)
    given = name_heads(model, tokenizer, pairs, links)
    assert given["kinds"] == together["kinds"] and given["alignments"] == "given" != together["alignments"]
    own = name_heads(model, tokenizer, [(source, None) for source in sources], max_new_tokens=4)
    assert own["pairs"] == 3 and own["target_tokens"] <= 30
    assert "line 3: index 9 is out of bounds" in error_of(name_heads, model, tokenizer, pairs, [[], [], [(9, 0)], []])
    with pytest.raises(ValueError, match="shorter"):
        name_heads(model, tokenizer, pairs, [[]])
    assert "no pair to look at" in error_of(name_heads, model, tokenizer, [("", "x")])


def test_the_command_writes_the_report(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    sources, targets = map(list, zip(*PAIRS[:30], strict=True))
    with gzip.open(tmp_path / "a.en.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(sources) + "\n")
    (tmp_path / "a.de").write_text("\n".join(targets) + "\n", encoding="utf-8")
    links = align(*load_model(folder), sources, targets)
    (tmp_path / "links").write_text("".join(pharaoh(one) + "\n" for one in links))
    files = ["--target", str(tmp_path / "a.de"), "--alignments", str(tmp_path / "links")]
    command = ["attention", str(folder), "--report", str(tmp_path / "a.en.gz"), *files]
    command += ["--output", str(tmp_path / "out")]
    assert main(command) == 0
    report = json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))
    text = (tmp_path / "out" / "heads.md").read_text(encoding="utf-8")
    assert text == heads_as_markdown(report) and capsys.readouterr().out.startswith(text)
    expected = name_heads(*load_model(folder), zip(sources, targets, strict=True), links)
    assert report["kinds"] == expected["kinds"] and report["files"]["target"]["name"] == "a.de"
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| 1 | 1 |")]
    assert [row[3].strip(" *") for row in rows] == [kind["heads"][0]["role"] for kind in report["kinds"].values()]
    assert main(command) == 2
    assert "exists: give another --output, or --overwrite" in capsys.readouterr().err
    (tmp_path / "a.de").write_text("one\n")
    assert main([*command, "--overwrite"]) == 2
    assert "has 30 lines and " in capsys.readouterr().err


def test_links_of_a_file(tmp_path):
    path = tmp_path / "links"
    path.write_text("0-0 1-2\n\n10-3\n")
    assert list(read_links(path)) == [[(0, 0), (1, 2)], [], [(10, 3)]]
    path.write_text("0-0\n1-x\n")
    assert f"{path}, line 2: " in error_of(list, read_links(path))
