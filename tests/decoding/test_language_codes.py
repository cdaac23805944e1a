"""Codes of the target language: set or typed, tokens or text, each sentence that the model gets begins with one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of, tiny_model
from document_files import in_place, louder, run, word_file
from exporting_models import PAIRS, small_tokenizer
from model_folders import save
from translating import run as vaswani

from vaswani_transformer import TranslationPipeline, Translator, align, score_pairs
from vaswani_transformer.documents.formats import FORMATS, translate_document
from vaswani_transformer.model.language_codes_vaswani import LanguageCodes

A, B, C = "The old dog sleeps here.", "We see a small bird, and a cat.", "It rains."
FRENCH, GREEK = ">>fra<< ", ">>ell_Grek<< "


@pytest.fixture(scope="module", params=[(FRENCH.strip(), GREEK.strip(), "<num>"), ()], ids=["tokens", "text"])
def loaded(request):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_tokens(list(request.param))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 100}
    return tiny_model(seed=1, scale=3.0, dtype=torch.float64, **sizes), tokenizer


def test_parts_of_long_lines_have_the_code_of_their_line(loaded):
    options = {"num_beams": 1, "scores": True, "split_long": True, "max_source_tokens": 26}
    alone = [FRENCH + A, FRENCH + B, FRENCH + C, GREEK + B, GREEK + C, C]
    one = {line: row[0] for line, row in zip(alone, Translator(*loaded, **options).hypotheses(alone), strict=True)}
    wanted = [[FRENCH + A, FRENCH + B, FRENCH + C], [GREEK + B, GREEK + C], [C]]
    for language, last in ((None, C), (FRENCH.strip(), FRENCH + C)):
        lines = [FRENCH + " ".join((A, B, C)), f"{GREEK}{B} {C}", C]
        found = Translator(*loaded, target_language=language, **options).hypotheses(lines)
        for (hypothesis,), parts in zip(found, [*wanted[:2], [last]], strict=True):
            assert hypothesis.text == " ".join(one[part].text for part in parts)
            assert hypothesis.log_probability == pytest.approx(sum(one[part].log_probability for part in parts))


@pytest.mark.parametrize("typed", ["<num> ", ">>Oh<< ", ">>ita<<", "<2it>"])
def test_only_codes_are_codes_and_unknown_ones_are_errors(loaded, typed):
    codes, is_tag = LanguageCodes(loaded[1]), "it" in typed
    if is_tag and codes.known:
        lines = Translator(*loaded, num_beams=1).translate([C, typed + C])
        next(lines)
        with pytest.raises(ValueError, match=r"^line 2: '.*ita?.*' is no target language of the model: it has >>ell"):
            next(lines)
        assert "line 2: '" in error_of(align, *loaded, [C, typed + C], [C, C])
        assert ">>fra<<" in error_of(Translator, *loaded, target_language=typed)
        assert codes.code("FRA") == FRENCH.strip() and codes.code("ell-Grek") == GREEK.strip()
    else:
        assert codes.split(typed + C) == ((typed, C) if is_tag else ("", typed + C))
        assert codes.split(typed) == ("", typed)
        assert "is no target language" in error_of(Translator, *loaded, target_language="it")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("<b> <br> <hr> <li> <tr> </tr> <mask> <pad> <num>", ""),  # of HTML, and of all models
        ("<nl> <unk>", ""),  # a new line
        ("<br> <de> <fr> <mask>", "br de fr"),
        ("[en_XX] [de_DE] [MASK]", "de_DE en_XX"),
        ("<br> <2br> __th__ >>tur<<", "br th tur"),
    ],
)
def test_tags_of_html_are_no_codes(tokens, expected):
    codes = LanguageCodes(SimpleNamespace(get_vocab=lambda: dict.fromkeys(tokens.split())))
    assert " ".join(sorted(codes.known)) == expected
    assert codes.split("<br> A dog.") == (("<br> ", "A dog.") if "<de>" in tokens else ("", "<br> A dog."))


def test_in_pipelines(loaded):
    translator = TranslationPipeline(*loaded, device="cpu", max_new_tokens=6)
    text, first, second = f"{A} {C}", *(one["translation_text"] for one in translator([FRENCH + A, FRENCH + C]))
    for typed, options in ((FRENCH, {}), ("", {"tgt_lang": FRENCH.strip()}), (FRENCH, {"tgt_lang": GREEK.strip()})):
        assert translator(typed + text, split_sentences=True, **options) == [{"translation_text": f"{first} {second}"}]
    if LanguageCodes(loaded[1]).known:
        with pytest.raises(ValueError, match="'ita' is no target language"):
            translator(text, tgt_lang="ita")
        for options in ({"tgt_lang": "fra"}, {"task": "translation_eng_to_fra"}):
            translator = TranslationPipeline(*loaded, device="cpu", max_new_tokens=6, **options)
            assert [one["translation_text"] for one in translator([A, C])] == [first, second]


@pytest.mark.parametrize("format", FORMATS[:-2])  # slides and OpenDocument are read as Word files are
def test_a_document_becomes_what_it_does_without_its_code_and_each_sentence_had_it(format):
    line = {"html": "<p>{}Two <b>small birds</b> sing. A <i>dog</i> sees.</p>"}
    line |= {"markdown": "{}Two **small birds** sing. A *dog* sees."}
    line |= {"srt": "1\n00:00:01,000 --> 00:00:02,000\n{}Two <b>small birds</b> sing. A <i>dog</i> sees."}
    line |= {"vtt": line["srt"].replace("1", "WEBVTT\n", 1) + " It rains."}

    def document(code: str) -> bytes:
        if format == "docx":
            runs = run(f"{code}Two "), run("small birds", True), run(" sing. A "), run("dog", True), run(" sees.")
            return word_file(f"<w:p>{''.join(runs)}</w:p><w:p>{run('It rains.')}</w:p>")
        return (line.get(format, "{}Two small birds sing. A dog sees.") + "\n\nIt rains.\n").format(code).encode()

    def french(sentences):
        assert all(sentence.startswith(FRENCH) for sentence in sentences) and len(sentences) == 3
        return louder(sentence.removeprefix(FRENCH) for sentence in sentences)

    expected = translate_document(document(""), format, louder, in_place)
    for code in (FRENCH,) if format in ("srt", "vtt", "docx", "html") else (FRENCH, FRENCH + "\n\n"):
        assert translate_document(document(code), format, french, in_place) == expected


def test_alignments_leave_codes_out(loaded):
    sources, targets = map(list, zip(*PAIRS[:8], strict=True))
    for source, links in zip(sources, align(*loaded, [FRENCH + source for source in sources], targets), strict=True):
        assert {number for number, _ in links} <= set(range(len(source.split())))


def test_commands_do_as_with_typed_codes(loaded, tmp_path, capsys):
    folder = save(tmp_path / "model", *loaded)
    typed, plain, target = (str(tmp_path / name) for name in ("typed", "plain", "target"))
    for name, lines in ((typed, [FRENCH + A, "", FRENCH + C]), (plain, [A, "", C]), (target, ["Ein Hund.", "", "Er."])):
        (tmp_path / name).write_text("\n".join([*lines, ""]))
    outputs = []
    for source, option in ((typed, []), (plain, ["--target-language", FRENCH.strip()]), (plain, [])):
        details = ["--format", "json", "--alignments", "--confidence", *option]
        assert vaswani("translate", folder, "--input", source, *details) == 0
        assert vaswani("score", folder, "--source", source, "--target", target, *option) == 0
        assert vaswani("evaluate", folder, "--source", source, "--reference", target, *option) == 0
        printed = capsys.readouterr()
        assert ("no --target-language" in printed.err) == (not option and LanguageCodes(loaded[1]).known != {})
        outputs.append(printed.out.rpartition(" translated in ")[0])
    assert outputs[0] == outputs[1] != outputs[2]
    losses, _ = score_pairs(*loaded, [FRENCH + A], ["Ein Hund."])
    assert f"{-losses[0]:.6f}"[:6] in outputs[1]
