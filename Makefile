# SPDX-License-Identifier: Apache-2.0
# Every target makes what it needs in .venv and does not ask questions. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
# Where the demonstration writes its partition.
DEMO ?= build/demo/cora
# Which of benchmarks/*.py `make bench` runs: all of them on small graphs.
BENCH ?= short
# An environment for the programs that benchmarks compare with.
PEER ?= .venv-peer

# An environment with neither DGL nor PyG.
CORE ?= .venv-core
CORE_TESTS := tests/comm tests/ops tests/graph tests/fullbatch tests/partition tests/sampling

# The release of torch of `make test-torch`, and its environment; PyPI's may bring gigabytes of CUDA.
TORCH ?= 2.6.0
OTHER := .venv-torch-$(TORCH)

# Other processors, as far as one can be told to be another: what limits torch's own kernels, and by
# them ours, those of oneDNN, and those of MKL; and two threads. Space in a setting is "+".
PROCESSORS := \
	ATEN_CPU_CAPABILITY=default+ONEDNN_MAX_CPU_ISA=SSE41+MKL_CBWR=COMPATIBLE \
	ATEN_CPU_CAPABILITY=avx2+ONEDNN_MAX_CPU_ISA=AVX2+MKL_CBWR=AVX2 \
	ATEN_CPU_CAPABILITY=default \
	ONEDNN_MAX_CPU_ISA=AVX2 \
	GRAPHSHARD_TEST_THREADS=2
# The tests that compute.
PROCESSOR_TESTS := $(addprefix tests/,nn ops fullbatch sampling graph pyg dgl_names sar train)
PROCESSOR_TESTS += $(addprefix --ignore=tests/train/,commands launch)

# Tests start hundreds of programs. Where the environment forbids files of bytecode, each of them
# would compile the package anew: a sixth of the 2.7 s that a start takes.
test test-docs test-campaigns test-core test-torch test-processors test-all: export PYTHONDONTWRITEBYTECODE =

