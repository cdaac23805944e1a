"""Whoever takes part in `generation.py`: all load what `write_models` wrote of one model's random weights.

The model has the paper's sizes and what every engine can express: Marian's positions, a decoder that starts from zeros,
and an output bias that rules the end token out. transformers' Marian is another model of the same sizes. Marian itself
runs in a Python that has pymarian (`pip install pymarian==1.12.42`, 604 MB). Its int8 is what its own converter makes
for intgemm or FBGEMM, with the output matrix apart from the embeddings, since it leaves a tied one in float32; intgemm
takes vocabularies of a multiple of 8. ONNX Runtime computes what its `quantize_dynamic` makes of our export; the search
around it is here. OpenVINO does not take part: its int8 needs nncf, optimum-intel's search an older transformers.

Modules are imported by the contestant that needs them, so that memory is the contestant's own.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Forces AVX2, as far as a library can be forced: torch, its oneDNN and FBGEMM, MKL, CTranslate2, Marian's intgemm.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2", "INTGEMM_CPUID": "AVX2",
}  # fmt: skip
TRANSFORMERS, PLAIN, PREPARED = "transformers' Marian", "ours", "ours, prepared"
CTRANSLATE2, CTRANSLATE2_PARTS = "CTranslate2", "CTranslate2, in parts"
MARIAN, MARIAN_FBGEMM, ONNX = "Marian", "Marian, FBGEMM", "ONNX Runtime"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # their ids: 0 to 3
END = 2
_LEAST_SECONDS = 0.5  # of a turn


def contestants(options: argparse.Namespace) -> list[str]:
    """Names of all that can take part here, each with its precision, and a message about those that cannot."""
    if options.device != "cpu":
        names = [f"{who}, {dtype}" for dtype in ("float32", "bfloat16") for who in (TRANSFORMERS, PLAIN)]
        names.append(f"{PLAIN}, static cache, compiled, float32")
        names += [f"{CTRANSLATE2}, {dtype}" for dtype in ("float32", "float16", "int8_float16")]
    else:
        parts = [CTRANSLATE2_PARTS] if options.threads > 1 else []
        names = [f"{who}, float32" for who in (TRANSFORMERS, PLAIN, PREPARED, CTRANSLATE2, *parts, MARIAN)]
        names += [f"{who}, int8" for who in (PREPARED, CTRANSLATE2, *parts, MARIAN, MARIAN_FBGEMM, ONNX)]
        names += [f"{PREPARED}, bfloat16"] if _has_bfloat16(options) else []
    lacking = {}
    if importlib.util.find_spec("ctranslate2") is None:
        lacking[CTRANSLATE2] = lacking[CTRANSLATE2_PARTS] = "not installed"
    if options.avx2:
        lacking[MARIAN_FBGEMM] = lacking[ONNX] = "cannot be forced to AVX2"
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")):
        lacking[ONNX] = "not installed"
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('_pymarian') is None)"
    if subprocess.run([options.marian_python, "-c", find]).returncode:
        lacking[MARIAN] = lacking[MARIAN_FBGEMM] = f"{options.marian_python} has no pymarian (--marian-python)"
    for name in names:
        if _who(name) in lacking:
            print(f"left out: {name}: {lacking[_who(name)]}", file=sys.stderr)
    names = [name for name in names if _who(name) not in lacking]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        sys.exit(f"error: no contestant {', '.join(sorted(unknown))}: choose of {'; '.join(names)}")
    return options.only or names


def _who(name: str) -> str:
    return name.rpartition(", ")[0]


def _has_bfloat16(options: argparse.Namespace) -> bool:
    """Return whether the processor computes in bfloat16; a run takes minutes where it does not."""
    import torch

    return not options.avx2 and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def our_model(options: argparse.Namespace):
    """Our model, which every engine can express."""
    import torch

    from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration

    torch.manual_seed(0)
    config = VaswaniConfig.from_preset(
        options.preset, vocab_size=options.vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=END,
        decoder_start_token_id=1, position_encoding="sinusoidal-tensor2tensor", layer_norm_eps=1e-6, output_bias=True,
    )  # fmt: skip
    model = VaswaniForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[config.decoder_start_token_id] = 0
        model.lm_head.bias[END] = -1e3
    return model


def _transformers_model(config):
    from transformers import MarianConfig, MarianMTModel

    return MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size, d_model=config.d_model, encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers, encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads, encoder_ffn_dim=config.d_ff, decoder_ffn_dim=config.d_ff,
            activation_function="relu", scale_embedding=True, max_position_embeddings=512, pad_token_id=0,
            bos_token_id=1, eos_token_id=END, decoder_start_token_id=1, forced_eos_token_id=None,
        )
    )  # fmt: skip


def _words(size: int) -> list[str]:
    return SPECIAL + [f"w{number}" for number in range(len(SPECIAL), size)]


def write_models(names: list[str], options: argparse.Namespace, folder: Path) -> None:
    """Write into a folder what the contestants of these names load."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    from vaswani_transformer.export.exporting import export_model

    disable_progress_bar()
    model, words = our_model(options), _words(options.vocab_size)
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", END)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder / "model")
    _transformers_model(model.config).save_pretrained(folder / "transformers")
    for name in names:
        who, _, precision = name.rpartition(", ")
        if who.startswith(CTRANSLATE2) and not (folder / f"ctranslate2-{precision}").exists():
            export_model(folder / "model", folder / f"ctranslate2-{precision}", quantization=precision)
        elif who in (MARIAN, MARIAN_FBGEMM) and not (folder / "marian").exists():
            export_model(folder / "model", folder / "marian", "marian", positions=256)
            _untie(folder / "marian")
        elif who == ONNX:
            export_model(folder / "model", folder / "onnx", "onnx", positions=256)
            _quantize(folder / "onnx")


