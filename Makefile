# make chat | serve | test | test-all | lint | clean.  PYTHON, MODEL, DEVICE and ARGS pass through:
#   make chat MODEL=/path/to/folder DEVICE=cpu ARGS="--max-model-len 1024"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A GPU, real or emulated, needs numba-cuda and cuda-python: the extra "cuda"; a picture needs Pillow: "vision".
INSTALLED := $(VENV)/.installed $(if $(filter-out auto cpu,$(DEVICE)),$(VENV)/.installed-cuda) \
	$(if $(findstring --image,$(ARGS)),$(VENV)/.installed-vision)
OPTIONS := $(if $(MODEL),--model $(MODEL)) $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

# Where nobody keeps bytecode every process compiles all that it imports, which takes three times as long as the rest of
# its start, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chat serve test test-all lint style types tests all-tests clean

# The bundled mixture of experts has learned to call a calculator.
chat: $(INSTALLED)
	@$(BIN)/python -m runtime.cli chat $(OPTIONS) $(if $(filter %demo_moe %demo_moe/,$(MODEL)),--calculator)

serve: $(INSTALLED)
	@$(BIN)/python -m runtime.cli serve $(OPTIONS)

# Style, then types beside every test that this machine can run, but for the exhaustive ones, which take as long again.
# Types take one core a minute or two: a target that fails is named in the last line.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types tests

test-all: style
	@$(MAKE) --no-print-directory --jobs 2 types all-tests

lint: style types

style: $(VENV)/.installed-dev
	@$(BIN)/python -m ruff check --no-cache .
	@$(BIN)/python -m ruff format --no-cache --check --quiet .

# What mypy found is kept beside the compiled kernels, so that a fresh checkout checks what has changed.
types: $(VENV)/.installed-dev
	@MYPY_CACHE_DIR="$${MYPY_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/xserv/mypy}" $(BIN)/python -m mypy

# Numpy's products in float64 are small: a second thread spins beside other workers.
tests all-tests: export OPENBLAS_NUM_THREADS = 1

tests: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal --durations 30 -m "not exhaustive" $(ARGS)

all-tests: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal -o faulthandler_timeout=3600 $(ARGS)

$(VENV)/.installed: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" "."
	@touch $@

$(VENV)/.installed-dev: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-cuda $(VENV)/.installed-vision

$(VENV)/.installed-cuda: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" ".[cuda]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-vision: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" ".[vision]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
