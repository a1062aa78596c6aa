# `make tutorial` and `make test` need Python 3.11 or newer and a network the first time, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that share the tests; at the end of a run one that is idle takes tests from another.
WORKERS ?= 2
# Of the thorough tests many wait for processes.
THOROUGH_WORKERS ?= 3
# The tests of one room alone: `make test ROOM=engine/schedules`.
ROOM ?=
# Their order: as it stands, or drawn anew with `SEED=7`.
SEED ?=
# How many random pipelines `make random` compares.
EXAMPLES ?= 5000
# How many times `make soak` kills a process that trains, alone and of several, and interrupts one; and how
# often its threads train.
KILLS ?= 50
INTERRUPTS ?= 200
THREAD_RUNS ?= 1000
# How many faults `make mutants` draws.
MUTANTS ?= 20
ORDER := $(if $(SEED),-p randomly --randomly-seed=$(SEED),-p no:randomly)
PYTEST := $(BIN)/python -m pytest $(ORDER) --dist worksteal --numprocesses
# XLA compiles a small program as a whole: in parts, which it would compile at once, takes half as long again.
QUICK := XLA_FLAGS="$$XLA_FLAGS --xla_cpu_parallel_codegen_split_count=1"
# A fresh environment of Python 3.11 or 3.12 has an older one.
PIP_OF_GROUPS := $(BIN)/pip install --quiet --disable-pip-version-check 'pip >=25.1'
TIMED := bash -c 'TIMEFORMAT="%U s of CPUs and %S in the system, %R s in all"; time "$$@"' timed
# The tests start many processes: what they import is to be compiled once, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: tutorial test thorough tests random soak mutants bench docs dist versions lint clean

tutorial: $(VENV)/installed
	$(BIN)/python answers/step4_configurable_stages.py --dataset digits --steps 30 \
	    --splits dense64 dense32 logits --emulate 0.25

# Lint and types beside the tests: they would hold up one processor while the other is idle.
test: $(VENV)/installed-dev
	$(TIMED) $(MAKE) --no-print-directory --jobs 2 tests $(if $(ROOM),,lint)

tests: $(VENV)/installed-dev
	$(QUICK) $(PYTEST) $(WORKERS) -m "not thorough and not soak" $(ROOM:%=tests/%)

thorough: $(VENV)/installed-dev
	$(TIMED) $(PYTEST) $(THOROUGH_WORKERS) -m "thorough and not soak" $(ROOM:%=tests/%)

random: $(VENV)/installed-dev
	RANDOM_PIPELINES=$(EXAMPLES) $(PYTEST) $(WORKERS) tests/engine/test_random_pipelines.py

soak: $(VENV)/installed-dev
	KILLS=$(KILLS) INTERRUPTS=$(INTERRUPTS) THREAD_RUNS=$(THREAD_RUNS) $(BIN)/python -m pytest -m soak $(ROOM:%=tests/%)

# Small faults put into a room's code one at a time: which do the fast tests find?
mutants: $(VENV)/installed-dev
	$(QUICK) $(BIN)/python scripts/mutants.py $(ROOM) --number $(MUTANTS)

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks.run_all --short --write docs/benchmarks.md
	$(BIN)/python scripts/draw_figures.py

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
	$(QUICK) $(BIN)/python scripts/try_versions.py

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

$(VENV)/installed: $(VENV)/created pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[datasets,reports]'
	touch $@

# Modules are compiled when they are imported: most never are.
$(VENV)/installed-dev: $(VENV)/created pyproject.toml
	$(PIP_OF_GROUPS)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --editable '.[datasets]' --group dev
	touch $@ $(VENV)/installed $(VENV)/installed-docs

$(VENV)/installed-docs: $(VENV)/created pyproject.toml
	$(PIP_OF_GROUPS)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable . --group docs
	touch $@

$(VENV)/installed-bench: $(VENV)/created pyproject.toml benchmarks/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[datasets,reports]' --requirement benchmarks/requirements.txt
	touch $@ $(VENV)/installed
