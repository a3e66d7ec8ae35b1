PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
STAMP := .venv/.installed
JOBS ?= 2

.PHONY: venv demo test test-fast lint bench clean

venv: $(STAMP)

# pip 25.1 is the first that reads dependency groups. recbole is only read as data (MovieLens 100K), never
# imported; its dependencies would drag in half of PyPI. tritonclient is a client in tests, and holds ml_dtypes
# and protobuf back, which it works with as they are. TensorRT for RTX has wheels for Linux x86-64 and
# Windows only, and Ray is late with wheels for a new Python: everything else works without them, but CI must
# not lose them unseen.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -qq --upgrade 'pip>=25.1'
	$(PIP) install -qq --constraint constraints.txt --editable '.[cpu,export,sign,serve,registry,mlflow]' --group dev
	$(PIP) install -qq --constraint constraints.txt --no-deps recbole tritonclient
	$(PIP) install -qq --constraint constraints.txt --editable '.[tensorrt-rtx]' || { \
	  test -z "$$CI" && echo "note: TensorRT for RTX cannot be installed here; its backend will say so"; }
	$(PIP) install -qq --constraint constraints.txt --editable '.[ray]' || { \
	  test -z "$$CI" && echo "note: Ray cannot be installed here; the executor 'ray' will say so"; }
	touch $@

demo: venv
	$(BIN)/loka-onnx demo

# Both tiers. Workers share the cores, so tests/conftest.py gives each one thread.
test: venv
	$(BIN)/pytest -n $(JOBS) --cov --cov-report=term:skip-covered

test-fast: venv
	$(BIN)/pytest -m "not slow" -n $(JOBS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .coverage* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
