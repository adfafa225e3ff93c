# make demo | test | test-all | lint | type | fmt | bench: each first installs what it needs into one environment, .venv.
# The demo needs the least (`.[demo]` of setup.cfg), the first tier of the tests more (`.[test]`), all else `.[dev]`.
# Where nothing can be installed, use the interpreter as it is:  make test PYTHON=python3 VENV=

VENV ?= .venv
ifeq ($(VENV),)
PYTHON ?= python3
else
BASE ?= python3
PYTHON := $(VENV)/bin/python
DEMO_READY := $(VENV)/.demo
TEST_READY := $(VENV)/.test
READY := $(VENV)/.dev
endif
ARGS ?=
# Workers of the tests; each has its own processes to be ranks. One that is done takes tests over from another.
JOBS ?= 2
# Threads of each: more of them than cores wait for each other, busily.
THREADS ?= 1
RUN := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)

.PHONY: demo docs package test test-rest test-all test-full test-anywhere test-torch test-with test-gpu browser bench bench-before bench-overhead bench-growth bench-fit bench-layer-inputs bench-threshold bench-faults bench-spikes bench-bits bench-gradients bench-clip bench-reading bench-explain bench-explain-gpu bench-gpu bench-gpu-first bench-gpu-dry bench-simulated architecture lint type fmt clean

demo: $(DEMO_READY)
	PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) PYTHON="$(PYTHON)" LOGS= launch/local.sh demo/train.py $(ARGS)

PYTEST := OMP_NUM_THREADS=$(THREADS) $(RUN) -m pytest -n $(JOBS) --dist worksteal

# The first tier (tests/support/tiers.py): every law, the package's parts, three engines on two ranks. Five to eight minutes on 2 cores.
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
  tests/device/test_long_run.py tests/device/test_race_hunt.py
test-full: $(READY)
	$(PYTEST) --tier full
	DISTHOOKS_FULL=1 $(RUN) -m pytest -s -o faulthandler_timeout=0 $(FULL_TESTS) $(ARGS)

# What compares numbers, with other instructions of the CPU, from other seeds (tests/support/seeds.py) and with other numbers
# of threads: no test may depend on any of them. Six minutes on 2 cores.
ANYWHERE ?= $(addprefix tests/,laws/test_01_exact.py laws/test_01_exact_codecs.py laws/test_11_truth.py \
  laws/test_11_truth_statistics.py laws/test_16_one_decision.py laws/test_16_one_decision_steps.py engines/test_truth.py \
  engines/test_one_step.py engines/test_forward_statistics.py unit/grads unit/support/test_rounding.py unit/test_conformance.py)
ANYWHERE_TESTS := $(RUN) -m pytest --dist worksteal --tier first $(ANYWHERE)
test-anywhere: $(TEST_READY)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE $(ANYWHERE_TESTS) -n $(JOBS) $(ARGS)
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
	{ grep -vE '^(torch|triton)==' $(CONSTRAINTS) || true; } > $(TORCH_VENV)/constraints.txt
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

# Some 15 minutes on 2 cores and 8 GiB of room in the temporary directory, both best with nothing else running.
bench: $(READY)
	$(RUN) benchmarks/disk.py --model transformer $(ARGS)
	$(RUN) benchmarks/disk.py --model resnet152 $(ARGS)

bench-overhead: $(READY)
	$(RUN) benchmarks/overhead.py $(ARGS)

# Some 6 minutes on 2 cores; peers that are not installed are named.
bench-gradients: $(READY)
	$(RUN) benchmarks/gradients.py $(ARGS)

# ClipNorm and the optimizer's step beside torch's clip_grad_norm_ and step: two minutes.
bench-clip: $(READY)
	$(RUN) benchmarks/clip.py $(ARGS)

# All statistics on the CPU beside an older commit and torch's clip_grad_norm_, in turn:  make bench-reading COMMIT=v0.1.0
bench-reading: $(READY)
	$(RUN) benchmarks/reading.py $(COMMIT) $(ARGS)

