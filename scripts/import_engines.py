"""Four engines for one model of Marian's: Marian itself, this package, transformers and CTranslate2.

What `scripts/import_measurements.py` and `scripts/benchmarks/import_speed.py` have in common. Each engine is
made from Marian's own `.npz`:

- Marian translates in a Python of its own (`pip install pymarian==1.12.42`), int8 by a file that its converter makes;
- ours is the folder that `vaswani import` wrote;
- transformers' `MarianMTModel` is made here as transformers' own conversion of OPUS-MT made those on the Hub: a padding
  entry with a row of zeros and no output bias is added, which `generate()` may not choose;
- CTranslate2's own `MarianConverter` runs on a copy of the `.npz` whose embedded options end in one NUL instead of the
  several of Marian 1.12, at which it would stop, with a vocabulary in YAML written from the tokenizer.

All search with the same beam, scores logP / |Y|^alpha (|Y| counts the end token), the unknown token ruled out and up to
MAX_TOKENS output tokens. Positions are either "marian", what Marian computes, or "transformers", what transformers and
CTranslate2 compute for models of Marian; both may be had from each engine but Marian.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import yaml
from transformers import AutoTokenizer, MarianConfig, MarianMTModel

from vaswani_transformer import Translator, VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.data.batching import batches_by_length
from vaswani_transformer.decoding.cpu_inference import prepare_for_inference
from vaswani_transformer.decoding.scoring import score_ids

MAX_TOKENS, SENTENCES_PER_BATCH, TOKENS_PER_BATCH = 300, 32, 512
OPTIONS = "special:model.yml"  # the array of an .npz in which Marian keeps its options, as bytes
OUR_POSITIONS = {"marian": "sinusoidal-tensor2tensor", "transformers": "sinusoidal-halves"}

_SERVER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Marian prints there too
import _pymarian
translators = {}
for line in sys.stdin:
    options, lines, changed = json.loads(line)
    if options not in translators:
        translators[options] = _pymarian.Translator(options)
    print(json.dumps(translators[options].translate(lines, **changed)), file=answers, flush=True)
"""
_COMMAND = "import _pymarian, sys; sys.exit(_pymarian.main(sys.argv[1:]))"


