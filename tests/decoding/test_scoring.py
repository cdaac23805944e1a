"""`vaswani score`, confidence and what is under them, against the model by hand and the search's own scores."""

import json
import math

import pandas
import pytest
import torch
import translating
from conftest import error_of
from model_folders import PAIRS, write_model
from translating import LINES, run

from vaswani_transformer import align, load_model, score_pairs, score_tokens, train_tokenizer
from vaswani_transformer.cli.main import main
from vaswani_transformer.decoding.scoring import PairScore, confidences, mean_confidence, word_probabilities
from vaswani_transformer.decoding.translator import Translator
from vaswani_transformer.errors import UserError

folder, source, here = translating.model, translating.source, translating.here
SOURCES, TARGETS = map(list, zip(*PAIRS[:30], strict=True))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, "cpu")


@torch.no_grad()
def by_hand(model, tokenizer, source, target):
    """Log-probability of each token, one position at a time, from probabilities in double precision."""
    ids, wanted = tokenizer(source, return_tensors="pt")["input_ids"], tokenizer(target)["input_ids"]
    written, logs = [model.config.decoder_start_token_id], []
    for token in wanted:
        logits = model(input_ids=ids, decoder_input_ids=torch.tensor([written])).logits[0, -1].double()
        logs.append(math.log(float(logits.softmax(dim=-1)[token])))
        written.append(token)
    return logs


def test_tokens_score_as_by_hand_whatever_the_batches(loaded):
    model, tokenizer = loaded
    expected = [by_hand(model, tokenizer, *pair) for pair in PAIRS[:5]]
    for tokens in (1, 90, 4096):
        scores = score_tokens(model, tokenizer, SOURCES[:5], TARGETS[:5], tokens_per_batch=tokens)
        for target, log_probabilities, score in zip(TARGETS, expected, scores, strict=False):
            assert score.log_probabilities == pytest.approx(log_probabilities, rel=1e-4, abs=1e-4)
            assert "".join(score.tokens) == f" {target}</s>"


def test_scores_of_nothing(loaded):
    assert score_tokens(*loaded, [], []) == [] and score_pairs(*loaded, [], []) == ([], [])


def test_one_string_is_one_text_and_what_is_no_text_is_refused(loaded):
    source, target = PAIRS[0]
    assert score_pairs(*loaded, source, target) == score_pairs(*loaded, [source], (target,))
    assert align(*loaded, source, target) == align(*loaded, [source], [target])
    assert list(Translator(*loaded).translate(source)) == list(Translator(*loaded).translate((source,)))
    with pytest.raises(UserError, match=r"^each line is a text, or a pair .*too many values"):
        next(Translator(*loaded).translate([source.split()]))
    assert len(train_tokenizer(source, vocab_size=300)) == len(train_tokenizer([source], vocab_size=300))
    for table in ({"en": [source]}, pandas.DataFrame({"en": [source]})):  # which yield names of columns
        for function, *more in ((align, *loaded, table, [target]), (next, Translator(*loaded).translate(table))):
            assert error_of(function, *more).endswith("is given in place of texts: give one of its columns")
    for wrong in (None, math.nan, {"en": source}, [source, target, 3], (source, None)):
        translations = Translator(*loaded).translate(text for text in (source, wrong))
        assert next(translations)
        with pytest.raises(UserError, match=r"^line 2 is .*, not text: give strings, of a dataset one column"):
            next(translations)
        for function in (score_pairs, align, score_tokens):
            assert "target 2 is " in error_of(function, *loaded, [source] * 2, [target, wrong])
            assert "source 1 is " in error_of(function, *loaded, [wrong], [target])


