"""Terms in translations: what occurs in a text, and searches against the list of every output that has the terms."""

import os
import threading
import unicodedata
from functools import partial, reduce
from unittest import mock

import pytest
import torch
import translating
from conftest import error_of, tiny_model
from every_output import END, LIMIT, VOCABULARY, chained_model, every_output, peaked_model
from hypothesis import given, settings
from hypothesis import strategies as st
from translating import LINES, run

from vaswani_transformer import Translator, load_model, train_tokenizer
from vaswani_transformer.decoding.glossary import (
    Glossary,
    Progress,
    Terms,
    Tokens,
    beams_for,
    read_glossary,
    term_forms,
)
from vaswani_transformer.decoding.scoring import token_texts
from vaswani_transformer.decoding.search import TermsSentence
from vaswani_transformer.decoding.translator import Piece

repetition_free, model, source = translating.model, translating.papers_model, translating.source
TOKENS = st.integers(3, VOCABULARY - 1)
FORMS = st.lists(st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=2), min_size=1, max_size=2)


def has(output, forms, continuing=frozenset()):
    """Whether one of the forms is in an output, and no token that continues a word follows it."""
    text = [token for token in output if token != END]
    ends = [start + len(form) for form in forms for start in range(len(text)) if text[start:][: len(form)] == form]
    return any(end == len(text) or text[end] not in continuing for end in ends)


def search(model, terms, source, num_beams, **options):
    opened = model.open_search(num_beams=num_beams, max_new_tokens=LIMIT, **options)
    mask = torch.ones(1, len(source), dtype=torch.long)
    [sentence] = opened.join(source[None], mask, [partial(TermsSentence, terms)])
    while opened.running:
        opened.step()
    return sentence


@settings(max_examples=30)
@given(seed=st.integers(0, 30), forms=FORMS, beams=st.integers(2, 6), alpha=st.sampled_from([0.0, 0.6, 1.5]),
       continuing=st.frozensets(TOKENS, max_size=1), signs=st.frozensets(TOKENS))  # fmt: skip
def test_every_output_has_all_terms(seed, forms, beams, alpha, continuing, signs):
    begins_words = [[form for form in own if form[0] not in continuing] for own in forms]
    terms = Terms([own for own in begins_words if own], Tokens(continuing, signs))
    source = torch.tensor([3, 5, 4, 3])
    beams = beams_for(terms, beams)
    sentence = search(peaked_model(seed), terms, source, beams, length_penalty=alpha, num_return_sequences=2)
    first, *others = [output.tokens for output in sentence.outputs()]
    assert first and len(first) <= sentence.limit
    for output in (first, *filter(None, others)):
        assert all(has(output, [list(form) for form in own], continuing) for own in terms.forms)


def is_over(model, source, output, sign, forms):
    """Whether terms are missing in some beginning of an output that ends with the sign and likely ends there."""
    start = torch.tensor([[model.config.decoder_start_token_id, *output]])
    probabilities = model(input_ids=source[None], decoder_input_ids=start).logits[0].softmax(dim=-1)
    return any(
        token == sign and probabilities[place, END] > 0.5 and not all(has(output[:place], own) for own in forms)
        for place, token in enumerate(output[:-1], start=1)
    )


@torch.no_grad()
def test_no_term_stands_behind_the_full_stop():
    """Of all outputs with the terms the best, but for those whose terms come when the model would have ended."""
    word, sign, term = 3, 4, 5
    for likely_end, expected in ((0.8, [word, term, END]), (0.4, [word, sign, term, END])):
        table = [[1 / 6] * 6 for _ in range(6)]
        table[0] = [0.01, 0.01, 0.01, 0.92, 0.04, 0.01]
        table[word] = [0.01, 0.01, 0.02, 0.15, 0.8, 0.01]
        table[sign] = [0.01, 0.01, likely_end, 0.93 - likely_end, 0.01, 0.04]
        table[term] = [0.01, 0.01, 0.6, 0.05, 0.32, 0.01]
        model, source, forms = chained_model(table), torch.tensor([word]), [[[term]]]
        whole = [list(output) for _, output in every_output(model, source, 0.6) if has(output, forms[0])]
        assert whole[0] == [word, sign, term, END]
        assert next(one for one in whole if not is_over(model, source, one, sign, forms)) == expected
        for beams in (3, 150):
            terms = Terms(forms, Tokens(signs=frozenset({sign})))
            [best] = search(model, terms, source, beams, length_penalty=0.6).outputs()
            assert best.tokens == expected


