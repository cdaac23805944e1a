"""How far models that `vaswani import` writes are from the programs that they come from, as rows of a Markdown table.

    python scripts/import_differences.py [--only NAME] [--sentences 200]

For each format a random model is made in its own program, imported, and run beside it on random sentences: the largest
difference of a logit, and how many outputs of greedy and of beam search are the same. A format is one function of
`FORMATS`, which makes the source in a folder and returns an `Original`.
"""

import argparse
import json
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration, MarianConfig, MarianMTModel, PreTrainedModel

from vaswani_transformer import VaswaniForConditionalGeneration, import_model

LONGEST = 16  # tokens of a sentence
BEAMS = 4
SEARCHES = {"greedy": 1, "beam": BEAMS}


@dataclass
class Original:
    """A random model in the program that it comes from."""

    name: str  # a row's
    #: `(sentences, source tokens)` ids, their mask, and `(sentences, target tokens)` decoder ids to logits.
    logits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    #: ids, their mask and a number of beams to `(sentences, tokens)` outputs, with the decoder's start.
    search: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    source: Path  # what `import_model` is given
    options: dict = field(default_factory=dict)  # and its options
    search_options: dict = field(default_factory=dict)  # for our search, of what the source does not say


def randomize(model: torch.nn.Module, seed: int, scale: float = 1.3) -> None:
    """Random weights of every kind, biases and gains too, with which outputs depend on inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "embed_positions" in name:
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter.copy_(0.1 * noise + (1 if "norm" in name and name.endswith("weight") else 0))
            else:
                parameter.copy_(noise * scale / parameter.shape[1] ** 0.5)


def of_transformers(
    name: str, model: PreTrainedModel, folder: Path, dtype: torch.dtype, options: dict | None = None
) -> Original:
    """A model of transformers, saved in a folder."""
    model = model.to(dtype).eval()
    model.save_pretrained(folder)

    def logits(ids, mask, decoder_ids):
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False).logits

    def search(ids, mask, beams):
        return model.generate(ids, attention_mask=mask, num_beams=beams)

    return Original(name, logits, search, folder, options or {})


def marianmt(folder: Path, dtype: torch.dtype, positions: str = "transformers", **changes) -> Original:
    """`MarianMTModel`, which for Marian's own positions is given Marian's table, epsilon and bias of padding."""
    sizes = {"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_ffn_dim": 40, f"{stack}_attention_heads": 4}
    pad = min(changes.get("decoder_vocab_size", 61), 61) - 1
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    config = MarianConfig(**{**sizes, **ids, "activation_function": "swish", "scale_embedding": True, **changes})
    model = MarianMTModel(config)
    randomize(model, 1)
    with torch.no_grad():
        for matrix in (model.get_input_embeddings().weight, model.model.decoder.embed_tokens.weight):
            matrix[pad] = 0
        generator = torch.Generator().manual_seed(2)
        model.final_logits_bias.copy_(torch.randn(1, len(model.lm_head.weight), generator=generator))
    model.generation_config.update(num_beams=BEAMS, max_length=20, bad_words_ids=[[pad]])
    write_marian_tokenizer(folder, config)
    name = f"`MarianMTModel`, positions of {'Marian' if positions == 'marian' else positions}"
    original = of_transformers(name, model, folder, dtype, {"positions": positions})
    if positions == "marian":  # after it was saved
        give_marians_arithmetic(model, pad)
    return original


def give_marians_arithmetic(model: MarianMTModel, pad: int) -> None:
    """What Marian computes with the weights of a `MarianMTModel`."""
    half = model.config.d_model // 2
    for stack in (model.model.encoder, model.model.decoder):
        table = stack.embed_positions.weight
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
        angles = torch.arange(len(table), dtype=torch.float64)[:, None] * rates
        table.data.copy_(torch.cat([angles.sin(), angles.cos()], dim=1).float())  # as Marian does
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    model.final_logits_bias[0, pad] = -1e4


def separate_marianmt(folder: Path, dtype: torch.dtype) -> Original:
    """With two vocabularies."""
    original = marianmt(folder, dtype, decoder_vocab_size=53, share_encoder_decoder_embeddings=False)
    original.name += ", two vocabularies"
    return original


def marian_positions(folder: Path, dtype: torch.dtype) -> Original:
    """With Marian's positions."""
    return marianmt(folder, dtype, positions="marian")


