# `make tutorial` and `make test` need Python 3.11 or newer and a network the first time, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that share the tests; at the end of a run one that is idle takes tests from another.
WORKERS ?= 2
# Of the thorough tests many wait for processes.
THOROUGH_WORKERS ?= 3
# How many random pipelines `make random` compares.
EXAMPLES ?= 5000
# How many times `make soak` kills a process that trains, alone and of several, and interrupts one; and how
# often its threads train.
KILLS ?= 50
INTERRUPTS ?= 200
THREAD_RUNS ?= 1000
PYTEST := $(BIN)/python -m pytest --dist worksteal --numprocesses
# The tests start many processes: what they import is to be compiled once, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: tutorial test thorough tests random soak bench docs dist versions lint clean

tutorial: $(VENV)/installed
	$(BIN)/python answers/step4_configurable_stages.py --dataset digits --steps 30 \
	    --splits dense256 dense128 dense64

# Lint and types beside the tests: they would hold up one processor while the other is idle.
test: $(VENV)/installed-dev
	$(MAKE) --no-print-directory --jobs 2 tests lint

# XLA compiles a small program as a whole: in parts, which it would compile at once, takes half as long again.
tests: $(VENV)/installed-dev
	XLA_FLAGS="$$XLA_FLAGS --xla_cpu_parallel_codegen_split_count=1" $(PYTEST) $(WORKERS) -m "not thorough"

thorough: $(VENV)/installed-dev
	$(PYTEST) $(THOROUGH_WORKERS) -m "thorough and not alone"
	$(BIN)/python -m pytest -m "thorough and alone"

random: $(VENV)/installed-dev
	RANDOM_PIPELINES=$(EXAMPLES) $(PYTEST) $(WORKERS) tests/engine/test_random_pipelines.py

soak: $(VENV)/installed-dev
	KILLS=$(KILLS) INTERRUPTS=$(INTERRUPTS) THREAD_RUNS=$(THREAD_RUNS) $(BIN)/python -m pytest \
	    tests/processes/test_survival.py tests/processes/test_interrupts.py tests/processes/test_going_on.py \
	    tests/processes/test_nodes.py -k "random_moments or two_threads or network"

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks.run_all --short --write docs/benchmarks.md

# The site, to build/site/index.html. Whatever Sphinx warns of fails: a link, a name, an anchor that is not there.
docs: $(VENV)/installed-docs
	rm -rf build/site build/doctrees
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html --conf-dir docs/site \
	    --doctree-dir build/doctrees . build/site

# The wheel and the archive of the sources.
dist: $(VENV)/installed-dev
	$(BIN)/python scripts/make_dist.py

# A part of the tests with the oldest JAX, and with other Pythons that are here.
versions: $(VENV)/created
	XLA_FLAGS="$$XLA_FLAGS --xla_cpu_parallel_codegen_split_count=1" $(BIN)/python scripts/try_versions.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(VENV)/created:
	$(PYTHON) -c 'import sys; sys.exit("ipu_pipeline needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/created setup.cfg pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[datasets,reports]'
	touch $@

# Modules are compiled when they are imported: most never are.
$(VENV)/installed-dev: $(VENV)/created setup.cfg pyproject.toml
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]'
	touch $@ $(VENV)/installed $(VENV)/installed-docs

$(VENV)/installed-docs: $(VENV)/created setup.cfg pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

$(VENV)/installed-bench: $(VENV)/created setup.cfg pyproject.toml benchmarks/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[datasets,reports]' --requirement benchmarks/requirements.txt
	touch $@ $(VENV)/installed
