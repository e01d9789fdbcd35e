# Two commands do everything on a fresh machine with Python 3.10 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
FRONTEND := tb_plugin/frontend
DOCS := .venv-docs
WHEELS := .venv-wheels

.PHONY: help install demo screenshots performance test test-versions test-wandb-versions test-trackers test-frameworks test-doctor test-verdicts test-verdicts-inputs lint types format frontend schema docs test-docs dist wheels clean
.DELETE_ON_ERROR:

help:
	@echo "make install   create the virtual environment with all that development needs"
	@echo "make demo      train healthy and sick models on real data, report on each, say how to open TensorBoard"
	@echo "make screenshots  take the pictures of docs/images anew, over the demo's runs (needs Chromium)"
	@echo "make performance  measure what watching costs, beside other tools and at many sizes; writes docs/performance.md"
	@echo "make test      run the tests"
	@echo "make test-versions  run unit, contract and loop tests on the oldest and newest torch; writes docs/versions.md"
	@echo "make test-wandb-versions  run all W&B tests on three releases of wandb (part of test-versions)"
	@echo "make test-trackers  run the adapters for MLflow, SwanLab, Aim and ClearML against the real packages"
	@echo "make test-frameworks  run the integrations in the real frameworks; writes the table of docs/integrations.md"
	@echo "make test-doctor  run the doctor on a script for each of its treatments"
	@echo "make test-verdicts  run the tests of verdicts under the arithmetic of other machines"
	@echo "make lint      ruff: rules and format; prettier for the panel (needs Node 20 and npm)"
	@echo "make types     mypy --strict"
	@echo "make format    let ruff and prettier rewrite what they can"
	@echo "make frontend  check the panel: format, types, tests, committed bundle (needs Node 20 and npm)"
	@echo "make schema    write docs/metrics.md and docs/issues anew from catalogue and rules, and the table of docs/loops.md"
	@echo "make docs      build the documentation site into build/site, strictly; needs no network once installed"
	@echo "make test-docs  build the site, walk through it in Chromium, run every example of docs and examples"
	@echo "make dist      build sdist and wheel, and check both in an environment of their own"
	@echo "make wheels    build and check sdist and the wheels of all platforms"
	@echo "make clean     remove the virtual environment, caches and runs/demo"
	@echo "PYTHON=python3.12 chooses the interpreter, VENV=path the environment."

