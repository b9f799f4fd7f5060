# Everything happens in .venv, which is made anew when requirements.lock changes.
.DEFAULT_GOAL := help
.PHONY: help demo test lint benchmark

VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
MODEL := smollm2-135m
# Tried in this order; `make PYTHON=/path/to/python3.12 ...` names another.
PYTHON ?= python3.11 python3
# Snakemake starts a script's interpreter by its unquoted path. In a folder with a space in its path the
# environment therefore lies in the user's cache, and .venv is a link to it.
CACHE := $${XDG_CACHE_HOME:-$$HOME/.cache}/locos-workflow
PLACE := $(if $(word 2,$(CURDIR)),$(CACHE)/$(shell pwd | cksum | cut -d' ' -f1),$(VENV))

help: ## Say what there is.
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

$(READY): requirements.lock
	@for python in $(PYTHON) none; do \
	  "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	test "$$python" != none || { echo "error: no Python 3.11 or newer with its venv module among:" \
	  "$(PYTHON); install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }; \
	place="$(PLACE)"; rm -rf $(VENV); "$$python" -m venv --clear "$$place" && \
	{ test "$$place" = $(VENV) || ln -s "$$place" $(VENV); }
	. $(BIN)/activate && python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@touch $(READY)

demo: $(READY) ## Set up, then run the main job on the embedded model and print its result.
	. $(BIN)/activate && snakemake -j2 results/$(MODEL)/ablation.parquet results/$(MODEL)/summary.md
	@cat results/$(MODEL)/summary.md

lint: $(READY) ## Set up, then check format, style, types and the workflow.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	. $(BIN)/activate && snakemake --lint

test: lint ## Set up, then pass every check and test.
	. $(BIN)/activate && OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile

# FOLDER names a converted model; without it the demo makes one, and its times by rule are reported too.
benchmark: $(if $(FOLDER),$(READY),demo) ## Measure speed and memory into benchmarks/report.md, on an idle machine.
	. $(BIN)/activate && python -m benchmarks.measure \
	  $(or $(FOLDER),$$(ls -d results/store/$(MODEL)/model/*/ | head -1)) benchmarks/report.md
