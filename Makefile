# `make demo`, `make test` and `make docs` (a site, in build/site) need Python 3.11 or newer and make; the tests also a C++ compiler (c++).
# Everything is installed into .venv; nothing outside this directory is changed,
# but for the demo's model, which goes to the user's cache directory.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# mlx for Linux comes for a processor or for a kind of GPU: cpu, cuda12, cuda13.
ifeq ($(shell uname -s),Linux)
EXTRA ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda12 || echo cpu)
EXTRAS := test,$(EXTRA)
else
EXTRAS := test
endif

comma := ,
VENV := .venv
# Processes that run test files side by side; most tests wait for a server they started.
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.PHONY: demo test docs types changelog clean

demo: $(INSTALLED)
	$(BIN)/mlx_lm.tiered demo $(DEMO_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TEST_ARGS)

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

types: $(INSTALLED)
	$(BIN)/python -m mypy

# Moves the files of changelog.d into a section of CHANGELOG.md: make changelog VERSION=1.2.3
changelog: $(INSTALLED)
	@test -n "$(VERSION)" || { echo "make changelog needs VERSION=X.Y.Z"; exit 2; }
	$(BIN)/towncrier build --yes --version $(VERSION)

$(INSTALLED): pyproject.toml $(wildcard patches/site/*)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; say where it is with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks venv; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo 'installing into $(VENV); this takes some minutes the first time'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV)
