"""Section 3.5 checked: offsets as linear maps of sinusoids, and learned against sinusoidal positions on long sentences.

    python scripts/position_study.py --output runs/positions

Trains small models on short sequences (copying, and the generated English-German corpus), tests them on longer ones,
and writes a table, a picture and JSON. A second call trains only what is missing.
"""

import argparse
import sys

from vaswani_transformer.errors import UserError
from vaswani_transformer.experiments.positions import positions_as_markdown, run_position_study


def main() -> int:
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/positions", help="folder for the results (default: runs/positions)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default: 0 1")
    arguments = parser.parse_args()
    try:
        result = run_position_study(
            arguments.output, seeds=arguments.seeds, say=lambda line: print(line, file=sys.stderr, flush=True)
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(positions_as_markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