@pytest.mark.usefixtures("whole_outputs")
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("rule", ["gnmt", "power"])
def test_an_nbest_list_is_that_of_the_search_with_its_scores(loaded, rule, alpha):
    model, tokenizer = loaded
    inputs = tokenizer(SOURCES[:12], return_tensors="pt", padding=True)
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, "length_penalty": alpha}
    if rule == "power":
        options["length_normalization"] = rule
    found = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    ours = list(Translator(model, tokenizer, 60, scores=True, **options).hypotheses(SOURCES[:12], window=5))
    texts = tokenizer.batch_decode(found.sequences, skip_special_tokens=True)
    assert [one.text for line in ours for one in line] == [" ".join(text.strip().splitlines()) for text in texts]
    assert [one.score for line in ours for one in line] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)
    for hypothesis in (hypothesis for line in ours for hypothesis in line):
        divisor = ((5 + hypothesis.tokens) / 6) ** alpha if rule == "gnmt" else hypothesis.tokens**alpha
        assert hypothesis.score == pytest.approx(hypothesis.log_probability / divisor)


@pytest.fixture
def files(tmp_path):
    """Sources and targets in white space, some with a blank side."""
    lines = {"source": [*SOURCES, "", "A dog."], "target": [*TARGETS, "Ein Hund.", "  "]}
    for name, side in lines.items():
        (tmp_path / name).write_text("".join(f" {line}\t\n" for line in side))
    return ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]


def test_the_command_writes_scores_and_sums(folder, loaded, files, tmp_path, capsys):
    expected = score_tokens(*loaded, SOURCES, TARGETS)
    assert main(["score", str(folder), *files, "--window", "7", "--json", str(tmp_path / "sums.json")]) == 0
    out, error = capsys.readouterr()
    lines = out.split("\n")
    assert len(lines) == 33 and lines[30:] == ["", "", ""]
    for line, score in zip(lines, expected, strict=False):
        ranked, log, tokens = line.split("\t")
        assert float(log) == pytest.approx(score.log_probability, abs=1e-3) and int(tokens) == len(score.tokens)
        assert float(ranked) == pytest.approx(float(log) / ((5 + int(tokens)) / 6) ** 0.6, abs=1e-5)
    sums = json.loads((tmp_path / "sums.json").read_text())
    losses, counts = score_pairs(*loaded, SOURCES, TARGETS)
    assert (sums["pairs"], sums["tokens"]) == (30, sum(counts))
    perplexity = math.exp(sum(losses) / sum(counts))
    assert sums["perplexity"] == pytest.approx(perplexity, rel=1e-5) and f"perplexity {perplexity:.3f} " in error
    options = ["--tokens", "--format", "json", "--length-penalty", "0", "--output", str(tmp_path / "out")]
    assert main(["score", str(folder), *files, *options, "--ensemble", str(folder)]) == 0
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [record["line"] for record in records] == list(range(1, 33)) and records[30] == {"line": 31, "score": None}
    for record, score in zip(records, expected, strict=False):
        assert "".join(token for token, _ in record["token_log_probabilities"]) == "".join(score.tokens)
        logs = [log for _, log in record["token_log_probabilities"]]
        assert logs == pytest.approx(score.log_probabilities, rel=1e-4, abs=1e-4)
        assert record["score"] == pytest.approx(sum(logs))


@pytest.mark.parametrize("way", [["--tokens"], ["--tokens", "--format", "json"]], ids=["text", "json"])
def test_workers_write_what_one_process_writes(folder, files, tmp_path, here, way):
    def command(name, *options) -> list:
        written = ["--output", tmp_path / name, "--json", tmp_path / f"{name}.json"]
        return ["score", folder, *files, "--window", "5", *way, *written, *options]

    assert run(*command("one")) == 0
    assert run(*command("workers", "--workers", "2")) == 0
    for suffix in ("", ".json"):
        assert (tmp_path / f"workers{suffix}").read_bytes() == (tmp_path / f"one{suffix}").read_bytes() != b""
    assert not list(tmp_path.glob("*.parts")) + list(tmp_path.glob("*.unfinished.json"))


