"""The command line: its verbs by subject."""

from __future__ import annotations

import signal
from typing import NoReturn


def command() -> NoReturn:
    """Run the command; nothing is imported before Ctrl-C is cared for.

    While modules are imported it ends the process as it does any other (a shell reports 130): raised as an
    exception inside of an import, it would be a traceback, or an error of the library that was imported.
    """
    raised = signal.getsignal(signal.SIGINT)
    if raised is signal.default_int_handler:
        # A process in the background may have been started to ignore it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from loka_onnx.cli.main import end, main

    signal.signal(signal.SIGINT, end if raised is signal.default_int_handler else raised)
    main()
