#!/usr/bin/env bash
# The release as a user gets it: built from the tracked files, checked, installed into a clean environment
# without this checkout, and the demo run there. Needs python3 (with venv) and git; leaves nothing behind.
#
#   tests/release.sh            # builds into a temporary place
#   tests/release.sh DIST       # takes the wheel that `make release` has left in DIST
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ $# -gt 0 ]; then
  dist=$(cd "$1" && pwd)
else
  # What git would take, as it is in this checkout: what it ignores must not get into a release.
  mkdir "$work/source"
  (cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory "$work/source")
  "$root/.venv/bin/python" -m build --outdir "$work/dist" "$work/source" > "$work/build.log" 2>&1 || {
    cat "$work/build.log" >&2
    exit 1
  }
  dist=$work/dist
fi
"$root/.venv/bin/twine" check --strict "$dist"/*

# The environment has nothing of .venv; versions are those that CI tests.
"$PYTHON" -m venv "$work/venv"
wheel=$(echo "$dist"/*.whl)
"$work/venv/bin/pip" install -qq --constraint "$root/constraints.txt" "$wheel[cpu,export]"
# MovieLens 100K lies in this package; it is read as data, and its dependencies are not wanted.
"$work/venv/bin/pip" install -qq --constraint "$root/constraints.txt" --no-deps recbole

# From a place without a checkout, so that only what is installed can be imported.
cd "$work"
unset PYTHONPATH
export LOKA_ONNX_CACHE=$work/cache
"$work/venv/bin/loka-onnx" --version
"$work/venv/bin/loka-onnx" doctor
"$work/venv/bin/loka-onnx" demo
"$work/venv/bin/loka-onnx" bundle verify runs/demo/bundle
test -s runs/demo/report.html
