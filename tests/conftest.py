"""Shared by all tests: small models with seeded weights, a recipe of seconds with its text, the shared data.

It imports nothing that takes long: the process that deals tests to others reads it before they start. A test file takes
a fixture of `helpers/` by its name: `push = pushing.push`.
"""

from __future__ import annotations

import gc
import os
import socket

os.environ["OMP_NUM_THREADS"] = "1"  # threads of OpenMP do not live on in a fork, where CTranslate2 would wait for them

from hub_server import HUB, HubServer  # first: it sets the Hub's address and an empty home of its caches

# isort: split
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import vaswani_transformer as vt
from vaswani_transformer.errors import UserError
from vaswani_transformer.recipes.recipe import Recipe

if TYPE_CHECKING:
    from children import Children
    from torch import Tensor, dtype

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
# For tests that start a file of theirs as a program.
_PATHS = [*map(str, (TESTS, TESTS / "helpers", ROOT, ROOT / "scripts")), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

gc.disable()  # until the first test: what the test files import are millions of objects, and hardly any garbage
os.fsync = lambda descriptor: None  # waiting for disks took a third of the time, and nobody cuts the power here
# A machine that others use may take any time for one example.
settings.register_profile("shared machine", deadline=None, max_examples=50)
settings.load_profile("shared machine")


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_torch() -> None:
    """Matrices of a few dozen rows are slower on many cores; and a fork after work on several would wait for ever."""
    import torch

    torch.set_num_threads(1)  # in each module: other libraries set it too


@pytest.fixture(scope="module", autouse=True)
def no_walk_through_all_imported_modules() -> None:
    """accelerate collects garbage at each start of a training, which would visit the objects of every library."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def no_accelerator_of_another_module() -> None:
    """Accelerate keeps one state a process, so that a test's bf16 would be refused to the next module's fp32."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def tiny_config(**changes) -> vt.VaswaniConfig:
    """Sizes that all differ, so that a swapped axis shows; no dropout, so that two passes agree."""
    sizes = {"vocab_size": 29, "d_model": 24, "d_ff": 40, "num_heads": 3, "encoder_layers": 2, "decoder_layers": 2}
    return vt.VaswaniConfig(**{**sizes, "dropout": 0.0, "max_position_embeddings": 32, **changes})


def tiny_model(
    seed: int = 0, dtype: dtype | None = None, attn_implementation: str = "sdpa", scale: float = 1.0, **changes
) -> vt.VaswaniForConditionalGeneration:
    """A model in evaluation mode whose every weight is random, biases and layer-norm gains too.

    `scale` multiplies the matrices: above 1 the distributions are less flat.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(**changes)
    config._attn_implementation = attn_implementation
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.float32)  # also for the table of sinusoids
    try:
        model = vt.VaswaniForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():  # a tied matrix comes once
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:  # biases around 0, gains around 1
                parameter.copy_(parameter.mean().round() + 0.3 * noise)
            else:
                parameter.copy_(scale * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def random_ids(*shape: int, seed: int = 0, vocab_size: int = 29) -> Tensor:
    """Token ids without special ones."""
    import torch

    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(lengths: tuple[int, ...], seed: int = 0, vocab_size: int = 29) -> tuple[Tensor, Tensor]:
    """Token ids padded on the right with 1, and their mask."""
    import torch

    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return random_ids(*mask.shape, seed=seed, vocab_size=vocab_size).masked_fill(mask == 0, 1), mask


@pytest.fixture
def shared_data() -> Path:
    """The folder of shared data; a test that asks for it is skipped where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the project's shared data, which is not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def hub() -> HubServer:
    """The Hub of all tests, empty."""
    HUB.reset()
    return HUB


@pytest.fixture(scope="session")
def forked(tmp_path_factory) -> Children:
    """Commands and code in copies of this process."""
    from children import Children

    return Children(tmp_path_factory.mktemp("forked"))


TINY_SIZES = {"vocab_size": 400, "d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
TINY_RECIPE = {
    "train_source": "train.en", "train_target": "train.de",
    "validation_source": "validation.en", "validation_target": "validation.de", "validation_bleu": 0,
    "tokens_per_batch": 600, "tokens_per_device": 600, "max_length": 60, "warmup_steps": 3, "log_every": 1,
    "keep_checkpoints": 3, **TINY_SIZES,
}  # fmt: skip


def tiny_recipe(text: Path, output: Path | None = None, **changes) -> Recipe:
    """A recipe of seconds for the corpus that `write_corpus` has put into `text`."""
    folders = {"data_dir": str(text), "output": None if output is None else str(output)}
    return Recipe(**{**TINY_RECIPE, **folders, **changes})


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A generated corpus: train.en, train.de and so on."""
    from vaswani_transformer.data.synthetic import generate_corpus, write_corpus

    folder = tmp_path_factory.mktemp("text")
    write_corpus(generate_corpus(200, 20, 20), folder)
    return folder


@pytest.fixture
def whole_outputs(monkeypatch) -> None:
    """Random models go round in circles, which a `Translator` would cut."""
    from vaswani_transformer.decoding import translator

    monkeypatch.setattr(translator, "_ROUNDS", 10**6)


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, and returns the one line of its error, the last that it prints."""
    from translating import run

    def call(*arguments, status=2) -> str:
        capsys.readouterr()
        code, error = run(*arguments), capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert code == status and "Traceback" not in error, error
        assert len(lines) == 1 and error.rstrip().endswith(lines[0]), error
        return lines[0]

    return call


@pytest.fixture(scope="module")
def without_pictures() -> Iterator[None]:
    """Drawing the learning curve would take a third of the time; `test_monitoring` looks at it."""
    from vaswani_transformer.training import run_folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "plot_learning_curve", lambda *_: None)
        yield


def error_of(function, *arguments, **options) -> str:
    """The one line of the error that a call must raise."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
