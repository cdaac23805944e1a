"""What must not happen on loading: code that runs, pickles that are read, memory that a damaged file asks for."""

import io
import pickle
import shutil
from pathlib import Path

import model_folders
import pytest
from canaries import Canary
from children import limit_memory
from conftest import error_of, random_ids, tiny_config
from huggingface_hub.errors import StrictDataclassError
from model_folders import change, pickle_weights
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani_transformer import VaswaniForConditionalGeneration, load_model
from vaswani_transformer.cli.main import main

saved, folder = model_folders.saved, model_folders.folder


@pytest.mark.parametrize("load", [AutoModelForSeq2SeqLM, VaswaniForConditionalGeneration])
def test_pickled_weights_are_refused(folder, fails, load):
    pickle_weights(folder)
    with pytest.raises(OSError, match="no file named model"):
        load.from_pretrained(folder)
    with pytest.raises(ValueError, match="safetensors only"):
        load.from_pretrained(folder, use_safetensors=False)
    error = fails("translate", folder, "words")
    assert str(folder) in error and "model.safetensors" in error


def test_a_pickle_beside_safetensors_in_their_place_or_alone_is_not_read(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(str(tmp_path / "ran"))))
    AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder / "model.safetensors").write_bytes((folder / "pytorch_model.bin").read_bytes())
    with pytest.raises(ValueError, match="damaged or not complete"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    error_of(load_model, folder)
    assert not (tmp_path / "ran").exists()


def test_a_half_precise_model_has_exact_positions_in_float32_and_one_too_large_for_half_is_refused(folder):
    AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float16").save_pretrained(folder)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32")
    model, _ = load_model(folder, "cpu", "float32")
    assert all(one.equal(other) for one, other in zip(model.buffers(), theirs.buffers(), strict=True))
    model.lm_head.weight.data[0, 0] = 1e6
    model.save_pretrained(folder)
    assert "finite" in error_of(load_model, folder, "cpu", "float16")


def test_code_in_a_folder_does_not_run(folder, tmp_path):
    for name in [*(path.name for path in folder.glob("*.py")), "custom_generate/generate.py", "tokenization_x.py"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_x.Tokenizer"]})
    AutoConfig.from_pretrained(folder)
    AutoModelForSeq2SeqLM.from_pretrained(folder).generate(random_ids(1, 4), max_new_tokens=2)
    load_model(folder)
    assert main(["translate", str(folder), "words"]) == 0
    assert not (tmp_path / "ran").exists()


PLANTED = "from pathlib import Path\nPath({!r}).touch()\nfrom transformers import PreTrainedTokenizerFast as Tok\n"


@pytest.mark.parametrize("command", ["translate", "import", "push"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_no_command_runs_code_or_asks_whether_to(folder, tmp_path, monkeypatch, fails, command, file):
    (folder / "planted.py").write_text(PLANTED.format(str(tmp_path / "ran")))
    if file == "config.json":
        change(folder, file, model_type="unheard_of", auto_map={"AutoConfig": "planted.Tok"})
    else:
        change(folder, file, tokenizer_class="Tok", auto_map={"AutoTokenizer": [None, "planted.Tok"]})
    if command == "import":
        pickle_weights(folder)
    options = {"import": ["--output", str(tmp_path / "new")], "push": ["me/model", "--dry-run"]}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 10)))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a command asked a question"))
    fails(command, folder, *options.get(command, ()))
    assert not (tmp_path / "ran").exists()


def test_installed_code_wins_even_where_remote_code_is_trusted(folder):
    (folder / "modeling_vaswani.py").write_text("raise RuntimeError('the folder\\'s own code ran')\n")
    (folder / "configuration_vaswani.py").write_text("raise RuntimeError('the folder\\'s own code ran')\n")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model) is VaswaniForConditionalGeneration
    assert type(AutoTokenizer.from_pretrained(folder, trust_remote_code=True)).__module__.startswith("transformers")


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 10**12}, {"max_position_embeddings": 10**14, "position_encoding": "learned"}, {"dropout": 7.0}],
    ids=str,
)
def test_absurd_sizes_are_refused_before_anything_is_built(folder, changes, fails):
    with pytest.raises((StrictDataclassError, ValueError)):
        tiny_config(**changes)
    change(folder, "config.json", **changes)
    with pytest.raises((StrictDataclassError, ValueError)):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    fails("translate", folder, "words")


def test_a_configuration_far_larger_than_its_weights_allocates_nothing(folder, tmp_path, forked):
    if not Path("/proc/self/statm").exists():
        pytest.skip("reads the process's memory from /proc")
    # Within what a configuration may ask for: 24, 10 and 20 billion numbers.
    sizes = [{"vocab_size": 10**9}, {"d_ff": 10**8}, {"encoder_layers": 200, "d_ff": 2 * 10**6}]
    folders = [shutil.copytree(folder, tmp_path / str(number)) for number in range(len(sizes))]
    for copy, changes in zip(folders, sizes, strict=True):
        change(copy, "config.json", **changes)

    def load():
        limit_memory(2 << 30)  # building one of the models would fail
        for copy in folders:
            with pytest.raises(ValueError, match="does not fit the weights"):
                AutoModelForSeq2SeqLM.from_pretrained(copy)

    done = forked.run(load)
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder_layers": 3}, ["missing"]),
        ({"encoder_layers": 1}, ["unexpected"]),
        ({"d_ff": 41}, ["fc1", "[40", "[41"]),
    ],
    ids=str,
)
def test_the_command_refuses_a_configuration_of_another_model(folder, changes, words, fails):
    change(folder, "config.json", **changes)
    error = fails("translate", folder, "words")
    assert all(word in error for word in words)
