"""Looking at a model changes nothing of it, and threads that share it get what each would get alone."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import tiny_model
from model_folders import PAIRS

from vaswani_transformer import Ensemble, Translator, align, attend, pipeline, score_pairs, train_tokenizer

SOURCES = [source for source, _ in PAIRS[:6]]
TARGETS = [target for _, target in PAIRS[:6]]
SHORT = {"max_new_tokens": 6, "num_beams": 2}
SAMPLE = {"seed": 3, "do_sample": True, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((side for pair in PAIRS for side in pair), vocab_size=400)


def new_model(tokenizer, **changes):
    return tiny_model(seed=2, scale=2.0, vocab_size=len(tokenizer), **changes)


def state(model, tokenizer) -> dict:
    """All that other users of a model, its tokenizer and torch in this process could notice."""
    config, tensors = model.config.to_dict(), [*model.named_parameters(), *model.named_buffers()]
    return {
        "config": json.dumps(config, default=str, sort_keys=True),
        "attention": {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")},
        "search": json.dumps(model.generation_config.to_dict(), default=str, sort_keys=True),
        "modes": [module.training for module in model.modules()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "hooks": [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()],
        "tensors": [(name, id(tensor), tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors],
        "values": [tensor.detach().sum().item() for _, tensor in tensors],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "random": torch.get_rng_state().tolist(),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
    }


def pipe(model, tokenizer, **options):
    return pipeline("translation", model, tokenizer=tokenizer, device="cpu")(SOURCES, **SHORT, **options)


READERS = {
    "translate": lambda model, tokenizer: list(Translator(model, tokenizer, scores=True, **SHORT).hypotheses(SOURCES)),
    "sample": lambda model, tokenizer: list(Translator(model, tokenizer, **SAMPLE).translate(SOURCES)),
    "score": lambda model, tokenizer: score_pairs(model, tokenizer, SOURCES, TARGETS),
    "attend": lambda model, tokenizer: attend(model, tokenizer, SOURCES[0], **SHORT).encoder.tolist(),
    "align": lambda model, tokenizer: align(model, tokenizer, SOURCES, TARGETS),
    "ensemble": lambda model, tokenizer: list(Translator(Ensemble([model] * 2), tokenizer, **SHORT).translate(SOURCES)),
    "pipeline": pipe,
    "pipeline that cuts": lambda model, tokenizer: pipe(model, tokenizer, truncation=True),
}


IN_TRAINING = [name for name in READERS if name not in ("ensemble", "sample")]  # without dropout; these draw


@pytest.mark.parametrize(
    ("reader", "training"), [*((reader, False) for reader in READERS), *((reader, True) for reader in IN_TRAINING)]
)
def test_reading_leaves_everything_as_it_was(tokenizer, reader, training):
    model, tokenizer = new_model(tokenizer, dropout=0.1, attention_window=8).train(training), copy.deepcopy(tokenizer)
    tokenizer.model_max_length = 10
    before = state(model, tokenizer)
    READERS[reader](model, tokenizer)
    after = state(model, tokenizer)
    if "pipeline" in reader:  # torch's DataLoader draws a number for its workers, even for none
        del before["random"], after["random"]
    assert after == before


@pytest.mark.parametrize("kind", ["as built", "window", pytest.param("compiled", marks=pytest.mark.slow)])
def test_translations_are_right_while_another_thread_looks(tokenizer, kind):
    """The other thread is stopped inside of its pass, where it would have changed what it changes."""
    model = new_model(tokenizer, attention_window=4 if kind == "window" else None)
    if kind == "compiled":
        model.model.encoder.layers[0] = torch.compile(model.model.encoder.layers[0], backend="eager")
    main, inside, go_on = threading.current_thread(), threading.Event(), threading.Event()

    def stop(module, given):
        if threading.current_thread() is not main:
            inside.set()
            assert go_on.wait(60)

    model.model.encoder.layers[1].register_forward_pre_hook(stop)
    translator, own = Translator(model, tokenizer, **SHORT), copy.deepcopy(tokenizer)
    alone, seen = list(translator.hypotheses(SOURCES)), attend_as_lists(new_model(tokenizer), own)
    before = state(model, tokenizer)
    with ThreadPoolExecutor(2) as threads:
        try:
            looks = [threads.submit(attend_as_lists, model, own) for _ in range(2)]
            assert inside.wait(60)
            assert state(model, tokenizer) == before
            assert list(translator.hypotheses(SOURCES)) == alone
        finally:
            go_on.set()
        if kind != "window":
            for look in looks:
                torch.testing.assert_close(look.result(), seen, atol=1e-6, rtol=0)
    assert state(model, tokenizer) == before


def attend_as_lists(model, tokenizer):
    weights = attend(model, tokenizer, SOURCES[0], TARGETS[0])
    return [torch.tensor(array) for array in (weights.encoder, weights.decoder, weights.encoder_decoder)]


def test_threads_that_cut_texts_do_not_cut_those_of_others(tokenizer):
    model, tokenizer = new_model(tokenizer), copy.deepcopy(tokenizer)
    tokenizer.model_max_length = 5
    translate = pipeline("translation", model, tokenizer=tokenizer, device="cpu")
    long = [" ".join(SOURCES)] * 40
    whole = translate.preprocess(long[0])["input_ids"].shape[1]
    with ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(lambda cut: [translate.preprocess(text, truncation=cut) for text in long], bool(number % 2))
            for number in range(4)
        ]
        for number, call in enumerate(calls):
            assert {row["input_ids"].shape[1] for row in call.result()} == {5 if number % 2 else whole}
    assert tokenizer.backend_tokenizer.truncation is None