@settings(max_examples=25)
@given(seed=st.integers(0, 30), forms=FORMS, alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_with_room_for_all_hypotheses_the_best_output_with_the_terms_is_found(seed, forms, alpha):
    terms = Terms(forms)
    tokens = [token for own in forms for form in own for token in form]
    if terms.lacks(Progress()) >= LIMIT or len(set(tokens)) < len(tokens):
        return  # the limit is raised, or one token could serve two terms, which is not counted on near the limit
    model, source = peaked_model(seed), torch.tensor([3, 5, 4, 3])
    outputs = every_output(model, source, alpha)
    expected = next(score for score, output in outputs if all(has(output, own) for own in forms))
    [best] = search(model, terms, source, 150, length_penalty=alpha).outputs()
    assert best.score == pytest.approx(expected, abs=1e-4)
    assert all(has(best.tokens, own) for own in forms)


@pytest.mark.parametrize(
    ("sources", "text", "expected"),
    [
        ("red|red dog|dog", "The red dog sees a Red cat, not a redder one.", ["red dog", "red"]),
        ("Bank|dog", "At the Bank, not at the bank, a dog.", ["Bank", "dog"]),
        ("C++", "C++ and c++", ["C++"]),
        ("red", "", []),
        ("电脑|脑|iPhone", "我的电脑坏了。大脑和iPhone和iPhones", ["电脑", "脑", "iPhone"]),
        ("ตา", "ดวงตา", ["ตา"]),
        ("ตา", "ตา\u0e48", []),  # with another tone
        ("Red Dog|red|blue", "the RED dog, and a blue cat", ["red", "blue"]),
        ("bank|Bank", "Bank or BANK or bank", ["Bank", "bank"]),
        ("red dog|(red)", "a red  dog, x(red) (red)x", ["red dog"]),
        ("(red)|c++|+", "(red) dog ab c++d c++", ["(red)", "c++"]),
        ("file|{name}", "%(file)s %{file} {file} <file a='file'>", []),
        ("file", "\\emph{file} " + "%#" * 50_000, ["file"]),
        ("file|{name}|a {b}", "<b>file</b> of a {b} for {name}", ["file", "a {b}", "{name}"]),
        ("\u0915", "\u0915\u093f \u0915", ["\u0915"]),
        ("\u0915", "\u0915\u093f\u0915", []),  # letters with a vowel's sign behind or before them
    ],
)
def test_terms_that_occur(sources, text, expected):
    assert list(Glossary(dict.fromkeys(sources.split("|"), ("x",))).of(text)) == expected


@settings(max_examples=300)
@given(
    sources=st.lists(st.text("abA +中文", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=4),
    text=st.text("abA +中文", max_size=12),
)
def test_terms_that_occur_are_those_that_are_longest_from_the_left(sources, text):
    def is_torn(outer, inner):
        return text[outer : outer + 1].isalnum() and not {text[outer], text[inner]} & set("中文")

    terms = {" ".join(source.split()): ["x"] for source in sources}
    text, place, expected = " ".join(text.split()), 0, []
    while place < len(text):
        ends = [end for end in range(len(text), place, -1)
                if not (place and is_torn(place - 1, place)) and not is_torn(end, end - 1)]  # fmt: skip
        keys = [(key, end) for end in ends for key in (text[place:end], text[place:end].lower()) if key in terms]
        if keys:
            expected.append(keys[0][0])
        place = keys[0][1] if keys else place + 1
    assert list(Glossary(terms).of(text)) == list(dict.fromkeys(expected))


@pytest.mark.timeout(60)  # a term after the other at each place it would be minutes
def test_a_large_glossary_is_fast():
    sources = [f"a {number}" for number in range(100_000)] + ["b " * length + "b" for length in range(300)]
    assert len(Glossary(dict.fromkeys(sources, ("x",))).of("a 5 b b b " + "a a " * 20_000 + "b " * 2_000)) == 4


@pytest.mark.parametrize("ids", [[], [3]])  # as of tokenizers that drop control characters, and of others
def test_a_term_that_the_model_cannot_write(ids):
    tokenizer = mock.Mock(return_value={"input_ids": [[5], ids]}, unk_token_id=3)
    line = error_of(term_forms, tokenizer, ("Vogel", "\u0001"))
    assert "cannot write '\\x01' of the glossary: leave it out" in line


def test_a_term_across_two_rounds_is_not_cut_off(model):
    translator = Translator(*load_model(model, "cpu"))
    circle = [5, 6] * 4
    assert translator._without_repetition(circle, Piece(0, [3])) == [5, 6]
    assert translator._without_repetition(circle, Piece(0, [3], terms=Terms([[[6, 5]]]))) == circle
    assert translator._without_repetition(circle, Piece(0, [3], terms=Terms([[[5, 6]]]))) == [5, 6]


def test_files(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("source\tTarget\ndog\tHund\n\ndog\tHündin\nVaswani\n  red   cat \t rote Katze\n")
    terms = read_glossary(path).terms
    assert terms == {"dog": ("Hund", "Hündin"), "Vaswani": ("Vaswani",), "red cat": ("rote Katze",)}
    for text, message in (
        ("dog\t\n", "line 1"), ("dog\t\n", "empty term"), ("\tHund\n", "empty term"),
        ("dog\tHund||\n", "empty term"), ("a\tb\tc\n", "3 columns"),
    ):  # fmt: skip
        path.write_text(text)
        assert message in error_of(read_glossary, path)
    assert "No such file" in error_of(read_glossary, tmp_path / "none")
    assert "g.CSV is no text file" in error_of(read_glossary, tmp_path / "g.CSV")


def test_texts_in_batches_and_alone(model):
    """Lines with terms have them, in any batch, and the others are as without a glossary."""
    loaded, tokenizer = load_model(model, "cpu")
    options = {"num_beams": 2, "max_new_tokens": 12}
    glossary = Glossary({"dog": ["Hund", "Tier"], "bird": ["bird"]})
    translators = (Translator(loaded, tokenizer, size, glossary=glossary, **options) for size in (64, 2048))
    with_terms = [list(translator.translate(LINES)) for translator in translators]
    without = list(Translator(loaded, tokenizer, **options).translate(LINES))
    assert with_terms[0] == with_terms[1]
    number = 0
    for line, text, plain in zip(LINES, with_terms[0], without, strict=True):
        found = glossary.of(line)
        number += len(found)
        if not found:
            assert text == plain
        assert all(any(target in text.split() for target in targets) for targets in found.values())
    assert number > 3


@pytest.mark.parametrize(("of_term", "of_text"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_terms_are_found_in_every_form_of_a_text(of_term, of_text):
    glossary = Glossary({unicodedata.normalize(of_term, "Hà Nội"): ["Hanoi"], "क": ["ka"], "می": ["mi"]})
    [targets] = glossary.of(unicodedata.normalize(of_text, "Hà Nội, कि क\u200d्ष می\u200cروم")).values()  # others go on
    assert targets == ("Hanoi",) and len(glossary.of("क می")) == 2


def test_terms_that_no_position_is_left_for(model):
    tokenizer = load_model(model, "cpu")[1]
    learned = {"position_encoding": "learned", "max_position_embeddings": 16}
    short = tiny_model(vocab_size=len(tokenizer), **learned)
    for words, fits in ((1, True), (20, False)):
        glossary = Glossary({"dog": ["Hund " * words]})
        translator = Translator(short, tokenizer, glossary=glossary, num_beams=2)
        if fits:
            assert len(list(translator.translate(["a dog", "a cat"]))) == 2
        else:
            assert "line 2 has terms of" in error_of(lambda t=translator: list(t.translate(["a cat", "a dog"])))


def test_tokens_that_go_on_with_a_word(model):
    tokenizer = load_model(model, "cpu")[1]
    continuing = Tokens.of(tokenizer).continuing
    for text in ("small cats", "Zwei Hunde, ein Bär."):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        [pieces] = token_texts(tokenizer, [ids])
        expected = [bool(piece) and piece[0].isalnum() for piece in pieces]  # a first one may lack its space
        assert [number in continuing for number in ids][1:] == expected[1:]
    hindi = train_tokenizer(["कि खि गि घि नि"] * 9, vocab_size=263)
    *_, vowel = hindi("कि", add_special_tokens=False)["input_ids"]
    assert hindi.decode([vowel]) == "\u093f" and vowel in Tokens.of(hindi).continuing


@pytest.fixture(scope="module")
def chinese():
    return train_tokenizer(["我的电脑坏了。", "两只狗，在玩电脑。", "a small dog"] * 3, vocab_size=320)


def test_a_term_without_a_space_before_it(chinese):
    spaced, joined = term_forms(chinese, ["电脑"])
    before = chinese("我的", add_special_tokens=False)["input_ids"]
    assert [chinese.decode(before + form) for form in (spaced, joined)] == ["我的 电脑", "我的电脑"]
    alone, behind = term_forms(chinese, ["dog"])
    assert chinese.decode(alone) == chinese.decode(behind[1:]) == "dog" and alone != behind[1:] and behind[0] < 0
    opening, dot = (chinese(sign, add_special_tokens=False)["input_ids"][-1] for sign in "(.")
    terms = Terms([[alone, behind]], Tokens.of(chinese))
    for sign, lacking in ((opening, False), (dot, True)):
        ends = reduce(terms.after, [sign, *behind[1:]], Progress())
        assert bool(terms.lacks(ends)) == lacking and -1 not in terms.wanted(ends)
    kinds = Tokens.of(chinese)
    for text in ("我的电脑坏了", "。", "small"):
        ids = chinese(text, add_special_tokens=False)["input_ids"]
        assert not kinds.continuing & set(ids) or text == "small"
        assert all(number in kinds.signs for number in ids) == (text == "。")


def test_terms_in_translations_without_spaces(chinese):
    model = tiny_model(vocab_size=len(chinese), seed=3, scale=2.0)
    glossary = Glossary({"电脑": ["computer"], "dog": ["狗", "两只狗"]})
    translator = Translator(model, chinese, num_beams=4, max_new_tokens=9, glossary=glossary)
    first, second, third = translator.translate(["my dog", "我的电脑坏了。", "我的电脑和dog"])
    assert "狗" in first and "computer" in second.split() and "狗" in third and "computer" in third


def test_samples_have_no_glossary(model):
    tokenizer = load_model(model, "cpu")[1]
    options = {"glossary": Glossary({"a": ["b"]}), "do_sample": True}
    translator = Translator(tiny_model(vocab_size=len(tokenizer)), tokenizer, **options)
    assert "leave it out" in error_of(lambda: list(translator.translate(["a dog"])))


def test_the_command(model, source, tmp_path, fails):
    path, output = tmp_path / "terms.tsv", tmp_path / "out"
    path.write_text("dog\tHund\n")
    command = ["translate", model, "--input", source, "--glossary", path, "--max-new-tokens", "8", "--output", output]
    assert run(*command) == 0
    lines = output.read_text().split("\n")
    assert all("Hund" in text.split() for line, text in zip(LINES, lines, strict=False) if "dog" in line.split())
    assert "--glossary and --sample" in fails("translate", model, "a", "--glossary", path, "--sample")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("dog\tHund\n",))
    writer.start()
    command[5], command[-1] = tmp_path / "pipe", tmp_path / "other"
    assert run(*command) == 0
    writer.join()
    assert command[-1].read_bytes() == output.read_bytes()
    path.write_text("dog\t\n")
    assert "line 1" in fails("translate", model, "a", "--glossary", path)
