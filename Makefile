PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
STAMP := .venv/.installed
JOBS ?= 2
TORCHREC := torchrec fbgemm-gpu-cpu tensordict pyre-extensions pyvers typing-inspect

.PHONY: venv demo test coverage test-fast test-pythons lint docs release bench clean

venv: $(STAMP)

# pip 25.1 is the first that reads dependency groups. recbole is only read as data (MovieLens 100K), never
# imported; its dependencies would drag in half of PyPI. tritonclient is a client in tests, and holds ml_dtypes
# and protobuf back, which it works with as they are. TorchRec is for an example, and would bring a PyTorch of its own
# choice; fbgemm-gpu-cpu 1.8 is the newest that loads beside PyTorch 2.13, and lies apart, because its import name is
# that of a GPU package. TensorRT for RTX has wheels for Linux x86-64 and
# Windows only, and Ray is late with wheels for a new Python: everything else works without them, but CI must
# not lose them unseen.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -qq --upgrade 'pip>=25.1'
	$(PIP) install -qq --constraint constraints.txt --editable '.[cpu,export,sign,serve,registry]' --group dev --group docs
	$(PIP) install -qq --constraint constraints.txt --no-deps recbole tritonclient
	$(PIP) install -qq --constraint constraints.txt --no-deps --upgrade --target .venv/torchrec $(TORCHREC)
	$(PIP) install -qq --constraint constraints.txt --editable '.[tensorrt-rtx]' || { \
	  test -z "$$CI" && echo "note: TensorRT for RTX cannot be installed here; its backend will say so"; }
	$(PIP) install -qq --constraint constraints.txt --editable '.[ray]' || { \
	  test -z "$$CI" && echo "note: Ray cannot be installed here; the executor 'ray' will say so"; }
	touch $@

demo: venv
	$(BIN)/loka-onnx demo

# Both tiers. Workers share the cores, so tests/conftest.py gives each one thread; a file stays with its worker,
# so that the runs that its tests share are made once.
test: venv
	$(BIN)/pytest -n $(JOBS) --dist loadfile

# Both tiers once more, half as long again: lines and branches that no test enters.
coverage: venv
	$(BIN)/pytest -n $(JOBS) --dist loadfile --cov --cov-report=term:skip-covered

# Ends with tests that may belong to the other tier: seconds by the clock, twice those of a core that is shared.
test-fast: venv
	$(BIN)/pytest -m "not slow" -n $(JOBS) --dist loadfile --durations=10 --durations-min=0.6

# The fast tier on other versions of Python; needs nothing of .venv.
test-pythons:
	JOBS=$(JOBS) tests/pythons.sh

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in ./site. The variable silences what mkdocs-material says of MkDocs 2.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What is uploaded to a registry, in ./dist.
release: venv
	rm -rf dist build
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

bench: venv
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv site dist .coverage* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
