"""The installed commands, which also answer a shell that completes them.

Ctrl-C ends them without a traceback even while their modules are being imported.
"""

from __future__ import annotations

import importlib
import signal

from medarc_rl.completion.answers import complete
from medarc_rl.completion.hooks import is_asked
from prime_rl.utils.private import set_home
from prime_rl.utils.signals import start_program


def medarc_train() -> None:
    _main_of("medarc_train")


def medarc_slurm() -> None:
    _main_of("medarc_slurm")


def medarc_submit() -> None:
    _main_of("medarc_submit")


def medarc_jobs() -> None:
    _main_of("medarc_jobs")


def _main_of(program: str) -> None:
    if is_asked():
        # A shell waits for the answer, so the commands are not imported.
        complete(program)
        return
    set_home()
    handler = signal.getsignal(signal.SIGINT)
    start_program(launches=True)
    main = importlib.import_module(f"medarc_rl.{program}").main
    # Commands catch KeyboardInterrupt, which only the first handler raises.
    signal.signal(signal.SIGINT, handler)
    main()
