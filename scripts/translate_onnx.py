"""Greedy translation with a model that `vaswani export --format onnx` wrote: onnxruntime, tokenizers and numpy alone.

    python scripts/translate_onnx.py FOLDER < source.en > translated.de

Short enough to copy into a program, or to write again in another language.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


class OnnxTranslator:
    """An encoder that runs once a batch and a decoder that runs once a token.

    Args:
        folder: the exported model.
        threads: 0 leaves it to onnxruntime.
    """

    def __init__(self, folder: str | Path, threads: int = 0):
        folder = Path(folder)
        self.facts = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        self.extra_tokens = settings.get("max_extra_tokens", 50)
        self.never, self.least = settings.get("suppress_tokens") or [], settings.get("min_new_tokens") or 0
        kind = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if "auto_map" in kind or not (folder / "tokenizer.json").is_file():  # two vocabularies, Moses' rules, ...
            sys.exit(f"error: the tokenizer of {folder} needs more than tokenizers: take AutoTokenizer for the texts")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True  # "</s>" in a text is text
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
            for name in ("onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx")
        )

    def greedy(self, sources: list[list[int]]) -> list[list[int]]:
        """Token ids of the outputs of one batch, the end token included where it was reached.

        Args:
            sources: token ids with the end token.
        """
        facts, end = self.facts, self.facts["eos_token_id"]
        lengths = np.array([len(source) for source in sources])
        limits = np.minimum(lengths + self.extra_tokens, facts["positions"])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.full_like(mask, facts["pad_token_id"])
        ids[mask == 1] = np.concatenate(sources)
        [states] = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        # What the decoder gives as `present.*` it takes as `past_key_values.*`, empty at first.
        past = {}
        for layer, side in itertools.product(range(facts["decoder_layers"]), ("decoder", "encoder")):
            for kind, width in (("key", facts["d_k"]), ("value", facts["d_v"])):
                empty = np.zeros((len(sources), facts["num_heads"], 0, width), dtype=np.float32)
                past[f"past_key_values.{layer}.{side}.{kind}"] = empty
        names = [output.name for output in self.decoder.get_outputs()]
        tokens = np.full((len(sources), 1), facts["decoder_start_token_id"], dtype=np.int64)
        results: list[list[int]] = [[] for _ in sources]
        running = np.ones(len(sources), dtype=bool)
        for step in range(1, int(limits.max()) + 1):
            given = {"input_ids": tokens, "encoder_attention_mask": mask, "encoder_hidden_states": states, **past}
            outputs = dict(zip(names, self.decoder.run(None, given), strict=True))
            logits = outputs["logits"][:, -1:].copy()
            logits[..., self.never] = -np.inf
            if step <= self.least:
                logits[..., end] = -np.inf
            tokens = logits.argmax(axis=-1)
            for row in np.flatnonzero(running):
                results[row].append(int(tokens[row, 0]))
            running &= (tokens[:, 0] != end) & (step < limits)
            if not running.any():
                break
            past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
        return results

    def translate(self, sentences: Iterator[str], batch_size: int = 32) -> Iterator[str]:
        """One translation a sentence, in order; an empty one for an empty one."""
        lines = map(str.strip, sentences)
        while batch := list(itertools.islice(lines, batch_size)):
            yield from self._translate_batch(batch)

    def _translate_batch(self, batch: list[str]) -> Iterator[str]:
        filled = [sentence for sentence in batch if sentence]
        sources = [encoding.ids for encoding in self.tokenizer.encode_batch(filled)]
        if sources and max(map(len, sources)) > self.facts["positions"]:
            sys.exit(f"error: a line has more than the model's {self.facts['positions']} tokens: split it")
        texts = iter(self.tokenizer.decode_batch(self.greedy(sources)) if sources else [])
        for sentence in batch:
            yield " ".join(next(texts).splitlines()) if sentence else ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for line in OnnxTranslator(sys.argv[1]).translate(sys.stdin):
        print(line, flush=True)
