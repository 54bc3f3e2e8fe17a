# Each target does its own set-up; a second run installs nothing and needs no network.
VENV ?= .venv
PYTHON ?= python3
OUT ?= graphwright-demo
NAME ?=
BIN := $(VENV)/bin
export VENV PYTHON
# many processes are started here: what one of them compiled, the others read
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test lint types cov docs bench conformance gpu lock chromium clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo:  ## open, edit, train and export the bundled model; writes graphwright-demo/
	@scripts/environment.sh hf
	@$(BIN)/graphwright demo --out $(OUT) --overwrite

test:  ## lint, then all tests
	@scripts/environment.sh all,dev
	@scripts/triton.sh
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(if $(filter deep,$(HYPOTHESIS_PROFILE)),--timeout 7200)

lint:  ## ruff's rules and format, and the words of docs and code
	@scripts/environment.sh all,dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_language.py

types:  ## pyright
	@scripts/environment.sh all,dev
	$(BIN)/pyright --pythonpath $(BIN)/python

cov:  ## branch coverage per folder, compiled kernels run as Python; takes half an hour
	@scripts/environment.sh all,dev
	@rm -f .coverage .coverage.*
	NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest -n 2 --dist worksteal --timeout 900
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report
	@$(BIN)/coverage json --quiet -o .coverage.json
	@$(BIN)/python scripts/coverage_by_folder.py .coverage.json

docs:  ## the site, in site/; fails on a link that leads nowhere
	@scripts/environment.sh docs
	@scripts/site.sh

bench:  ## figures beside peers; NAME=edits for one
	@scripts/environment.sh hf,bench
	$(BIN)/python -m benchmarks $(NAME)

conformance:  ## what from_torch opens, beside torch: docs/conformance.md; NAME=resnet18 for one; takes an hour on 2 cores
	@# apart: beside torch without CUDA, transformers cannot import an installed torchvision by itself
	@VENV=$(VENV)/conformance scripts/environment.sh all,dev,conformance
	@# outcomes are kept by commit, so that a run that was stopped goes on
	OMP_NUM_THREADS=1 $(VENV)/conformance/bin/python scripts/conformance.py --processes $$(nproc) \
	  $(if $(NAME),--only $(NAME),--json $(VENV)/conformance/$$(git rev-parse --short HEAD).json)

gpu:  ## checks and figures on a GPU: docs/gpu.md; DEVICE=sim runs the checks without one; ONLY=models for one group
	@# apart: beside Triton, torch.compile and transformers load it with every import
	@if [ "$(DEVICE)" = sim ]; then scripts/environment.sh all,dev; else VENV=$(VENV)/gpu scripts/environment.sh triton; fi
	$(if $(filter sim,$(DEVICE)),$(BIN),$(VENV)/gpu/bin)/python scripts/gpu.py --device $(or $(DEVICE),cuda) $(if $(ONLY),--only $(ONLY))

lock:  ## rewrite constraints.txt from this environment
	@scripts/lock.sh

chromium:  ## a system Chromium for the browser tests, where a package manager may install one
	@scripts/chromium.sh

clean:  ## remove everything generated
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis .coverage* $(OUT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
