# `make demo` and `make test` make the environment first if it is missing. PYTHON is the Python that it is made with.
PYTHON ?= python3
# Tests that run at the same time: some wait, for processes or threads. With a GPU: make test JOBS=0 ARGS="-m gpu"
JOBS ?= 3
# The tests of weights: what comes out of forwards, edits, files, removal, LoRA, pipelines.
PORTABLE := $(addprefix tests/,engine/weights engine/test_changes.py engine/test_odd_modules.py engine/test_options.py \
	engine/test_streams.py files integrations cli/test_cli.py units/test_system.py)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FETCHES := it fetches torch and the tools: 1.4 GB with torch for the CPU, more where torch comes with CUDA, in a few minutes

# Tests start many processes: what they import is compiled once, whatever the shell says, and not into the tree.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

.DEFAULT_GOAL := help
.PHONY: help setup demo cover size test quick portable matrix versions lint type bench pages pins site docs dist wheel

help:
	@echo "make setup   the environment, in $(VENV): $(FETCHES)"
	@echo "make demo    a diffusers pipeline, resident and with its weights in files, by diffusers and by this package (into demo-output/)"
	@echo "make test    all tests; those that need a GPU are skipped where there is none"
	@echo "make quick   the tests that take no time, for while you work: two and a half minutes on 2 cores"
	@echo "make portable the weights' tests, with what Linux, macOS and Windows all have: one minute on 2 cores"
	@echo "make cover   all tests, and the lines that they leave out"
	@echo "make matrix  every model class of diffusers on every tier, and the tables of docs/compatibility.md: fifteen minutes on 2 cores"
	@echo "make versions other versions of Python, torch and diffusers, one after the other: it fetches 25 GB (ARGS: see tests/versions.py)"
	@echo "make lint    ruff: rules and format"
	@echo "make size    the lines of the package, the tests and the benchmarks"
	@echo "make type    mypy, strict, on the package and the examples"
	@echo "make pages   write what is generated in docs/: the reference, and the tables of benchmarks"
	@echo "make pins    write constraints.txt again, for what pyproject.toml asks (ARGS=--upgrade for the newest versions)"
	@echo "make docs    build the site from docs/ (into site/), and run every code block in it"
	@echo "make dist    the sdist and the wheel, checked (into dist/)"
	@echo "make wheel   install the wheel into an environment and run the README there"
	@echo "make bench   python -m benchmarks weights (needs a GPU); options in ARGS"

setup: $(READY)

# torch comes first and alone: resolved together with the rest, pip may pick another build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Development needs Python 3.10 or newer: make PYTHON=python3.10 ...")'
	@echo "Making the environment in $(VENV): $(FETCHES)."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m examples.demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

cover: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov=group_offload --cov-report=term-missing:skip-covered $(ARGS)

size:
	@for part in 'group_offload/*.py' 'group_offload/*.css' 'group_offload/*.js' 'tests/*.py' 'benchmarks/*.py'; do \
		echo "$$part $$(git ls-files -z "$$part" | xargs -0 cat | wc -l)"; done

quick: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(ARGS)

# The package is shown nothing that only some systems have: tests/support/portable.py.
portable: export GROUP_OFFLOAD_PORTABLE := 1
portable: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(PORTABLE) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks weights $(ARGS)

pages: $(READY)
	$(BIN)/python -m docs.generated

pins: $(READY)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-python-downloads --all-extras --no-annotate \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make pins" pyproject.toml -o constraints.txt $(ARGS)
	sed -i.all '/^\(cuda\|nvidia\|triton\)/d' constraints.txt && rm constraints.txt.all

site: $(READY)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build; \
	else echo "The site is not built: mkdocs-material needs Python 3.11 or newer."; fi

docs: site
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

wheel: $(READY)
	$(BIN)/python -m tests.wheel

matrix: $(READY)
	$(BIN)/python -m tests.matrix --write $(ARGS)

versions:
	$(PYTHON) -m tests.versions $(ARGS)
