# Everything happens in .venv, which is made anew when requirements.lock changes.
.DEFAULT_GOAL := help
.PHONY: help demo test lint benchmark

VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
MODEL := smollm2-135m

help: ## Say what there is.
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

$(READY): requirements.lock
	@python=$$(command -v python3.11 || command -v python3) && \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: needs Python 3.11 or newer as python3.11 or python3" >&2; exit 1; }; \
	$$python -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
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
	. $(BIN)/activate && python -m pytest

benchmark: demo ## Run the main job, then measure speed and memory into benchmarks/report.md.
	. $(BIN)/activate && python -m benchmarks.measure results/store/$(MODEL)/model/* benchmarks/report.md
