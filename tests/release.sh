#!/usr/bin/env bash
# The release as a user gets it: built from the tracked files, checked, then installed into a clean environment by
# the very commands of docs/index.md, and the demo run there. Needs python3 (with venv), git, a package index, and
# this checkout's .venv (`make venv`), whose build and twine it uses; leaves nothing behind.
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

# The environment has nothing of .venv; versions are those that CI tests. The wheel stands in for what an index would
# send: it is there already when the first command asks for the package, and that adds what it needs.
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-deps "$dist"/*.whl
commands=$(sed -n '/^```console title="not run:.*release\.sh/,/^```$/s/^\$ //p' "$root/docs/index.md")
test -n "$commands"

# From a place without a checkout, so that only what is installed can be imported.
cd "$work"
unset PYTHONPATH
export LOKA_ONNX_CACHE=$work/cache PATH=$work/venv/bin:$PATH
PIP_CONSTRAINT=$root/constraints.txt PIP_QUIET=2 bash -euxo pipefail -c "$commands"
loka-onnx --version
loka-onnx doctor
loka-onnx bundle verify runs/demo/bundle
test -s runs/demo/report.html
