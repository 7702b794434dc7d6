# make demo: a few minutes from a fresh clone to learned features. make test: lint and tests.
# Both make their own environment in .venv; PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ADDONS_PYTHON ?= python3.11
ADDONS_VENV := .venv-addons
DEMO_DIR ?= runs/quickstart

.PHONY: demo test lint format clean compare-addons

demo: $(VENV)/.installed
	$(BIN)/python -m amdim_tf.train --flagfile=configs/quickstart.cfg --model_dir=$(DEMO_DIR)
	$(BIN)/python -m amdim_tf.visualize --model_dir=$(DEMO_DIR) --figures=retrieval,similarity \
	  --output_dir=$(DEMO_DIR)/figures
	$(BIN)/python -m amdim_tf.export --model_dir=$(DEMO_DIR)
	$(BIN)/python -m amdim_tf.evaluate --model_dir=$(DEMO_DIR) --baselines=untrained,pixels
	@echo
	@echo "Files of the run: $(DEMO_DIR)"
	@echo "What it has learned to match: $(DEMO_DIR)/figures/retrieval.png, similarity.png"
	@echo "SavedModel: $(DEMO_DIR)/export"
	@echo "Curves and views: $(BIN)/tensorboard --logdir=$(DEMO_DIR)/logs"

test: lint
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --max-worker-restart=0 --durations=15

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs tensorflow-addons' image operations beside ours, in an environment of its own.
compare-addons: $(ADDONS_VENV)/.installed
	$(ADDONS_VENV)/bin/python tools/compare_with_addons.py

clean:
	rm -rf $(VENV) $(ADDONS_VENV)

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else \
	  "error: expected Python 3.10 to 3.13. Received: %d.%d. Try: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing what requirements.txt lists; a minute or more."
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt requirements-beam.txt \
		requirements-parquet.txt requirements-serving.txt
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	touch $@

$(ADDONS_VENV)/.installed: requirements-addons.txt
	@$(ADDONS_PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 9) <= v <= (3, 11) else \
	  "error: expected Python 3.9 to 3.11, which tensorflow-addons has wheels for. " \
	  "Received: %d.%d. Try: make compare-addons ADDONS_PYTHON=python3.10" % v)'
	$(ADDONS_PYTHON) -m venv $(ADDONS_VENV)
	$(ADDONS_VENV)/bin/pip install --quiet --requirement requirements-addons.txt
	touch $@
