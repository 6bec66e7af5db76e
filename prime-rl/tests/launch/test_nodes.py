"""Two agents as real processes: what ends a launch on two nodes, what it says, and that nothing is left on either.

Every process of a launch holds one named pipe open for writing, so the pipe's end says that all of them are gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event as Flag

import pytest

from prime_rl.launch import LocalHost, ProcessSpec
from prime_rl.launch.nodes.agent import orders_from
from prime_rl.launch.nodes.cluster import ClusterHost, PipeChannel, agent_argv
from prime_rl.launch.nodes.messages import Ping, Start, Stop, encoded, order_of
from prime_rl.launch.spec import Exited, NodeLost
from prime_rl.utils.errors import CannotStart, RunError, StoppedEarly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HEAD = """
import json, os, sys
from pathlib import Path
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor
from prime_rl.launch.nodes.cluster import PipeChannel, agent_argv
from prime_rl.launch.nodes.cluster import ClusterHost
from prime_rl.launch.stalling import StallLimits, Watchdog

root, children, limits = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
grace_s, silent_s = limits.pop("grace_s", 60), limits.pop("silent_s", 20)
with LocalHost() as local:
    channels = [
        PipeChannel(name, agent_argv(), {**os.environ, "SLURMD_NODENAME": name}) for name in ("n0", "n1")
    ]
    (root / "agents").write_text(json.dumps([channel.pid for channel in channels]))
    with ClusterHost(local, channels, silent_s=silent_s) as host:
        specs = [
            ProcessSpec(
                name, (sys.executable, "-c", code), root / f"{name}.log", node=node, completes_run=True,
                heartbeat=root / f"{name}.beat", completion=root / f"{name}.complete", secrets={"KEY": "open sesame"},
            )
            for name, (node, code) in children.items()
        ]
        watchdog = Watchdog(StallLimits(**limits))
        say = lambda line: print(line, flush=True)
        outcome = Supervisor(specs, host, say, grace_s, watchdog=watchdog, failure_grace_s=15).run()
print(outcome.report())
raise SystemExit(outcome.exit_code)
"""

PRELUDE = """
import os, signal, sys
from prime_rl.run.process import own_beats
from prime_rl.run.process import report_completion
from prime_rl.utils.signals import write_stacks_on_signal
write_stacks_on_signal()
pipe = os.open(os.environ["PIPE"], os.O_WRONLY)
def tell(word): os.write(pipe, f"{word}\\n".encode())
def ready(): tell(f"ready {os.getpid()} {os.environ['SLURMD_NODENAME']}")
def wait_for_ever():
    while True: signal.pause()
