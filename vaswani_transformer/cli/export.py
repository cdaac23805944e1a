"""The command that writes a model in another engine's format: `vaswani export`."""

import argparse
import shlex
import sys

from .command import add_command, command_name

_FORMATS = ("ctranslate2", "onnx")
_QUANTIZATIONS = ("float32", "int8", "int8_float32", "bfloat16", "float16", "int16")


def add_export(commands) -> None:
    """Add `vaswani export`."""
    parser = add_command(
        commands,
        "export",
        _export,
        "write a model for CTranslate2 or ONNX Runtime",
        "Write a model in the format of another engine, its tokenizer beside it, and compare the two on a few"
        " sentences before the folder appears. Each format is an extra: pip install"
        " 'vaswani_transformer[ctranslate2]' or '[onnx]'.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("--format", choices=_FORMATS, default="ctranslate2", help="(default: ctranslate2)")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new folder for the exported model")
    parser.add_argument(
        "--quantization", choices=_QUANTIZATIONS, help="how CTranslate2 stores the weights (default: float32)"
    )
    parser.add_argument(
        "--positions",
        type=int,
        metavar="N",
        help="longest source and output of the exported model, in tokens (default: max_position_embeddings)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an exported model in the output folder")


def _export(arguments: argparse.Namespace) -> int:
    from ..export.exporting import export_model

    print(f"exporting {arguments.model} to {arguments.format}", file=sys.stderr)
    done = export_model(
        arguments.model,
        arguments.output,
        format=arguments.format,
        quantization=arguments.quantization,
        positions=arguments.positions,
        overwrite=arguments.overwrite,
    )
    what = "log-probabilities" if arguments.format == "ctranslate2" else "logits"
    print(f"exported: {arguments.output}, {done.bytes / 1e6:,.1f} MB, {done.positions:,} positions")
    print(f"{what} differ from the model's by at most {done.difference:.2g} (3 sentences of random tokens)")
    if arguments.format == "ctranslate2":
        print(f"use it with: {command_name()} translate {shlex.quote(arguments.output)}")
    return 0
