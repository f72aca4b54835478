# make quickstart   train and evaluate a small model on real text: 8 minutes on two idle cores
# make test         run the default tests                       make checks   run ruff, mypy, prose and link checks
# make test-all     run the slow tests that `make test` skips   make soak     run tests of minutes to hours
# make kernels      run every GPU kernel in Triton's interpreter and compile it for A100 and H100, without a GPU
# make cluster      run tests on two simulated hosts and Slurm; as root, with openssh-server, pdsh, slurm-wlm and munge
# make docs         build the documentation in site/            make clean    delete the virtual environment and caches
# make constraints  resolve constraints.txt, the versions of all packages in .venv, to the newest releases
# make matrix       run a short tier under the oldest, middle and newest versions of the libraries (ROWS=newest: one)
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu selects PyTorch's CPU build (200 MB instead of several GB).
# PYTHON=python3.12 selects the interpreter of the virtual environment. JOBS=8: 8 test processes (default: 2).

SHELL := /bin/bash
PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
BIN := .venv/bin
# With long spin-waits, threads slow down tenfold as soon as another process needs a core.
export GOMP_SPINCOUNT ?= 2000
TORCH := $(shell grep -o '^torch==[^ ]*' constraints.txt)
# Print the output of a command only if it fails.
quiet = @output=$$($(1) 2>&1) || { echo "$$output"; exit 1; }

.PHONY: quickstart test test-all checks docs kernels soak cluster clean install constraints matrix

quickstart: .venv/installed
	@$(BIN)/megasparse quickstart

# Triton's interpreter multiplies by OpenBLAS, whose Haswell kernel sums a row in an order that depends on other rows.
test test-all kernels: export OPENBLAS_CORETYPE ?= SandyBridge
# Processes that tests start would compile the package again.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: TIERS := not slow and not soak and not kernels and not cluster and not claims
test-all: TIERS := slow and not soak and not kernels and not cluster and not claims
test test-all: .venv/installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(TIERS)" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

checks: .venv/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	$(call quiet,$(BIN)/python tools/prose.py)
	$(call quiet,$(BIN)/python -m pytest -q tests/test_docs.py -k "links or figures or counts or site_has")
	$(call quiet,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict)  # --quiet would hide warnings from --strict

docs: .venv/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "open site/index.html, or look at it with $(BIN)/mkdocs serve"

kernels: .venv/installed-dev
	@$(BIN)/python -m pytest -m kernels $(TESTS)

soak: .venv/installed-dev
	@$(BIN)/python -m pytest -m soak $(TESTS)

cluster: .venv/installed-dev
	@$(BIN)/python -m pytest -m cluster $(TESTS)

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is missing or older than 3.10. Install it (apt-get install python3), or select one: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "error: $(PYTHON) lacks venv or pip. Install them: apt-get install python3-venv python3-pip"; exit 2; }
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing $(TORCH) into .venv $(if $(TORCH_INDEX),from $(TORCH_INDEX),(TORCH_INDEX=https://download.pytorch.org/whl/cpu selects the smaller CPU build))"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "installing megasparse and its other requirements"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e ".[compress$$($(BIN)/python -c 'import sys; print(",tasks" * (sys.version_info >= (3, 11)))')]"  # transformers
	@touch $@

.venv/installed-dev: .venv/installed
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: the tests need Python 3.11 or later. Select one: make clean, then make PYTHON=python3.12"; exit 2; }
	@echo "installing development tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.cache/uv/bin/uv:
	@$(PYTHON) -m venv .cache/uv && .cache/uv/bin/python -m pip install --quiet --disable-pip-version-check uv

matrix: .cache/uv/bin/uv
	@.cache/uv/bin/python tools/matrix.py $(if $(ROWS),--only $(ROWS))

# The tests need Python 3.11. torch's own requirements fix the packages of CUDA.
constraints: .cache/uv/bin/uv
	@printf '%s\n' '.[compress]' '.[dev]; python_version >= "3.11"' | .cache/uv/bin/uv pip compile - --quiet --upgrade \
	  --universal --python-version 3.10 --no-annotate --no-emit-package megasparse \
	  --custom-compile-command "make constraints" --output-file constraints.txt >/dev/null
	@sed -i -E '/^(nvidia|cuda)-/d' constraints.txt

clean:
	rm -rf .venv site .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
