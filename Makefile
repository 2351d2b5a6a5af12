SHELL := bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test check install clean-venv

$(BIN)/.installed: pyproject.toml requirements/base.txt requirements/cpu.txt requirements/cuda.txt requirements/dev.txt launchers/setup.sh
	bash launchers/setup.sh $(VENV)
	touch $@

install: $(BIN)/.installed

demo: install
	bash launchers/demo.sh

check: install
	ruff check .
	ruff format --check .
	python tests/check_comments.py
	lint-imports
	mypy

test: check
	python -m pytest

clean-venv:
	rm -rf $(VENV)
