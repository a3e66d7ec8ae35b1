#!/usr/bin/env bash
# Benchmarks side by side on one GPU host, each in a session of its own: the end of a remote command does not end them.
#
#   side_by_side.sh start NAME COMMAND…     runs it; leaves NAME/NAME.log, and NAME.done with its exit status
#   side_by_side.sh wait SECONDS NAME…      waits until all of them are done, or for so long; prints the ends of logs
#
# Below $RESULTS (/tmp/results where it is not set). Compiling uses the processors, and who times kernels or engines has
# the device alone (`loka_onnx.engines.device_lock`): together they take much less time than one after the other.
set -euo pipefail
results=${RESULTS:-/tmp/results}
# Records say so (`benchmarks.recording`).
export BENCHMARKS_BESIDE=${BENCHMARKS_BESIDE:-"other benchmarks' builds ran on the same host; engines were timed with the device locked"}
mkdir -p "$results"
case ${1:-} in
start)
  name=$2
  shift 2
  mkdir -p "$results/$name"
  line=$(printf '%q ' "$@")
  setsid nohup bash -c "$line > '$results/$name/$name.log' 2>&1; echo \$? > '$results/$name.done'" > /dev/null 2>&1 &
  ;;
wait)
  end=$((SECONDS + $2))
  shift 2
  while [ "$SECONDS" -lt "$end" ]; do
    left=0
    for name in "$@"; do [ -e "$results/$name.done" ] || left=1; done
    [ "$left" = 0 ] && break
    sleep 1
  done
  for name in "$@"; do
    echo "== $name: $(cat "$results/$name.done" 2> /dev/null || echo running)"
    tail -n "${LINES_OF_LOG:-6}" "$results/$name/$name.log" | cut -c1-600
  done
  ;;
*)
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 2
  ;;
esac
