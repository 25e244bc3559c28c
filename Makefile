# Everything is installed into .venv; nothing outside the project is touched. `make help` lists the targets.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
LOCK := requirements.lock
DEVELOPMENT_LOCK := development.lock
SBOM := build/sbom.json
WHEELS := dist
SBOM_TOOL := build/sbom/bin/cyclonedx-py
PACKAGES := -c constraints.txt -e '.[cpu,dev]'
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
# From slow to quick: the tests of the Ray cluster keep one of two processes busy while the other does the rest.
TIER_P := $(wildcard $(addprefix tests/,on_ray gpu ranks behaviour browser unit golden oracle repo))

.DEFAULT_GOAL := help
.PHONY: help setup locked quickstart test check types deadcode site soak claims golden lock sbom wheel clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: $(INSTALLED)  ## install xmcray and the tools into .venv (quick when nothing changed)

locked:  ## the same anew on Linux x86-64, from development.lock: pip refuses files with other hashes
	rm -rf .venv
	$(MAKE) setup PACKAGES='--require-hashes -r $(DEVELOPMENT_LOCK)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .

# pip would compile 27,000 files, of which 3,000 are ever imported. Python compiles those when it
# first imports them, and keeps them for later processes.
export PYTHONDONTWRITEBYTECODE =

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PACKAGES)
	touch $@

quickstart: setup  ## sample corpus, training, metrics and a few answers in minutes on 2 cores
	$(BIN)/xmcray quickstart

# One thread per process: with more, the processes of a rank test or a Ray cluster wait for each other's threads.
test: export OMP_NUM_THREADS = 1
test: setup  ## tier P, which CI runs: about a quarter of an hour on 2 cores
	sh tests/install.sh
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(TIER_P)

check: setup  ## style, formatting, strict types, dead code, and links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs=2 types deadcode site

# mypy keeps one core busy for a minute; the other two share the second one.
types: setup
	$(BIN)/mypy

deadcode: setup
	$(BIN)/vulture

site: setup  ## the documentation as pages: build/site/index.html
	$(SITE)

soak: export OMP_NUM_THREADS = 1
soak: setup  ## tier N: kills, sweeps, load and mutations for hours; the last tables go to benchmarks/results
	$(BIN)/python -m pytest -m soak tests
	for part in soak soak_jobs soak_nodes soak_serving soak_continual soak_sweep soak_files soak_signals state_machines mutations; do $(BIN)/python benchmarks/$$part.py || exit 1; done

claims: export OMP_NUM_THREADS = 1
claims: setup  ## the papers' claims on small data: measures what is missing, writes docs/claims.md
	$(BIN)/python benchmarks/claims/all.py

golden: export OMP_NUM_THREADS = 1
golden: export XMCRAY_RENEW_GOLDEN = 1
golden: setup  ## write the golden curves anew after a wanted change of the mathematics
	$(BIN)/python -m pytest tests/golden

# uv finds packages where UV_INDEX, UV_EXTRA_INDEX_URL and UV_FIND_LINKS say; pip's settings do not concern it.
lock: setup  ## write the two locks anew: the versions of constraints.txt with the hashes of their files
	$(MAKE) --always-make $(LOCK) $(DEVELOPMENT_LOCK)

$(LOCK): EXTRAS := cpu serve tune
$(LOCK): WHAT := the CPU image
$(DEVELOPMENT_LOCK): EXTRAS := cpu dev
$(DEVELOPMENT_LOCK): WHAT := `make locked`
$(LOCK) $(DEVELOPMENT_LOCK):
	echo '# What $(WHAT) installs on Linux x86-64 with Python 3.11, with the hashes of its files; made by `make lock`.' > $@.new
	$(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-annotate --no-header \
		--index-strategy unsafe-best-match --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--constraints constraints.txt $(EXTRAS:%=--extra %) pyproject.toml >> $@.new
	mv $@.new $@

# In an environment of its own: with this tool's packages beside it, every process of Ray starts 1.5 s later.
$(SBOM_TOOL): constraints.txt
	$(PYTHON) -m venv $(dir $@)..
	$(dir $@)python -m pip install --quiet --disable-pip-version-check -c constraints.txt cyclonedx-bom
	touch $@

sbom: $(SBOM_TOOL)  ## write build/sbom.json: what requirements.lock installs, in the format of CycloneDX
	$(SBOM_TOOL) requirements --pyproject pyproject.toml --output-reproducible -o $(SBOM) $(LOCK)

# The time stamps in a wheel are those of the newest commit, so that two builds are equal.
wheel: setup  ## build the wheel, the same bytes on every machine
	rm -rf build/lib build/bdist.*
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -w $(WHEELS) .

clean:  ## remove .venv, caches and build output (never runs or data)
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
