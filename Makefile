# Two commands do all the set-up: `make quickstart` and `make test`. The rest is for people who work on this.
SHELL := /bin/bash
# The oldest first, Debian 12's own 3.11.2 where it is there: the tests run on the oldest version that is promised.
PYTHON ?= $(shell for p in /usr/bin/python3.11 python3.11 python3.12 python3.13 python3.14 python3; do \
	command -v $$p >/dev/null && $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help quickstart install install-test test check docs unit integration e2e cluster-tests test-kind cluster images test-full \
	bench crds format clean

help:
	@echo 'make quickstart   install into .venv and run the example job on this machine'
	@echo 'make test         install what the tests need and run all of them'
	@echo 'make test-full    the long counts: 100 kills, whole benchmarks'
	@echo 'make cluster      start a real Kubernetes on this machine and install the chart there (Linux, root, Go)'
	@echo 'make images       build the images'
	@echo 'make check|docs|unit|integration|e2e|cluster-tests|test-kind|bench|crds|format|clean'

quickstart: install
	$(BIN)/rolloutctl run examples/quickstart/job.yaml

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer with venv is needed, and none was found; install it (Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12 ...'; exit 1; }
	$(PYTHON) -m venv .venv

# What is compiled, or read, when the package is installed.
INSTALLED := pyproject.toml constraints.txt agent_runtime/executor/init/subreaper.c
# Stamps, so that a second `make` does not ask the package index again.
.venv/installed: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[quickstart]'
	@touch $@

.venv/installed-test: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[test]'
	@touch .venv/installed $@

install: .venv/installed
install-test: .venv/installed-test

test: install-test
	$(MAKE) --no-print-directory check
	hack/install-test-tools
	hack/test

check: install-test docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With --strict by its settings: a link or an anchor that leads nowhere fails. The variable spares us an advertisement.
docs: install-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

unit: install-test
	$(BIN)/python -m pytest tests/unit -n 2 -q

# Workspaces are forked from the process that tests them, and their memory limits count what it has: a small one, then.
WORKSPACES := tests/integration/executor_workspaces
# Where there is root, as for the cluster: those that make images and containers.
ON_CLUSTER := $(addprefix --ignore tests/,integration/cluster_harness integration/operator_core integration/images \
	integration/oci integration/containers e2e/cluster)
integration: install-test
	hack/pytest $(WORKSPACES)
	hack/pytest tests/integration --ignore $(WORKSPACES) $(ON_CLUSTER) -n 3 --dist loadfile

e2e: install-test
	hack/pytest tests/e2e --ignore tests/e2e/docs $(ON_CLUSTER)
	hack/pytest tests/e2e/docs -n 2

cluster-tests: install-test
	hack/cluster-tests

test-kind: install-test
	hack/kind-tests

cluster: install-test
	hack/cluster/up
	hack/install-on-cluster

images:
	hack/images/build

test-full: install-test
	ROLLOUT_FULL=1 PYTEST_TIMEOUT=0 $(MAKE) --no-print-directory test
	$(BIN)/python -m benchmarks

bench: install-test
	$(BIN)/python -m benchmarks

crds: install-test
	$(BIN)/python -m rollout_api.crd

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
