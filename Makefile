# Everything a newcomer or a machine runs.  `make` alone lists the verbs.
# ARGS goes to the tool behind a verb:  make test ARGS="-k barrier"   make bench ARGS=--quick

VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
# The smallest numpy that pyproject.toml declares, in a folder that goes before the environment's own.
OLDEST := $(FRAMEWORKS)/oldest
NUMPY := $(shell sed -n 's/^ *"numpy>=\([0-9.]*\)".*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
ARGS ?=
# Processes that share the tests: most of them wait for something most of the time.
WORKERS ?= 3

# The first interpreter that is new enough; PYTHON=... overrides the search.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo test test-frameworks style types format cover bench soak docs dev clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## three nodes find each other, train, lose one and get it back, live
	@$(BIN)/potluck demo $(ARGS)

test: style types ## style, types and all tests (soaks excepted)
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal $(ARGS)

test-frameworks: $(FRAMEWORKS)/.installed ## JAX, MLX, accelerate, Trainer, Lightning, DeepSpeed, the oldest numpy
	$(FRAMEWORKS)/bin/pytest -m 'not soak' tests/arrays/test_jax.py tests/arrays/test_mlx.py \
		tests/arrays/test_adapters_frameworks.py tests/training/test_elastic_frameworks.py \
		tests/integration/test_torch_frameworks.py $(ARGS)
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(FRAMEWORKS)/bin/python -c \
		'import numpy; assert f"{numpy.__version__}.".startswith("$(NUMPY)."), numpy.__version__'
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(FRAMEWORKS)/bin/pytest tests/arrays/test_torch.py tests/arrays/test_adapters.py \
		tests/integration/test_torch_storage.py $(ARGS)

style: $(VENV)/.dev ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

cover: $(VENV)/.dev ## branch coverage; the pure layers must reach 100 %
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/coverage report --include='src/potluck/schedule/*,src/potluck/schedule/algorithms/*,src/potluck/compression/*,src/potluck/membership/*,src/potluck/trust/pairing_code.py,src/potluck/trust/pairing_protocol.py,src/potluck/trust/roster.py,src/potluck/trust/roster_records.py,src/potluck/trust/admission.py,src/potluck/backend/barrier.py,src/potluck/backend/matching.py,src/potluck/rpc/errors.py,src/potluck/rpc/protocol.py,src/potluck/training/steps.py' --fail-under=100

bench: $(VENV)/.bench ## every benchmark, beside what it is compared with (ARGS=--quick for a glance)
	$(BIN)/python benchmarks/run.py $(ARGS)

soak: $(VENV)/.dev ## the long tests
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -m soak --timeout=3600 -o faulthandler_timeout=3600 $(ARGS)
	$(BIN)/python -m potluck.testing.seeds --seeds 200000
	PYTHONPATH=tests $(BIN)/python -m support.fuzz_run --inputs 10000000
	PYTHONPATH=tests $(BIN)/python -m support.mutation_run --sample 300 --jobs 2

docs: $(VENV)/.dev ## write what the documentation takes from the code
	$(BIN)/python docs/build.py $(ARGS)

dev: $(VENV)/.dev ## only install what the verbs above need

clean: ## remove the environment and every cache
	rm -rf $(VENV) $(FRAMEWORKS) .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* htmlcov dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: an install is repeated only when what it was made from has changed.  The demo rests on
# the first alone, so it waits for neither torch nor developer tools.

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Potluck needs Python 3.11 or newer; none was found (PYTHON=... names one)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Potluck needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version)."; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "No environment could be made; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Potluck into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the developer tools and torch into $(VENV) (a few hundred megabytes)"
	@$(PIP) --editable '.[dev,torch,mpi,dashboard]'
	@touch $@

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt
	@echo "Installing JAX, MLX, torch and the frameworks on it into $(FRAMEWORKS) (two gigabytes)"
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@DS_BUILD_OPS=0 $(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint constraints.txt --editable '.[dev,jax,mlx,torch,frameworks]'
	@$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet \
		--no-deps --upgrade --target $(OLDEST) numpy==$(NUMPY)
	@touch $@

# mpi4py needs nothing to be installed; without Open MPI (openmpi-bin) the tables say who is missing.
$(VENV)/.bench: $(VENV)/.dev
	@$(PIP) --editable '.[bench]'
	@touch $@