def fairseq(folder: Path, dtype: torch.dtype) -> Original:
    """A checkpoint of fairseq's `transformer`, computed by FSMT, whose weights are fairseq's under other names.

    It has two vocabularies; decoder input and output are one matrix.
    """
    sizes = {"src_vocab_size": 61, "tgt_vocab_size": 53, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_ffn_dim": 40, f"{stack}_attention_heads": 4}
    model = FSMTForConditionalGeneration(FSMTConfig(**sizes, langs=["de", "en"]))
    randomize(model, 3)
    with torch.no_grad():
        for matrix in (model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight):
            matrix[model.config.pad_token_id] = 0
        model.model.decoder.output_projection.weight.copy_(model.model.decoder.embed_tokens.weight)
    original = of_transformers("fairseq, computed by FSMT", model, folder / "fsmt", dtype)
    state = {
        name.removeprefix("model."): tensor for name, tensor in model.state_dict().items() if "positions" not in name
    }
    heads = {f"{stack}_attention_heads": model.config.encoder_attention_heads for stack in ("encoder", "decoder")}
    languages = {"source_lang": "de", "target_lang": "en"}
    args = argparse.Namespace(arch="transformer", share_decoder_input_output_embed=True, **heads, **languages)
    torch.save({"args": args, "model": state}, folder / "model.pt")
    for language, size in (("de", model.config.src_vocab_size), ("en", model.config.tgt_vocab_size)):
        (folder / f"dict.{language}.txt").write_text("".join(f"word{number} 1\n" for number in range(size - 4)))

    def search(ids, mask, beams):
        # Never padding, and no limit but this one, as fairseq.
        limits = {"max_length": 20, "forced_eos_token_id": None, "suppress_tokens": [1], "length_penalty": 1.0}
        return model.generate(ids, attention_mask=mask, num_beams=beams, **limits)

    options = {"max_length": 20, "max_extra_tokens": None}
    return Original(original.name, original.logits, search, folder / "model.pt", search_options=options)


DOUBLE, SINGLE = torch.float64, torch.float32
#: Functions and the types of numbers that they are asked for.
FORMATS = {
    marianmt: (DOUBLE, SINGLE),
    separate_marianmt: (DOUBLE, SINGLE),
    marian_positions: (DOUBLE, SINGLE),
    fairseq: (SINGLE,),  # FSMT's mask is not made for others
}


# The least that the tokenizers of these folders consist of


def letters(count: int) -> list[str]:
    """So many different tokens."""
    return [f"▁{chr(ord('a') + number)}" if number < 26 else f"x{number}" for number in range(count)]


def _field(number: int, kind: int, content: bytes) -> bytes:
    return bytes([number << 3 | kind]) + (bytes([len(content)]) if kind == 2 else b"") + content


def sentencepiece_model(pieces: Iterable[str]) -> bytes:
    """A .spm file: a message of protocol buffers, with `<unk>`, `<s>`, `</s>` and the given pieces."""
    kinds = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((piece, 1) for piece in pieces)]
    message = b""
    for number, (piece, kind) in enumerate(kinds):
        score = struct.pack("<f", -float(number))
        message += _field(1, 2, _field(1, 2, piece.encode()) + _field(2, 5, score) + _field(3, 0, bytes([kind])))
    return message + _field(2, 2, _field(3, 0, b"\1")) + _field(3, 2, _field(1, 2, b"identity"))


