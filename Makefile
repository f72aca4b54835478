# make quickstart   from nothing to held-out bits/dim of a model trained on real text: 9 minutes on two quiet cores
# make test         the tests: every promise once                        make checks   ruff, mypy, turns of phrase, the site's links
# make test-all     the grids and long cases that `make test` leaves out (marked slow)
# make kernels      every GPU kernel in Triton's interpreter, and compiled for the A100 and the H100 (no GPU needed)
# make soak         the tests that take minutes to hours        make clean    the virtual environment and caches
# make docs         the documents as a site, in site/
# make cluster      two hosts, and a Slurm, made of namespaces of this one; as root, with openssh-server, pdsh, slurm-wlm and munge
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch's CPU build (no GPU: 200 MB in place of several GB).
# PYTHON=python3.12 chooses the interpreter of the virtual environment. JOBS=8 runs the files of the tests in 8 processes (2).

SHELL := /bin/bash
PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
BIN := .venv/bin
# Threads that wait for each other by spinning for long slow down tenfold as soon as anything else needs a core.
export GOMP_SPINCOUNT ?= 2000
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: quickstart test test-all checks docs kernels soak cluster clean install

quickstart: .venv/installed
	@$(BIN)/megasparse quickstart

test: TIERS := not slow and not soak and not kernels and not cluster and not claims
test-all: TIERS := slow and not soak and not kernels and not cluster and not claims
test test-all: .venv/installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(TIERS)" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

checks: .venv/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/prose.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: .venv/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "open site/index.html, or look at it with $(BIN)/mkdocs serve"

kernels: .venv/installed-dev
	@$(BIN)/python -m pytest -m kernels $(TESTS)

soak: .venv/installed-dev
	@$(BIN)/python -m pytest -m soak $(TESTS)

cluster: .venv/installed-dev
	@$(BIN)/python -m pytest -m cluster $(TESTS)

install: .venv/installed

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is missing or older than 3.10. Install one (apt-get install python3), or name one: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "error: $(PYTHON) has no venv and pip. Install them: apt-get install python3-venv python3-pip"; exit 2; }
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing $(TORCH) into .venv $(if $(TORCH_INDEX),from $(TORCH_INDEX),(without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu is the small build))"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "installing megasparse and its other requirements"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -e ".[compress$$($(BIN)/python -c 'import sys; print(",tasks" * (sys.version_info >= (3, 11)))')]"  # transformers
	@touch $@

.venv/installed-dev: .venv/installed
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: the tests need Python 3.11, as transformers does. Name one: make clean, then make PYTHON=python3.12"; exit 2; }
	@echo "installing the tools of the tests"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv site .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