def save(signum, frame):
    tell("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
own_beats().say("training")
own_beats().started()
"""
SAVING = PRELUDE + "ready(); wait_for_ever()"
FAILING = PRELUDE + "tell('ready'); print('before', flush=True); sys.exit('it broke')"
DONE = PRELUDE + "tell('ready'); assert os.environ['KEY'][:4] == 'open'; report_completion()"
UNFINISHED = PRELUDE + "tell('ready')"
PEERLESS = (
    PRELUDE
    + "signal.signal(signal.SIGUSR1, lambda *_: sys.exit('connection closed by peer'))\nready(); wait_for_ever()"
)
STUBBORN = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); wait_for_ever()"


@dataclass
class Launch:
    """A head in a process of its own with two agents, and the pipe that all children hold."""

    root: Path
    process: subprocess.Popen[str] = field(init=False)
    descriptor: int = field(init=False)
    pids: dict[str, int] = field(default_factory=dict)
    """A child of each node."""

    def start(self, children: dict[str, tuple[int, str]], ready: int | None = None, **limits: float) -> None:
        """Start children on nodes, and wait until all are ready, or `ready` of them."""
        os.mkfifo(self.root / "pipe")
        self.descriptor = os.open(self.root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEAD, str(self.root), json.dumps(children), json.dumps(limits)],
            env=os.environ | {"PIPE": str(self.root / "pipe"), "PRIME_RL_RUNTIME_DIR": str(self.root / "runtime")},
            stdout=subprocess.PIPE,
            text=True,
        )
        text = ""
        while text.count("ready") < (len(children) if ready is None else ready):
            select.select([self.descriptor], [], [])
            data = os.read(self.descriptor, 4096)
            assert data or self.process.poll() is None, f"the launch ended after {text!r}"
            text += data.decode()
        self.pids = {line.split()[2]: int(line.split()[1]) for line in text.splitlines()}

    def agent(self, node: int) -> int:
        return int(json.loads((self.root / "agents").read_text())[node])

    def rest_of_pipe(self) -> str:
        """What is still written until the last process that holds the pipe is gone."""
        os.set_blocking(self.descriptor, True)
        text = ""
        while data := os.read(self.descriptor, 4096):
            text += data.decode()
        return text

    def read_until(self, words: str) -> None:
        """Read the head's output up to a line with these words: a child is ready before the head knows."""
        while words not in (line := self.process.stdout.readline()):
            assert line, "the launch ended"

    def end(self) -> str:
        """The head's further output, once it has ended."""
        return self.process.communicate()[0]

    def left_over(self) -> list[str]:
        """What is in the runtime directory once the guards have ended, which outlive agents that are killed."""
        runtime = str(self.root / "runtime").encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                if runtime in (process / "cmdline").read_bytes():
                    end = os.pidfd_open(int(process.name))
                    select.select([end], [], [])
                    os.close(end)
        return sorted(path.name for path in (self.root / "runtime").iterdir() if path.name != ".lock")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.process.kill()
    launch.process.wait()
    launch.process.stdout.close()
    os.close(launch.descriptor)


def test_two_nodes_run_to_a_common_end_and_secrets_reach_no_file_or_argument(launch: Launch) -> None:
    launch.start({"trainer": (0, DONE), "trainer_rank_1": (1, DONE)}, ready=0)
    output = launch.end()
    assert launch.process.returncode == 0, output
    assert "trainer finished" in output
    texts = [path.read_text() for path in launch.root.glob("*.log")]
    assert len(texts) == 2
    assert not any("sesame" in text for text in (output, *texts))
    assert launch.left_over() == []


@pytest.mark.parametrize(("code", "words"), [(FAILING, "exited with code 1"), (UNFINISHED, "before its work was done")])
def test_a_child_that_fails_on_the_second_node_is_named_with_its_node_and_last_lines(
    launch: Launch, code: str, words: str
) -> None:
    launch.start({"trainer": (0, SAVING), "trainer_rank_1": (1, code)}, ready=0)
    output = launch.end()
    assert launch.process.returncode == 1
    assert f"\ntrainer_rank_1 exited with code {int(code == FAILING)} on n1" in output
    assert words in output
    assert ("  | before\n  | it broke\n" in output) == (code == FAILING)
    launch.rest_of_pipe()
    assert launch.left_over() == []


def test_a_child_that_is_killed_on_the_second_node_ends_the_first(launch: Launch) -> None:
    launch.start({"trainer": (0, SAVING), "trainer_rank_1": (1, SAVING)})
    os.kill(launch.pids["n1"], signal.SIGKILL)
    assert launch.rest_of_pipe() == "saved\n"
    assert "\ntrainer_rank_1 was ended by SIGKILL on n1" in launch.end()
    assert launch.process.returncode == 1


def test_an_agent_that_is_killed_ends_the_launch_by_the_nodes_name_and_leaves_nothing(launch: Launch) -> None:
    launch.start({"trainer": (0, SAVING), "trainer_rank_1": (1, SAVING), "trainer_rank_2": (1, SAVING)})
    os.kill(launch.agent(1), signal.SIGKILL)
    assert launch.rest_of_pipe() == 3 * "saved\n", "the guard on the lost node lets its children save, too"
    output = launch.end()
    assert launch.process.returncode == 1
    assert "node n1 is gone: its agent ended (" in output
    assert "ended by signal 9" in output
    assert "it ran trainer_rank_1, trainer_rank_2\nthe last lines of trainer_rank_1:" in output


def test_a_node_that_hangs_is_named_although_a_process_elsewhere_fails_first(launch: Launch) -> None:
    launch.start({"trainer": (0, PEERLESS), "trainer_rank_1": (1, SAVING)}, silent_s=8)
    launch.read_until("trainer_rank_1 started")
    os.kill(launch.agent(1), signal.SIGSTOP)
    os.kill(launch.pids["n0"], signal.SIGUSR1)
    launch.rest_of_pipe()
    output = launch.end()
    assert launch.process.returncode == 1
    assert "node n1 is gone: no message from its agent for 8 s" in output
    assert "it ran trainer_rank_1\n" in output
    assert launch.left_over() == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_without_their_head_both_nodes_save_and_end(launch: Launch, signum: signal.Signals) -> None:
    launch.start({"trainer": (0, SAVING), "trainer_rank_1": (1, SAVING)})
    launch.process.send_signal(signum)
    assert launch.rest_of_pipe() == 2 * "saved\n"
    output = launch.end()
    if signum is signal.SIGTERM:
        assert launch.process.returncode == 143
        assert output.endswith("stopped by SIGTERM\n")
        assert launch.left_over() == []


def test_a_signal_to_an_agent_stops_the_launch_in_order(launch: Launch) -> None:
    """Slurm signals every step of a job."""
    launch.start({"trainer": (0, SAVING), "trainer_rank_1": (1, SAVING)})
    os.kill(launch.agent(1), signal.SIGTERM)
    assert launch.rest_of_pipe() == 2 * "saved\n"
    assert launch.end().endswith("stopped by SIGTERM\n")


def test_the_same_ctrl_c_from_several_agents_is_not_a_second_one(launch: Launch) -> None:
    """`scancel -s INT` signals every step, and a second Ctrl-C would kill what is still saving."""
    launch.start({"trainer": (0, SAVING), "trainer_rank_1": (1, SAVING)})
    for node in (0, 1):
        os.kill(launch.agent(node), signal.SIGINT)
    assert launch.rest_of_pipe() == 2 * "saved\n"
    output = launch.end()
    assert output.endswith("stopped by SIGTERM\n")
    assert "stopping now" not in output


def test_a_child_that_hangs_on_the_second_node_is_found_and_shows_its_stack(launch: Launch) -> None:
    launch.start({"trainer_rank_1": (1, STUBBORN)}, timeout_s=0.1, grace_s=0.1)
    assert launch.rest_of_pipe() == ""
    output = launch.end()
    assert "\ntrainer_rank_1 made no progress since" in output
    assert "it was: training" in output
    assert "in wait_for_ever" in output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('no such module')", ["n7", "exit code 1", "| no such module"]),
        ("print('Welcome to n7!')", ["n7", "a line that is not a message", "Welcome to n7!"]),
        ("""print('{"type":"Refusal","fault":"a GPU twice"}')""", ["n7", "a GPU twice"]),
    ],
)
def test_an_agent_that_cannot_work_is_reported_with_what_it_said(local: LocalHost, code: str, words: list[str]) -> None:
    with pytest.raises(CannotStart) as refused, ClusterHost(local, [PipeChannel("n7", (sys.executable, "-c", code))]):
        pass
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_program_that_is_missing_on_a_node_is_named_with_the_node(local: LocalHost, tmp_path: Path) -> None:
    with ClusterHost(local, [PipeChannel("n0", agent_argv())]) as host:
        spec = ProcessSpec("inference", ("/nowhere/inference",), tmp_path / "inference.log")
        with pytest.raises(CannotStart, match=f"on {host.facts[0].name}: .*inference.*No such file"):
            host.start(spec)


