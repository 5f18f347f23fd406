# `make demo` and `make test` work on a fresh clone: each makes its own virtual environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check format bench bench-compare clean

demo: $(VENV)/.installed
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(VENV)/.installed-dev $(VENV)/.installed-for-tests
	$(BIN)/coverage run -m pytest $(TEST_ARGS)
	$(BIN)/coverage report --fail-under=100

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The standard scenarios; a fault of a peer (haproxy, nginx) is shown and does not end it.
bench: $(VENV)/.installed-dev
	@benchmarks/install-system-packages
	@for scenario in benchmarks/scenarios/*.yaml; do \
		$(BIN)/userspace-proxy bench run -f $$scenario -o benchmarks/results $(BENCH_ARGS) || failed="$$failed $$scenario"; \
	done; test -z "$$failed" || { echo "Not all is as it should be:$$failed" >&2; exit 1; }

# Writes the README's table. What is wrong with a peer, or was not to be measured, is shown, and in the table.
bench-compare: $(VENV)/.installed-dev
	@benchmarks/install-system-packages
	@rm -f benchmarks/results/compare.json
	-@$(BIN)/userspace-proxy bench run -f benchmarks/scenarios/compare.yaml -o benchmarks/results $(BENCH_ARGS)
	@$(BIN)/python benchmarks/readme_table.py benchmarks/results/compare.json

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# python-iptables is compiled when it is installed. Without a compiler its tests are skipped.
$(VENV)/.installed-for-tests: $(VENV)/.installed-dev tests/install-system-packages
	@PYTHON=$(BIN)/python tests/install-system-packages
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[libiptc]' \
	    || echo "python-iptables cannot be installed: its tests are skipped"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
