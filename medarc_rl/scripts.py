"""The installed commands. Ctrl-C ends them without a traceback even while their modules are being imported."""

from __future__ import annotations

import importlib
import signal

from prime_rl.utils.interrupts import end_quietly_on_ctrl_c


def medarc_train() -> None:
    _main_of("medarc_rl.medarc_train")


def medarc_slurm() -> None:
    _main_of("medarc_rl.medarc_slurm")


def _main_of(module: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    end_quietly_on_ctrl_c()
    main = importlib.import_module(module).main
    # Commands catch KeyboardInterrupt, which only the first handler raises.
    signal.signal(signal.SIGINT, handler)
    main()
