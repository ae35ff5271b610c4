# Everything a newcomer needs: `make run`, `make test`. A recipe that runs our code first brings the environment and the
# kernels up to date; nothing outside this directory is changed.
SHELL    := /bin/bash
VENV     := .venv
PY       := $(VENV)/bin/python
PYTHON   ?= python3
STAMP    := $(VENV)/.stamp
KERNELS  := build/dev/.stamp
BYTECODE := build/dev/.bytecode
ROOMS    := bench cli colibri_moe conversion deploy models native services shared
NATIVE_SOURCES := $(shell find CMakeLists.txt native -name CMakeLists.txt -o -name '*.c' -o -name '*.h' 2>/dev/null)
TESTS    ?=
PROMPT   ?= Tell me a story about a small bird.
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv kernels run test test-all cross check bench template schema clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## the environment in .venv, with test and development tools
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing the environment into $(VENV) (a few minutes the first time) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,dev]'
	@command -v cmake >/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check cmake ninja
	@touch $@

kernels: $(KERNELS) $(BYTECODE) ## compile native/ into the source tree
$(KERNELS): $(NATIVE_SOURCES) | $(STAMP)
	@mkdir -p build/dev
	@PATH="$$PATH:$(abspath $(VENV))/bin"; cmake -S . -B build/dev -DCMAKE_BUILD_TYPE=Release > build/dev/configure.log 2>&1 \
	  || { cat build/dev/configure.log; exit 1; }
	@PATH="$$PATH:$(abspath $(VENV))/bin"; echo "compiling the kernels ..."; cmake --build build/dev --parallel > build/dev/build.log 2>&1 \
	  || { cat build/dev/build.log; exit 1; }
	@touch $@

# A start loads 150 modules of ours; where PYTHONDONTWRITEBYTECODE is set each of them would be compiled every time.
$(BYTECODE): $(shell find $(ROOMS) -name '*.py' 2>/dev/null) | $(STAMP) $(KERNELS)
	@$(PY) -m compileall -q $(ROOMS)
	@touch $@

run: $(STAMP) $(KERNELS) $(BYTECODE) ## start the group on the embedded model, let it answer, show where the time went, stop
	@$(VENV)/bin/colibri run --profile --run-dir .run $(if $(MODEL),--model "$(MODEL)") --max-tokens 300 "$(PROMPT)"

# Tests without process groups share the processors. Groups mostly wait (for starts, deaths, silence), so two run side by side;
# those whose memory or time is measured have the machine to themselves.
test: $(STAMP) $(KERNELS) ## all tests; TESTS="..." runs only those
ifeq ($(TESTS),)
	@$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder tests --ignore tests/group $(PYTEST_ARGS)
	@$(PY) -m pytest -n 2 --dist loadfile -m "not alone" tests/group $(PYTEST_ARGS)
	@$(PY) -m pytest -m alone tests/group $(PYTEST_ARGS)
else
	@$(PY) -m pytest $(TESTS) $(PYTEST_ARGS)
endif

test-all: export COLIBRI_TEST_ALL = 1
test-all: test ## all tests, kernels at every size and on every emulated rung

cross: $(STAMP) $(KERNELS) ## the kernels for aarch64, built by a cross compiler and tested under qemu-user
	@$(PY) -m pytest -rs tests/checkasm/test_cross.py $(PYTEST_ARGS)

check: $(STAMP) $(KERNELS) ## format, lint, types, import contracts, message contracts
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(PY) -m pytest -q tests/contract

bench: $(STAMP) $(KERNELS) ## measure this machine and the kernels on it (minutes; nothing else should run)
	@$(VENV)/bin/colibri bench kernels

template: $(STAMP) ## rewrite deploy/colibri.toml from the declarations of the settings
	@$(PY) -m shared.run.config

schema: $(STAMP) ## rewrite the golden message bytes (fails unless SCHEMA_VERSION was raised)
	@$(PY) -m tests.contract.golden

clean: ## remove what was built (the environment stays)
	@rm -rf build dist native/*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
