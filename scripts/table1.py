"""Table 1 of the paper: `vaswani experiment table1` with the same options, such as --scale paper or --dry-run."""

import sys

from vaswani_transformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["experiment", "table1", *sys.argv[1:]]))