class MarianEngine:
    """Marian, in a process of the Python that has pymarian."""

    def __init__(self, python: str, model: Path, vocabulary: Path, threads: int = 1, alpha: float = 1.0):
        self.python, self.model, self.vocabulary, self.threads, self.alpha = python, model, vocabulary, threads, alpha
        # Threads are Marian's own workers; each must not start others.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment = kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.server = subprocess.Popen(
            [python, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8", env=self.environment,
        )  # fmt: skip

    def _command(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.python, "-c", _COMMAND, *arguments], capture_output=True, text=True, env=self.environment
        )
        if done.returncode:
            raise RuntimeError(f"Marian failed: {done.stderr[-2000:]}")
        return done.stdout

    def int8(self, folder: Path, kind: str = "intgemm8") -> "MarianEngine":
        """The same model with 8-bit matrix products of a kind that Marian knows, converted into `folder`."""
        path = folder / f"{kind}.bin"
        self._command("convert", "--from", str(self.model), "--to", str(path), "--gemm-type", kind)
        return MarianEngine(self.python, path, self.vocabulary, self.threads, self.alpha)

    def translate(self, lines: list[str], beams: int, **changed) -> list[str]:
        """One translation a line. `changed` are options of Marian in place of those below, such as `mini_batch=8`."""
        options = (
            f"--models {self.model} --vocabs {self.vocabulary} {self.vocabulary}"
            f" --normalize {self.alpha} --max-length 1000 --mini-batch {SENTENCES_PER_BATCH}"
            f" --maxi-batch 100 --maxi-batch-sort src --cpu-threads {self.threads} --workspace 512 --quiet"
        )
        changed = {name.replace("_", "-"): value for name, value in {"beam_size": beams, **changed}.items()}
        self.server.stdin.write(json.dumps([options, lines, changed]) + "\n")
        self.server.stdin.flush()
        if not (answer := self.server.stdout.readline()):
            raise RuntimeError(f"Marian ended with status {self.server.wait()}")
        return json.loads(answer)

    def score(self, sources: list[str], targets: list[str]) -> list[float]:
        """Log-probability of each target given its source, the end token counted."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("source", "target")]
            for path, lines in zip(paths, (sources, targets), strict=True):
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            vocabularies = [str(self.vocabulary)] * 2
            output = self._command(
                "score", "--model", str(self.model), "--vocabs", *vocabularies, "--train-sets", *map(str, paths),
                "--cpu-threads", "1", "--workspace", "512", "--mini-batch", "16", "--max-length", "1000", "--quiet",
            )  # fmt: skip
        return [float(line) for line in output.split()]

    def close(self) -> None:
        """End the process."""
        self.server.stdin.close()
        self.server.wait()


class OurEngine:
    """The imported folder, as `Translator` and `score_ids` run it."""

    def __init__(self, folder: Path, positions: str = "marian", precision: str | None = None, alpha: float = 1.0):
        config = VaswaniConfig.from_pretrained(folder)
        config.position_encoding = OUR_POSITIONS[positions]
        model = VaswaniForConditionalGeneration.from_pretrained(folder, config=config).eval()
        self.model = prepare_for_inference(model, precision) if precision else model
        self.tokenizer, self.alpha = AutoTokenizer.from_pretrained(folder), alpha

    def translate(self, lines: list[str], beams: int) -> list[str]:
        """One translation a line."""
        translator = Translator(
            self.model, self.tokenizer, TOKENS_PER_BATCH, num_beams=beams, length_penalty=self.alpha,
            length_normalization="power", max_new_tokens=MAX_TOKENS,
        )  # fmt: skip
        return list(translator.translate(lines))

    def token_scores(self, sources: list[str], targets: list[str]) -> list[list[float]]:
        """Log-probability of each token of each target."""
        target_ids = self.tokenizer(text_target=targets)["input_ids"]
        return score_ids(self.model, self.tokenizer(sources)["input_ids"], target_ids)

    def score(self, sources: list[str], targets: list[str]) -> list[float]:
        """Log-probability of each target."""
        return [sum(row) for row in self.token_scores(sources, targets)]


class TransformersEngine:
    """transformers' `MarianMTModel` with the weights of the `.npz`."""

    def __init__(self, npz: Path, tokenizer, positions: str = "transformers", pad_bias: float = 0.0, alpha: float = 1):
        self.model, self.tokenizer, self.alpha = marian_mt_model(npz, pad_bias), tokenizer, alpha
        if positions == "marian":
            for stack in (self.model.model.encoder, self.model.model.decoder):
                table = stack.embed_positions.weight
                table.data.copy_(torch.from_numpy(marian_positions(*table.shape)))

    @torch.no_grad()
    def translate(self, lines: list[str], beams: int) -> list[str]:
        """One translation a line."""
        ids, outputs = self.tokenizer(lines)["input_ids"], [""] * len(lines)
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        for start in range(0, len(order), SENTENCES_PER_BATCH):
            indices = order[start : start + SENTENCES_PER_BATCH]
            batch = self._padded([ids[index] for index in indices])
            rows = self.model.generate(
                **batch, num_beams=beams, do_sample=False, length_penalty=self.alpha, max_new_tokens=MAX_TOKENS
            )
            for index, text in zip(indices, self.tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True):
                outputs[index] = text
        return outputs

    def _padded(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        return self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")

    @torch.no_grad()
    def score(self, sources: list[str], targets: list[str]) -> list[float]:
        """Log-probability of each target."""
        source_ids = self.tokenizer(sources)["input_ids"]
        target_ids = self.tokenizer(text_target=targets)["input_ids"]
        scores = [0.0] * len(sources)
        lengths = [max(map(len, pair)) for pair in zip(source_ids, target_ids, strict=True)]
        for indices in batches_by_length(lengths, 2048):
            batch = self._padded([source_ids[index] for index in indices])
            target = self._padded([target_ids[index] for index in indices])
            labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
            losses = torch.nn.functional.cross_entropy(
                self.model(**batch, labels=labels).logits.transpose(1, 2), labels, reduction="none"
            )
            for index, loss in zip(indices, losses.sum(dim=1).tolist(), strict=True):
                scores[index] = -loss
        return scores


class CTranslate2Engine:
    """CTranslate2 with what its own `MarianConverter` makes of the `.npz`."""

    def __init__(
        self, npz: Path, tokenizer, folder: Path, positions: str = "transformers", precision: str = "float32",
        threads: int = 1, alpha: float = 1.0,
    ):  # fmt: skip
        import ctranslate2

        self.tokenizer, self.alpha = tokenizer, alpha
        output = folder / f"ctranslate2-{positions}"
        if not output.exists():
            _convert_to_ctranslate2(npz, tokenizer, output, positions)
        self.translator = ctranslate2.Translator(str(output), compute_type=precision, intra_threads=threads)

    def translate(self, lines: list[str], beams: int) -> list[str]:
        """One translation a line."""
        results = self.translator.translate_batch(
            pieces(self.tokenizer, lines), beam_size=beams, length_penalty=self.alpha, disable_unk=True,
            max_batch_size=SENTENCES_PER_BATCH, max_decoding_length=MAX_TOKENS,
        )  # fmt: skip
        rows = [self.tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def score(self, sources: list[str], targets: list[str]) -> list[float]:
        """Log-probability of each target, the end token counted."""
        tokens = pieces(self.tokenizer, sources), pieces(self.tokenizer, targets)
        return [sum(result.log_probs) for result in self.translator.score_batch(*tokens, max_batch_size=32)]


def pieces(tokenizer, lines: list[str]) -> list[list[str]]:
    """Subwords of each line, without the end token."""
    return [tokenizer.convert_ids_to_tokens(ids[:-1]) for ids in tokenizer(lines)["input_ids"]]


def marian_positions(rows: int, width: int) -> np.ndarray:
    """Marian's sinusoids `(rows, width)`: sines, then cosines, of frequencies 10000^(-i / (width / 2 - 1)).

    Source: `sinusoidalPositionEmbeddings` in Marian's `src/graph/node_initializers.cpp`.
    """
    half = width // 2
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _arrays(npz: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and options of a model of Marian's."""
    with np.load(npz, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return arrays, yaml.safe_load(arrays[OPTIONS].tobytes().rstrip(b"\0"))


def marian_mt_model(npz: Path, pad_bias: float = 0.0) -> MarianMTModel:
    """`MarianMTModel` with the weights of an `.npz` (one vocabulary, all embeddings tied), and transformers' positions.

    The padding entry follows the vocabulary, as in the conversion of OPUS-MT; `pad_bias` is its output bias, 0 there.
    """
    arrays, options = _arrays(npz)
    pad, width = arrays["Wemb"].shape
    model = MarianMTModel(
        MarianConfig(
            vocab_size=pad + 1, d_model=width, encoder_layers=options["enc-depth"], decoder_layers=options["dec-depth"],
            encoder_attention_heads=options["transformer-heads"], decoder_attention_heads=options["transformer-heads"],
            encoder_ffn_dim=options["transformer-dim-ffn"], decoder_ffn_dim=options["transformer-dim-ffn"],
            activation_function={"swish": "silu"}.get(*[options["transformer-ffn-activation"]] * 2),
            scale_embedding=True, max_position_embeddings=1024, pad_token_id=pad, decoder_start_token_id=pad,
            eos_token_id=0, forced_eos_token_id=None,
        )
    ).eval()  # fmt: skip
    weights = {"model.shared.weight": np.concatenate([arrays["Wemb"], np.zeros((1, width), np.float32)])}
    weights["final_logits_bias"] = np.append(arrays["decoder_ff_logit_out_b"], np.float32(pad_bias))[None]
    for theirs, ours in _layer_names(options):
        array = arrays[theirs]
        is_matrix = ours.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))
        weights[ours] = array.T if is_matrix else array[0]  # Marian's vectors are matrices of one row
    missing, unknown = model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()}, False)
    known = ("embed_positions.weight", "embed_tokens.weight", "lm_head.weight")  # computed, or tied
    if unknown or not all(name.endswith(known) for name in missing):
        raise RuntimeError(f"weights do not fit MarianMTModel: {missing} missing, {unknown} unknown")
    model.tie_weights()
    model.generation_config.bad_words_ids = [[pad]]
    model.generation_config.suppress_tokens = [1]  # <unk>, which Marian rules out
    return model


