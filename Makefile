# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
FOLDER ?= runs/mnist
BIN := $(VENV)/bin

.PHONY: train test check unit docs results bench clean

## Train a private model, print its epsilon, leave a report to look at.
train: $(VENV)/.installed
	$(BIN)/lap2 train --folder $(FOLDER)

## Everything CI runs: format, lint, types, layering, tests.
test: check docs unit

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

unit: $(VENV)/.installed
	$(BIN)/pytest -n auto

## The documentation as a site, in build/site; a broken link is an error.
docs: $(VENV)/.installed
	$(BIN)/mkdocs build --strict

## Fill docs/results.md from the result files.
results: $(VENV)/.installed
	$(BIN)/python -c 'from pathlib import Path; from lap2.experiments.report import write; write(Path("docs/results.md"), Path("results"))'

## Speed against other libraries, interleaved in one process.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/accountant.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/noise.py --sizes 10000 10000000
	$(BIN)/python benchmarks/step.py

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	# First and pinned: any other request for torch may bring gigabytes of CUDA.
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	# Without its torchvision, which has no build for every torch; the tests stand in for it.
	$(BIN)/python -m pip install --quiet --no-deps 'timm>=1.0,<2'
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .hypothesis
