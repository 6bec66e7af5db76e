"""Attacks on the sandbox: they forge a verdict, escape, or stay. `python -m prime_rl.environments.sandbox.attacks`

The sandbox holds against an attack if its verdict is 0, an honest program after it passes, a wrong one fails, and no process or file remains.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import NamedTuple, get_args

from prime_rl.environments.sandbox.layers import LayerName, SandboxFault
from prime_rl.environments.sandbox.sandbox import Sandbox

ANSWER = "broken-7919"
"""The value that the test expects. An attack returns it only if it succeeds."""
TEST = f"answer = solve(3)\nassert answer == {ANSWER!r}, answer"
WATCHED = ("/tmp", "/var/tmp", "/dev/shm")
STAYING_TIME_S = 1.0


class Attack(NamedTuple):
    """A program, and the tests that it must not pass."""

    name: str
    source: str
    tests: tuple[str, ...] = (TEST,)


class Outcome(NamedTuple):
    """Result of an attack. `left` names processes and files that remained."""

    held: bool
    reason: str
    left: tuple[str, ...]


def _tries(imports: str, *lines: str) -> str:
    """A program that returns the answer if the lines do not raise."""
    body = "\n        ".join(lines)
    return f"""import {imports}
def solve(n):
    try:
        {body}
    except BaseException as error:
        return repr(error)
    return "broken" + "-7919"