def _untie(folder: Path) -> None:
    """A model of Marian's a second time, with the output matrix apart and under the name by which it becomes int8."""
    import numpy as np

    from vaswani_transformer.export.to_marian import _terminated, _write_arrays
    from vaswani_transformer.marian_format import CONFIG

    with np.load(folder / "model.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    text = arrays[CONFIG].tobytes().rstrip(b"\0").decode("utf-8")
    text = text.replace("tied-embeddings-all: true", "tied-embeddings-all: false")
    arrays[CONFIG] = _terminated(text.replace("tied-embeddings-src: false", "tied-embeddings-src: true"))
    arrays["decoder_ff_logit_out_W"] = np.ascontiguousarray(arrays["Wemb"].T)
    _write_arrays(arrays, folder / "untied.npz")


def _quantize(folder: Path) -> None:
    import logging

    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logging.disable(logging.WARNING)  # its advice
    for path in folder.glob("*.onnx"):
        quant_pre_process(path, path, skip_symbolic_shape=True)  # without which the output layer stays float32
        quantize_dynamic(path, path, weight_type=QuantType.QInt8)
    logging.disable(logging.NOTSET)


def load(name: str, options: argparse.Namespace, folder: Path) -> tuple[Callable, int]:
    """A function of source ids and a number of beams that gives the number of output tokens, and whose process runs."""
    who, _, precision = name.rpartition(", ")
    if who.startswith(CTRANSLATE2):
        parts = options.threads if who == CTRANSLATE2_PARTS else 1
        return _ctranslate2(folder / f"ctranslate2-{precision}", precision, parts, options), os.getpid()
    if who in (MARIAN, MARIAN_FBGEMM):
        kind = "intgemm8" if who == MARIAN else "packed8avx512" if "avx512vl" in processor() else "packed8avx2"
        return _marian(folder / "marian", None if precision == "float32" else kind, options)
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    if who == ONNX:
        return _onnx(folder / "onnx", options), os.getpid()
    return _torch(who, precision, options, folder), os.getpid()


def _torch(who: str, precision: str, options: argparse.Namespace, folder: Path) -> Callable:
    import torch
    from transformers import CompileConfig, MarianMTModel

    from vaswani_transformer import VaswaniForConditionalGeneration
    from vaswani_transformer.decoding.cpu_inference import prepare_for_inference

    if who == TRANSFORMERS:
        model = MarianMTModel.from_pretrained(folder / "transformers")
    else:
        model = VaswaniForConditionalGeneration.from_pretrained(folder / "model")
    model.eval()
    if who == PREPARED:
        return by_generate(prepare_for_inference(model, precision), options)
    compiled = {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=False)}
    return by_generate(
        model.to(options.device, getattr(torch, precision)), options, **(compiled if "compiled" in who else {})
    )


def by_generate(model, options: argparse.Namespace, **more) -> Callable:
    """Tokens of transformers' `generate()`, to which `more` is given."""
    import torch

    def run(ids: list[list[int]], beams: int) -> int:
        length, source = options.target_length, torch.tensor(ids, device=model.device)
        outputs = model.generate(
            input_ids=source, attention_mask=torch.ones_like(source), num_beams=beams, do_sample=False,
            min_new_tokens=length, max_new_tokens=length, **more,
        )  # fmt: skip
        if model.device.type != "cpu":
            torch.accelerator.synchronize()
        return outputs[:, 1:].numel()

    return run


