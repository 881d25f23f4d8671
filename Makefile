# make test, make demo: set up .venv when needed (Python 3.11 or newer, pip), then run.
# make test PYTHON=python3 VENV=   the tests alone, in that interpreter as it is: installs nothing.

PYTHON ?= python3
VENV ?= .venv

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
SETUP :=
CHECKS :=
PYTEST_ARGS ?=
else
PY := $(VENV)/bin/python
SETUP := $(VENV)/.installed
CHECKS := lint
PYTEST_ARGS ?= -n 2 --dist worksteal
endif

.PHONY: test test-amd test-engines test-engines-all fuzz lint demo

test: $(SETUP) $(CHECKS)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

# Every kernel that the gfx942 and gfx950 tables can choose, as machine code executed on the CPU.
# Takes minutes; rewrites the committed result.
test-amd: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m tools.amdgcn.report --output benchmarks/results/amdgcn_execution.json

# Random calls of every operator against float64, on the GPU where there is one: N of each family.
# A failure prints the line that runs it again.
N ?= 1000
SEED ?= 0
fuzz: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m tools.fuzz --batches $(N) --seed $(SEED)

# In environments with the real vLLM and sglang, kept under ~/.cache; the first time they are fetched.
# The newest release of each engine, and of one of them the older one, which changes by the day;
# test-engines-all runs every tested release, make test-engines ENGINES="vllm==0.33.0" one alone.
ENGINES ?=
test-engines: $(SETUP)
	$(PY) tests/engines/envs.py $(ENGINES)

test-engines-all: $(SETUP)
	$(PY) tests/engines/envs.py all

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

demo: $(SETUP)
	$(PY) -m backend_cli.main demo

# An installed torch or triton is left alone: it may be a build for this machine's GPU.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11: name a newer one, PYTHON=python3.11"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@if ! $(PY) -c 'import torch' 2>/dev/null; then \
	  if command -v rocm-smi >/dev/null; then \
	    echo "install the ROCm build of torch into $(VENV) first: the one on PyPI is for CUDA"; exit 1; \
	  elif command -v nvidia-smi >/dev/null; then $(PY) -m pip install torch; \
	  else $(PY) -m pip install torch==2.13.0; fi; fi
	@# tests compile the CUDA kernels with it, where torch has not brought one for a GPU
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  $(PY) -m pip install 'nvidia-cuda-nvrtc==13.0.*'; fi
	@$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install triton==3.6.0
	$(PY) -m pip install -e '.[dev]'
	@touch $@
