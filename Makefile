# Everything a developer types. `make demo` and `make test` need Python 3.11 or newer and nothing else: they make their
# own virtual environment in .venv first. `make PYTHON=python3.12 …` picks the interpreter, `make test ARGS='-k name'`
# hands arguments on.

PYTHON ?= python3
ARGS ?=
N ?= 20
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The rings of the tests are folders.  Compiled files are kept: without them each of 2000 processes compiles for itself.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal
RUN_TESTS = $(BIN)/python tools/run_tests.py
QUIET_RINGS := tests/core tests/property tests/simulation tests/shell

.DEFAULT_GOAL := help
RELEASE_TOOLS := build/release/.installed
CROWDED := build/crowded/.installed

.PHONY: help demo demo-elastic demo-any-host pictures test-core test test-all stress mutants stories crowded soak coverage matrix lint types docs site dist sbom image bench bench-goodput clean

help:  ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r verb what; do \
		printf '  make %-16s %s\n' "$$verb" "$$what"; done

demo: $(INSTALLED)  ## train on two workers, kill one in the middle, see it finish from its checkpoint
	@$(BIN)/python examples/demo/demo.py $(ARGS)

demo-elastic: $(INSTALLED)  ## train on three nodes, kill one in the middle, let another join, see it finish
	@$(BIN)/python examples/demo/demo_elastic.py $(ARGS)

demo-any-host: $(INSTALLED)  ## train on three nodes that each serve an endpoint; freeze the first one, then kill it
	@$(BIN)/python examples/demo/demo_elastic.py --any-host $(ARGS)

PICTURES := recovery timeline rehearsal

pictures: $(INSTALLED)  ## make the pictures of the pages again, from real runs (needs chromium); PICTURES=recovery for one
	@for each in $(PICTURES); do PYTHONPATH=examples/demo:tools $(BIN)/python -m pictures.$$each || exit; done

test-core: $(INSTALLED)  ## run the tests that start no process, in half a minute
	$(RUN_TESTS) --without-processes -m 'not all' $(ARGS)

test: $(INSTALLED)  ## run what a change can break, in three minutes
	$(RUN_TESTS) -m 'not all' $(RING) $(ARGS)

test-all: $(INSTALLED)  ## run all tests: both loops, all repetitions, torchrun beside ours, frameworks
	TEST_EFFORT=all $(RUN_TESTS) $(RING) $(ARGS)

stress: $(INSTALLED)  ## run ARGS, N times (20), with all cores busy and a twentieth of one for it; count the failures
	$(BIN)/python tools/stress.py $(N) $(ARGS)

stories: $(INSTALLED)  ## rewrite what text stories expect with what happens now; what changed is a diff to read
	PYTHONPATH=.:tests $(BIN)/python -m kit.stories

mutants: $(INSTALLED)  ## put each bug of tools/mutants into a core, and see that a test finds it
	$(BIN)/python tools/mutants.py $(ARGS)

crowded: $(CROWDED)  ## run jobs beside the oldest versions we allow, what training images have, and hooks of Python
	TEST_EFFORT=all TEST_CROWDED=required $(PYTEST) tests/crowded $(ARGS)

soak: $(INSTALLED)  ## run all tests on thousands of seeds, with each interpreter started anew; takes an hour or more
	TEST_EFFORT=soak $(RUN_TESTS) --timeout 3600 $(RING) $(ARGS)

coverage: $(INSTALLED)  ## say which lines the tests without processes reach, by file; 95 % of the cores at least
	@mkdir -p build
	$(PYTEST) $(QUIET_RINGS) --cov=aelastic --cov-report= $(ARGS)
	$(BIN)/python tests/kit/coverage_of_cores.py

matrix: $(INSTALLED)  ## run the tests on other versions of Python and torch; takes hours, and 5 GB of disk at a time
	$(BIN)/python tools/matrix.py $(ARGS)

