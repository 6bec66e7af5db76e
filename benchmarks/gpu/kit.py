"""Runs the parts of the kit one after another, each under a time limit, and sums up: `bash run` calls this.

    bash benchmarks/gpu/run                       # everything, the most important first
    bash benchmarks/gpu/run trainer-speed --minutes 9
    bash benchmarks/gpu/run --device cpu --tiny   # the same scripts on a CPU, in a few minutes

Writes results as JSON and Markdown, and a log per part, to `--out`. Exit code 0 if every part ran and every check
passed, 1 if not, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GRACE_S = 30.0
"""For a launcher to end the processes of its run."""


@dataclass(frozen=True)
class Part:
    """A script, or a pytest or benchmark command, with the minutes that it may take on a GPU."""

    name: str
    purpose: str
    limit_min: float
    script: str | None = None
    command: tuple[str, ...] = ()
    """Instead of a script. `DEVICE` stands for the device."""


def files_with_gpu_tests() -> list[str]:
    """Only these are collected: others import packages that the machine lacks."""
    files = sorted((REPOSITORY / "prime-rl" / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


PARTS = (
    Part("machine", "versions, matrix products, bandwidth", 2, "machine.py"),
    Part("trainer-numbers", "loss and gradients against Transformers and PEFT", 4, "trainer_numbers.py"),
    Part("engine-numbers", "the engine against Transformers; CUDA graphs; weight updates", 3, "engine_numbers.py"),
    Part("runs", "sft resumes, rl on one GPU learns", 6, "runs.py"),
    Part(
        "tests", "the tests with the mark gpu", 4, command=("-m", "pytest", "-q", "-m", "gpu", *files_with_gpu_tests())
    ),
    Part("several", "with two and more GPUs: divided rows, layers and experts", 4, "several.py"),
    Part("trainer-speed", "tokens/s, memory, MFU, where the time goes", 9, "trainer_speed.py"),
    Part("engine-speed", "tokens/s with CUDA graphs and without, share of the bandwidth", 4, "engine_speed.py"),
    Part(
        "memory",
        "the estimate against the allocator",
        4,
        command=("benchmarks/memory/estimate.py", "--device", "DEVICE", "--worst-percent", "5"),
    ),
)
TINY_ONLY = {"memory": ("--only", "llama, sgd")}
"""Options that make a part short in the dry form."""


def main() -> int:
    args = parse_arguments()
    ending = Ending()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup does
            signal.signal(signum, ending.on_signal)
    if args.list:
        for part in PARTS:
            print(f"{part.name:16} {part.limit_min:>3g} min  {part.purpose}")
        return 0
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * args.minutes
    wanted = [part for part in PARTS if not args.parts or part.name in args.parts]
    results = []
    for index, part in enumerate(wanted):
        left_s = deadline_s - time.monotonic()
        limit_s = share_s(wanted[index:], left_s) if args.device == "cuda" else left_s
        results.append(
            run_part(part, args, out, limit_s, ending) if left_s > 0 else {"part": part.name, "status": "no time left"}
        )
        write(out, results, args)
    print((out / "results.md").read_text())
    return int(any(result["status"] != "ok" for result in results))


def share_s(parts: Sequence[Part], left_s: float) -> float:
    """How long the first of `parts` may run: up to its limit, or its share if the time is too short for all limits.

    So the last parts get some time too, and what a part does not use goes to the parts after it.
    """
    first = 60 * parts[0].limit_min
    return min(first, left_s * first / sum(60 * part.limit_min for part in parts))


class Ending:
    """Ends the kit by an exception when it is told to, so that the processes of the running part end, too.

    While a part starts, the exception waits: it would leave behind a process that nobody knows yet.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: int | None = None

    def on_signal(self, signum: int, frame: object) -> None:
        if self._is_held:
            self._waiting = signum
        else:
            sys.exit(128 + signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._waiting is not None:
            sys.exit(128 + self._waiting)


def run_part(part: Part, args: argparse.Namespace, out: Path, limit_s: float, ending: Ending) -> dict[str, Any]:
    """The part's result; its output goes to a log and, line by line, to the terminal."""
    print(f"== {part.name}: {part.purpose}", flush=True)
    findings, log = out / f"{part.name}.json", out / f"{part.name}.log"
    findings.unlink(missing_ok=True)
    started_s = time.monotonic()
    child: subprocess.Popen[bytes] | None = None
    with log.open("wb") as file:
        try:
            with ending.held():
                child = subprocess.Popen(
                    command_of(part, args, findings),
                    cwd=REPOSITORY,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            code = child.wait(limit_s)
            status = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"cut off after {limit_s:.0f} s"
        finally:
            if child is not None:
                # Also what the part started, such as the processes of a run.
                end_group(child)
    result = {"part": part.name, "status": status, "seconds": round(time.monotonic() - started_s, 1)}
    if findings.exists():
        result |= json.loads(findings.read_text())
        if any(not check["ok"] for check in result["checks"]) and status == "ok":
            result["status"] = "failed checks"
    if result["status"] != "ok":
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)
    return result


def command_of(part: Part, args: argparse.Namespace, findings: Path) -> list[str]:
    if part.script is None:
        words = [args.device if word == "DEVICE" else word for word in part.command]
        return [sys.executable, *words, *(TINY_ONLY.get(part.name, ()) if args.tiny else ())]
    tiny = ["--tiny"] if args.tiny else []
    only = ["--only", *args.only] if args.only else []
    return [sys.executable, str(HERE / part.script), "--device", args.device, *tiny, *only, "--result", str(findings)]


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a part. The processes of a run have sessions of their own: their launcher must end them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        while time.monotonic() < deadline_s:
            child.poll()
            os.killpg(child.pid, 0)
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def write(out: Path, results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    commit = os.environ.get("MEDARC_GPU_COMMIT", "unknown")
    about = {"commit": commit, "device": args.device, "tiny": args.tiny}
    (out / "results.json").write_text(json.dumps(about | {"parts": results}, indent=1) + "\n")
    lines = [f"Commit {commit}, device {args.device}{', tiny shapes' if args.tiny else ''}.", ""]
    for result in results:
        lines += [f"## {result['part']}: {result['status']} ({result.get('seconds', 0)} s)", ""]
        lines += [f"- {name}: {value}" for name, value in result.get("facts", {}).items()]
        lines += [
            f"- {'ok' if check['ok'] else '**FAILED**'}: {check['name']}: {check['detail']}"
            for check in result.get("checks", [])
        ]
        lines += ["", *table(result.get("rows", [])), ""]
    (out / "results.md").write_text("\n".join(lines))


def table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *body]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few steps, to see that everything runs")
    parser.add_argument(
        "--minutes",
        type=float,
        default=28,
        help="for all parts together: with less than the sum of their limits, each gets its share",
    )
    parser.add_argument("--only", nargs="+", default=[], help="rows of trainer-speed with one of these texts")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of results and logs")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    args = parser.parse_args()
    for name in args.parts:
        if name not in names:
            parser.error(f"there is no part {name!r}: {', '.join(names)}")
    if args.device == "cuda" and not args.list:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU here: use --device cpu --tiny for the dry form")
    return args


if __name__ == "__main__":
    sys.exit(main())
