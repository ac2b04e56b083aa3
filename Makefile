# `make demo`, `make test` and `make docs` make .venv on their first run and reuse it after.

PYTHON ?= $(firstword $(shell command -v python3.11 || command -v python3) python3)
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready

# every install, build environments included, takes the versions of this file
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test docs format clean

demo: $(READY)
	$(BIN)/isokron demo

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "Open site/index.html, or serve it (search needs that): $(BIN)/python -m http.server --directory site"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv site

# torch first and by its exact version, so that no other package chooses a build of it
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("isokron needs Python 3.11 or newer, %s is %d.%d; run make PYTHON=/path/to/python3.11" % (sys.executable, *v))'
	@echo "Installing into .venv (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@
