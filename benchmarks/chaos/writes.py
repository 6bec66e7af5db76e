"""Fails the writes of an SFT run one after another, and checks that each failure ends in one line and loses nothing.

    uv run benchmarks/chaos/writes.py --out /tmp/chaos-writes
    uv run benchmarks/chaos/writes.py --out /tmp/chaos-writes --every 10

A small library, built with gcc and preloaded, counts every write, open for writing, flush, rename and new directory
below the run's directory. For each of them and each error number, a run is forked in which it fails: ENOSPC, EDQUOT and
EROFS from then on, as on a full or read-only disk, EIO only once. The run must end with 0 or 1, without a traceback and
with one error line if it failed. Then a resume must reach the weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ONCE = {"ENOSPC": False, "EDQUOT": False, "EROFS": False, "EIO": True}
STEPS = 4


def preload(library: Path) -> None:
    """Start this program again with the library loaded before any other."""
    if os.environ.get("LD_PRELOAD") == str(library):
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    source = HERE / "failing_writes.c"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-D_LARGEFILE64_SOURCE", "-o", library, source, "-ldl"], check=True
    )
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)})


def train(out: Path, resume: bool) -> int:
    """Train in this process. Returns the exit code."""
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.trainer.sft.run import run

    settings: dict[str, Any] = {
        "device": "cpu",
        "model": {"name": str(ROOT / "examples" / "reverse_text" / "checkpoint"), "attn": "sdpa"},
        "data": {"type": "fake", "input_ids": "random", "batch_size": 2, "seq_len": 64},
        "max_steps": STEPS,
        "ckpt": {"interval": 1} | ({"resume_step": -1} if resume else {}),
    }
    try:
        return run(SFTConfig(**settings, output_dir=out))
    except SystemExit as exit_:
        return int(exit_.code or 0)


def forked(work: Callable[[], int], log: Path) -> int:
    """Run `work` in a fork whose output goes to `log`. Returns its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 70
    try:
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def fail_one(out: Path, library: Any, at: int, name: str) -> int:
    library.arm(str(out).encode(), at, getattr(errno, name), int(ONCE[name]))
    return train(out, resume=False)


def count_operations(out: Path, library: Any, log: Path) -> int:
    counted = out.with_name("operations")

    def work() -> int:
        library.arm(str(out).encode(), 0, 0, 0)
        code = train(out, resume=False)
        counted.write_text(str(library.operations()))
        return code

    assert forked(work, log) == 0, log.read_text()
    return int(counted.read_text())


def faults_of(out: Path, code: int, log: str) -> list[str]:
    """What is wrong with how a run ended."""
    lines = log.splitlines()
    errors = [line for line in lines if " ERROR " in line]
    wrong = [] if code in (0, 1) else [f"exit code {code}"]
    wrong += ["a traceback"] if "Traceback" in log else []
    wrong += [f"{len(errors)} error lines"] if len(errors) != code else []
    return wrong


def resume_faults(out: Path, log: Path, wanted: bytes) -> list[str]:
    from prime_rl.run.paths import RunPaths, stable_steps
    from prime_rl.utils.contents import find_damage

    paths = RunPaths(out)
    steps = stable_steps(paths.checkpoints)
    wrong = [fault for step in steps if (fault := find_damage(paths.checkpoint(step)))]
    if not steps:
        shutil.rmtree(out, ignore_errors=True)
    code = forked(lambda: train(out, resume=bool(steps)), log)
    weights = paths.weight(STEPS) / "model.safetensors"
    if code != 0:
        wrong.append(f"the resume from {steps or 'nothing'} ended with {code}: {log.read_text()[-500:]}")
    elif weights.read_bytes() != wanted:
        wrong.append(f"after the resume from {steps or 'nothing'} the weights differ")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="fail only every n-th operation")
    parser.add_argument("--first", type=int, default=0, help="skip so many operations")
    parser.add_argument("--errors", type=lambda text: text.split(","), default=list(ONCE), help=", ".join(ONCE))
    options = parser.parse_args()
    preload(options.out.resolve() / "failing_writes.so")

    # Once, here: the forks have it then.
    import prime_rl.trainer.sft.run  # noqa: F401
    from prime_rl.run.paths import RunPaths

    library = ctypes.CDLL(None)
    out, log = options.out.resolve() / "run", options.out.resolve() / "output.log"
    shutil.rmtree(out, ignore_errors=True)
    operations = count_operations(out, library, log)
    wanted = (RunPaths(out).weight(STEPS) / "model.safetensors").read_bytes()
    print(f"{operations} operations in {STEPS} steps", flush=True)
    runs, bad = Counter[str](), Counter[str]()
    for at in range(1 + options.first, operations + 1, options.every):
        for name in options.errors:
            shutil.rmtree(out, ignore_errors=True)
            code = forked(lambda at=at, name=name: fail_one(out, library, at, name), log)
            text = log.read_text(errors="replace")
            wrong = faults_of(out, code, text) + resume_faults(out, log, wanted)
            runs[f"{name}, ended with {code}"] += 1
            bad[name] += bool(wrong)
            if wrong:
                print(f"{name} at operation {at}: {'; '.join(wrong)}\n{text[-1500:]}", flush=True)
        print(f"{at} of {operations}", flush=True)
    print(f"runs: {dict(runs)}\nfaults: {dict(bad)}")
    sys.exit(any(bad.values()))


if __name__ == "__main__":
    main()
