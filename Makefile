# Everything here sets itself up in ./.venv; a second run is quick.
#
#   make demo    train on the digits data that ships with scikit-learn, private and not, under two minutes
#   make test    the whole test suite, under ten minutes on two cores
#   make check   ruff and mypy
#   make docs    the site, into docs/_build/html; warnings are errors, links are checked, the tutorial is executed
#   make dist    wheel and sdist into dist/, checked, installed and tried in an empty environment
#   make matrix  the suite at the ends of the ranges that pyproject.toml states, in environments of up to 6 GB each in the
#                system's temporary folder, over an hour; docs/versions.md is written from it
#   make bench   step time and memory against plain Lightning and other libraries
#
# The torch that is installed first; any version that pyproject.toml allows will do: make TORCH=torch test
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test matrix check docs dist bench models clean

$(VENV)/.runtime: pyproject.toml
	@echo "setting up $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[examples]"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --editable ".[examples,plot,models,paper,dev]"
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) "opacus>=1.5"
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/python examples/digits.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

matrix: $(VENV)/.dev
	$(BIN)/python -m benchmarks.matrix --write docs/versions.md

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.docs: $(VENV)/.runtime
	$(PIP) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	rm -rf docs/_build
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

dist: $(VENV)/.runtime
	rm -rf build dist
	$(PIP) build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	TORCH="$(TORCH)" $(BIN)/python .ci/try_dist.py dist

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# docs/models.md, from the zoo's own results
models: $(VENV)/.dev
	$(BIN)/python -m tests.zoo.table

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_logs