# How many files of tests run side by side; 0 runs them in one process, where a debugger works. One
# more than two cores, as a tenth of their time is waiting for processes that end.
TEST_WORKERS ?= 3
# Each file in one process, in the order of tests/conftest.py.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -q
INSTALL := $(PIP) install -c constraints.txt
# The extension is compiled again when one of these changes; Python files need no reinstall.
NATIVE := $(wildcard CMakeLists.txt cmake/*.cmake csrc/*/*.cpp csrc/*/*.h)
CXX_FILES := $(wildcard csrc/*/*.cpp csrc/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-docs test-campaigns test-core test-torch test-processors test-all notebooks docs lint format
.PHONY: peer bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(BIN)/python:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# One stamp per set of dependencies, so that a second run installs nothing. The larger sets hold the
# smaller, and stamp for them, so that the extension is compiled once.
$(VENV)/.run: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing graphshard and what it needs"
	@$(INSTALL) -e .
	@touch $(VENV)/.run

$(VENV)/.test: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing graphshard and what its tests need"
	@$(INSTALL) -e ".[test]"
	@touch $(VENV)/.run $(VENV)/.test

$(VENV)/.docs: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing graphshard and what its site needs"
	@$(INSTALL) -e ".[docs]"
	@touch $(VENV)/.run $(VENV)/.test $(VENV)/.docs

$(VENV)/.dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing graphshard and what its tests, its site and the lint need"
	@$(INSTALL) -e ".[dev]"
	@touch $(VENV)/.run $(VENV)/.test $(VENV)/.docs $(VENV)/.dev

install: $(VENV)/.run  ## make .venv with graphshard in it

demo: $(VENV)/.run  ## partition Cora in two, train a GCN and a GAT on it with two workers
	$(BIN)/graphshard partition --data cora --parts 2 --out $(DEMO)
	$(BIN)/graphshard train --data $(DEMO)/cora.json --model gcn --workers 2 --mode full
	$(BIN)/graphshard train --data $(DEMO)/cora.json --model gat --workers 2 --mode full

test: $(VENV)/.test  ## run the tests (PYTEST_ARGS="tests/ops -x" narrows them)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(SIDE_BY_SIDE) \
		--ignore tests/campaigns --ignore tests/docs $(PYTEST_ARGS)

test-docs: $(VENV)/.test  ## run what pages, examples, notebooks and README show, and compare
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(SIDE_BY_SIDE) tests/docs $(PYTEST_ARGS)

test-campaigns: $(VENV)/.test  ## a sample of the campaigns: mutations, kills, hostile arguments, soaks
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(SIDE_BY_SIDE) tests/campaigns $(PYTEST_ARGS)

$(CORE)/.test: pyproject.toml constraints.txt $(NATIVE)
	@echo "installing graphshard in $(CORE), without DGL and PyG"
	@$(PYTHON) -m venv $(CORE)
	@$(CORE)/bin/python -m pip --disable-pip-version-check --no-input -q install \
		-c constraints.txt -e ".[core-test]"
	@touch $@

test-core: $(CORE)/.test  ## run the tests of the core where neither DGL nor PyG is installed
	@$(CORE)/bin/python -c "import graphshard, importlib.util as u; \
		found = [name for name in ('dgl', 'torch_geometric') if u.find_spec(name)]; \
		assert not found, f'{found} must not be installed here'"
	$(CORE)/bin/python -m pytest -n $(TEST_WORKERS) $(SIDE_BY_SIDE) $(CORE_TESTS)

$(OTHER)/.test: pyproject.toml $(NATIVE)
	@echo "installing graphshard in $(OTHER), with torch $(TORCH) and the newest of all else"
	@$(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip --disable-pip-version-check --no-input -q install \
		torch==$(TORCH) -e ".[test]"
	@touch $@

test-torch: $(OTHER)/.test  ## run the tests with another torch: TORCH=2.6.0 PYTHON=python3.10
	$(OTHER)/bin/python -m pytest -n $(TEST_WORKERS) $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-processors: $(VENV)/.test  ## run the tests that compute as on other processors
	@set -e; $(foreach setting,$(PROCESSORS),echo "with $(subst +, ,$(setting))"; \
		env $(subst +, ,$(setting)) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) \
		$(SIDE_BY_SIDE) $(PROCESSOR_TESTS);)

test-all: $(VENV)/.test  ## run the tests with every case and whole campaigns: hours, before a release
	@$(INSTALL) "ray[train]" || echo "Ray cannot be installed here: its tests are skipped"
	$(BIN)/python -m pytest --all --timeout 600 -n $(TEST_WORKERS) $(SIDE_BY_SIDE) $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-processors

notebooks: $(VENV)/.test  ## run the notebooks of docs/notebooks, check their text, write their outputs
	$(BIN)/python docs/run_notebooks.py $(NOTEBOOKS)

# DOCS_ARGS=--as-committed leaves the notebooks as they are.
docs: $(VENV)/.docs  ## build the site in build/site, with the notebooks run anew, and check its links
	$(BIN)/python docs/site/build_site.py $(DOCS_ARGS)

lint: $(VENV)/.dev  ## ruff, mypy, clang-format, codespell: what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES))
	$(BIN)/codespell

format: $(VENV)/.dev  ## put every file into the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

$(PEER)/.made: benchmarks/peers/requirements.txt constraints.txt
	@echo "making $(PEER) with DGL and PyG"
	@$(PYTHON) -m venv $(PEER)
	@$(PEER)/bin/python -m pip --disable-pip-version-check --no-input -q install \
		-c constraints.txt -r benchmarks/peers/requirements.txt
	@touch $@

peer: $(PEER)/.made  ## make .venv-peer, with the DGL and PyG that benchmarks compare with

bench: $(VENV)/.test  ## run the short benchmarks, or one: BENCH=memory BENCH_ARGS="--write"
	GRAPHSHARD_PEER_PYTHON=$(if $(wildcard $(PEER)/.made),$(abspath $(PEER)/bin/python),$${GRAPHSHARD_PEER_PYTHON:-python3}) \
		$(BIN)/python benchmarks/$(BENCH).py $(BENCH_ARGS)

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) $(CORE) $(PEER) .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '_kernels*.so' -delete
