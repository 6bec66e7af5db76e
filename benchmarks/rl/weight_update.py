"""Measures a weight update (`POST /update_weights` to a running server) against reading the file.

    uv run python benchmarks/rl/weight_update.py [--backend embedded|vllm] [--model DIR] [--dtype float32|bfloat16]

For `--backend vllm`, set `PRIME_RL_VLLM_PYTHON` to an interpreter with vLLM. The file is in the page cache, as it is
after the trainer has written it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from against_trl import tiny_model  # noqa: E402
from against_vllm import KEY_HEADER, free_port, running  # noqa: E402

UPDATES = 10


def seconds_of_updates(url: str, directory: Path) -> list[float]:
    body = json.dumps({"weight_dir": str(directory)}).encode()
    seconds = []
    for _ in range(UPDATES + 1):
        request = Request(f"{url}/update_weights", body, {"Content-Type": "application/json", **KEY_HEADER})
        started = time.perf_counter()
        with urlopen(request, timeout=120) as answer:
            answer.read()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]  # the first one warms up


def seconds_of_reads(file: Path) -> list[float]:
    seconds = []
    for _ in range(UPDATES):
        started = time.perf_counter()
        file.read_bytes()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="embedded", choices=("embedded", "vllm"))
    parser.add_argument("--model", type=Path, help="a Transformers directory instead of a tiny random Qwen3")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = (args.model or tiny_model(Path(scratch) / "model")).resolve()
        weights = Path(scratch) / "broadcasts" / "step_1"
        shutil.copytree(model, weights)
        (weights / "STABLE").touch()
        port = free_port()
        command = [str(Path(sys.executable).with_name("inference")), "--device", "cpu", "--backend", args.backend]
        command += ["--model.name", str(model), "--model.dtype", args.dtype, "--model.max-model-len", "512"]
        command += ["--server.host", "127.0.0.1", "--server.port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with running(command, {}, url, Path(scratch) / "log"):
            update_s = statistics.median(seconds_of_updates(url, weights))
        file = weights / "model.safetensors"
        read_s, size_mb = statistics.median(seconds_of_reads(file)), file.stat().st_size / 1e6
    print("| engine | file, MB | update, s | reading the file, s | ratio |\n|---|---|---|---|---|")
    print(f"| {args.backend}, {args.dtype} | {size_mb:.0f} | {update_s:.3f} | {read_s:.3f} | {update_s / read_s:.1f} |")


if __name__ == "__main__":
    main()
