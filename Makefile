# make demo and make test need nothing but Python 3.10 or newer (with venv and pip) and make.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# How the suite is run: MEASURE="-m coverage run" measures coverage, for `make coverage` to report.
MEASURE ?=
# Tests mostly wait for processes, so there are more of them than cores; JOBS=0 runs one after the other.
JOBS ?= 4
RUNS ?= 5
SCALE ?= full
BIN := $(VENV)/bin
# What installs the extras; the CI takes uv, in a tenth of the time.
PIP = $(BIN)/python -m pip
# Hundreds of processes import what is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick stress docs coverage lint chaos ecosystem celery-suite bench count release-check clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:
	@echo "make demo           real workers on a server of its own (or REDIS_URL=...)"
	@echo "make test           the test suite; ARGS='-k lock' for pytest, JOBS=0: in turn"
	@echo "make quick          in a minute: nothing slow, one worker"
	@echo "make stress         make test RUNS=5 times, while cores and disk are kept busy"
	@echo "make lint           ruff, mypy --strict, pyright"
	@echo "make docs           the documentation as a site, in docs/_build"
	@echo "make coverage       what make test MEASURE='-m coverage run' has measured"
	@echo "make chaos          bare locks, and workers, under every fault; 15 min, needs gcc; SCALE=1"
	@echo "make ecosystem      real workers beside Sentry, Flower, ...; in its own venv"
	@echo "make celery-suite   Celery's own suite, guarded; 10 min; ARGS=--part: in 3"
	@echo "make bench          all of docs/performance/; half an hour; ARGS=--quick"
	@echo "make count          what a call costs, counted; 2 min, needs valgrind"
	@echo "make release-check  all that a release needs but the upload; files in dist/"
	@echo "make clean          remove $(VENV) and everything else that is not in git"

demo: $(VENV)/.demo
	@$(BIN)/python -m examples.demo $(ARGS)

test: $(VENV)/.test
	$(BIN)/python $(MEASURE) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

quick: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --quick $(ARGS)

stress: $(VENV)/.test
	$(BIN)/python -m tests.stress --runs $(RUNS) -- -q -n $(JOBS) --dist loadfile $(ARGS)

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --scale $(SCALE)

# Other libraries' versions, plugins and patches stay out of $(VENV).
ecosystem:
	$(MAKE) VENV=$(VENV)-ecosystem $(VENV)-ecosystem/.ecosystem
	$(VENV)-ecosystem/bin/python -m pytest -n $(JOBS) --dist loadfile tests/ecosystem $(ARGS)

celery-suite:
	$(MAKE) VENV=$(VENV)-ecosystem $(VENV)-ecosystem/.ecosystem
	$(VENV)-ecosystem/bin/python -m tests.celery_suite $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

count: $(VENV)/.bench
	$(BIN)/python -m benchmarks.count $(ARGS)

release-check: $(VENV)/.dev
	$(BIN)/python -m tests.release $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet -b html docs docs/_build

coverage: $(VENV)/.test
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=95

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/mypy --strict tests/typing_api.py
	$(BIN)/basedpyright

clean:
	rm -rf $(VENV) $(VENV)-ecosystem build dist docs/_build *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find celery_setnx examples tests -name __pycache__ -prune -exec rm -rf {} +

# A stamp per extra: installed again only when pyproject.toml has changed. uv would take the environment that it
# runs in, whatever $(VENV) is; pip does not read UV_PYTHON.
$(VENV)/.%: pyproject.toml | $(BIN)/pip
	UV_PYTHON=$(abspath $(BIN)/python) $(PIP) install --quiet --editable '.[$*]'
	@touch $@

# pip comes last, so a virtual environment that was left half made is made again.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
