#!/usr/bin/env bash
# Compares CANDIDATE with DEPLOYED on DATA. Exits with what `loka-onnx compare` says: 0 inside the budget, 3 if the
# loss may have grown by more, 1 or 2 if it could not be judged. All but 0 fail the job.
set -euo pipefail

# Words of the options are split on blanks, on purpose, and never expanded.
read -r -a options <<< "${OPTIONS:-}"
code=0
loka-onnx compare "$DEPLOYED" "$CANDIDATE" --data "$DATA" --budget "$BUDGET" \
    ${options[@]+"${options[@]}"} > comparison.txt || code=$?
cat comparison.txt

{
    case $code in
        0) echo "### Model change: inside the budget of $BUDGET" ;;
        3) echo "### Model change: not certain to be inside the budget of $BUDGET" ;;
        *) echo "### Model change: could not be judged (exit code $code)" ;;
    esac
    printf '```text\n%s\n```\n' "$(cat comparison.txt)"
} >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$code"
