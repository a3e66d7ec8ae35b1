#!/usr/bin/env bash
# The fast tier on other versions of Python than that of .venv.
#
#   tests/pythons.sh               # 3.12 and 3.13, where one runs here; each in an environment in .venv/pythons
#   tests/pythons.sh PYTHON ...    # these interpreters as they are, with the packages that they find (PYTHONPATH)
#
# PyTorch's CPU build is not on every index for these versions, and its CUDA build brings gigabytes: neither it nor
# the two packages below is installed. Tests that need one that is missing skip; any other skip fails (tests/conftest.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OPTIONAL="torch ray tensorrt_rtx"

# A shim of pyenv is found and then fails, so that an interpreter is run before it is taken.
interpreter() {
  local candidate
  for candidate in "python$1" "$(pyenv root 2> /dev/null || echo "$HOME/.pyenv")/versions/$1".*/bin/python; do
    if "$candidate" -c '' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

environment() {
  local place=.venv/pythons/$1 python=$2
  test -x "$place/bin/python" || "$python" -m venv "$place"
  if [ ! "$place/.installed" -nt pyproject.toml ] || [ ! "$place/.installed" -nt constraints.txt ]; then
    "$place/bin/python" -m pip install -qq --upgrade 'pip>=25.1'
    "$place/bin/python" -m pip install -qq --constraint constraints.txt --group dev --group docs \
      --editable '.[cpu,sign,serve,registry]' onnxscript safetensors
    "$place/bin/python" -m pip install -qq --constraint constraints.txt --no-deps recbole tritonclient
    touch "$place/.installed"
  fi
}

fast_tier() {
  local python=$1 missing
  missing=$("$python" -c "
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))" $OPTIONAL)
  echo "== $("$python" -VV), without: ${missing:-nothing}"
  PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} LOKA_ONNX_EXPECT_NO_SKIP=1 LOKA_ONNX_WITHOUT=$missing HYPOTHESIS_PROFILE=fast \
    "$python" -m pytest -q -m "not slow" -n "${JOBS:-2}" --dist loadfile -p no:cacheprovider
}

if [ $# -gt 0 ]; then
  for python in "$@"; do fast_tier "$python"; done
  exit
fi
for version in 3.12 3.13; do
  if python=$(interpreter "$version"); then
    environment "$version" "$python"
    fast_tier ".venv/pythons/$version/bin/python"
  else
    echo "note: no Python $version runs here; the fast tier is not run on it"
  fi
done
