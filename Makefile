# Two commands do all the set-up: `make quickstart` and `make test`. The rest is for people who work on this.
SHELL := /bin/bash
# The oldest first, Debian 12's own 3.11.2 where it is there: the tests run on the oldest version that is promised.
PYTHON ?= $(shell for p in /usr/bin/python3.11 python3.11 python3.12 python3.13 python3.14 python3; do \
	command -v $$p >/dev/null && $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
# Tests start hundreds of Python processes: compiling the same modules anew in each of them takes half of their start.
unexport PYTHONDONTWRITEBYTECODE
# mypy reads what has changed since its last run, also in a fresh clone: it compares contents, its own version and settings.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/agent-rollouts/mypy
# uv where it is: it resolves in a second.
UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet \
	--disable-pip-version-check) -c constraints.txt

.PHONY: help quickstart install install-test test check ruff mypy lint-imports docs unit integration workspaces parts e2e laptop pages \
	cluster-tests test-kind cluster images release test-full bench crds format clean

help:
	@echo 'make quickstart   install into .venv and run the example job on this machine'
	@echo 'make test         install what the tests need, and run all of them that do not take long'
	@echo 'make test-full    also what takes long: 100 kills, the soak, whole trainings and benchmarks'
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

# The documentation's tools are installed apart: a conflict among them does not stop the tests.
.venv/installed-docs: $(INSTALLED) | .venv/installed-test
	$(INSTALL) -e '.[docs]'
	@touch $@

install: .venv/installed
install-test: .venv/installed-test

test: install-test
	hack/install-test-tools
	hack/test

# A target each: with --keep-going, what fails holds none of the others.
check: ruff mypy lint-imports
ruff: install-test
	hack/part ruff $(BIN)/ruff check .
	hack/part 'ruff format' $(BIN)/ruff format --check .
mypy: install-test
	hack/part mypy $(BIN)/mypy
lint-imports: install-test
	hack/part lint-imports $(BIN)/lint-imports

# With --strict by its settings: a link or an anchor that leads nowhere fails. The variable spares us an advertisement.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 hack/part documentation $(BIN)/mkdocs build --quiet

unit: install-test
	hack/part unit $(PYTEST) tests/unit -n 2

# Workspaces are forked from the process that tests them, and their memory limits count what it has: a small one, then.
WORKSPACES := tests/integration/executor_workspaces
# Where there is root, as for the cluster: those that make images and containers.
ON_CLUSTER := $(addprefix --ignore tests/,integration/cluster_harness integration/operator_core integration/images \
	integration/oci integration/containers e2e/cluster)
integration: workspaces parts
workspaces: install-test
	hack/part 'integration: workspaces' $(PYTEST) $(WORKSPACES)
parts: install-test
	hack/part 'integration: parts' $(PYTEST) tests/integration --ignore $(WORKSPACES) $(ON_CLUSTER) -n 2 --dist loadfile

e2e: laptop pages
laptop: install-test
	hack/part 'e2e: laptop' $(PYTEST) tests/e2e --ignore tests/e2e/docs $(ON_CLUSTER)
pages: install-test
	hack/part 'e2e: pages' $(PYTEST) tests/e2e/docs -n 2

cluster-tests: install-test
	hack/cluster-tests

test-kind: install-test
	hack/kind-tests

cluster: install-test
	hack/cluster/up
	hack/install-on-cluster

release: install-test
	$(BIN)/python hack/release

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
