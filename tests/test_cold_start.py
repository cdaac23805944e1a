"""What is imported, each in a process of its own: quick commands wait for no library, and our models are registered."""

import os
import shutil
import subprocess
import sys

import pytest
import translating
from model_folders import change

from vaswani_transformer import VaswaniTokenizer, export_model, load_tokenizer

folder = translating.model
HEAVY = ("torch", "transformers", "datasets", "numpy", "huggingface_hub", "pydantic")
MAIN = "from vaswani_transformer.cli.main import main; main(sys.argv[1:])"


def imported(code: str, *words: str) -> set[str]:
    """The names of `HEAVY` that a program has imported when it ends."""
    program = f"import sys\n{code}\nprint('IMPORTED', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


QUICK = [
    "--help", "--version", "recipes", "recipes demo", "recipes no-such", "no-such", "train --help",
    "translate --help", "parse --help", "translate MODEL --beems 2", "translate MODEL --beams 0",
    "train demo --warmup-step 3", "score MODEL --source a", "translate MODEL --sample --top-p nan",
    "translate MODEL --temperature 2", "translate MODEL A --input x",
]  # fmt: skip
IN_COPIES = """
import os
for code in eval(sys.argv[2]):
    if not os.fork():
        exec(code)
        os._exit(0)
    assert not os.wait()[1], code
"""


def test_what_answers_at_once_imports_nothing_heavy():
    run = "try:\n    main({words!r})\nexcept SystemExit:\n    pass\nassert not {heavy!r} & sys.modules.keys()"
    codes = [run.format(words=words.split(), heavy=set(HEAVY)) for words in QUICK]
    assert imported(MAIN.partition(";")[0] + IN_COPIES, "", repr(codes)) == set()


def test_importing_the_package_and_describing_a_recipe_imports_nothing_heavy():
    code = "import vaswani_transformer; dir(vaswani_transformer); vaswani_transformer.UserError"
    assert imported(f"{code}; vaswani_transformer.Recipe(max_steps=3)") == set()


def test_an_exported_model_translates_without_torch(folder, tmp_path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    shutil.copytree(folder, tmp_path / "model")
    change(tmp_path / "model", "generation_config.json", no_repeat_ngram_size=0)  # CTranslate2 does not follow it
    export_model(tmp_path / "model", tmp_path / "exported")
    code = MAIN.replace("main(sys.argv[1:])", "assert main(sys.argv[1:]) == 0")
    assert not imported(code, "translate", str(tmp_path / "exported"), "A dog.") & {"torch", "transformers", "datasets"}
    code = (
        "from vaswani_transformer.export.engine import load_for_decoding\n"
        "from vaswani_transformer.decoding.scoring import score_pairs\n"
        "score_pairs(*load_for_decoding(sys.argv[1]), ['A dog.'], ['Ein Hund.'])"
    )
    assert not imported(code, str(tmp_path / "exported")) & {"torch", "transformers", "datasets"}


LOADS = "assert type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])).__module__.startswith('vaswani_transformer.')"
# Each is run in a copy of a process that has imported nothing of ours nor of transformers' models, whose import ours
# waits for, but what these take long to import.
ORDERS = [
    f"from vaswani_transformer import VaswaniTokenizer\nfrom transformers import AutoModelForSeq2SeqLM\n{LOADS}",
    f"import transformers.trainer, vaswani_transformer\nfrom transformers import AutoModelForSeq2SeqLM\n{LOADS}",
    f"import vaswani_transformer.experiments.translation\nfrom transformers import AutoModelForSeq2SeqLM\n{LOADS}",
    "import vaswani_transformer\nfrom transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
    "assert type(AutoTokenizer.from_pretrained(sys.argv[3])) is vaswani_transformer.VaswaniTokenizer",
    "from transformers import AutoConfig\nimport vaswani_transformer\n"
    "assert type(AutoConfig.from_pretrained(sys.argv[1])) is vaswani_transformer.VaswaniConfig",
    "import vaswani_transformer\nfrom transformers import AutoModelForSeq2SeqLM, AutoTokenizer, AutoModel\n"
    "tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModel))\n"
    f"assert isinstance(model, vaswani_transformer.VaswaniModel) and tokenizer('a').input_ids\n{LOADS}",
    "import pickle, vaswani_transformer\nfrom transformers import AutoModel\n"
    "model = AutoModel.from_config(pickle.loads(pickle.dumps(vaswani_transformer.VaswaniConfig(d_model=16))))\n"
    "assert model._auto_class == 'AutoModel'",
    # Two threads: one meets the auto classes half imported, the other our model.
    "import threading, importlib, vaswani_transformer\n"
    "names = ['transformers.models.auto.modeling_auto', 'vaswani_transformer.model.modeling_vaswani']\n"
    "threads = [threading.Thread(target=importlib.import_module, args=[name]) for name in names]\n"
    "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
    "from transformers import AutoModel\n"
    "AutoModel.from_config(vaswani_transformer.VaswaniConfig(d_model=16))",
]
IMPORTED = """
import accelerate, datasets, huggingface_hub.hf_api, jinja2.meta, PIL.Image, tokenizers, torch._dynamo, transformers
import torch.distributed.checkpoint, torch.distributed.elastic.agent, torch.nn.attention.flex_attention
assert not any(name.startswith(("transformers.models", "vaswani_transformer")) for name in sys.modules)
"""


def test_our_models_load_whichever_is_imported_first(folder, tmp_path):
    backend = load_tokenizer(folder).backend_tokenizer
    VaswaniTokenizer(tokenizer_object=backend, target_tokenizer_object=backend).save_pretrained(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    imported(IMPORTED + IN_COPIES, str(folder), repr(ORDERS), str(tmp_path))


def test_debug_shows_the_traceback_anywhere_on_the_line():
    for words in (["--debug", "recipes", "no-such"], ["recipes", "no-such", "--debug"], ["recipes", "no-such"]):
        command = [sys.executable, "-m", "vaswani_transformer", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: there is no recipe 'no-such'")
        assert ("Traceback" in done.stderr) == ("--debug" in words)
