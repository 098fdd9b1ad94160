# `make quickstart` and `make test` do all the set-up that they need. The other targets are for developers.
SHELL := /bin/bash
# The oldest version first, such as Debian 12's 3.11.2, because the tests should run on the oldest supported version.
PYTHON ?= $(shell for p in /usr/bin/python3.11 python3.11 python3.12 python3.13 python3.14 python3; do \
	command -v $$p >/dev/null && $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
# Tests start hundreds of Python processes. Without cached bytecode, compilation would take half of each start.
unexport PYTHONDONTWRITEBYTECODE
# The cache of mypy is shared by all clones. mypy compares contents, its version and its settings.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/agent-rollouts/mypy
# uv, if installed, because it resolves dependencies in a second.
UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet \
	--disable-pip-version-check) -c constraints.txt

.PHONY: help quickstart install install-test test check ruff mypy lint-imports docs unit integration workspaces sandboxes parts vllm e2e laptop pages \
	cluster-tests test-kind cluster images release test-full bench crds format clean

help:
	@echo 'make quickstart   install into .venv and run the example job on this machine'
	@echo 'make test         install what the tests need, and run all tests except the longest'
	@echo 'make test-full    also run the longest tests (100 kills, soak, whole trainings) and benchmarks'
	@echo 'make cluster      start a real Kubernetes on this machine and install the chart in it (Linux, root, Go)'
	@echo 'make images       build the images'
	@echo 'make check|docs|unit|integration|e2e|cluster-tests|test-kind|bench|crds|format|clean'

quickstart: install
	$(BIN)/rolloutctl run examples/quickstart/job.yaml

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or newer with venv was found; install it (Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12 ...'; exit 1; }
	$(PYTHON) -m venv .venv

# Files whose change needs a new installation.
INSTALLED := pyproject.toml constraints.txt agent_runtime/executor/init/subreaper.c
# Stamp files, so that a second `make` does not query the package index again.
.venv/installed: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[quickstart]'
	@touch $@

.venv/installed-test: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[test]'
	@touch .venv/installed $@

# The documentation's tools are installed separately, so that a conflict among them does not stop the tests.
.venv/installed-docs: $(INSTALLED) | .venv/installed-test
	$(INSTALL) -e '.[docs]'
	@touch $@

install: .venv/installed
install-test: .venv/installed-test

test: install-test
	hack/install-test-tools
	hack/test

# Separate targets, so that with --keep-going a failure does not stop the others.
check: ruff mypy lint-imports
ruff: install-test
	hack/part ruff $(BIN)/ruff check .
	hack/part 'ruff format' $(BIN)/ruff format --check .
mypy: install-test
	hack/part mypy $(BIN)/mypy
lint-imports: install-test
	hack/part lint-imports $(BIN)/lint-imports

# The settings include --strict, so a broken link or anchor is an error. The variable suppresses an advertisement.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 hack/part documentation $(BIN)/mkdocs build --quiet

unit: install-test
	hack/part unit $(PYTEST) tests/unit -n 2

# Workspaces are forked from the test process, and their memory limits include its memory. A separate process keeps it small.
WORKSPACES := tests/integration/executor_workspaces
# Tests of the cluster, and tests that build images and start containers, which need root. hack/cluster-tests runs them.
ON_CLUSTER := $(addprefix --ignore tests/,integration/cluster_harness integration/operator_core integration/images \
	integration/oci integration/containers e2e/cluster)
# hack/test runs two of these at once. The longest are first, and none is as long as half of all, so that both end together.
integration: parts sandboxes workspaces vllm
workspaces: install-test
	hack/part 'integration: workspaces' $(PYTEST) $(WORKSPACES)
SANDBOXES := $(addprefix tests/integration/,cluster_provider executor sandboxes)
ON_TWO := -n 2 --dist loadfile
sandboxes: install-test
	hack/part 'integration: sandboxes' $(PYTEST) $(SANDBOXES) $(ON_TWO)
parts: install-test
	hack/part 'integration: parts' $(PYTEST) tests/integration $(addprefix --ignore ,$(SANDBOXES) $(WORKSPACES) $(ON_VLLM)) $(ON_CLUSTER) $(ON_TWO)
# In one process, so that `make test-full` starts vLLM once.
ON_VLLM := tests/integration/vllm
vllm: install-test
	hack/part 'integration: vLLM' $(PYTEST) $(ON_VLLM)

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