# Overhead, gradients and the transformer, beside those of an older commit, in turn:  make bench-before COMMIT=v0.1.0
bench-before: $(READY)
	$(RUN) benchmarks/before.py $(COMMIT) $(ARGS)

# Whether thousands of saved tensors that share something take time in proportion to their number.
bench-growth: $(READY)
	$(RUN) benchmarks/growth.py $(ARGS)

# Budgets of resident memory: what fit keeps of each, and what a step takes under it.
bench-fit: $(READY)
	$(RUN) benchmarks/fit.py $(ARGS)

# Layers under checkpoints: their inputs in memory, moved by transformers, and moved by disthooks.
bench-layer-inputs: $(READY)
	$(RUN) benchmarks/layer_inputs.py $(ARGS)

# Faults in the training of a small GPT on 2 to 4 ranks, and whether `disthooks report` names them: some 25 minutes.
bench-faults: $(READY)
	$(RUN) benchmarks/faults.py $(ARGS)

# Induced spikes in the training of a GPT, under each rule, and whether the alarm comes before the loss: some 25 minutes.
bench-spikes: $(READY)
	$(RUN) benchmarks/spikes.py $(ARGS)

# Single bits flipped on 2 and 3 ranks, and whether `disthooks diff` names them: one minute.
bench-bits: $(READY)
	$(RUN) benchmarks/bits.py $(ARGS)

bench-threshold: $(READY)
	$(RUN) benchmarks/threshold.py $(ARGS)

# Seconds and memory of dh.explain for models of full size and 1,024 ranks, and what others predict: some 10 minutes.
bench-explain: $(READY)
	$(RUN) benchmarks/explain.py $(ARGS)

# Predicted on fake tensors of the CPU beside measured on a GPU, 68 cases in 540 seconds; exit code 1 beyond 1% and 3%.
bench-explain-gpu: $(READY)
	$(RUN) benchmarks/explain_gpu.py $(ARGS)

# A budget of 520 seconds: benchmarks/results/gpu.json, a table, docs/img. docs/gpu.md says what is in it.
bench-gpu: $(READY)
	$(RUN) benchmarks/gpu.py --budget 520 $(ARGS)

# Two minutes at most: what the machine gives, and whether what all else rests on works: benchmarks/results/gpu-first.json.
bench-gpu-first: $(READY)
	$(RUN) benchmarks/gpu_first.py $(ARGS)

# The same scripts without a GPU, on models of no size: to see that they run. CI does it too.
bench-gpu-dry: $(READY)
	$(RUN) benchmarks/gpu_first.py --device cpu --size tiny
	$(RUN) benchmarks/gpu.py --device cpu --size tiny --repeats 1 --budget 300 $(ARGS)
	$(RUN) benchmarks/explain_gpu.py --device cpu --size tiny --only "llama bf16 flash" "resnet152 fp32" "gpt2 fp32 math"

# Tapes of two large models on a modelled clock and link: seconds, on any machine. No figure is measured on a GPU.
bench-simulated: $(READY)
	$(RUN) benchmarks/simulated.py $(ARGS)

# What is written from the code: docs/img/architecture.svg, the list of Notes, and all that follows from @register.
architecture: $(READY)
	$(RUN) docs/generate.py --write
	$(RUN) docs/architecture.py

# The site, in build/site: open build/site/index.html. A warning (a broken link, an unknown name) is an error.
docs: $(READY)
	OMP_NUM_THREADS=$(THREADS) $(RUN) -m sphinx -q -W --keep-going -b html docs build/site

# The sdist, and the wheel that is built from it, in dist/. tests/jobs/test_package.py builds, installs and tries both.
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
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: setup.cfg pyproject.toml constraints.txt
	test -x $(PYTHON) || $(BASE) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache runs
