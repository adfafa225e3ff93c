# make demo | test | test-all | lint | type | fmt | bench: each first installs what it needs into one environment, .venv.
# The demo needs the least (`.[demo]` of setup.cfg), the first tier of the tests more (`.[test]`), the site `.[docs]`, all else
# `.[dev]`.
# Where nothing can be installed, use the interpreter as it is:  make test PYTHON=python3 VENV=

VENV ?= .venv
ifeq ($(VENV),)
PYTHON ?= python3
else
BASE ?= python3
PYTHON := $(VENV)/bin/python
DEMO_READY := $(VENV)/.demo
TEST_READY := $(VENV)/.test
DOCS_READY := $(VENV)/.docs
READY := $(VENV)/.dev
endif
ARGS ?=
# Workers of the tests; each has its own processes to be ranks. One that is done takes tests over from another.
JOBS ?= 2
# Threads of each: more of them than cores wait for each other, busily.
THREADS ?= 1
RUN := PYTHONPATH="$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))" $(PYTHON)

.PHONY: demo docs package test test-rest test-all test-full test-anywhere test-torch test-elsewhere test-with test-gpu browser bench help architecture lint type fmt clean

demo: $(DEMO_READY)
	PYTHONPATH="$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))" PYTHON="$(PYTHON)" LOGS= launch/local.sh demo/train.py $(ARGS)

PYTEST := OMP_NUM_THREADS=$(THREADS) $(RUN) -m pytest -n $(JOBS) --dist worksteal

# The first tier (tests/support/tiers.py): every law, the package's parts, three engines on two ranks. Less than five minutes on 2 quiet cores.
test: $(TEST_READY)
	$(PYTEST) --tier first $(ARGS)

# What the first tier leaves out: every engine and situation, four ranks, races, integrations, whole commands.
test-rest: $(READY)
	$(PYTEST) --tier second $(ARGS)

# First the whole environment: with it, what the first tier leaves out where a framework is missing runs too.
test-all: $(READY) test test-rest

# All of torch's operators and modules, every dtype and store, threads for hundreds of steps, and 2,000 steps of training
# with lengths and delays that vary: an hour and a half on 2 cores. Before that what `make test-all` leaves out: the matrix of
# engines, situations and plans, and tests of the benchmarks.
FULL_TESTS := $(addprefix tests/laws/test_,01_exact_every_op.py 01_exact_every_module.py 07_thread_local_many_threads.py \
  19_predicted_is_measured_modules.py) \
  tests/device/test_long_run.py
test-full: $(READY)
	$(PYTEST) --tier full
	DISTHOOKS_FULL=1 $(RUN) -m pytest -s -o faulthandler_timeout=0 $(FULL_TESTS) $(ARGS)

# What compares numbers, with other instructions of the CPU, from other seeds (tests/support/seeds.py) and with other numbers
# of threads: no test may depend on any of them. Six minutes on 2 cores. `make test-elsewhere` is the first third of it.
ANYWHERE ?= $(addprefix tests/,laws/test_01_exact.py laws/test_01_exact_codecs.py laws/test_11_truth.py \
  laws/test_11_truth_statistics.py laws/test_16_one_decision.py laws/test_16_one_decision_steps.py engines/test_truth.py \
  engines/test_one_step.py engines/test_forward_statistics.py unit/grads unit/support/test_rounding.py unit/test_conformance.py)
ANYWHERE_TESTS := $(RUN) -m pytest --dist worksteal --tier first $(ANYWHERE)
test-elsewhere: $(TEST_READY)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE DISTHOOKS_SEED=777 \
	  $(ANYWHERE_TESTS) -n $(JOBS) $(ARGS)

test-anywhere: test-elsewhere
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 DISTHOOKS_SEED=12345 $(ANYWHERE_TESTS) -n $(JOBS) $(ARGS)
	OMP_NUM_THREADS=4 DISTHOOKS_SEED=777 $(ANYWHERE_TESTS) -n 1 $(ARGS)

