# Two commands on a fresh machine: `make demo` serves a real model, `make test` runs every test.
# Both make the virtual environment they need in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# On Linux MLX's CPU backend is an extra; on macOS MLX needs none.
ifeq ($(shell uname -s),Linux)
EXTRAS := cpu
else
EXTRAS :=
endif

empty :=
space := $(empty) $(empty)
comma := ,
bracket = $(if $(strip $(1)),[$(subst $(space),$(comma),$(strip $(1)))])

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/mlx-serve --demo $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.$(call bracket,$(EXTRAS))'
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.$(call bracket,$(EXTRAS) dev)'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
