# Everything runs from a virtual environment in .venv that is made on demand. `make` alone says what there is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where a machine without an NVIDIA GPU gets a small, CPU-only PyTorch (200 MB in place of 2.5 GB).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TESTS ?= tests
PYTEST_WORKERS ?= 2
# How many simulated clusters `make sim` runs; SEED=7 runs that one and prints its story.
SEEDS ?= 100
FIRST ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo up down test gpu sim check format bench lock clean
.DELETE_ON_ERROR:

help:  ## what there is
	@echo 'make TARGET, one of:'
	@sed -n 's/^\([a-z][a-z]*\):[^#]*##  *\(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '%-12s %s\n' "$$name" "$$what"; done

install: $(VENV)/.installed-examples  ## the virtual environment in .venv, with what the demo needs

demo: $(VENV)/.installed-examples  ## two nodes on this machine run the training-and-inference loop; then all of it is stopped
	@exec $(BIN)/python -m example_pipelines.demo run

up: $(VENV)/.installed-examples  ## the same cluster, kept up: Dagster at 127.0.0.1:3000, scheduler at 127.0.0.1:8080; Ctrl-C ends it
	@exec $(BIN)/python -m example_pipelines.demo up

down: $(VENV)/.installed-examples  ## stop what `make up` started in another terminal
	@exec $(BIN)/python -m example_pipelines.demo down

test: $(VENV)/.installed-dev  ## all tests but those that need a real GPU (TESTS=tests/unit runs a part)
	@tests/system_packages.sh
	@$(BIN)/python -m pytest $(TESTS) -n $(PYTEST_WORKERS) --dist loadfile -m 'not hardware' --durations 5

gpu: $(VENV)/.installed-dev  ## the tests of GPUs on a real card of this machine; skipped, with the reason, where there is none
	@$(BIN)/python -m pytest tests/hardware -n 0 -m hardware -rs

sim: $(VENV)/.installed-dev  ## the whole cluster simulated under faults: SEEDS=1000 of them, or one with its story: SEED=7
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST))

check: $(VENV)/.installed-dev  ## format, lint, types and the rules of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## let ruff put the format right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-bench  ## measure beside peers; writes benchmarks/results.json and docs/performance.md
	@$(BIN)/python -m benchmarks.run

lock: $(VENV)/.installed-bench  ## write constraints.txt anew from what is installed now
	@$(BIN)/pip install -q -e '.[examples,dev,bench,postgres,etcd,plots]'
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > .constraints.new && mv .constraints.new constraints.txt

clean:  ## remove the environment, the demo's data and all caches
	rm -rf $(VENV) .demo .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say which with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made. On Debian and Ubuntu: sudo apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# A stamp a set of extras: nothing is installed again until the versions asked for change.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	@case '$*' in \
	  examples) extras=examples ;; \
	  dev) extras=examples,dev,postgres,etcd,plots ;; \
	  bench) extras=examples,dev,postgres,etcd,plots,bench ;; \
	esac; \
	index=''; \
	if ! command -v nvidia-smi >/dev/null 2>&1; then \
	  if timeout 5 $(BIN)/python -c "import urllib.request as u; u.urlopen('$(TORCH_INDEX)/torch/', timeout=3)" >/dev/null 2>&1; \
	  then index='--extra-index-url $(TORCH_INDEX)'; \
	  else echo "No GPU here, and $(TORCH_INDEX) cannot be reached: PyTorch comes from pip's own sources."; fi; \
	fi; \
	echo "Installing .[$$extras] into $(VENV) ..."; \
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $$index -e ".[$$extras]"
	@touch $@
