"""Real weights: annalog 1.0.6 (MIT), trained on molecules, imported by a mapping and compared with its own model.

The package is no dependency. To run this test:

    pip install --no-deps --target FOLDER annalog==1.0.6
    PYTHONPATH=FOLDER python -m pytest -m slow tests/importing/test_annalog.py
"""

import importlib.util
import itertools
import pickle
import sys
from pathlib import Path

import pytest
import torch
from conftest import TESTS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.importing.source import ImportOptions
from vaswani_transformer.importing.torch_transformer import read

SPEC = importlib.util.find_spec("annalog")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SPEC is None, reason="needs annalog 1.0.6; the docstring of this file says how to get it"),
]

FIRST = [
    "CC(=O)Nc1ccc(O)cc1", "CN1C=NC2=C1C(=O)N(C)C(=O)N2C", "c1ccncc1", "CC(C)Cc1ccc(cc1)C(C)", "O=C(O)c1ccccc1",
    "C1CCNCC1", "Clc1ccc(Br)cc1", "C[C@H](N)C(=O)", "N#Cc1ccsc1", "CS(=O)(=O)N", "FC(F)(F)c1ccccc1",
    "COc1ccc2[nH]ccc2c1", "C1CC1", "[O-][N+](=O)c1ccco1",
]  # fmt: skip
SECOND = [
    "C", "CC", "O", "N", "OC", "C(=O)O", "C(=O)N", "C#N", "c1ccccc1", "C1CCCC1", "CCO", "C(F)F", "NC(=O)C",
    "S(=O)C", "CBr",
]  # fmt: skip
MOLECULES = [one + other for one, other in itertools.product(FIRST, SECOND)]


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of the package; its `__init__` would import chemistry that the model does not need."""
    return Path(SPEC.submodule_search_locations[0])


@pytest.fixture(scope="module")
def theirs(package):
    """Its modules, its words and its model with the trained weights."""
    folder = package / "model_files"
    spec = importlib.util.spec_from_file_location(
        "annalog_model_files", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    modules = sys.modules["annalog_model_files"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules)
    with (package / "ckpt_and_vocab" / "stereo_experiment_vocab_ttf.pkl").open("rb") as file:
        words = pickle.load(file)["itos"]
    code, sizes = modules.seq2seq_attention, (len(words), 256, 3, 8, 512, 0.1, "cpu", 102)
    pad = words.index("<pad>")
    model = code.Seq2Seq(code.Encoder(*sizes), code.Decoder(*sizes), pad, pad, "cpu")
    weights = torch.load(package / "ckpt_and_vocab" / "Lev_extended.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    return modules.vocabulary.SMILESTokenizer(), words, model.eval()


@pytest.fixture(scope="module")
def ours(package, theirs, tmp_path_factory):
    """The imported model and its tokenizer."""
    _, words, _ = theirs
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[[^\]]*\]|%\d{2}|Br|Cl|."), "isolated")
    backend.decoder = decoders.Fuse()
    file = tmp_path_factory.mktemp("annalog") / "tokenizer.json"
    backend.save(str(file))
    options = ImportOptions(vocabularies=(file,), mapping=TESTS / "fixtures" / "annalog.yaml")
    imported = read(package / "ckpt_and_vocab" / "Lev_extended.pt", options)
    model = VaswaniForConditionalGeneration(imported.config).eval()
    assert not any(model.load_state_dict(imported.weights))
    return imported.tokenizer, model


def test_tokens_are_annalogs(theirs, ours):
    tokenize, words, _ = theirs
    for molecule in MOLECULES:
        expected = [words.index(token) for token in ["<sos>", *tokenize.tokenize(molecule), "<eos>"]]
        assert ours[0](molecule).input_ids == expected
        assert ours[0](text_target=molecule).input_ids == expected[1:]
        assert ours[0].decode(expected, skip_special_tokens=True) == molecule


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-14)])
@torch.no_grad()
def test_logits_are_annalogs(theirs, ours, dtype, tolerance):
    tokenizer, model = ours[0], ours[1].to(dtype)
    oracle = theirs[2].to(dtype)
    # Tensors that are no part of the state: sqrt(256) is exact, the square root of a head's 32 is not.
    for module in oracle.modules():
        if hasattr(module, "scale"):
            module.scale = torch.tensor(float(round(float(module.scale) ** 2)), dtype=dtype).sqrt()
    batch = tokenizer(MOLECULES, return_tensors="pt", padding=True)
    target = tokenizer(MOLECULES[::-1], return_tensors="pt", padding=True).input_ids
    expected = oracle(batch.input_ids, target)[0]
    logits = model(**batch, decoder_input_ids=target).logits
    # A padded target's rows, which count nowhere: they see the padding before them here and not there.
    is_word = target.ne(tokenizer.pad_token_id)
    difference = (logits - expected)[is_word].abs().max() / expected[is_word].abs().max()
    print(f"{dtype}: {float(difference):.2g} of {float(expected[is_word].abs().max()):.1f}")  # noqa: T201
    assert difference < tolerance


@torch.no_grad()
def test_greedy_outputs_are_annalogs(theirs, ours):
    tokenizer, model, oracle = ours[0], ours[1].double(), theirs[2].double()
    batch = tokenizer(MOLECULES, return_tensors="pt", padding=True)
    bos, eos, pad = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad"))
    expected, done = torch.full((len(MOLECULES), 1), bos), torch.zeros(len(MOLECULES), dtype=torch.bool)
    encoded, mask = oracle.encoder(batch.input_ids, oracle.make_src_mask(batch.input_ids)), batch.input_ids
    while expected.shape[1] <= 60 and not done.all():
        output, _ = oracle.decoder(expected, encoded, oracle.make_trg_mask(expected), oracle.make_src_mask(mask))
        token = output[:, -1].argmax(-1).masked_fill(done, pad)
        expected, done = torch.cat([expected, token[:, None]], dim=1), done | (token == eos)
    generated = model.generate(**batch, num_beams=1, do_sample=False, max_new_tokens=60)
    assert generated.tolist() == expected.tolist()
