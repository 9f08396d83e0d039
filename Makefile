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
WORKERS ?= 4
PYTEST := $(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal

# The tiers.  A test is in the first unless a marker says otherwise.  Property tests are in the first
# with few examples and in the second with all.  tests/test_tiers.py shows that none falls between.
FIRST := not slow and not soak and not frameworks
SECOND := (slow or hypothesis) and not soak and not frameworks
FRAMEWORKS_ONLY := frameworks and not soak
SOAKS := soak

# What `make test-bare` runs while everything is hidden that some platform lacks.
BARE := tests/backend/test_tcp.py tests/backend/test_messages.py tests/backend/test_mesh.py \
	tests/collective/test_p2p.py tests/collective/test_collectives.py tests/collective/test_context.py \
	tests/rpc/test_agent.py tests/rpc/test_peer.py tests/cluster/test_cluster.py

# What decides and never acts (tests/support/architecture.py has the same list), and the tests of it.
PURE := src/potluck/schedule/*,src/potluck/schedule/algorithms/*,src/potluck/compression/*,src/potluck/membership/*,src/potluck/trust/pairing_code.py,src/potluck/trust/pairing_protocol.py,src/potluck/trust/roster.py,src/potluck/trust/roster_records.py,src/potluck/trust/admission.py,src/potluck/backend/barrier.py,src/potluck/rpc/errors.py,src/potluck/rpc/protocol.py,src/potluck/training/steps.py
PURE_TESTS := tests/schedule tests/compression tests/membership tests/testing tests/trust tests/rpc tests/collective \
	tests/backend/test_barrier.py tests/backend/test_matching.py tests/training/test_steps.py tests/test_errors.py \
	src/potluck/schedule src/potluck/compression src/potluck/membership src/potluck/trust src/potluck/rpc \
	src/potluck/backend/barrier.py src/potluck/training/steps.py

# Tests start hundreds of interpreters: each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

# The first interpreter that is new enough; PYTHON=... overrides the search.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest test-slow test-bare test-frameworks style types types-here format cover
.PHONY: cover-pure bench soak docs dev clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## three nodes find each other, train, lose one and get it back, live
	@$(BIN)/potluck demo $(ARGS)

test: style types-here ## before every commit: style, types, the tests of every module (5 minutes)
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-quick} $(PYTEST) -m '$(FIRST)' $(ARGS)

test-all: test test-rest cover-pure ## all tests but the soaks, and coverage of the pure parts (45 minutes)

test-rest: types test-slow test-bare test-frameworks ## what CI adds to `make test`

test-slow: $(VENV)/.dev ## storms of several machines, long runs, sweeps, property tests with all examples
	$(PYTEST) -m '$(SECOND)' $(ARGS)

test-bare: $(VENV)/.dev ## messages, collectives, calls and clusters without what some platform lacks
	PYTHONPATH=$(CURDIR)/tests/support/bare $(PYTEST) -m '$(FIRST)' $(BARE) $(ARGS)

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

types-here: $(VENV)/.dev
	$(BIN)/mypy

types: types-here ## mypy, strict: for this platform, and the package for macOS and Windows
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin src
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 src

format: $(VENV)/.dev ## let ruff repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

cover: $(VENV)/.dev ## branch coverage of everything
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

cover-pure: $(VENV)/.dev ## branch coverage of what decides and never acts, which must be 100 %
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses=2 $(PURE_TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='$(PURE)' --fail-under=100

bench: $(VENV)/.bench ## every benchmark, beside what it is compared with (ARGS=--quick for a glance)
	$(BIN)/python benchmarks/run.py $(ARGS)

soak: $(VENV)/.dev ## the long tests
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -m soak --timeout=3600 -o faulthandler_timeout=3600 $(ARGS)
	$(BIN)/python -m potluck.testing.seeds --seeds 200000
	PYTHONPATH=tests $(BIN)/python -m support.fuzz_run --inputs 10000000
	PYTHONPATH=tests $(BIN)/python -m support.mutation_run --sample 300 --jobs 2
	for area in pure net training; do PYTHONPATH=tests $(BIN)/python -m support.mutation_run \
		--area $$area --sample 300 --jobs 2 --least 0.9 || exit 1; done

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
