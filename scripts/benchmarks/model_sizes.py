"""The model of a benchmark: its options on the command line, and the configuration that they make."""

import argparse

SIZES = {"vocab_size": 8000, "d_model": 256, "d_ff": 512, "heads": 4, "layers": 3}  # of the recipe multi30k-en-de


def add_whole_numbers(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """One option for each name."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def vaswani_config(options: argparse.Namespace, **more):
    """Our configuration of the sizes that the command line names."""
    from vaswani_transformer import VaswaniConfig  # takes seconds, which --help does without

    return VaswaniConfig(
        vocab_size=options.vocab_size,
        d_model=options.d_model,
        d_ff=options.d_ff,
        num_heads=options.heads,
        encoder_layers=options.layers,
        decoder_layers=options.layers,
        **more,
    )