# The laws, the parts, the simulated device and the engines on another torch, in an environment of its own beside the
# temporary files: three minutes and 5 GB for a torch with CUDA. docs/torch.md says what was run on which version.
TORCH ?= 2.15.0
TORCH_VENV ?= $(or $(TMPDIR),/tmp)/disthooks-torch-$(TORCH)
# /dev/null on a Python that does not have these versions, 3.10 say: then the newest that it has are installed.
CONSTRAINTS ?= constraints.txt
TORCH_TESTS ?= disthooks tests/laws tests/unit tests/device tests/engines
test-torch:
	test -x $(TORCH_VENV)/bin/python || python3 -m venv $(TORCH_VENV)
	{ grep -vE '^torch==' $(CONSTRAINTS) || true; } > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torch==$(TORCH) --editable ".[test]"
	$(MAKE) test-with VENV= PYTHON=$(TORCH_VENV)/bin/python

# The same with the interpreter as it is:  make test-with VENV= PYTHON=/path/to/python
test-with: $(TEST_READY)
	$(PYTEST) $(TORCH_TESTS) $(ARGS)

# What is a GPU's own, and the laws on it, within GPU_LIMIT seconds; what did not run is named in GPU_JSON. docs/gpu.md.
# Few threads each: as many as there are cores, in every one of the processes, take turns on them.
DEVICE ?= cuda
GPU_JOBS ?= 6
GPU_THREADS ?= 2
# Empty: all, in groups, the most telling first (tests/gpu/run.py); files and folders: each of these.
GPU_TESTS ?=
GPU_LIMIT ?= 540
GPU_JSON ?= benchmarks/results/test-gpu.json
test-gpu: $(READY)
	@$(RUN) tests/support/switch.py $(DEVICE)
	OMP_NUM_THREADS=$(GPU_THREADS) $(RUN) tests/gpu/run.py --device $(DEVICE) --limit $(GPU_LIMIT) --jobs $(GPU_JOBS) --json $(GPU_JSON) $(if $(GPU_TESTS),--only $(GPU_TESTS)) -- $(ARGS)

# The tests of pages need Chromium or Chrome. If there is none, root gets Debian's: tests/support/browser.py.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  if command -v $$name; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	else \
	  echo "No browser is installed, and only root can install one: apt-get install chromium" >&2; exit 1; \
	fi

# One of the scripts in benchmarks/ that `make help` lists, best with nothing else running:  make bench NAME=overhead ARGS="..."
NAME ?= disk
bench: $(READY)
	$(RUN) benchmarks/$(NAME).py $(ARGS)

# The targets, and the benchmarks with what each measures.
help:
	@grep -E '^[a-z-]+:' Makefile | cut -d: -f1 | paste -sd' ' -
	@for file in $$(grep -l '^    make bench' benchmarks/*.py); do \
	  name=$$(basename $$file .py); printf '%-14s %s\n' $$name "$$(head -1 $$file | cut -c4-)"; done

# What is written from the code: docs/img/architecture.svg, the list of Notes, and all that follows from @register.
architecture: $(READY)
	$(RUN) tools/generate.py --write
	$(RUN) tools/architecture.py

# The site, in build/site: open build/site/index.html. A warning (a broken link, an unknown name) is an error.
docs: $(DOCS_READY)
	OMP_NUM_THREADS=$(THREADS) $(RUN) -m sphinx -q -W --keep-going -b html docs build/site

# The sdist, and the wheel that is built from it, in dist/. tests/end_to_end/test_package.py builds, installs and tries both.
package: $(READY)
	rm -rf dist
	$(PYTHON) -m build --outdir dist

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m vulture
	$(RUN) -c "from importlinter.cli import lint_imports_command as run; run()" --no-cache --no-logo

type: $(READY)
	$(PYTHON) -m mypy

fmt: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# Rebuilt when what it installs changes; the stamp is made last, so an interrupted install starts again.
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.dev: $(VENV)/.%: setup.cfg pyproject.toml constraints.txt
	test -x $(PYTHON) || $(BASE) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache runs