def _layer_names(options: dict) -> Iterator[tuple[str, str]]:
    """Names of Marian's parameters of both stacks, with MarianMTModel's."""
    parts = {"ffn_W1": "fc1.weight", "ffn_b1": "fc1.bias", "ffn_W2": "fc2.weight", "ffn_b2": "fc2.bias"}
    norms = {"ffn_ffn": "final_layer_norm"}
    for theirs, ours in (("self", "self_attn"), ("context", "encoder_attn")):
        norms[f"{theirs}_Wo"] = f"{ours}_layer_norm"
        for letter, projection in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
            parts |= {f"{theirs}_W{letter}": f"{ours}.{projection}.weight"}
            parts |= {f"{theirs}_b{letter}": f"{ours}.{projection}.bias"}
    parts |= {f"{theirs}_ln_scale": f"{ours}.weight" for theirs, ours in norms.items()}
    parts |= {f"{theirs}_ln_bias": f"{ours}.bias" for theirs, ours in norms.items()}
    for stack, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        for layer in range(depth):
            for theirs, ours in parts.items():
                if stack == "decoder" or not theirs.startswith("context"):
                    yield f"{stack}_l{layer + 1}_{theirs}", f"model.{stack}.layers.{layer}.{ours}"


def _convert_to_ctranslate2(npz: Path, tokenizer, output: Path, positions: str) -> None:
    """CTranslate2's own conversion; with Marian's positions by replacing the one function that computes them."""
    from ctranslate2.converters import MarianConverter, marian

    arrays, _ = _arrays(npz)
    ended_once = arrays[OPTIONS].tobytes().rstrip(b"\0") + b"\0"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as changes:
        copy, vocabulary = Path(folder) / "model.npz", Path(folder) / "vocabulary.yml"
        np.savez(copy, **(arrays | {OPTIONS: np.frombuffer(ended_once, arrays[OPTIONS].dtype)}))
        tokens = tokenizer.convert_ids_to_tokens(range(len(arrays["Wemb"])))
        quoted = (token.replace("\\", "\\\\").replace('"', '\\"') for token in tokens)
        vocabulary.write_text("".join(f'"{token}": {id}\n' for id, token in enumerate(quoted)), encoding="utf-8")
        if positions == "marian":
            replaced = {"_make_sinusoidal_position_encodings": lambda width: marian_positions(2048, width)}
            changes.enter_context(mock.patch.multiple(marian, **replaced))
        MarianConverter(str(copy), [str(vocabulary)] * 2).convert(str(output))


def joined(lines: Sequence[str], count: int) -> list[str]:
    """Consecutive lines joined `count` at a time; those at the end that are too few are dropped."""
    whole = len(lines) - len(lines) % count
    return [" ".join(lines[start : start + count]) for start in range(0, whole, count)]
