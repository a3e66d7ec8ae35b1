"""The interpreter of a page: executes the blocks that come in, one JSON object a line, in one namespace.

It stands alone, so that a page finds nothing imported but what it imports.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer each block with what it printed and the traceback of what it raised."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # What code writes past `sys.stdout` must not mix with the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.path[0] = str(Path.cwd())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        request = json.loads(line)
        printed, error = io.StringIO(), ""
        with redirect_stdout(printed), redirect_stderr(printed):
            try:
                exec(compile(request["code"], request["name"], "exec"), namespace)
            except BaseException:
                error = traceback.format_exc()
        answers.write(json.dumps({"printed": printed.getvalue(), "error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
