"""The model that a training begins with: new weights, those of a model folder, or low-rank adapters on these."""

import copy
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, set_seed

from ..data.tokenization import check_tokenizer_matches, has_two_sides, vocabulary_sizes
from ..errors import UserError, reading
from ..evaluation.records import weights_sha256
from ..hardware import accelerator
from ..json_and_yaml import read_json
from ..loading import check_folder, load_model, read_config
from ..model.configuration_vaswani import VaswaniConfig
from ..model.generation_vaswani import MAX_EXTRA_TOKENS
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipes.recipe import AUTO, DROPOUTS, Recipe, model_config
from .run_folder import IMPORT, ORIGIN, VERDICT

SEARCH = {"num_beams": 4, "length_penalty": 0.6, "max_extra_tokens": MAX_EXTRA_TOKENS}  # the paper's, Section 6.1
# All linear layers of encoder and decoder. Embeddings and output projection may be one matrix and stay as they are.
ADAPTED = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
_TUNED = "They were then trained further, as stated below."


def new_model(recipe: Recipe, tokenizer) -> VaswaniForConditionalGeneration:
    """Return a model with initial weights and the recipe's decoding settings.

    Raises:
        UserError: for a tokenizer without the special tokens that the model needs, sizes that no model can have, or an
            attention implementation that is not there.
    """
    if None in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        raise UserError("the tokenizer has no pad or no eos token: use one of `vaswani tokenizer`")
    config: VaswaniConfig = model_config(recipe, len(tokenizer))
    if has_two_sides(tokenizer):
        config.vocab_size, config.decoder_vocab_size = vocabulary_sizes(tokenizer)
        sides = [tokenizer.side(name).get_vocab().items() for name in ("source", "target")]
        names = [{(re.sub("[<\ufff2-\ufff6]", "", token), number) for token, number in side} for side in sides]
        if names[0] != names[1]:  # signs of `sentencepiece_vaswani` aside: a row of one matrix would be two words
            config.share_encoder_decoder_embeddings = False
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    # Marian's vocabularies have no beginning: its decoders start from padding.
    config.decoder_start_token_id = config.pad_token_id if config.bos_token_id is None else config.bos_token_id
    check_tokenizer_matches(tokenizer, config)
    if config.position_encoding == "learned":
        tokenizer.model_max_length = config.max_position_embeddings  # as `truncation=True` needs it
    set_seed(recipe.seed)
    model = VaswaniForConditionalGeneration(config)
    _set_search(model, recipe, **SEARCH, min_new_tokens=1)  # of single words the likeliest output is often empty
    return with_attention(model, recipe)


def model_of_folder(recipe: Recipe, folder: str | Path, weights: bool = True) -> VaswaniForConditionalGeneration:
    """Return the model in a folder, in float32, with the recipe's dropout and adapters.

    Its search stays as it is but for what the recipe sets. The folder may be a checkpoint. Without
    `weights` these are not read.

    Raises:
        UserError: as `load_model`, for learned positions that are fewer than `max_length`, and as `new_model`.
    """
    folder = Path(folder)
    source = load_model(folder, "cpu", "float32")[0] if weights else read_model_of(folder)
    config = copy.deepcopy(source.config)
    config.update({name: value for name in DROPOUTS if (value := getattr(recipe, name)) is not None})
    if config.position_encoding == "learned" and recipe.max_length > config.max_position_embeddings:
        learned = f"{folder} has learned {config.max_position_embeddings} positions"
        raise UserError(f"max_length is {recipe.max_length} and {learned}")
    set_seed(recipe.seed)
    model = VaswaniForConditionalGeneration(config)
    if weights:
        model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    _set_search(model, recipe)
    if recipe.lora_rank is not None:
        add_adapters(model, recipe)
    elif config.decoder_start_token_id == config.pad_token_id:
        # The zero vector that Marian's decoders start from, and without which there is no way back to Marian. Where the
        # output projection is the same matrix the loss would move it.
        model.model.decoder.embed_tokens.weight.register_hook(
            lambda gradient: gradient.index_fill(0, torch.tensor(config.pad_token_id, device=gradient.device), 0)
        )
    return with_attention(model, recipe)


