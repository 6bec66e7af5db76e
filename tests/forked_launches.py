"""Runs launches one after another, each in a fork of this process, which has loaded the heavy packages once.

`python tests/forked_launches.py CASES.json` reads a list of [name, words of medarc_train, log], and prints the exit
codes as JSON. Each process that a launch starts is a fork, too. It runs the module that its `ProcessSpec` names, on the
config that the launcher has written. So a case takes the time of its work alone.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from medarc_rl.scripts import medarc_train

LOADED = (
    "prime_rl.trainer.sft.run",
    "prime_rl.trainer.rl.run",
    "prime_rl.orchestrator.run",
    "prime_rl.orchestrator.env_checks.examination",
    "prime_rl.inference.embedded.startup",
    "prime_rl.inference.embedded.http.api",
    "verifiers",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Fork:
    """A child of this process that runs `body`, and is waited for as a `Popen` is."""

    def __init__(self, body: Callable[[], object], env: Mapping[str, str], output: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code: Any = 1
            try:
                become(env, output)
                body()
                code = 0
            except SystemExit as end:
                code = end.code
            except Exception:  # noqa: BLE001 (the log of the case shows it)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else int(code is not None))

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def become(env: Mapping[str, str], output: int) -> None:
    """Take on the session, signals, files and environment that `Popen` gives a child."""
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(env)


def is_ours(argv: Sequence[str]) -> bool:
    """Whether this interpreter would run one of our modules. The guard of a launch, `-c`, stays a process."""
    return argv[0] == sys.executable and argv[1] == "-m"


def as_module(argv: Sequence[str]) -> None:
    """What `python -m MODULE WORDS` does."""
    sys.argv = list(argv[2:])
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)


def as_command(words: Sequence[str]) -> None:
    """What `medarc_train WORDS` does."""
    sys.argv = ["medarc_train", *words]
    medarc_train()


def popen(argv: Sequence[str], *, env: Mapping[str, str], stdout: Any, **options: Any) -> Any:
    if not is_ours(argv):
        return subprocess.Popen(argv, env=env, stdout=stdout, **options)
    return Fork(partial(as_module, argv), env, stdout if isinstance(stdout, int) else stdout.fileno())


def run(argv: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    """The trial of a run's environments, whose stderr is read."""
    if not is_ours(argv):
        return subprocess.run(argv, env=env, check=False, **options)
    with tempfile.TemporaryFile("w+") as output:
        code = Fork(partial(as_module, argv), env, output.fileno()).wait()
        output.seek(0)
        return subprocess.CompletedProcess(argv, code, "", output.read())


def main() -> None:
    for module in LOADED:
        importlib.import_module(module)
    from prime_rl.checks import environments
    from prime_rl.launch import host

    constants = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    vars(host)["subprocess"] = SimpleNamespace(Popen=popen, **constants)
    vars(environments)["subprocess"] = SimpleNamespace(run=run, **constants)
    codes = {}
    for name, words, log in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        with Path(log).open("w") as output:
            codes[name] = Fork(partial(as_command, words), os.environ.copy(), output.fileno()).wait()
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    main()
