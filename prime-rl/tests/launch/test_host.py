"""Real processes and signals: however a launch ends, none of its processes is left running.

Every process of a launch holds one named pipe open for writing, so the pipe's end says that all of them are gone.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from prime_rl.launch import Exited, LocalHost, ProcessSpec
from prime_rl.launch.reaper import Leader, note

LAUNCHER = """
import json, sys
from pathlib import Path
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor

root = Path(sys.argv[1])
children = json.loads(sys.argv[2])
with LocalHost() as host:
    (root / "launch").write_text(str(host.directory))
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
WATCHFUL = "from prime_rl.run.process import end_with_launch; end_with_launch()\n" + SAVING
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
    names: tuple[str, ...] = ()

    def start(self, children: dict[str, str], grace_s: float = 3600, ready: int | None = None) -> None:
        """Start and wait until every child is ready, or `ready` of them: one that ends early stops the others."""
        self.names = tuple(children)
        os.mkfifo(self.root / "pipe")
        self.descriptor = os.open(self.root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(self.root), json.dumps(children), str(grace_s)],
            env=os.environ | {"PIPE": str(self.root / "pipe"), "PRIME_RL_RUNTIME_DIR": str(self.root / "runtime")},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.expect("ready", times=len(children) if ready is None else ready)

    def expect(self, word: str, times: int = 1) -> None:
        """Wait until children have written `word` `times` times."""
        text = ""
        while text.count(word) < times:
            select.select([self.descriptor], [], [])
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

    @property
    def guard(self) -> int:
        """Process id of the guard."""
        for pid in self.children():
            with suppress(OSError):
                if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError("there is no guard")

    def wait_for_guard(self) -> int:
        while True:
            with suppress(AssertionError):
                return self.guard

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def leader(self, name: str) -> int:
        """Process id of a child, as the record names it."""
        record = Path((self.root / "launch").read_text(), "record").read_text().splitlines()
        leaders = [json.loads(line)["leader"][0] for line in record if "leader" in line]
        return leaders[list(self.names).index(name)]

    def runtime_files(self) -> list[str]:
        """What is left in the runtime directory."""
        return sorted(path.name for path in (self.root / "runtime").iterdir() if path.name != ".lock")

    def wait_until_quiet(self) -> None:
        """Wait until no process holds the lock of the launch's directory: neither launcher nor guard."""
        with suppress(FileNotFoundError), Path((self.root / "launch").read_text(), "owner.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

    def descendants(self) -> list[int]:
        """Descriptors that become readable when a child of the launcher, the guard included, ends."""
        return [os.pidfd_open(pid) for pid in self.children()]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.process.kill()
    launch.process.wait()
    launch.process.stdout.close()
    os.close(launch.descriptor)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
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


def test_a_launcher_that_is_killed_leaves_no_process_and_no_directory(launch: Launch) -> None:
    launch.start({"inference": WITH_DAEMON, "orchestrator": LIKE_TORCHRUN, "trainer": SAVING})
    ends = launch.descendants()
    launch.process.kill()
    assert launch.rest_of_pipe() == "saved\n"
    for end in ends:
        select.select([end], [], [])
        os.close(end)
    assert launch.runtime_files() == []


KILLED = {
    "launcher": lambda launch: [launch.process.pid],
    "launcher, then guard": lambda launch: [launch.process.pid, launch.guard],
    "guard, then launcher": lambda launch: [launch.guard, launch.process.pid],
    "both, and a child": lambda launch: [launch.guard, launch.process.pid, launch.leader("orchestrator")],
}


@pytest.mark.parametrize("killed", KILLED)
def test_whoever_is_killed_nothing_is_left(launch: Launch, killed: str) -> None:
    """One watchful child is enough to end those that are not."""
    launch.start({"inference": WITH_DAEMON, "orchestrator": LIKE_TORCHRUN, "trainer": WATCHFUL})
    for pid in KILLED[killed](launch):
        os.kill(pid, signal.SIGKILL)
    assert launch.rest_of_pipe() == "saved\n"
    launch.wait_until_quiet()
    assert launch.runtime_files() == []


def test_a_child_that_is_stopped_does_not_outlive_launcher_and_guard(launch: Launch) -> None:
    launch.start({"inference": WITH_DAEMON, "trainer": WATCHFUL})
    os.kill(launch.leader("trainer"), signal.SIGSTOP)
    for pid in (launch.guard, launch.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert launch.rest_of_pipe() == "saved\n"
    launch.wait_until_quiet()
    assert launch.runtime_files() == []


def test_a_guard_that_is_killed_is_replaced_and_the_run_goes_on(launch: Launch) -> None:
    launch.start({"inference": WITH_DAEMON, "trainer": WATCHFUL})
    end = os.pidfd_open(launch.guard)
    signal.pidfd_send_signal(end, signal.SIGKILL)
    select.select([end], [], [])
    os.close(end)
    launch.wait_for_guard()
    launch.process.kill()
    assert launch.rest_of_pipe() == "saved\n"


def test_what_outlives_launcher_guard_and_children_ends_with_the_next_launch(launch: Launch) -> None:
    launch.start({"inference": WITH_DAEMON, "trainer": POLITE})
    pids = (launch.guard, launch.process.pid, launch.leader("trainer"), launch.leader("inference"))
    ends = [os.pidfd_open(pid) for pid in pids]
    # Stop all of them first, so that none can react when another one ends.
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for end in ends:
            signal.pidfd_send_signal(end, signum)
    for end in ends:
        select.select([end], [], [])
        os.close(end)
    launch.process.wait()
    assert launch.runtime_files() != []
    following = subprocess.run(
        [sys.executable, "-c", "from prime_rl.launch import LocalHost\nwith LocalHost(): pass"],
        env=os.environ | {"PRIME_RL_RUNTIME_DIR": str(launch.root / "runtime")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert following.stderr == "ended 1 processes of a launch that was killed earlier\n"
    assert launch.rest_of_pipe() == ""
    assert launch.runtime_files() == []


def test_the_next_launch_spares_a_live_one_and_whoever_got_the_id_of_a_dead_child(launch: Launch) -> None:
    launch.start({"trainer": POLITE})
    runtime, bystander = launch.root / "runtime", os.getpid()
    dead = runtime / "launch-dead"
    dead.mkdir()
    (dead / "owner.lock").touch()
    leader = Leader.of(bystander)
    note(dead, leader=leader._replace(started_ticks=leader.started_ticks + 1))
    note(dead, leader=leader._replace(boot="another"))
    (dead / "record").open("a").write('{"leader": [1')

    subprocess.run(
        [sys.executable, "-c", "from prime_rl.launch import LocalHost\nwith LocalHost(): pass"],
        env=os.environ | {"PRIME_RL_RUNTIME_DIR": str(runtime)},
        check=True,
    )

    assert launch.runtime_files() == [Path((launch.root / "launch").read_text()).name]
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait() == 143


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


@pytest.mark.parametrize("gets_service_keys", [True, False])
def test_keys_of_other_services_reach_only_who_asks_them(
    gets_service_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer and a server keep those of the hub, of monitors and of the launch itself."""
    kept = ["HF_TOKEN", "MAX_TOKENS", "OURS_TOKEN", "WANDB_API_KEY"]
    others = ["AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY", "SSH_AUTH_SOCK"]
    for name in {*kept, *others} - {"OURS_TOKEN"}:
        monkeypatch.setenv(name, "value")
    code = f"import os; print([name for name in {sorted(kept + others)} if name in os.environ])"
    log = tmp_path / "child.log"
    with LocalHost() as host:
        spec = ProcessSpec("child", (sys.executable, "-c", code), log, secrets={"OURS_TOKEN": "value"})
        host.start(replace(spec, gets_service_keys=gets_service_keys))
        assert host.next_event(None) == Exited("child", 0)
    assert str(sorted(kept + others * gets_service_keys)) in log.read_text()
