# make chat | serve | test | test-all | lint | clean.  PYTHON, MODEL, DEVICE and ARGS pass through:
#   make chat MODEL=/path/to/folder DEVICE=cpu ARGS="--max-model-len 1024"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A GPU, real or emulated, needs numba-cuda and cuda-python: the extra "cuda".
INSTALLED := $(VENV)/.installed$(if $(filter-out auto cpu,$(DEVICE)),-cuda)
OPTIONS := $(if $(MODEL),--model $(MODEL)) $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

.PHONY: chat serve test test-all lint clean

chat: $(INSTALLED)
	@$(BIN)/python -m runtime.cli chat $(OPTIONS)

serve: $(INSTALLED)
	@$(BIN)/python -m runtime.cli serve $(OPTIONS)

# Linters, types, then every test that this machine can run, but for the exhaustive ones, which take as long again.
test: lint
	@$(BIN)/python -m pytest --numprocesses logical --dist worksteal --durations 30 -m "not exhaustive" $(ARGS)

test-all: lint
	@$(BIN)/python -m pytest --numprocesses logical --dist worksteal -o faulthandler_timeout=3600 $(ARGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/python -m ruff check --no-cache .
	@$(BIN)/python -m mypy

$(VENV)/.installed: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" "."
	@touch $@

$(VENV)/.installed-dev: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-cuda

$(VENV)/.installed-cuda: pyproject.toml tools/make_environment.sh
	@sh tools/make_environment.sh "$(PYTHON)" "$(VENV)" ".[cuda]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
