"""Table 3 of the paper: `vaswani experiment table3` with the same options, such as --scale paper or --dry-run."""

import sys

from vaswani_transformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["experiment", "table3", *sys.argv[1:]]))