def _ctranslate2(path: Path, precision: str, parts: int, options: argparse.Namespace) -> Callable:
    """With `parts` a batch is shared out among so many workers of one thread, else all threads compute together."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(path), device=options.device.partition(":")[0], compute_type=precision,
        inter_threads=parts, intra_threads=options.threads // parts,
    )  # fmt: skip
    words, length = _words(options.vocab_size), options.target_length

    def run(ids: list[list[int]], beams: int) -> int:
        results = translator.translate_batch(
            [[words[number] for number in row] for row in ids], beam_size=beams, min_decoding_length=length,
            max_decoding_length=length, max_batch_size=-(-len(ids) // parts),
        )  # fmt: skip
        return sum(len(result.hypotheses[0]) for result in results)

    return run


def processor() -> str:
    """What Linux says of the processor."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _marian(folder: Path, kind: str | None, options: argparse.Namespace) -> tuple[Callable, int]:
    """A batch is shared out among Marian's threads, which do not compute together; `kind` is that of its int8."""
    from marian_engine import MarianEngine

    path = folder / ("model.npz" if kind is None else "untied.npz")
    engine = MarianEngine(options.marian_python, path, folder / "vocab.yml", options.threads)
    if kind:
        unquantized, engine = engine, engine.int8(folder, kind)
        unquantized.close()
    words, factor = _words(options.vocab_size), options.target_length / options.source_length

    def run(ids: list[list[int]], beams: int) -> int:
        lines = [" ".join(words[number] for number in row[:-1]) for row in ids]  # Marian appends the end token
        size = -(-len(ids) // options.threads)
        outputs = engine.translate(lines, beams, mini_batch=size, maxi_batch=1, max_length_factor=factor)
        return sum(len(line.split()) for line in outputs)

    run([[len(SPECIAL)] * options.source_length], 1)  # loads the model
    return run, engine.server.pid


def _onnx(folder: Path, options: argparse.Namespace) -> Callable:
    import numpy as np
    import torch

    from vaswani_transformer.export.facts import ExportFacts
    from vaswani_transformer.export.to_onnx import DECODER, ENCODER, cache_names, open_session

    facts = ExportFacts.read(folder, "onnx")
    encoder, decoder = (open_session(folder / name, options.threads) for name in (ENCODER, DECODER))
    own, source = (cache_names("past_key_values", side, facts.decoder_layers) for side in ("decoder", "encoder"))
    widths = (facts.d_k, facts.d_v) * facts.decoder_layers

    def run(ids: list[list[int]], beams: int) -> int:
        given, rows = np.array(ids), len(ids) * beams
        mask = np.ones_like(given)
        _, *encoded = encoder.run(None, {"input_ids": given, "attention_mask": mask})
        feed = {name: states.repeat(beams, 0) for name, states in zip(source, encoded, strict=True)}
        feed["encoder_attention_mask"] = mask.repeat(beams, 0)
        feed |= {
            name: np.zeros((rows, facts.num_heads, 0, width), np.float32)
            for name, width in zip(own, widths, strict=True)
        }
        tokens = np.full((rows, 1), facts.decoder_start_token_id)
        scores = torch.tensor([0.0] + [-torch.inf] * (beams - 1)).repeat(len(ids), 1)
        first = torch.arange(0, rows, beams)[:, None]
        for _ in range(options.target_length):
            logits, *present = decoder.run(None, {"input_ids": tokens, **feed})
            scores = scores[..., None] + torch.from_numpy(logits[:, -1]).log_softmax(-1).view(len(ids), beams, -1)
            scores, best = scores.flatten(1).topk(beams)
            size = logits.shape[-1]
            tokens = (best % size).view(rows, 1).numpy()
            origins = (first + best // size).flatten().numpy()
            feed.update(zip(own, present if beams == 1 else [states[origins] for states in present], strict=True))
        return len(ids) * options.target_length

    return run


def peak_memory(pid: int) -> float:
    """The most megabytes that a process had so far (Linux)."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def take_part(name: str, options: argparse.Namespace, folder: Path, connection) -> None:
    """What a contestant's process does: for a batch and beams that come in, output tokens a second and its memory."""
    run, pid = load(name, options, folder)
    connection.send(peak_memory(pid))
    for ids, beams in iter(connection.recv, None):
        tokens, started, expected = 0, time.perf_counter(), len(ids) * options.target_length
        while (seconds := time.perf_counter() - started) < _LEAST_SECONDS:
            tokens += expected
            if (given := run(ids, beams)) != expected:
                sys.exit(f"error: {name} gave {given} tokens, not {expected}")
        connection.send((tokens / seconds, peak_memory(pid)))