$(BIN)/python:
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); \
	sys.exit(None if ok else f"Python 3.10 to 3.13 is needed, {sys.executable} is {sys.version.split()[0]}; run: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras: nothing is installed twice until pyproject.toml or constraints.txt changes.
# `dev` holds `test`, which holds `demo`.
$(VENV)/.stamp-%: pyproject.toml constraints.txt $(wildcard gradflow_export/native/*.[ch]) | $(BIN)/python
	$(PIP) -e '.[$*]'
	@touch $@ $(if $(filter dev,$*),$(VENV)/.stamp-test) $(if $(filter dev test,$*),$(VENV)/.stamp-demo)

install: $(VENV)/.stamp-dev

demo: $(VENV)/.stamp-demo
	$(BIN)/gradflow demo --logdir runs/demo --tour

screenshots: export OMP_NUM_THREADS ?= 1
screenshots: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/screenshots.py

# Takes an hour or two; a noisy machine makes noisy tables. PERFORMANCE="--part overhead" measures one part again.
performance: export OMP_NUM_THREADS ?= 1
performance: $(VENV)/.stamp-test,benchmarks
	$(BIN)/python benchmarks/performance.py $(PERFORMANCE)

# Small models wait for each other's threads where other work shares the cores, and threads that wait in a loop take the others a core.
test test-doctor test-verdicts test-verdicts-inputs: export OMP_NUM_THREADS ?= 1
test test-doctor test-verdicts test-verdicts-inputs: export OMP_WAIT_POLICY ?= PASSIVE
# Whole lives of a session of W&B take minutes; `make test-wandb-versions` has them.
LIVES := life ends replay exporter_life offline patterns
# So does the doctor on a script for each treatment; `make test-doctor` has these.
TREATMENTS := batches by_hand cures learners mending samples sizes treatments
# The longest files come first (tests/conftest.py), so that no worker is left alone with one at the end.
test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(CASES) $(LIVES:%=--ignore=tests/wandb_core/test_%.py) \
		$(TREATMENTS:%=--ignore=tests/unit/test_experiments_%.py)

test-doctor: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TREATMENTS:%=tests/unit/test_experiments_%.py)

# Makes four environments of several GB each; takes hours. VERSIONS="--torch 2.9 --python 3.10" runs one pair.
test-versions:
	$(PYTHON) benchmarks/versions.py $(VERSIONS)
	$(MAKE) test-wandb-versions

# The W&B tests on the oldest, a middle and the newest release of wandb, which share everything else with $(VENV).
test-wandb-versions: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/wandb_versions.py

# The adapters of gradflow_export/writers/trackers.py against the real MLflow, SwanLab, Aim and ClearML, offline.
test-trackers: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/wandb_versions.py --trackers

# gradflow_export/integrations in the real frameworks; what they do not need newer, as torch may be, is that of $(VENV).
test-frameworks: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/wandb_versions.py --frameworks

# What `make test` runs as it is, with other kernels, other rounding, other inputs and more threads: see tests/perturb.py.
# Rounding is written in Python and slow where a model convolves, so that the demo is left to the first of the two.
test-verdicts: test-verdicts-inputs

# The first of the two, which CI runs before `make test`. With noise on its inputs, no batch is the same as data that stand in memory.
# VERDICTS=--cases=last, as there, takes the last case of each test, and CASES=--cases=others all that this leaves to `make test`;
# --half=0 and --half=1 in either take one half: of the last cases, or of the cases of tests that have several.
test-verdicts-inputs: $(VENV)/.stamp-test
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -n 2 --dist loadfile --perturb inputs,threads=2 $(VERDICTS) \
		-k "not (drawn_anew and (indices or slice))" \
		tests/pathologies tests/unit/test_cli_demo.py::test_a_broken_batch_is_a_loss_spike_that_passes

test-verdicts: $(VENV)/.stamp-test
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -n 2 --dist loadfile --perturb products,deterministic \
		tests/pathologies

lint: $(VENV)/.stamp-dev $(FRONTEND)/node_modules/.package-lock.json
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(FRONTEND) && npm run --silent lint

types: $(VENV)/.stamp-dev
	$(BIN)/mypy

format: $(VENV)/.stamp-dev $(FRONTEND)/node_modules/.package-lock.json
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd $(FRONTEND) && npm run --silent format

frontend: $(FRONTEND)/node_modules/.package-lock.json
	cd $(FRONTEND) && npm run check

# npm writes this file when it is done; it is older than the lock file only where that has changed since.
$(FRONTEND)/node_modules/.package-lock.json: $(FRONTEND)/package-lock.json
	cd $(FRONTEND) && npm ci --no-audit --no-fund
	@touch $@

schema: $(VENV)/.stamp-demo
	mkdir -p build
	$(BIN)/gradflow schema --markdown > build/metrics.md && mv build/metrics.md docs/metrics.md
	$(BIN)/python docs/_site/issue_pages.py
	$(BIN)/python tests/loops/table.py

# Nothing of the package is installed for it: mkdocstrings reads the sources.
$(DOCS)/.stamp: docs/_site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)/.stamp
	$(DOCS)/bin/python -m mkdocs build --strict

# What a reader does, in Chromium, over the site that was just built.
test-docs: docs $(VENV)/.stamp-test
	$(BIN)/python -m pytest tests/site

dist: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/distribution.py

$(WHEELS)/.stamp: benchmarks/wheels/requirements.txt
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

# gcc builds the wheel for Linux on x86-64, zig (a package of pip) the others; qemu-user, libc6-arm64-cross and wine run them.
wheels: $(WHEELS)/.stamp
	$(WHEELS)/bin/python benchmarks/wheels/build.py

clean:
	rm -rf $(VENV) $(DOCS) $(WHEELS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs/demo $(FRONTEND)/node_modules
	find gradflow_export tb_plugin tests -name __pycache__ -type d -prune -exec rm -rf {} +
