# make train   environment, install, and the main job on the embedded default
# make test    environment, install, and the whole test suite
# make check   formatting, lint, types, import layers
# make format  put the code into shape
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: train test check format

train: $(VENV)/installed
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