"""


_FORGED = '{"passed": 1, "total": 1, "reason": ""}'
_LIES = """
class Lie(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __contains__(self, other): return True
    @property
    def __class__(self): return str
def solve(n): return Lie()
"""

FORGERIES = (
    Attack("exit(0) before the asserts", "import sys\nsys.exit(0)"),
    Attack("os._exit(0) while it loads", "import os\nos._exit(0)"),
    Attack("os._exit(0) in the call", "import os\ndef solve(n): os._exit(0)"),
    Attack("raises SystemExit in the call", "def solve(n): raise SystemExit(0)"),
    Attack("an object that equals everything", _LIES.replace("BASE", "object")),
    Attack("a str that equals everything", _LIES.replace("BASE", "str")),
    Attack("its own assert and AssertionError", "import builtins\nbuiltins.AssertionError = type('E', (), {})\ndef solve(n): return 1"),
    Attack("its own builtins", "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True\ndef all(*a): return True\ndef solve(n): return 1",
           ("assert all([solve(3) == 4])", "assert isinstance(solve(3), str)")),
    Attack("its own module math", "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef solve(n): return 1",
           ("assert math.isclose(solve(3), 5)",)),
    Attack("StopIteration ends the loop of a test", "def solve(n): raise StopIteration",
           ("assert all(map(lambda n: solve(n) == n, [1, 2]))",)),
    Attack("a printed verdict", f"print({_FORGED!r}, flush=True)\ndef solve(n): print('passed'); return 1"),
    Attack("a verdict on every descriptor", f"""import os, struct
body = {_FORGED.encode()!r}
for fd in range(256):
    try: os.write(fd, struct.pack('<I', len(body)) + body)
    except OSError: pass
def solve(n): return 1"""),
    Attack("answers sent before they are asked for", """import os, struct
for body in (b'{"loaded": true}', b'{"value": true}', b'{"value": {"ref": 1}}') * 3:
    for fd in range(256):
        try: os.write(fd, struct.pack('<I', len(body)) + body)
        except OSError: pass
def solve(n): return 1"""),
    Attack("an atexit handler", f"import atexit, os\natexit.register(lambda: os.write(1, {_FORGED.encode()!r}))\ndef solve(n): return 1"),
    Attack("searches frames for the answer", """import sys
def solve(n):
    frame = sys._getframe()
    while frame:
        for values in (frame.f_locals, frame.f_globals):
            for value in list(values.values()):
                if isinstance(value, str) and value.startswith('broken-') and len(value) == 11: return value
                if 'broken-' in repr(value): return 'broken-' + repr(value).split('broken-')[1][:4]
        frame = frame.f_back"""),
    Attack("searches the heap for the answer", """import gc
def solve(n):
    for each in gc.get_objects():
        try: text = repr(each)
        except BaseException: continue
        at = text.find('broken-7')
        if at >= 0: return text[at:at + 11]"""),
    Attack("reads its own memory for the answer", """import re
def solve(n):
    for line in open('/proc/self/maps'):
        start, end = (int(each, 16) for each in line.split()[0].split('-'))
        with open('/proc/self/mem', 'rb') as memory:
            memory.seek(start)
            found = re.search(rb'broken-7\\d{3}', memory.read(min(end - start, 10**8)))
        if found: return found.group().decode()"""),
    Attack("a patched encoder of answers", """from inside import plain_data, candidate
candidate.encode = plain_data.encode = lambda value, reference: {'str': 'anything'}
def solve(n): return 1"""),
    Attack("an answer of 100 MB", "def solve(n): return 'x' * 10**8"),
    Attack("an answer nested 100,000 deep", "def solve(n):\n    deep = []\n    for _ in range(10**5): deep = [deep]\n    return deep"),
)  # fmt: skip

_ESCAPES = (
    ("fork", _tries("os", "os.fork()")),
    ("double fork, a daemon", _tries("os", "if os.fork() == 0:", "    os.setsid()", "    if os.fork() == 0:", "        while True: pass", "    os._exit(0)")),
    ("fork bomb", _tries("os", "while True: os.fork()")),
    ("a shell", _tries("subprocess", "subprocess.check_call(['/bin/sh', '-c', 'true'])")),
    ("exec without fork", _tries("os", "os.execv('/bin/sh', ['sh', '-c', 'true'])")),
    ("exec of memory", _tries("os", "fd = os.memfd_create('x')", "os.write(fd, b'#!/bin/sh')", "os.execve(fd, ['x'], {})")),
    ("clone by number", _tries("ctypes", "if ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) < 0: raise OSError")),
    ("a TCP connection", _tries("socket", "socket.create_connection(('127.0.0.1', 22), 1)")),
    ("a UDP packet", _tries("socket", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))")),
    ("a Unix socket", _tries("socket", "socket.socket(socket.AF_UNIX)")),
    ("io_uring, which needs no filtered call", _tries("ctypes", "if ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(256)) < 0: raise OSError")),
    ("/etc/shadow", _tries("os", "open('/etc/shadow').read()")),
    ("/etc/passwd", _tries("os", "open('/etc/passwd').read()")),
    ("the user's home", _tries("os", "os.listdir(os.environ.get('HOME', '/root'))")),
    ("environment secrets", _tries("os", "if not any('SECRET' in name or 'TOKEN' in name for name in os.environ): raise KeyError")),
    ("other processes' environment", _tries("os", "for pid in filter(str.isdigit, os.listdir('/proc')): open(f'/proc/{pid}/environ', 'rb').read()")),
    ("its parent's memory", _tries("os", "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)")),
    ("ptrace of its parent", _tries("ctypes, os", "if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) < 0: raise OSError")),
    ("kills its parent", _tries("os", "os.kill(os.getppid(), 9)")),
    ("kills its parent, as the owner of a socket's signals", _tries("fcntl, os, socket", "one, other = socket.socketpair()", "fcntl.fcntl(one, fcntl.F_SETOWN, os.getppid())", "fcntl.fcntl(one, 10, 9)", "fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)", "other.send(b'x')")),
    ("kills everything", _tries("os", "os.kill(-1, 9)")),
    ("a session of its own", _tries("os", "os.setsid()")),
    ("outlives its parent", _tries("ctypes", "if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError")),
    ("namespaces of its own", _tries("ctypes", "if ctypes.CDLL(None).unshare(0x10000000): raise OSError")),
    ("mount", _tries("ctypes", "if ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None): raise OSError")),
    ("chroot", _tries("os", "os.chroot('/tmp')")),
    ("becomes root", _tries("os", "os.setuid(0)")),
    ("higher limits", _tries("resource", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")),
    ("writes a file in /tmp", _tries("os", "open('/tmp/attack', 'w').write('x')")),
    ("writes a file in its directory", _tries("os", "open('attack', 'w').write('x')")),
    ("writes to shared memory", _tries("os", "open('/dev/shm/attack', 'w').write('x')")),
    ("fills the disk", _tries("tempfile, shutil", "f = tempfile.TemporaryFile()", "while True: f.write(b'x' * 10**7)")),
    ("poisons the sandbox's own code", _tries("inside.candidate as candidate", "open(candidate.__file__, 'a').write('#')")),
    ("600 MB of memory", _tries("os", "memory = bytearray(600 * 10**6)")),
    ("1,000 threads", _tries("threading", "stop = threading.Event()", "for _ in range(1000): threading.Thread(target=stop.wait, daemon=True).start()")),
)  # fmt: skip
ESCAPES = tuple(Attack(name, source) for name, source in _ESCAPES)

STAYING = (
    Attack("ignores SIGTERM and loops", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"),
    Attack("loops without letting go of the interpreter", "import re\ndef solve(n): re.match('(a+)+$', 'a' * 60 + 'b')"),
    Attack("closes all descriptors and sleeps", "import os, time\nos.closerange(0, 256)\ntime.sleep(1000)"),
    Attack("infinite output", "while True: print('x' * 10000)"),
    Attack("blocks all signals and sleeps", "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(1000)"),
)  # fmt: skip
ATTACKS = (*FORGERIES, *ESCAPES, *STAYING)


def try_attack(sandbox: Sandbox, attack: Attack) -> Outcome:
    """Run an attack, then an honest and a wrong program in the same sandbox, and look for what remained."""
    honest_program = f"def solve(n): return {ANSWER!r}"
    sandbox.check(honest_program, [TEST])  # both of its processes run from now on
    processes, files = _processes(sandbox), _files()
    verdict = sandbox.check(attack.source, attack.tests, time_s=STAYING_TIME_S if attack in STAYING else None)
    honest = sandbox.check(honest_program, [TEST])
    wrong = sandbox.check("def solve(n): return n", [TEST])
    left = tuple(
        sorted(_processes(sandbox) - processes) + sorted(each for each in _files() - files if "attack" in each)
    )
    if not honest.all_passed:
        return Outcome(False, f"an honest program then failed: {honest.reason}", left)
    if wrong.all_passed:
        return Outcome(False, "a wrong program then passed", left)
    return Outcome(not verdict.all_passed and not left, verdict.reason, left)


def _processes(sandbox: Sandbox) -> set[str]:
    """Processes below this one, and below those of the sandbox: in a container, these are children of an engine."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _parent(path)) is not None:
            parents[int(path.name)] = parent
    roots = {os.getpid(), *sandbox.pids()}
    return {f"process {pid}" for pid in parents if _is_below(pid, parents, roots)}


def _parent(path: Path) -> int | None:
    """The parent of a process that has not ended."""
    try:
        state, parent = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _is_below(pid: int, parents: Mapping[int, int], roots: Set[int]) -> bool:
    """Whether a process is one of the roots, or below one."""
    for _ in range(len(parents)):
        if pid in roots or pid not in parents:
            break
        pid = parents[pid]
    return pid in roots


def _files() -> set[str]:
    return {str(path) for folder in (*WATCHED, tempfile.gettempdir()) for path in Path(folder).glob("*attack*")}


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    """Print the table of attacks. The exit code is 1 if one got through, 2 if the layer cannot run here."""
    parser = argparse.ArgumentParser(description="Tries attacks on the sandbox.")
    parser.add_argument("--layer", choices=("auto", *get_args(LayerName)), default="auto")
    try:
        sandbox = Sandbox(parser.parse_args().layer)
    except SandboxFault as error:
        parser.error(str(error))
    write(f"In force: {sandbox.describe()}\n\n| attack | verdict | how it ended |\n|---|---|---|\n")
    failures = 0
    try:
        for attack in ATTACKS:
            outcome = try_attack(sandbox, attack)
            failures += not outcome.held
            left = f"; left behind: {', '.join(outcome.left)}" if outcome.left else ""
            write(f"| {attack.name} | {'0' if outcome.held else 'GOT THROUGH'} | {outcome.reason[:90]}{left} |\n")
    finally:
        sandbox.close()
    write(f"\n{len(ATTACKS) - failures} of {len(ATTACKS)} held\n")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
