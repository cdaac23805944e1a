"""The tokenizer with two sides: each side against a plain fast tokenizer of the same backend."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vaswani_transformer import VaswaniTokenizer

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
SOURCE = ["ein", "kleiner", "Hund", "rare"]
TARGET = ["a", "small", "big", "dog", "barks", "rare", "rarer"]


def words(names: list[str]) -> Tokenizer:
    """A backend whose tokens are words."""
    ids = {name: number for number, name in enumerate([*SPECIAL.values(), *names])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    backend.add_special_tokens(list(SPECIAL.values()))
    return backend


def plain(names: list[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=words(names), split_special_tokens=True, **SPECIAL)


@pytest.fixture
def tokenizer() -> VaswaniTokenizer:
    """ "rare", and "rarer" of the target, have ids that the model lacks."""
    return VaswaniTokenizer(
        tokenizer_object=words(SOURCE), target_tokenizer_object=words(TARGET), known_tokens=(7, 9), **SPECIAL
    )


def test_each_side_has_its_ids(tokenizer):
    source, target = plain(SOURCE[:-1]), plain(TARGET[:-2])
    assert tokenizer("ein Hund rare")["input_ids"] == source("ein Hund rare")["input_ids"] == [4, 6, 3, 2]
    assert tokenizer(text_target=["a dog barks", "dog"])["input_ids"] == target(["a dog barks", "dog"])["input_ids"]
    both = tokenizer(["ein Hund"], text_target=["a dog"], return_tensors="pt", padding=True)
    assert both["input_ids"].tolist() == [[4, 6, 2]] and both["labels"].tolist() == [[4, 7, 2]]
    cut = tokenizer("ein Hund", text_target="a dog barks", max_length=3, max_target_length=2, truncation=True)
    assert (cut["input_ids"], cut["labels"]) == ([4, 6, 2], [4, 2])
    assert tokenizer.decode([4, 7, 2], skip_special_tokens=True) == "a dog"
    assert tokenizer.batch_decode([[4, 2], [7, 8, 2, 1]], skip_special_tokens=True) == ["a", "dog barks"]
    assert tokenizer.convert_ids_to_tokens([4, 7, 2]) == ["a", "dog", "</s>"]
    assert tokenizer.tokenize("ein Hund") == ["ein", "Hund"]
    assert tokenizer.convert_tokens_to_ids("Hund") == 6


def test_pieces_that_the_model_lacks_are_unknown(tokenizer):
    assert tokenizer(["rare Hund"])["input_ids"] == [[3, 6, 2]]
    assert tokenizer(text_target=["rare rarer dog"], return_tensors="pt")["input_ids"].tolist() == [[3, 3, 7, 2]]
    assert tokenizer.convert_tokens_to_ids("rare") == 3
    assert len(tokenizer) == 7 and tokenizer.vocab_size == 7
    assert tokenizer.get_vocab() == plain(TARGET[:-2]).get_vocab()
    with pytest.raises(ValueError, match="cannot be added"):
        tokenizer.add_tokens(["new"])


def test_saved_and_loaded(tokenizer, tmp_path):
    names = {path.rpartition("/")[2] for path in tokenizer.save_pretrained(tmp_path)}
    assert {"tokenizer.json", "target_tokenizer.json", "tokenizer_config.json"} <= names
    read = [kind.from_pretrained(tmp_path) for kind in (AutoTokenizer, VaswaniTokenizer)]
    for loaded in (*read, pickle.loads(pickle.dumps(tokenizer))):
        assert type(loaded) is VaswaniTokenizer
        for texts in ({"text": "rare Hund"}, {"text_target": "rare dog rarer"}):
            assert loaded(**texts).data == tokenizer(**texts).data
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert len(loaded.save_pretrained(tmp_path / "again")) == len(names)


def test_one_backend_for_both_sides(tmp_path):
    VaswaniTokenizer(tokenizer_object=words(SOURCE), known_tokens=(7, 7), **SPECIAL).save_pretrained(tmp_path)
    assert not (tmp_path / "target_tokenizer.json").exists()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("rare Hund")["input_ids"] == loaded(text_target="rare Hund")["input_ids"] == [3, 6, 2]


def test_threads_do_not_see_each_others_side():
    target_only = words(["dog", "rare"])
    tokenizer = VaswaniTokenizer(tokenizer_object=words(["rare"]), target_tokenizer_object=target_only, **SPECIAL)

    def encoded(side: str) -> set[tuple[int, ...]]:
        return {tuple(tokenizer(**{side: ["rare"] * 3})["input_ids"][0]) for _ in range(300)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoded, ["text", "text_target"] * 2)) == [{(4, 2)}, {(5, 2)}] * 2
