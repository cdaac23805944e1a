"""The models of a server: their languages, loading when first asked for, unloading, and those that cannot be loaded."""

import asyncio
import json
import shutil
import weakref
from unittest.mock import Mock

import pytest
import served
from conftest import error_of
from model_folders import save
from served import SENTENCES, all_at_once, ask, client_of, find_models, load_in_double, translated

from vaswani_transformer import Translator, load_model, score_tokens
from vaswani_transformer.data.memory import Memory
from vaswani_transformer.serving.models import Models

folder, loaded, make = served.folder, served.loaded, served.make


def counting(most=9):
    """A function that loads models, and the list of those that it has loaded, of which fewer than `most` are there."""
    loads = []

    def load(folder):
        assert sum(model() is not None for model in loads) < most
        model, tokenizer = load_in_double(folder)
        loads.append(weakref.ref(model))
        return model, tokenizer

    return load, loads


def names(*models) -> list[str]:
    return [place.name for place in find_models([str(model) for model in models])]


def test_languages_that_a_folder_notes_or_that_are_given(tmp_path):
    for name, files in {
        "trained": {"recipe.yaml": "train_source: train.en.gz\ntrain_target: train.de.gz\n"},
        "columns": {"recipe.yaml": "source_column: fr\ntarget_column: en\n"},
        "imported": {"import.json": json.dumps({"toolkit": "x", "source": "y", "languages": ["fi", "sv"]})},
        "multilingual": {"import.json": json.dumps({"toolkit": "x", "source": "y", "languages": ["fi", "sv", "da"]})},
        "unknown": {},
        "a-b=c": {},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    assert names(tmp_path / "trained", tmp_path / "columns", tmp_path / "imported") == ["en-de", "fr-en", "fi-sv"]
    given = [f"{name}={tmp_path}/a-b=c" for name in ("en-pt_BR", "zh-Hans-en", "pt-BR-en", "en-GB-es-419", "en-SR-RS")]
    assert [served.source for served in find_models(given)] == ["en", "zh-Hans", "pt-BR", "en-GB", "en"]
    for name in ("unknown", "multilingual"):
        line = error_of(find_models, [str(tmp_path / name)])
        assert line == f"the languages of {tmp_path}/{name} are not known: give them too, as in en-de={tmp_path}/{name}"
    line = error_of(find_models, [str(tmp_path / "trained"), f"EN-de={tmp_path}/unknown"])
    assert line.endswith("are both for EN-de: give one of them")


def test_a_folder_that_is_not_there(tmp_path, folder, caplog):
    assert names(f"en-de={folder}", tmp_path / "none") == ["en-de"]
    assert f"there is no model folder {tmp_path}/none: it is left out" in caplog.text
    caplog.clear()
    assert "there is no model folder" in error_of(find_models, [f"en-de={tmp_path}/none"]) and not caplog.text


def test_a_broken_model_is_not_available_and_the_others_are(make, folder, loaded, tmp_path, caplog):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("{")
    app = make(f"en-de={folder}", f"de-en={broken}")
    (expected,) = translated(loaded, SENTENCES[:1])
    for source, target, answer in (
        ("de", "en", (503, {"error": "the model for de-en is not available"})),
        ("en", "de", (200, {"translatedText": expected})),
    ) * 2:
        assert ask(app, "POST", "/translate", json={"q": SENTENCES[0], "source": source, "target": target}) == answer
    assert "the model for de-en cannot be loaded: " in caplog.text and str(broken) in caplog.text
    shutil.copy(folder / "config.json", broken)  # what is repaired works
    wanted = {"text": SENTENCES[0], "source": "de", "target": "en"}
    assert ask(app, "POST", "/v1/translations", json=wanted)[1]["translations"][0]["text"] == expected


def test_each_is_loaded_once_when_it_is_first_asked_for(make, folder):
    load, loads = counting()
    app = make(f"en-de={folder}", f"de-en={folder}", load=load)
    assert not loads
    answers = all_at_once(app, "/translate", [{"q": one, "source": "en", "target": "de"} for one in SENTENCES])
    assert {answer.status_code for answer in answers} == {200}
    assert len(loads) == 1 and [place.name for place in app.state.service.models.loaded] == ["en-de"]


def test_the_least_recently_used_is_unloaded(make, folder, loaded):
    pairs = ["en-de", "de-en", "fr-en", "fi-en"]
    load, loads = counting(most=2)  # those that are unloaded take no memory any more
    app = make(*(f"{pair}={folder}" for pair in pairs), load=load, most_models=2)
    models = app.state.service.models
    expected = translated(loaded, SENTENCES[:5])

    async def run():
        async with client_of(app) as client:

            async def post(pair):
                source, target = pair.split("-")
                body = {"q": SENTENCES[:5], "source": source, "target": target}
                return (await client.post("/translate", json=body)).json()["translatedText"]

            for pair in ("en-de", "de-en", "en-de", "fr-en"):
                assert await post(pair) == expected
            assert [place.name for place in models.loaded] == ["en-de", "fr-en"]
            answers = await asyncio.gather(*(post(pair) for pair in pairs * 3))  # those at work are finished first
            assert answers == [expected] * 12 and len(models.loaded) == 2

    asyncio.run(run())
    assert len(loads) >= 5


def test_what_ctranslate2_cannot_follow_goes_to_the_float32_engine_that_is_there(folder):
    loads = []
    load = lambda model: loads.append(model.needs) or Mock(is_ours=model.needs)  # noqa: E731
    models = Models(find_models([f"en-de={folder}"]), load, most=1)

    async def run():
        for _ in range(3):
            async with models.engine(models.served[0], "alignments"):
                pass

    asyncio.run(run())
    assert loads == ["", "some requests"]


def coded_model(folder, tmp_path):
    """A model that has codes of two target languages."""
    model, tokenizer = load_model(folder, "cpu")
    tokenizer.add_tokens([">>fra<<", ">>pt_BR<<"])
    model.resize_token_embeddings(len(tokenizer))
    return load_in_double(save(tmp_path, model, tokenizer))


def test_codes_are_not_what_a_memory_looks_up(make, folder, tmp_path):
    loaded = coded_model(folder, tmp_path)
    pairs = [("A dog.", "UN CHIEN"), (">>pt_BR<< A cat.", "UM GATO"), (">>fra<< A bird.", "UN OISEAU")]
    pairs.append(("A dog. A cat.", "TOUS"))
    memory = Memory(pairs)
    app = make(f"en-fra={tmp_path}", memory=memory)
    texts = ["A dog.", ">>fra<< A dog.", ">>fra<<A dog.", ">>pt_BR<< A cat.", "A bird.", ">>fra<< A bird."]
    texts.append("A dog. A cat.")
    expected = ["UN CHIEN"] * 3 + ["UM GATO"] + ["UN OISEAU"] * 2 + ["TOUS"]
    answer = ask(app, "POST", "/translate", json={"q": texts, "source": "en", "target": "fra"})[1]
    assert answer["translatedText"] == expected
    translator = Translator(*loaded, memory=memory, target_language="fra")
    assert list(translator.translate(texts)) == expected
    assert [near for _, _, near in next(translator.near(["A bird!"]))] == ["UN OISEAU"]
    other = [">>pt_BR<< A dog."]  # of another language than the memory's
    assert list(translator.translate(other)) == translated(loaded, other)


def test_targets_of_one_model_share_it_and_have_their_codes(make, folder, tmp_path, caplog):
    loaded = coded_model(folder, tmp_path)
    load, loads = counting()
    names = [f"en-{target}={tmp_path}" for target in ("fr", "pt_BR", "it")]
    app, texts = make(*names, load=load), [" ".join(SENTENCES[:2]), SENTENCES[2]]
    for target, typed, code in (("fr", "", "fra"), ("pt-BR", "", "pt_BR"), ("it", ">>pt_BR<< ", "pt_BR")):
        wanted = {"q": [typed + text for text in texts], "source": "en", "target": target}
        one, two, three = translated(loaded, [f">>{code}<< {sentence}" for sentence in SENTENCES[:3]])
        expected = [f"{one} {two}", three]
        for format in ("text", "html"):
            answer = ask(app, "POST", "/translate", json=wanted | {"format": format})[1]
            assert answer == {"translatedText": expected}
        asked = {"text": typed + texts[1], "target": target, "token_scores": True, "alignments": True}
        [sentence] = ask(app, "POST", "/v1/translations", json=asked)[1]["translations"][0]["sentences"]
        [score] = score_tokens(*loaded, [f">>{code}<< {texts[1]}"], [three])
        tokens = [token["log_probability"] for token in sentence["translations"][0]["tokens"]]
        assert sentence["source_words"] == texts[1].split() and tokens == pytest.approx(score.log_probabilities)
    status, answer = ask(app, "POST", "/translate", json=wanted | {"q": ">>ita<< A dog."})
    assert (status, len(loads)) == (400, 1) and "'>>ita<<' is no target language of the model" in answer["error"]
    assert "texts for it get no language code: the model has >>fra<<, >>pt_BR<<" in caplog.text


def test_two_that_share_one_place_are_both_answered(make, folder):
    load, loads = counting()
    app = make(f"en-de={folder}", f"de-en={folder}", load=load, most_models=1)

    async def run():
        async with client_of(app) as client:

            async def post(source, target):
                body = {"q": SENTENCES[:2], "source": source, "target": target}
                assert (await client.post("/translate", json=body)).status_code == 200

            async def keep_on(done):
                while not done.is_set():
                    await asyncio.gather(*(post("en", "de") for _ in range(3)))

            for _ in range(3):
                await asyncio.wait_for(asyncio.gather(post("en", "de"), post("de", "en")), 60)
            done = asyncio.Event()
            users = [asyncio.create_task(keep_on(done)) for _ in range(3)]
            await asyncio.wait_for(post("de", "en"), 60)
            done.set()
            await asyncio.gather(*users)

    asyncio.run(run())
    assert len(loads) <= 11


def test_by_default_they_are_unloaded_when_memory_is_short(make, folder, monkeypatch):
    app = make(f"en-de={folder}", f"de-en={folder}")
    size = app.state.service.models.served[0].bytes
    assert size > 2 * (folder / "model.safetensors").stat().st_size
    for total, expected in ((4 * size, ["en-de", "de-en"]), (4 * size - 1, ["de-en"])):
        monkeypatch.setattr("psutil.virtual_memory", Mock(return_value=Mock(total=total)))
        for source, target in (("en", "de"), ("de", "en")):
            assert ask(app, "POST", "/translate", json={"q": "A.", "source": source, "target": target})[0] == 200
        assert [place.name for place in app.state.service.models.loaded] == expected
        app = make(f"en-de={folder}", f"de-en={folder}")