lint: $(INSTALLED)  ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)  ## check types
	$(BIN)/mypy

docs: $(INSTALLED)  ## write the pages that come from the code, and build the site, with its links checked, in build/site
	$(BIN)/python tools/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

site: $(INSTALLED)  ## add the site of this version, such as 0.1, to the branch gh-pages (ARGS=--push pushes it)
	NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike PATH=$(CURDIR)/$(BIN):$$PATH \
		mike deploy --update-aliases $$($(BIN)/python -m hatchling version | cut -d. -f1,2) latest $(ARGS)
	PATH=$(CURDIR)/$(BIN):$$PATH mike set-default latest $(ARGS)

dist: $(RELEASE_TOOLS)  ## build wheel and source distribution in dist/, and check them
	rm -rf dist
	build/release/bin/python -m build --quiet
	build/release/bin/twine check --strict dist/*

sbom: $(RELEASE_TOOLS)  ## list what an installation of the wheel brings along, in build/sbom.cdx.json (CycloneDX)
	@ls dist/*.whl >/dev/null 2>&1 || $(MAKE) dist
	rm -rf build/sbom && $(PYTHON) -m venv --without-pip build/sbom
	build/release/bin/pip --python build/sbom/bin/python install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	build/release/bin/cyclonedx-py environment --output-reproducible -o build/sbom.cdx.json build/sbom/bin/python

DOCKER ?= docker
BASE ?= python:3.13-slim

image: $(RELEASE_TOOLS)  ## build the container image aelastic:VERSION, and run two workers in it (DOCKER=podman, BASE=pytorch/pytorch)
	@set -e; version=$$(build/release/bin/hatchling version); image=aelastic:$$(echo $$version | tr + -); \
	$(DOCKER) build -f deploy/docker/Dockerfile --build-arg BASE=$(BASE) --build-arg VERSION=$$version \
		--build-arg PIP_EXTRA_INDEX_URL -t $$image .; \
	$(DOCKER) run --rm $$image --version; \
	$(DOCKER) run --rm --read-only --tmpfs /tmp --cap-drop ALL $$image --standalone --nproc-per-node 2 --no-python \
		sh -c 'echo "rank $$RANK of $$WORLD_SIZE"'

bench: $(INSTALLED)  ## measure against torchrun, some fifteen minutes; figures go to benchmarks/results/
	@$(BIN)/python -m compileall -q aelastic  # as pip leaves an installed package; an editable one is not compiled
	$(BIN)/python benchmarks/one_node.py $(ARGS)
	$(BIN)/python benchmarks/many_nodes.py $(ARGS)
	$(BIN)/python benchmarks/in_place.py
	$(BIN)/python benchmarks/logs.py $(ARGS)
	$(BIN)/python benchmarks/watching.py $(ARGS)

bench-goodput: $(INSTALLED)  ## measure effective training time under faults against torchrun, an hour
	@$(BIN)/python -m compileall -q aelastic
	$(BIN)/python benchmarks/goodput.py $(ARGS)

$(CROWDED): $(INSTALLED) tests/crowded/image.txt
	PYTHON=$(PYTHON) tools/venv_beside.sh build/crowded/oldest $$($(BIN)/python tools/oldest.py)
	PYTHON=$(PYTHON) tools/venv_beside.sh build/crowded/image -r tests/crowded/image.txt
	build/crowded/image/bin/python -m pip install --quiet --disable-pip-version-check --no-deps typing_extensions==4.10.0  # an old one
	@touch $@

$(RELEASE_TOOLS): Makefile
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --disable-pip-version-check build cyclonedx-bom hatch-vcs hatchling twine
	@touch $@

clean:  ## remove what was made here: .venv, caches, builds
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: there is no $(PYTHON); aelastic needs Python 3.11 or newer: try make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: aelastic needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1): try make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "make: installing into $(VENV); the first time takes a minute or more, torch is large"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
