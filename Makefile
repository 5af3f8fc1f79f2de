# Every target prepares what it needs first; `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
STAMP := $(VENV)/.installed
# mypy and import-linter do not follow the hooks of an editable install, so they read the same packages through links.
LINKS := $(VENV)/links
# Benchmarks measure the core as users have it, compiled with mypyc; COMPILED=0 measures the plain sources.
COMPILED ?= 1
CORE := build/compiled
# Before a command: run it on the compiled core.
WITH_CORE := PYTHONPATH=$(CURDIR)/$(CORE)
# What `make run` drives: sim or sglang.
ENGINE ?= sim
# Git revision whose contract must still be understood; empty while nothing has been released.
AGAINST ?= $(shell git describe --tags --match 'v[0-9]*' --abbrev=0 2>/dev/null)

ifneq ($(COMPILED),0)
CORE_BUILD := compiled
endif

# Run a benchmark, and keep what it prints for `make cost-table` and `make report`: $(call BENCH,name,module and flags). It takes the
# place of what the last run printed when it came to its end, which is a line of JSON, also where the benchmark calls that a failure.
define BENCH
@set -o pipefail; mkdir -p runs/bench; kept=runs/bench/$(1).txt; status=0; \
$(if $(CORE_BUILD),$(WITH_CORE)) $(PYTHON) -m rolloutd.bench.$(2) | tee "$$kept.new" || status=$$?; \
case "$$(tail -n 1 "$$kept.new")" in \
    "{"*"}") mv -f "$$kept.new" "$$kept" ;; \
    *) echo "It did not come to its end: what it printed is in $$kept.new, and $$kept is as it was." >&2 ;; \
esac; \
exit $$status
endef

define FIND_PYTHON
for candidate in "$${ROLLOUTD_PYTHON:-}" python3 python3.13 python3.12 python3.11; do \
    if [ -n "$$candidate" ] && "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
        command -v "$$candidate"; exit 0; \
    elif [ -n "$${ROLLOUTD_PYTHON:-}" ]; then \
        echo "ROLLOUTD_PYTHON=$$ROLLOUTD_PYTHON is not a Python 3.11 to 3.13." >&2; exit 1; \
    fi; \
done; \
echo "No Python 3.11 to 3.13 found. Install one, or name it: make ROLLOUTD_PYTHON=/path/to/python3.12 ..." >&2; exit 1
endef
export FIND_PYTHON

define LINK_PACKAGES
import os, pathlib, shutil, sys, tomllib
links = pathlib.Path(sys.argv[1])
shutil.rmtree(links, ignore_errors=True)
packages = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
for package, folder in packages.items():
    link = links / package.replace(".", "/")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
endef
export LINK_PACKAGES

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-15s %s\n", $$1, $$2 }'

.PHONY: setup
setup: $(STAMP) ## create .venv with everything needed (once; ROLLOUTD_PYTHON chooses the interpreter)

$(STAMP): requirements.lock pyproject.toml Makefile
	@python="$$(bash -c "$$FIND_PYTHON")"; \
	if ! $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	    echo "Setting up $(VENV) with $$("$$python" -V), which takes about a minute."; \
	    "$$python" -m venv --clear $(VENV) >/dev/null 2>&1 \
	        || { "$$python" -m venv --clear --without-pip $(VENV) && "$$python" -m pip -qq --python $(PYTHON) install pip; }; \
	fi
	@$(PYTHON) -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .
	@$(PYTHON) -c "$$LINK_PACKAGES" $(LINKS)
	@touch $@

.PHONY: compiled
compiled: $(STAMP) ## compile the scheduling core into build/compiled when a source changed (3 minutes); plain Python runs otherwise
	@$(PYTHON) setup.py -q compile_core

.PHONY: run
run: $(STAMP) ## a three-step GRPO loop on simulated engines; ENGINE=sglang: on two real SGLang CPU servers
	@$(BIN)/rolloutd demo --engine $(ENGINE)

.PHONY: test
test: $(STAMP) ## every check and test (ROLLOUTD_SKIP_SGLANG=1 leaves out the real engine)
	@$(MAKE) -j2 compiled test-plain
	@if [ -e $(CORE) ]; then \
	    $(WITH_CORE) ROLLOUTD_TEST_CORE=compiled $(PYTHON) -m pytest; \
	else \
	    $(PYTHON) -m pytest; \
	fi

# What drives the core directly, on its plain sources too, with a few random schedules. The compiler beside it takes longer.
.PHONY: test-plain
test-plain: lint
	@ROLLOUTD_SCHEDULES=250 $(PYTHON) -m pytest tests/scheduler tests/races

.PHONY: schedules
schedules: $(STAMP) $(CORE_BUILD) ## 10,000 random schedules of the core in virtual time; `make test` runs 1,250 (6 minutes)
	@$(if $(CORE_BUILD),$(WITH_CORE)) ROLLOUTD_SCHEDULES=10000 $(PYTHON) -m pytest tests/scheduler/virtual/test_schedules.py

.PHONY: lint
lint: $(STAMP) ## style, types, layering, contract
	@echo "ruff";          $(PYTHON) -m ruff check -q . && $(PYTHON) -m ruff format -q --check .
	@echo "mypy";          MYPYPATH=$(LINKS) $(PYTHON) -m mypy -p rolloutd
	@echo "import-linter"; PYTHONPATH=$(LINKS) $(PYTHON) $(BIN)/lint-imports --no-logo
	@echo "buf";           $(BIN)/buf lint && $(BIN)/buf format --diff --exit-code
	@$(MAKE) check-breaking check-stubs

