# `make demo` and `make test` set up .venv themselves; a second call goes straight to work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
PINNED := pyproject.toml constraints.txt hatch_build.py $(wildcard src/clipless/native/*.c)
RUFF := $(BIN)/ruff check . && $(BIN)/ruff format --check .

.DEFAULT_GOAL := help
.PHONY: help demo test test-scripts test-integrations test-torch test-worlds sabotage sweep soak figures screenshots docs package-check bench audit models-page zoo lint format clean

help:
	@echo "make demo    train digits without privacy, with Abadi clipping and with AUTO-S, side by side"
	@echo "make test    lint, type check and run the tests"
	@echo "make test-scripts  run what builds figures, pages and benchmarks, in a cheap form"
	@echo "make test-integrations  run the tests of clipless.integrations: Hugging Face, Lightning, Opacus, JAX, and of Dask and torchrun"
	@echo "make test-torch VERSION=2.13.0  run the core tests with another version of torch, in an environment of its own"
	@echo "make test-worlds  sharded runs in worlds of one to four processes, against one process: 3 minutes"
	@echo "make sabotage  break the source in 300 places, one at a time: the tests must notice each: 30 minutes"
	@echo "make sweep   calibrate over the whole range of epsilon, delta, rate and steps: 15 minutes"
	@echo "make soak    100,000 steps of a small model: memory and time of a step must stay what they are"
	@echo "make figures train and draw what docs/clipping.md and the pages about concepts show"
	@echo "make screenshots  draw what the commands print and the report shows, for docs/screenshots; needs chromium"
	@echo "make docs    build the documentation to site/, with warnings as errors"
	@echo "make package-check  build wheel and sources, install each into an empty environment and train there: 5 minutes"
	@echo "make bench   time and memory of private training over plain, for the table in the README"
	@echo "make audit   attack every clipping and noise source, and MNIST=FOLDER if given, for docs/audit.md: 10 minutes"
	@echo "make models-page  write docs/models.md, the list of what is exact, falls back or is refused"
	@echo "make zoo     compare every architecture of transformers and others with single records: 15 minutes"
	@echo "make lint    ruff and mypy alone"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove .venv, caches and runs"

demo: $(VENV)/.runtime
	$(BIN)/python examples/demo.py

# mypy reads the sources while the tests run.
test: $(VENV)/.test
	$(RUFF)
	$(BIN)/mypy & types=$$!; \
	  $(BIN)/python -m pytest -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder -m "not scripts"; tests=$$?; \
	  wait $$types || { echo "the types are wrong: see above, or make lint"; exit 1; }; exit $$tests

# What builds figures, pages and benchmarks, in a cheap form.
test-scripts: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --max-worker-restart 0 --dist loadfile -m scripts tests/test_makefile.py tests/app

# Without these folders in `make test`, which needs none of those libraries (norecursedirs in pyproject.toml).
test-integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest -n 2 --max-worker-restart 0 --dist loadfile tests/integrations src/clipless/integrations

# The core: the engine, its checks, noise, sampling, policies, saving. Other builds of torch are large.
CORE := tests/gradients tests/noise tests/runs tests/sampling tests/thresholds tests/test_clipping.py tests/test_optimizers.py \
  tests/test_private.py tests/test_promises.py tests/test_stepping.py
# What torch itself asks for in a version of its choice.
TORCHS_OWN := torch|sympy|filelock|fsspec|networkx|jinja2|mpmath|markupsafe
VERSION ?= $(patsubst torch==%,%,$(TORCH))
OTHER := .venv-torch-$(VERSION)
OTHER_PIP := $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check

test-torch:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER_PIP) torch==$(VERSION)
	(grep -v -E '^($(TORCHS_OWN))==' constraints.txt; echo torch==$(VERSION)) > $(OTHER)/constraints.txt
	$(OTHER_PIP) -c $(OTHER)/constraints.txt -e '.[test]'
	$(OTHER)/bin/python -c 'import torch; assert torch.__version__.split("+")[0] == "$(VERSION)", torch.__version__'
	$(OTHER)/bin/python -m pytest -n 2 --max-worker-restart 0 $(CORE)

test-worlds: $(VENV)/.test
	$(BIN)/python tests/distributed/all_worlds.py

sabotage: $(VENV)/.integrations
	$(BIN)/python tests/sabotages.py

sweep: $(VENV)/.test
	$(BIN)/python tests/accounting/sweep.py

soak: $(VENV)/.test
	$(BIN)/python benchmarks/soak.py

figures: $(VENV)/.test
	$(PIP) -c constraints.txt -e '.[figures]'
	$(BIN)/python experiments/clipping.py
	$(BIN)/python experiments/budget.py
	$(BIN)/python experiments/concepts.py

screenshots: $(VENV)/.test
	$(BIN)/python experiments/screenshots.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html; searching needs a server:  $(BIN)/python -m http.server -d site"

package-check:
	$(PYTHON) tests/package_check.py

bench: $(VENV)/.test
	$(PIP) -c constraints.txt -e '.[bench]'
	$(BIN)/clipless bench --malloc both --out benchmarks/results
	$(BIN)/clipless bench --from benchmarks/results --readme README.md
	$(BIN)/clipless bench --from benchmarks/results --readme docs/benchmarks.md

audit: $(VENV)/.test
	$(BIN)/python experiments/audit.py $(if $(MNIST),--mnist $(MNIST))

models-page: $(VENV)/.runtime
	$(BIN)/python experiments/models_page.py

zoo: $(VENV)/.test
	$(BIN)/python experiments/judge_zoo.py
	$(BIN)/python experiments/models_page.py

lint: $(VENV)/.test
	$(RUFF)
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-torch-* build dist site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples experiments -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("clipless needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its pin decides which build is taken before any other requirement is looked at.
$(VENV)/.torch: $(PINNED) | $(BIN)/python
	@echo "installing $(TORCH), once; this is the large one"
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.integrations: $(VENV)/.test
	$(PIP) -c constraints.txt -e '.[test,integrations]'
	@touch $@

$(VENV)/.docs: $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@
