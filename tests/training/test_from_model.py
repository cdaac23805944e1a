"""Training that starts from a model folder: its weights, tokenizer and search, all weights or adapters (LoRA)."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import finetuning
import pytest
import torch
import yaml
from children import run_on_two_processes
from conftest import TINY_RECIPE, TINY_SIZES, error_of, random_ids, tiny_model
from model_folders import save
from training_runs import equal, log_of, stop_after, weights_of
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

import vaswani_transformer as vt
from vaswani_transformer import train
from vaswani_transformer.cli.main import main
from vaswani_transformer.data.prepare import prepare
from vaswani_transformer.hub.card_facts import facts_of
from vaswani_transformer.hub.model_card import render_card
from vaswani_transformer.recipes.recipe import Recipe, check_recipe
from vaswani_transformer.training import run as training
from vaswani_transformer.training.initial_model import ADAPTED, new_model

pytestmark = pytest.mark.usefixtures("without_pictures")
source = finetuning.folder  # a random model and its tokenizer
EITHER = pytest.mark.parametrize("rank", [None, 2], ids=["weights", "adapters"])


@pytest.fixture
def recipe(source, text, tmp_path):
    fields = {name: value for name, value in TINY_RECIPE.items() if name not in TINY_SIZES}
    places = {"data_dir": str(text), "output": str(tmp_path / "run"), "from_model": str(source)}
    return Recipe(**fields, **places, max_steps=6, evaluate_every=2, average_checkpoints=2, precision="fp32")


def changed(recipe, **fields):
    recipe = dataclasses.replace(recipe, **fields)
    check_recipe(recipe)
    return recipe


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=random_ids(2, 7), decoder_input_ids=random_ids(2, 5, seed=1)).logits


def logged(folder, name: str) -> list[float]:
    return [entry[name] for entry in log_of(folder) if name in entry]


@EITHER
def test_a_training_starts_from_the_given_weights_tokenizer_and_search(source, recipe, text, rank):
    fields = {"lora_rank": rank, "learning_rate_scale": 1e-12, "num_beams": 3, "max_steps": 2}  # nothing changes
    result = train(changed(recipe, **fields), progress=False)
    torch.testing.assert_close(weights_of(result.folder), weights_of(source), rtol=0, atol=1e-7)
    model, tokenizer = vt.load_model(source, device="cpu")
    sides = [(text / f"validation.{side}").read_text().splitlines() for side in ("en", "de")]
    losses, counts = vt.score_pairs(model, tokenizer, *sides)
    assert result.metrics["eval_loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-5)
    loaded, same = vt.load_model(result.folder, device="cpu")
    assert same.get_vocab() == tokenizer.get_vocab()
    own, now = model.generation_config, loaded.generation_config
    assert now.num_beams == 3 and own.num_beams != 3  # the one setting that the recipe has
    assert getattr(now, "max_extra_tokens", None) == getattr(own, "max_extra_tokens", None)
    assert (now.decoder_start_token_id, now.pad_token_id) == (own.decoder_start_token_id, own.pad_token_id)


@EITHER
def test_a_model_that_becomes_worse_is_kept_as_it_was(source, recipe, rank, monkeypatch):
    """It is validated before the first step, and is a checkpoint to choose, but none of those to average."""
    loss = training.VaswaniTrainer.compute_loss

    def unlearned(self, *arguments, **options):
        return loss(self, *arguments, **options) * (-1 if self.model.training else 1)

    monkeypatch.setattr(training.VaswaniTrainer, "compute_loss", unlearned)
    fields = {"lora_rank": rank, "max_steps": 20, "early_stopping": 2, "keep_checkpoints": 1, "average_checkpoints": 9}
    stop_after(2, changed(recipe, **fields))
    result = train(changed(recipe, **fields), progress=False)
    losses = logged(result.folder, "eval_loss")
    assert len(losses) == 3 and losses[0] == min(losses) == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    assert result.steps == 4 and result.kept == "best checkpoint (the model that training started from)"
    assert equal(weights_of(source), weights_of(result.folder))
    fields |= {"keep_weights": "average", "output": f"{recipe.output}2"}
    assert train(changed(recipe, **fields), progress=False).averaged == 2


def test_the_length_penalty_stays_without_beams_or_a_telling_bleu(source, recipe, tmp_path):
    greedy = shutil.copytree(source, tmp_path / "greedy")
    model, _ = vt.load_model(greedy, device="cpu")
    model.generation_config.update(num_beams=1, length_penalty=None)
    model.generation_config.save_pretrained(greedy)
    fields = {"from_model": str(greedy), "max_steps": 1, "evaluate_every": 1, "validation_bleu": 4}
    for number, beams in enumerate([None, 2]):
        fields |= {"length_penalty": "auto", "num_beams": beams, "output": str(tmp_path / str(number))}
        search = GenerationConfig.from_pretrained(train(changed(recipe, **fields), progress=False).folder)
        assert (search.num_beams or 1) == (beams or 1) and search.length_penalty is None  # its own


def test_all_weights_learn_with_the_recipes_dropout(source, recipe):
    fields = {"dropout": 0.25, "attention_dropout": 0.1, "max_steps": 8, "evaluate_every": 4}
    result = train(changed(recipe, learning_rate_scale=0.1, **fields), progress=False)
    losses = logged(result.folder, "eval_loss")
    assert losses[-1] < losses[0]
    before, after = weights_of(source), weights_of(result.folder)
    assert not [name for name in before if torch.equal(before[name], after[name])]
    config, own = (json.loads((folder / "config.json").read_text()) for folder in (result.folder, source))
    dropouts = {"dropout": 0.25, "attention_dropout": 0.1}
    changes = {name: config[name] for name in own if own[name] != config[name]}
    assert changes.items() >= dropouts.items()
    assert changes.keys() <= {"transformers_version", "label_smoothing", *dropouts}


CONFIGURATIONS = {
    "paper": {},
    "three matrices": {"tie_word_embeddings": False, "attention_bias": True, "output_bias": True}
    | {"add_final_layer_norm": True, "position_encoding": "learned", "max_position_embeddings": 128},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_adapters_alone_are_trained_merged_and_saved(source, recipe, tmp_path, name):
    peft = pytest.importorskip("peft")
    _, tokenizer = vt.load_model(source, device="cpu")
    base = tiny_model(seed=3, vocab_size=len(tokenizer), **CONFIGURATIONS[name])
    save(tmp_path / "base", base, tokenizer)
    fields = {"from_model": str(tmp_path / "base"), "lora_rank": 4, "learning_rate_scale": 2.0, "max_steps": 2}
    fields["keep_weights"] = "last"  # the best may be the model as it was
    result = train(changed(recipe, **fields), progress=False)
    before, after = weights_of(tmp_path / "base"), weights_of(result.folder)
    assert before.keys() == after.keys()
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert different == {name for name in before if name.split(".")[-2] in ADAPTED and name.endswith("weight")}
    merged, _ = vt.load_model(result.folder, device="cpu")
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    expected = logits_of(peft.PeftModel.from_pretrained(plain, result.folder / "adapter"))
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (logits_of(base) - expected).abs().max() > 0.01
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (result.folder / "adapter").iterdir()) == names
    optimizer = torch.load(max((result.folder / "checkpoints").glob("checkpoint-*/optimizer.pt")), weights_only=True)
    trained = sum(state["exp_avg"].numel() for state in optimizer["state"].values())
    shapes = [weight.shape for name, weight in before.items() if name in different]
    assert trained == sum(4 * (rows + columns) for rows, columns in shapes)


def test_the_zero_vector_that_a_decoder_starts_from_stays_zero(source, recipe, tmp_path):
    """As in Marian, whose `.npz` has no row for it; output projection and embeddings are one matrix."""
    _, tokenizer = vt.load_model(source, device="cpu")
    pad = tokenizer.pad_token_id
    base = tiny_model(vocab_size=len(tokenizer), decoder_start_token_id=pad)
    base.model.shared.weight.data[pad] = 0
    save(tmp_path / "base", base, tokenizer)
    folder = train(changed(recipe, from_model=str(tmp_path / "base"), max_steps=2), progress=False).folder
    before, after = (weights_of(where)["model.shared.weight"] for where in (tmp_path / "base", folder))
    assert not after[pad].any() and (after != before).any(dim=1).sum() == len(before) - 1


@pytest.mark.parametrize(("rank", "prepared"), [(None, False), (2, True)], ids=["weights", "prepared-adapters"])
def test_a_run_resumes_without_the_model_that_it_started_from(source, recipe, tmp_path, rank, prepared):
    shutil.copytree(source, tmp_path / "base")
    recipe = changed(recipe, from_model=str(tmp_path / "base"), lora_rank=rank, dropout=0.2)
    if prepared:
        prepare(recipe, tmp_path / "prepared", progress=False)
        recipe = changed(recipe, prepared=str(tmp_path / "prepared"))
    straight = train(changed(recipe, output=str(tmp_path / "straight")), progress=False)
    stop_after(3, recipe)
    shutil.rmtree(tmp_path / "base")
    result = train(recipe, progress=False)
    assert equal(weights_of(straight.folder), weights_of(result.folder))
    notes = [json.loads((folder / "started_from.json").read_text()) for folder in (straight.folder, result.folder)]
    assert notes[0] == notes[1] and notes[0]["model"] == "base" and len(notes[0]["weights_sha256"]) == 64
    assert (result.folder / "adapter").is_dir() == (rank is not None)


def test_the_model_that_a_training_starts_from_is_not_replaced(source, recipe, tmp_path):
    base = Path(shutil.copytree(source, tmp_path / "base"))
    shutil.copytree(source, base / "checkpoints" / "checkpoint-2")
    for start in (base, base / "checkpoints" / "checkpoint-2"):
        other = changed(recipe, from_model=str(start), output=str(base / "." / "checkpoints" / ".."), overwrite=True)
        assert f"is where the model {start} lies" in error_of(train, other, progress=False)
    assert equal(weights_of(base), weights_of(source))


def test_another_start_or_rank_is_refused_on_resume(source, recipe, tmp_path):
    base = shutil.copytree(source, tmp_path / "base")
    stop_after(3, changed(recipe, num_beams=8))
    assert "num_beams: None, was 8" in error_of(train, recipe, progress=False)  # the model has 8 now, not its own
    assert f"from_model: {base}, was {source}" in error_of(train, changed(recipe, from_model=str(base)), progress=False)
    assert "lora_rank: 2, was None" in error_of(train, changed(recipe, lora_rank=2), progress=False)


def test_what_adapters_leave_is_no_model_and_is_removed_by_overwriting(recipe, tmp_path):
    pytest.importorskip("peft")
    recipe = changed(recipe, max_steps=2, evaluate_every=1)
    folder = Path(train(changed(recipe, lora_rank=2), progress=False).folder)
    checkpoints = sorted((folder / "checkpoints").glob("checkpoint-*"))
    assert "missing weights" in error_of(vt.average_models, checkpoints, tmp_path / "mean")
    assert "missing weights" in error_of(vt.load_model, checkpoints[0])
    (folder / "adapter" / "mine.txt").write_text("mine")
    train(changed(recipe, from_model=None, **TINY_SIZES | {"vocab_size": 300}, overwrite=True), progress=False)
    assert [path.name for path in (folder / "adapter").iterdir()] == ["mine.txt"]
    assert not (folder / "started_from.json").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 32}, "d_model is 32 and a model to start from is given"),
        ({"preset": "big"}, "preset is 'big' and"),
        ({"tokenizer_kind": "wordpiece"}, "leave tokenizer_kind out (the recipe `finetune` does), or --from"),
        ({"from_model": None, "lora_rank": 4}, "lora_rank is 4 and there is no model to adapt: give --from FOLDER too"),
    ],
)
def test_fields_that_the_model_decides_are_refused(recipe, fields, message):
    assert message in error_of(check_recipe, dataclasses.replace(recipe, **fields))


def test_the_recipe_is_then_finetune(monkeypatch):
    seen = []
    monkeypatch.setattr("vaswani_transformer.training.run.train", lambda recipe, progress: seen.append(recipe))
    monkeypatch.setattr("vaswani_transformer.cli.train._print_trained", print)
    for more in ([], ["--from", "runs/other"]):
        assert main(["train", "--train-data", "mine.tsv", "--output", "runs/mine", *more]) == 0
    assert [(recipe.max_steps, recipe.from_model) for recipe in seen] == [("auto", None), (2000, "runs/other")]


def test_folders_that_are_no_models_of_ours_are_refused(source, recipe, tmp_path):
    def refused(name):
        message = error_of(train, changed(recipe, from_model=str(tmp_path / name)), progress=False)
        assert not Path(recipe.output).exists()
        return message

    assert "there is no model folder" in refused("nowhere")
    shutil.copytree(source, tmp_path / "bart")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "bart"}
    (tmp_path / "bart" / "config.json").write_text(json.dumps(config))
    assert "holds a 'bart' model" in refused("bart")


def test_learned_positions_limit_the_length(source, recipe, tmp_path):
    _, tokenizer = vt.load_model(source, device="cpu")
    learned = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=40)
    base = save(tmp_path / "learned", learned, tokenizer)
    assert "max_length is 60" in error_of(train, changed(recipe, from_model=str(base)), progress=False)
    new_model(changed(Recipe(), preset="table3-e-learned-positions", vocab_size=len(tokenizer)), tokenizer)
    assert len(tokenizer("a " * 5000, truncation=True).input_ids) == tokenizer.model_max_length == 1024


def test_a_process_that_is_not_told_its_gpu_is_not_alone(monkeypatch):
    """accelerate takes it for a run of its own, which would write into the folder of the others."""
    monkeypatch.setattr(training, "PartialState", lambda **_: SimpleNamespace(num_processes=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "set LOCAL_RANK too" in error_of(training.join_process_group, Recipe())
    monkeypatch.setenv("WORLD_SIZE", "1")
    training.join_process_group(Recipe())


def test_adapters_and_fsdp_are_refused(recipe, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(training, "join_process_group", lambda recipe: None)
    assert "lora_rank cannot be used with FSDP" in error_of(train, changed(recipe, lora_rank=2), progress=False)


def test_the_card_names_the_model_that_was_started_from(source, recipe, tmp_path):
    shutil.copytree(source, tmp_path / "opus")
    imported = {"toolkit": "Marian", "source": "owner/name", "license": "apache-2.0", "notes": ["As it was."]}
    (tmp_path / "opus" / "import.json").write_text(json.dumps(imported))
    (tmp_path / "opus" / "verdict.json").write_text('{"languages": ["pt", "fr"]}')
    folder = train(changed(recipe, from_model=str(tmp_path / "opus"), max_steps=2), progress=False).folder
    assert json.loads((folder / "started_from.json").read_text())["languages"] == ["pt", "fr"]
    carried = json.loads((folder / "import.json").read_text())
    assert carried.pop("notes") == ["As it was.", "They were then trained further, as stated below."]
    assert carried.items() <= imported.items()
    card = render_card(facts_of(vt.load_model(folder, device="cpu")[0], "me/mine", folder))
    assert re.search(r"\| from_model \| opus \|", card) and str(tmp_path) not in card


@pytest.mark.slow
def test_adapters_on_two_processes_are_those_of_one(recipe, tmp_path):
    recipe = changed(recipe, lora_rank=2, tokens_per_device=300, dropout=0.0, learning_rate_scale=0.1)
    one = train(recipe, progress=False).folder
    path, output = tmp_path / "two.yaml", tmp_path / "two"
    path.write_text(yaml.safe_dump(dataclasses.asdict(recipe) | {"output": str(output)}))
    run_on_two_processes("train", path, "--quiet")
    assert (output / "adapter" / "adapter_config.json").is_file()
    torch.testing.assert_close(weights_of(one), weights_of(output), rtol=0, atol=1e-4)