def write_marian_tokenizer(folder: Path, config: MarianConfig) -> None:
    """The files of a `MarianTokenizer` with the sizes and ids of a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"source.spm": config.vocab_size, "target.spm": config.decoder_vocab_size}
    names = {"source.spm": "vocab.json", "target.spm": "target_vocab.json"}
    if config.share_encoder_decoder_embeddings:
        del names["target.spm"]
    for name, size in sizes.items():
        tokens = letters(size)
        (folder / name).write_bytes(sentencepiece_model(tokens))
        if name in names:
            tokens = ["</s>", "<unk>", *(token for token in tokens)]
            ids = {}
            for token in tokens:
                if len(ids) == config.pad_token_id:
                    ids["<pad>"] = config.pad_token_id
                if len(ids) < size:
                    ids[token] = len(ids)
            (folder / names[name]).write_text(json.dumps(ids), encoding="utf-8")
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": "fr", "target_lang": "en"}
    settings["separate_vocabs"] = not config.share_encoder_decoder_embeddings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


# The comparison


def random_batch(model: VaswaniForConditionalGeneration, sentences: int) -> tuple[torch.Tensor, ...]:
    """Ids, mask and decoder ids of random sentences that end with the end token and padding."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    special = {config.pad_token_id, config.eos_token_id}
    known = torch.tensor(
        [number for number in range(4, min(config.vocab_size, config.target_vocab_size)) if number not in special]
    )
    ids = known[torch.randint(len(known), (sentences, LONGEST), generator=generator)]
    lengths = torch.randint(2, LONGEST, (sentences, 1), generator=generator)
    places = torch.arange(LONGEST)
    ids = ids.masked_fill(places == lengths, config.eos_token_id).masked_fill(places > lengths, config.pad_token_id)
    decoder_ids = known[torch.randint(len(known), (sentences, LONGEST), generator=generator)]
    decoder_ids[:, 0] = config.decoder_start_token_id
    return ids, (places <= lengths).long(), decoder_ids


def same(one: torch.Tensor, other: torch.Tensor, pad: int) -> int:
    """How many rows are the same but for padding at their ends."""
    width = max(one.shape[1], other.shape[1])
    one, other = (torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=pad) for rows in (one, other))
    return int((one == other).all(dim=1).sum())


@torch.no_grad()
def compare(original: Original, output: Path, sentences: int, searches: dict[str, int] = SEARCHES) -> dict[str, float]:
    """Import a source, and compare it with the original; `searches` are names and numbers of beams."""
    import_model(original.source, output, **original.options)
    model = VaswaniForConditionalGeneration.from_pretrained(output).eval()
    ids, mask, decoder_ids = random_batch(model, sentences)
    expected = original.logits(ids, mask, decoder_ids)
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
    certain = expected.abs() < 1e3  # but the bias of what has no probability
    result = {"difference": float((logits - expected).abs().max()), "largest": float(expected[certain].abs().max())}
    for name, beams in searches.items():
        outputs = model.generate(ids, attention_mask=mask, num_beams=beams, **original.search_options)
        result[name] = same(outputs, original.search(ids, mask, beams), model.config.pad_token_id)
        result[f"{name}_different"] = len({tuple(row) for row in outputs.tolist()})
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=[format.__name__ for format in FORMATS])
    parser.add_argument("--sentences", type=int, default=200)
    arguments = parser.parse_args()
    print("| source | numbers | largest difference of a logit | of logits up to | greedy the same | beam the same |")
    print("|---|---|---|---|---|---|")
    for format, dtypes in FORMATS.items():
        for dtype in dtypes if arguments.only in (None, format.__name__) else ():
            with tempfile.TemporaryDirectory() as folder:
                original = format(Path(folder) / "source", dtype)
                result = compare(original, Path(folder) / "output", arguments.sentences)
            row = [original.name, str(dtype).removeprefix("torch."), f"{result['difference']:.1e}"]
            row += [f"{result['largest']:.1f}", *(f"{result[name]} of {arguments.sentences}" for name in SEARCHES)]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