def test_mistakes(folder, files, tmp_path, fails):
    (tmp_path / "one").write_text("Ein Hund.\n")
    line = fails("score", folder, "--source", tmp_path / "source", "--target", tmp_path / "one")
    assert "source has 32 lines and" in line and "one has 1 lines" in line
    assert "nowhere" in fails("score", folder, *files, "--json", tmp_path / "nowhere" / "sums.json")
    (tmp_path / "blank").write_text(" \n")
    both = ["--source", tmp_path / "blank", "--target", tmp_path / "blank"]
    assert "nothing to score" in fails("score", folder, *both)
    learned = write_model(tmp_path / "learned", position_encoding="learned", max_position_embeddings=40)
    (tmp_path / "long").write_text("Ein Hund.\n" * 4 + "Ein Hund " * 30 + "\n")
    (tmp_path / "short").write_text("A dog.\n" * 5)
    both = ["--source", tmp_path / "short", "--target", tmp_path / "long", "--window", "2"]
    assert "line 5" in fails("score", learned, *both, "--output", tmp_path / "out")
    assert (tmp_path / "out").read_text().count("\n") == 4  # what came before is written
    line = error_of(score_tokens, *load_model(learned, "cpu"), ["A", "B"], ["Ein", "Zwei " * 40])
    assert "line 2 of the targets has" in line
    for score in (score_tokens, score_pairs):
        with pytest.raises(ValueError):
            score(*load_model(learned, "cpu"), [], ["Ein"])


# Confidence: the probability of each word of a translation, and the mean of them.


def test_words_have_the_probability_of_all_their_tokens():
    score = PairScore(["Ein", " Hau", "s", ".", "</s>"], [-0.1, -0.2, -0.3, -0.4, -9.0])
    expected = [("Ein", pytest.approx(math.exp(-0.1))), ("Haus.", pytest.approx(math.exp(-0.9)))]
    assert word_probabilities(score) == expected
    assert mean_confidence(word_probabilities(score)) == pytest.approx((math.exp(-0.1) + math.exp(-0.9)) / 2)
    assert mean_confidence([]) == 1


def test_a_token_of_several_words_counts_for_each():
    score = PairScore([" 我的", "电", "", "脑", "。", " x", "</s>"], [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -9.0])
    logs = [(word, pytest.approx(math.log(probability))) for word, probability in word_probabilities(score)]
    # One word is in two tokens, of which the text is that of the first.
    assert logs == [("我", -0.1), ("的", -0.1), ("电", -0.5), ("脑。", -0.9), ("x", -0.6)]


def test_the_confidence_of_a_command(folder, loaded, tmp_path):
    """Each translation with the probabilities of its words and, in text, their mean."""
    (tmp_path / "in").write_text("".join(f"{line}\t\n" for line in LINES))
    command = "translate", folder, "--input", tmp_path / "in", "--confidence", "--output"
    assert run(*command, tmp_path / "text") == 0 and run(*command, tmp_path / "json", "--format", "json") == 0
    rows = [json.loads(line)["hypotheses"][0] for line in (tmp_path / "json").read_text().splitlines()]
    for line, row in zip((tmp_path / "text").read_text().splitlines(), rows, strict=True):
        assert line.split("\t")[0] == f"{row['confidence']:.3f}"
    filled = [(text.strip(), row) for text, row in zip(LINES, rows, strict=True) if row["text"].strip()]
    sources, outputs = [text for text, _ in filled], [row["text"] for _, row in filled]
    for (_, row), score in zip(filled, score_tokens(*loaded, sources, outputs), strict=True):
        assert " ".join(word for word, _ in row["words"]).split() == row["text"].split()
        expected = [probability for _, probability in word_probabilities(score)]
        assert [probability for _, probability in row["words"]] == pytest.approx(expected, rel=1e-4)
        assert row["confidence"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    blank = rows[[line.strip() for line in LINES].index("")]
    assert (blank["words"], blank["confidence"]) == ([], 1.0)


@pytest.mark.parametrize("option", ["--confidence", "--alignments"])
def test_a_line_that_has_no_positions_is_named_behind_the_others(option, tmp_path, fails):
    folder = write_model(tmp_path / "model", position_encoding="learned")
    (tmp_path / "lines").write_text("a dog\n" * 3 + "a dog " * 60 + "\na dog\n")
    files = "--input", tmp_path / "lines", "--output", tmp_path / "out"
    assert "line 4 has" in fails("translate", folder, *files, option)
    assert (tmp_path / "out").read_text().count("\n") == 3
    first, last = confidences(*load_model(folder, "cpu"), ["a dog", "a dog " * 60], ["a dog"] * 2)
    assert first > last == 0
