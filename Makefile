# Two commands on a fresh machine: `make demo` serves a real model, `make test` runs every test that needs no more than the
# project. Both make the virtual environment they need in .venv; `make test-clients`, which tries the published client
# packages against the server, has its own in .venv-clients, since they bring a hundred others, and needs npm. `make dist`
# builds the wheel and the sdist in dist/, `make check-dist` installs and tries the wheel.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS_VENV ?= .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin
CLIENTS_NODE := tests/clients/node
AGENTS := tests/agents

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

# Without Debian's python3-venv one is left behind that has no pip, and would be taken for whole the next time.
define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: PYTHON=python3.12")'
$(PYTHON) -m venv $(1) || { rm -rf $(1); exit 1; }
@echo "Installing into $(1); this takes a minute or two."
endef

.PHONY: demo test test-clients test-agents lint docs dist check-dist clean

# With what is optional, so that all of it can be tried.
demo: $(VENV)/.installed
	$(BIN)/mlx-serve --demo $(ARGS)

# -rs: what is skipped, and why.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -rs $(ARGS)

test-clients: $(CLIENTS_VENV)/.installed $(CLIENTS_NODE)/node_modules/.package-lock.json
	$(CLIENTS_BIN)/python -m pytest tests/clients $(ARGS)

# The coding agents, as published on npm, each in a network namespace of its own.
test-agents: $(VENV)/.installed-dev $(AGENTS)/node_modules/.package-lock.json
	cd $(AGENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs  # puts its program in place
	CODEX=$(AGENTS)/node_modules/.bin/codex CLAUDE=$(AGENTS)/node_modules/.bin/claude $(BIN)/python -m pytest $(AGENTS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page of commands, from their parsers.
docs: $(VENV)/.installed-dev
	$(BIN)/python .ci/commands_page.py > docs/commands.md

dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

check-dist: dist
	$(BIN)/python .ci/check_dist.py dist $(EXTRAS)

$(VENV)/bin/python:
	$(call make_venv,$(VENV))

$(VENV)/.installed: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --progress-bar on --editable '.$(call bracket,$(EXTRAS) metrics structured)'
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.$(call bracket,$(EXTRAS) dev)'
	touch $@ $(VENV)/.installed

$(CLIENTS_BIN)/python:
	$(call make_venv,$(CLIENTS_VENV))

$(CLIENTS_VENV)/.installed: pyproject.toml $(CLIENTS_BIN)/python
	$(CLIENTS_BIN)/python -m pip install --quiet --editable '.$(call bracket,$(EXTRAS) dev clients)'
	touch $@

# What npm writes itself when it is done. No package's own script is run.
%/node_modules/.package-lock.json: %/package.json %/package-lock.json
	npm ci --prefix $* --ignore-scripts --no-audit --no-fund
	touch $@

clean:
	rm -rf dist $(VENV) $(CLIENTS_VENV) $(CLIENTS_NODE)/node_modules $(AGENTS)/node_modules tests/ui/node_modules