.PHONY: format
format: $(STAMP) ## put sources into the shape that lint asks for
	@$(PYTHON) -m ruff check -q --fix . ; $(PYTHON) -m ruff format -q . ; $(BIN)/buf format -w

.PHONY: bench-core
bench-core: $(STAMP) $(CORE_BUILD) ## what one dispatch costs the core, and how near it comes to an exact choice; the last line is JSON (2 minutes)
	$(call BENCH,core,core_cost)

.PHONY: bench-index
bench-index: $(STAMP) ## what the prefix index costs at a million pages; the last line is JSON (1 minute)
	$(call BENCH,index,index_cost)

.PHONY: bench-kv-events
bench-kv-events: $(STAMP) ## what following the engines' KV events costs per block; the last line is JSON (10 seconds)
	$(call BENCH,kv-events,kv_events_cost)

.PHONY: bench-http
bench-http: $(STAMP) ## what our HTTP client to the engines saves beside aiohttp, per POST; the last line is JSON (1 minute)
	$(call BENCH,http,http_cost)

.PHONY: bench-overhead
bench-overhead: $(STAMP) $(CORE_BUILD) ## what the server costs next to sglang-router; the last line is JSON (3 minutes; QUICK=1: a look)
	$(call BENCH,overhead,overhead $(if $(QUICK),--quick))

.PHONY: bench-leaks
bench-leaks: $(STAMP) $(CORE_BUILD) ## what 100,000 cancels and 20,000 streams leave behind; the last line is JSON (5 minutes)
	$(call BENCH,leaks,leaks)

.PHONY: bench-publish
bench-publish: $(STAMP) $(CORE_BUILD) ## how long engines stand still for a new version, and what expires; the last line is JSON (7 minutes)
	$(call BENCH,publish,publish_cost)

.PHONY: bench-quality
bench-quality: $(STAMP) $(CORE_BUILD) ## how near to the bound rolloutd and control arms come on Q1 to Q4, ten seeds, cold and warm (15 minutes; ARGS=...)
	$(call BENCH,quality,quality $(ARGS))

.PHONY: bench-loop
bench-loop: $(STAMP) $(CORE_BUILD) ## trainer idle time and samples per second of Q5, synchronous and one step off-policy, three seeds (20 minutes; ARGS=...)
	$(call BENCH,loop,quality --workloads Q5 Q5-off --seeds 3 --arms rolloutd fifo least-in-flight prefix oracle $(ARGS))

.PHONY: bench-ablation
bench-ablation: $(STAMP) $(CORE_BUILD) ## each mechanism switched off where it should matter, five seeds; the last line is JSON (30 minutes; ARGS=...)
	$(call BENCH,ablation,ablation $(ARGS))

.PHONY: bench-mix
bench-mix: $(STAMP) $(CORE_BUILD) ## how near consumed data come to a target mix, strata over-supplied; the last line is JSON (5 minutes; ARGS=...)
	$(call BENCH,mix,mix_error $(ARGS))

.PHONY: bench-scale
bench-scale: $(STAMP) $(CORE_BUILD) ## what the core costs per rollout at 1,000 engines x 100,000 rollouts, beside 64; the last line is JSON (20 minutes; ARGS=...)
	$(call BENCH,scale,scale_cost $(ARGS))

.PHONY: bench-peers
# Children are started after gRPC was used; else it would write a line about each.
bench-peers: export GRPC_ENABLE_FORK_SUPPORT := false
bench-peers: $(STAMP) $(CORE_BUILD) ## rolloutd, sglang-router and smg as processes before the same engines, Q1 to Q4 (30 minutes; QUICK=1: a look; ARGS=...)
	$(call BENCH,peers,peers $(if $(QUICK),--quick) $(ARGS))

.PHONY: report
report: $(STAMP) ## write docs/report.md, tables and plots, from what the benchmarks last printed here
	@$(PYTHON) -m rolloutd.bench.report_page

.PHONY: cost-table
cost-table: $(STAMP) ## write the README's cost table from what the benchmarks last printed here
	@$(PYTHON) -m rolloutd.bench.cost_table

.PHONY: profile
profile: $(STAMP) $(CORE_BUILD) ## a flame graph of the server under the load of bench-overhead; prints its path
	@$(if $(CORE_BUILD),$(WITH_CORE)) $(PYTHON) -m rolloutd.bench.server_profile

.PHONY: stubs
stubs: $(STAMP) ## regenerate the Python stubs from the .proto files
	@$(PYTHON) proto/generate.py

.PHONY: check-stubs
check-stubs: $(STAMP) ## fail when a stub is not current
	@$(PYTHON) proto/generate.py --check

.PHONY: check-breaking
check-breaking: $(STAMP) ## fail when the contract breaks clients of the last release (AGAINST=revision)
	@if [ -n "$(AGAINST)" ]; then \
	    git archive --format=tar "$(AGAINST)" proto buf.yaml | $(BIN)/buf breaking --against '-#format=tar'; \
	else \
	    echo "buf breaking: no release yet to compare the contract with"; \
	fi

.PHONY: clean
clean: ## remove the environment, caches and build output
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@rm -rf clients/node/node_modules clients/node/proto clients/node/types
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