def read_model_of(folder: str | Path) -> VaswaniForConditionalGeneration:
    """Return the model that a folder's configurations describe, on the meta device.

    Raises:
        UserError: for a folder that holds no model of ours; its weights and its tokenizer are not looked at.
    """
    folder = Path(folder)
    check_folder(folder)
    with reading(folder), torch.device("meta"):
        model = VaswaniForConditionalGeneration(read_config(folder))
    path = folder / "generation_config.json"
    if path.is_file():
        read_json(path)  # refuses what transformers lets pass
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _set_search(model: VaswaniForConditionalGeneration, recipe: Recipe, **settings: Any) -> None:
    """Set what the recipe sets of a search, and these where it sets nothing; what is chosen after training stays."""
    config, given = model.generation_config, {name: getattr(recipe, name) for name in SEARCH}
    config.update(**settings | {name: value for name, value in given.items() if value not in (None, AUTO)})
    if recipe.fuzzy_matches:
        config.fuzzy_matches = True  # by which a translator knows that it may show them


def add_adapters(model: VaswaniForConditionalGeneration, recipe: Recipe) -> None:
    """Put low-rank adapters (LoRA) into a model, which alone are trained then; `merged_adapters` takes them out.

    Their scale, alpha over rank, is 2; all else is as PEFT has it.

    Raises:
        UserError: without PEFT, and where FSDP would split what is to be merged.
    """
    with reading("lora_rank needs PEFT (pip install 'vaswani_transformer[finetune]')"):
        from peft import LoraConfig, get_peft_model
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError("lora_rank cannot be used with FSDP: launch with scripts/accelerate/8gpu.yaml")
    rank = recipe.lora_rank
    settings = LoraConfig(task_type="SEQ_2_SEQ_LM", r=rank, lora_alpha=2 * rank, target_modules=ADAPTED)
    model.peft = [get_peft_model(model, settings)]  # in a list, or it would be a part of the model


def merged_adapters(model: VaswaniForConditionalGeneration, recipe: Recipe, folder: Path) -> None:
    """Save a model's adapters into a folder, and add them to its weights, which then have their own names again."""
    [adapted] = model.__dict__.pop("peft")
    adapted.peft_config["default"].base_model_name_or_path = recipe.from_model
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's card has nothing filled in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        adapted.merge_and_unload()


def origin(folder: str | Path) -> dict[str, str]:
    """Return the files by which a run notes the model that it started from: name, hash, languages and import.

    The latter is what `vaswani import` wrote, with licence and languages, for the card of the new model.
    """
    folder = Path(folder)
    facts = {"model": folder.resolve().name, "weights_sha256": weights_sha256(folder)}
    noted = (read_json(folder / name).get("languages") for name in (VERDICT, ORIGIN) if (folder / name).exists())
    facts["languages"] = next(filter(None, noted), [])  # in case the text to train it on names none
    files = {ORIGIN: json.dumps(facts, indent=1) + "\n"}
    if (folder / IMPORT).exists():
        imported = read_json(folder / IMPORT)
        notes = imported.get("notes")
        imported["notes"] = list(dict.fromkeys([*(notes if isinstance(notes, list) else []), _TUNED]))
        files[IMPORT] = json.dumps(imported, indent=2, ensure_ascii=False) + "\n"
    return files


def with_attention(model: VaswaniForConditionalGeneration, recipe: Recipe) -> VaswaniForConditionalGeneration:
    """Return the model with the recipe's attention, compiled if it says so."""
    # On a CPU torch's fused attention is slow backwards for short sequences; eager attention knows no blocks of
    # neighbours.
    automatic = "eager" if accelerator() is None and model.config.attention_window is None else "sdpa"
    attention = automatic if recipe.attention == "auto" else recipe.attention
    with reading(f"attention {attention!r}"):
        model.set_attn_implementation(attention)
    if recipe.compile:  # layers are compiled one by one: cutting their graphs for DDP would gain nothing
        torch._dynamo.config.optimize_ddp = False
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.is_compiled = recipe.compile
    return model
