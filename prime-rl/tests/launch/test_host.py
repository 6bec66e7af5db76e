"""Real processes and signals: however a launch ends, none of its processes is left running.

Every process of a launch holds one named pipe open for writing, so the pipe's end says that all of them are gone.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LAUNCHER = """
import json, sys
from pathlib import Path
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor

root = Path(sys.argv[1])
children = json.loads(sys.argv[2])
with LocalHost() as host:
    host.remove_if_killed(root / "scratch")
    specs = [
        ProcessSpec(name, (sys.executable, "-c", code), root / f"{name}.log", completes_run=name == "trainer",
                    relays=frozenset({10}) if name == "trainer" else frozenset())
        for name, code in children.items()
    ]
    outcome = Supervisor(specs, host, lambda line: print(line, flush=True), grace_s=float(sys.argv[3])).run()
print(outcome.report())
raise SystemExit(outcome.exit_code)
"""

PRELUDE = """
import os, signal, subprocess, sys
pipe = os.open(os.environ["PIPE"], os.O_WRONLY)
def tell(word): os.write(pipe, f"{word}\\n".encode())
def wait():
    while True: signal.pause()
"""
POLITE = PRELUDE + "tell('ready'); wait()"
STUBBORN = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell('ready'); wait()"
FAILING = PRELUDE + "tell('ready'); print('before', flush=True); sys.exit('it broke')"
DONE = PRELUDE + "tell('ready')"
SAVING = (
    PRELUDE
    + """
def save(signum, frame):
    tell("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
tell("ready")
wait()
"""
)
WITH_DAEMON = (
    PRELUDE
    + """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        tell("ready")
        wait()
    os._exit(0)
os.wait()
wait()
"""
)
LIKE_TORCHRUN = (
    PRELUDE
    + """
worker = '''
import os, signal
pipe = os.open(os.environ["PIPE"], os.O_WRONLY)
signal.signal(signal.SIGUSR1, lambda *_: os.write(pipe, b"checkpoint\\\\n"))
os.write(pipe, b"ready\\\\n")
while True: signal.pause()
'''
subprocess.run([sys.executable, "-c", worker], start_new_session=True)
"""
)


@dataclass
class Launch:
    """One launcher in a process of its own, and the pipe that its children hold."""

    root: Path
    process: subprocess.Popen = field(init=False)
    descriptor: int = field(init=False)

    def start(self, children: dict[str, str], grace_s: float = 30, ready: int | None = None) -> None:
        """Start and wait until every child is ready, or `ready` of them: one that ends early stops the others."""
        os.mkfifo(self.root / "pipe")
        (self.root / "scratch").mkdir()
        (self.root / "scratch" / "kernel.bin").touch()
        self.descriptor = os.open(self.root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(self.root), json.dumps(children), str(grace_s)],
            env=os.environ | {"PIPE": str(self.root / "pipe")},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.expect("ready", times=len(children) if ready is None else ready)

    def expect(self, word: str, times: int = 1) -> None:
        """Wait until children have written `word` `times` times."""
        text = ""
        while text.count(word) < times:
            assert select.select([self.descriptor], [], [], 60)[0], f"no {word!r} after {text!r}"
            data = os.read(self.descriptor, 4096)
            assert data or self.process.poll() is None, f"the launch ended without {word!r} after {text!r}"
            text += data.decode()

    def rest_of_pipe(self) -> str:
        """What is still written until the last process that holds the pipe is gone."""
        os.set_blocking(self.descriptor, True)
        text = ""
        while data := os.read(self.descriptor, 4096):
            text += data.decode()
        return text

    def descendants(self) -> list[int]:
        """Descriptors that become readable when a child of the launcher, the guard included, ends."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [os.pidfd_open(int(pid)) for pid in children]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.process.kill()
    launch.process.wait()
    launch.process.stdout.close()
    os.close(launch.descriptor)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_children_grandchildren_and_daemons(launch: Launch, signum: signal.Signals) -> None:
    launch.start({"inference": WITH_DAEMON, "orchestrator": LIKE_TORCHRUN, "trainer": SAVING})
    launch.process.send_signal(signum)
    assert launch.rest_of_pipe() == "saved\n"
    output, _ = launch.process.communicate()
    assert launch.process.returncode == 128 + signum
    assert output.endswith(f"stopped by {'Ctrl-C' if signum is signal.SIGINT else signum.name}\n")


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(launch: Launch) -> None:
    launch.start({"inference": STUBBORN, "trainer": POLITE}, grace_s=0.3)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.rest_of_pipe() == ""
    assert "inference did not stop in time and will be killed" in launch.process.communicate()[0]
    assert launch.process.returncode == 143


def test_a_launcher_that_is_killed_leaves_no_process_and_no_scratch(launch: Launch) -> None:
    launch.start({"inference": WITH_DAEMON, "orchestrator": LIKE_TORCHRUN, "trainer": SAVING})
    ends = launch.descendants()
    launch.process.kill()
    assert launch.rest_of_pipe() == "saved\n"
    for end in ends:
        assert select.select([end], [], [], 60)[0], "a child or the guard is still there"
        os.close(end)
    assert not (launch.root / "scratch").exists()


def test_the_first_failure_stops_the_rest_and_shows_the_end_of_its_log(launch: Launch) -> None:
    launch.start({"inference": POLITE, "trainer": FAILING}, ready=1)
    assert launch.rest_of_pipe() in ("", "ready\n")
    output, _ = launch.process.communicate()
    assert launch.process.returncode == 1
    assert output.endswith(
        f"trainer exited with code 1; its log is {launch.root}/trainer.log\nits last lines:\n  | before\n  | it broke\n"
    )


def test_a_run_that_is_complete_ends_well_and_stops_what_served_it(launch: Launch) -> None:
    launch.start({"inference": WITH_DAEMON, "trainer": DONE}, ready=1)
    assert launch.rest_of_pipe() in ("", "ready\n")
    assert launch.process.wait() == 0
    assert (launch.root / "scratch").exists(), "only the guard of a killed launcher removes it"


def test_sigusr1_reaches_the_worker_and_spares_the_parent_that_would_die_of_it(launch: Launch) -> None:
    launch.start({"inference": POLITE, "trainer": LIKE_TORCHRUN})
    launch.process.send_signal(signal.SIGUSR1)
    launch.expect("checkpoint")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait() == 143


def test_a_launcher_under_nohup_survives_its_terminal(launch: Launch) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch.start({"trainer": LIKE_TORCHRUN})
    finally:
        signal.signal(signal.SIGHUP, previous)
    launch.process.send_signal(signal.SIGHUP)
    launch.process.send_signal(signal.SIGUSR1)
    launch.expect("checkpoint")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait() == 143
