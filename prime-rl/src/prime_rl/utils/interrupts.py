"""Ctrl-C before a program handles it."""

from __future__ import annotations

import signal


def end_quietly_on_ctrl_c() -> None:
    """Let Ctrl-C end this process without a traceback, unless SIGINT is ignored. A later handler replaces this."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
