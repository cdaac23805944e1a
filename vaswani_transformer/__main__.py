"""`python -m vaswani_transformer` does what `vaswani` does."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