def test_a_node_that_falls_silent_is_lost_although_its_connection_stays(local: LocalHost) -> None:
    """Meanwhile the other node hears from the head, however long it takes to describe the lost one."""
    is_described, is_pinged = Flag(), Flag()

    class SlowToDescribe(PipeChannel):
        def describe(self) -> str:
            is_described.set()
            is_pinged.wait()
            return super().describe()

    class Pinged(PipeChannel):
        def send(self, message: bytes) -> None:
            super().send(message)
            if is_described.is_set() and message == encoded(Ping()):
                is_pinged.set()

    channel = SlowToDescribe("n0", agent_argv())
    with ClusterHost(local, [channel, Pinged("n1", agent_argv())], silent_s=3.0) as host:
        os.kill(channel.pid, signal.SIGSTOP)
        # On a busy machine the other one may be silent for so long, too.
        events = iter(lambda: host.next_event(None), None)
        event = next(each for each in events if isinstance(each, NodeLost) and each.node == 0)
        os.kill(channel.pid, signal.SIGCONT)
    assert "no message from its agent for 3 s" in event.fault


BROKEN_AGENT = """
from prime_rl.launch.nodes import agent
def has_completed(self, spec): raise OSError("Stale file handle")
agent.LocalHost.has_completed = has_completed
raise SystemExit(agent.main())
"""


