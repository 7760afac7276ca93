# Two commands do everything: `make demo` and `make test`. Both set up .venv on first use and start at once after that.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint format setup clean

demo: $(READY)
	@$(VENV)/bin/k3tool demo $(DIR)

test: $(READY)
	@$(VENV)/bin/python -m pytest $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check .

format: $(READY)
	$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

setup: $(READY)

# The lock file pins what the tests ran with; a Python that its pins do not support gets the ranges of pyproject.toml.
$(READY): requirements.lock pyproject.toml
	@echo "setting up $(VENV) (once; torch is the largest part)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@if $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		$(PIP) install -r requirements.lock; \
	else \
		$(PIP) install -e '.[test,oracle]'; \
	fi
	@$(PIP) install --no-deps -e .
	@touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info k3-demo
