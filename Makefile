# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-all check bench results results-training java clean

demo: $(STAMP)
	$(BIN)/prf demo

# Two processes for two cores: threads inside each would only wait for one another.
test test-all: export OMP_NUM_THREADS ?= 1

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not network and not gpu and not long"

# Also encodes all of NFCorpus, which takes minutes.
test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not network and not gpu"

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP)
	for file in tests/bench/bench_*.py; do $(BIN)/python $$file || exit 1; done

# The tables of pipelines/RESULTS.md, from the collections in PRF_SHARED.
results: $(STAMP)
	$(BIN)/python tests/bench/results.py
	$(BIN)/python tests/bench/results_prp.py

# The models of pipelines/training and pipelines/TRAINING.md; two hours.
results-training: $(STAMP)
	$(BIN)/python tests/bench/results_training.py --work runs/training

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# The Java helper is committed compiled; this rebuilds it (needs a JDK of 21 or newer on the path).
java: $(STAMP)
	javac --release 21 -Xlint:all -cp "$$($(BIN)/python -c 'from prf.jvm import find_jar; print(find_jar())')" prf/classes/PrfLucene.java

clean:
	rm -rf $(VENV) runs indexes/demo-*