def test_an_agent_that_cannot_report_an_end_ends_instead_of_leaving_its_head_waiting(
    local: LocalHost, tmp_path: Path
) -> None:
    with ClusterHost(local, [PipeChannel("n0", (sys.executable, "-c", BROKEN_AGENT))]) as host:
        host.start(ProcessSpec("trainer", (sys.executable, "-c", ""), tmp_path / "trainer.log"))
        event = host.next_event(None)
    assert isinstance(event, NodeLost)
    assert "Stale file handle" in event.fault


def test_the_exit_code_of_a_child_is_known_to_the_head(local: LocalHost, tmp_path: Path) -> None:
    with ClusterHost(local, [PipeChannel("n0", agent_argv())]) as host:
        host.start(ProcessSpec("launcher", (sys.executable, "-c", "raise SystemExit(2)"), tmp_path / "launcher.log"))
        assert isinstance(host.next_event(None), Exited)
        assert (host.exit_code("launcher"), host.exit_code("trainer")) == (2, None)


def test_a_signal_while_agents_start_ends_the_launch_as_a_signal_and_not_as_a_failure(local: LocalHost) -> None:
    """A failure could be started again."""
    os.kill(os.getpid(), signal.SIGTERM)
    waiting = PipeChannel("n0", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    with pytest.raises(StoppedEarly, match="stopped by SIGTERM while the agents of n0 started") as stopped:
        ClusterHost(local, [waiting]).__enter__()
    assert stopped.value.exit_code == 143


def test_an_agent_takes_the_silence_of_its_head_for_its_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, encoded(Stop(name="trainer")) + encoded(Ping()))
    assert list(orders_from(reading, silent_s=0.01)) == [Stop(name="trainer")]
    os.close(reading)
    os.close(writing)


def test_an_order_arrives_as_it_was_sent(tmp_path: Path) -> None:
    spec = ProcessSpec(
        "trainer",
        ("python", "-c", 'print("ä\n")'),
        tmp_path / "a b.log",
        {"A": "1\n2"},
        {"KEY": "secret"},
        node=1,
        gpus=("GPU-1",),
        relays=frozenset({signal.SIGUSR1}),
    )
    order = Start(7, spec=spec, umask=0o077)
    line = encoded(order)
    assert line.count(b"\n") == 1
    assert order_of(line) == order
    for damaged in (
        line[:-9],
        line[line.index(b"secret") - 9 :],
        b"{}",
        b'{"type":"Start"}',
        b"\xff\n",
        b"[" * 100_000,
    ):
        with pytest.raises(RunError) as refused:
            order_of(damaged)
        assert "secret" not in str(refused.value)
