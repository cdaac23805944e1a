# Everything runs in .venv, made by the first target that needs it with the exact versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test slow conformance docs gpu check format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'constraints.txt is for Python 3.11 or newer: make PYTHON=python3.11 ...')"
	@echo "setting up .venv, once (minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --quiet --no-deps opustrainer==0.5 typo==0.1.5  # wants an old sentencepiece
	@touch $@

demo: .venv/installed  ## set up, train on a generated corpus (minutes), show what was learned
	@$(BIN)/vaswani demo
	@echo "     (before it, once in each terminal: source .venv/bin/activate)"

test: .venv/installed  ## set up, run the fast tests
	$(BIN)/python -m pytest -q -n auto --dist loadfile --durations 20

slow: .venv/installed  ## run the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

conformance: .venv/installed  ## run transformers' own common tests of models (their sources are fetched once)
	$(BIN)/python tests/conformance/run.py

docs: .venv/installed  ## build the site of the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

gpu: .venv/installed  ## with an NVIDIA GPU: the tests of the GPU's code, then training base and big, timed on the device
	@$(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available() and 'torch finds no NVIDIA GPU here')"
	$(BIN)/python -m pytest -q tests/test_on_gpu.py tests/model/test_loss_kernel.py
	for preset in base big; do $(BIN)/python scripts/benchmarks/training.py --by device --device cuda --preset $$preset \
	    --batch-tokens 25000 --vocab-size 37000 --dropout 0.1 --pictures profiles; done

check: .venv/installed  ## lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed  ## format and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and what the demo made
	rm -rf .venv demo_output
