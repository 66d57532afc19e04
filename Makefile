# Everything a developer or a machine runs. Needs: Debian 12, root for what boots hosts, Python 3.12 or newer, make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Ansible starts twice as slowly without its compiled files.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/.collections
export ANSIBLE_DEPRECATION_WARNINGS := false
export UV_PYTHON_DOWNLOADS := never
export UV_CACHE_DIR ?= $(CURDIR)/.cache/uv
PYTHON ?= python3
UV_LOCK := roles/vllm_install/files/locks/uv.txt
UV := .tools/uv/bin/uv
SCENARIOS := $(notdir $(patsubst %/molecule.yml,%,$(wildcard extensions/molecule/*/molecule.yml)))

.PHONY: help venv lab unit lint security test demo bench locks clean $(addprefix molecule-,$(SCENARIOS))

help: ## what there is to make
	@sed -n 's/^\([a-z%-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(UV): $(UV_LOCK)
	@command -v $(PYTHON) >/dev/null || { echo "make: python3 is missing. Fix: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: python3 lacks venv. Fix: apt-get install python3-venv" >&2; exit 1; }
	@rm -rf .tools/uv && $(PYTHON) -m venv .tools/uv
	@.tools/uv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(UV_LOCK)
	@touch $@

# The environment is made anew when the lock, the project's metadata or the way it is built change.
.venv/.made: uv.lock pyproject.toml hatch_build.py .python-version $(UV)
	@$(UV) python find --quiet --no-project '>=3.12' >/dev/null 2>&1 || { \
	  echo "make: there is no CPython 3.12 or newer on this machine. Fix: install one and have it on PATH" >&2; exit 1; }
	@$(UV) sync --frozen --quiet || $(UV) sync --frozen --quiet --no-python-downloads --python '>=3.12'
	@touch $@

venv: .venv/.made ## .venv with firstlight and all that its checks need

lab: ## what boots test hosts on this machine: packages, image, network
	@tests/lab/setup.sh

unit: venv ## the tests that take seconds
	pytest tests/unit -m "not slow"

lint: venv ## style, types, the rules of Ansible and of its documentation
	ruff check .
	ruff format --check .
	mypy -p deploy
	mypy -p ansible_collections.firstlight.vllm.plugins
	ansible-lint --offline
	antsibull-docs lint-collection-docs --plugin-docs --skip-rstcheck .

security: venv ## scores and counts of what keeps a host safe, without a host
	python tests/security/report.py

test: venv lint lab ## everything, test hosts with a real vLLM included
	pytest tests/unit tests/integration

$(addprefix molecule-,$(SCENARIOS)): molecule-%: venv lab ## one scenario on its test host
	molecule test --scenario-name $*

demo: venv lab ## the whole job on a test host: from the old server to a real vLLM that speculates
	firstlight demo

bench: venv lab ## figures of speed, as ratios; fails when one is over its limit
	kept=0; for figures in tests/bench/bench_*.py; do echo "$$figures"; python "$$figures" || kept=1; done; exit $$kept

locks: $(UV) ## resolve the hash locks of what is installed on hosts again
	roles/vllm_install/files/locks/compile.sh $(CURDIR)/$(UV)

clean: ## remove what was made here, and the test hosts
	[ ! -f $${FIRSTLIGHT_LAB:-/var/cache/firstlight-lab}/containers.conf ] || tests/lab/lab.sh purge
	rm -rf .venv .tools .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
