"""Compares meshes of a few processes at equal work: CPU time, memory and bytes sent, each against FSDP alone.

    uv run benchmarks/meshes.py dense [--processes 4] [--tokens 4096] [--meshes dp_shard cp2 tp2 cp2-tp2]
    uv run benchmarks/meshes.py experts --meshes dp_shard ep2 ep4 cp2-ep4

Each step trains on as many rows as there are processes, whatever the mesh, so all meshes compute the same. CPU time is
that of all processes (on GPUs, time), which depends less than time on what else the machine does. Memory is what
forward and backward pass add to the weights at their peak, to the byte, in process 0; `--steps 0` measures it without
the time. Bytes are what the collectives of one step must send at least, beside what `--estimate` expects
(`checks/memory/traffic.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "memory")]

if TYPE_CHECKING:
    import torch

    from prime_rl.configs.model import ModelConfig
    from prime_rl.trainer.process.mesh import Mesh
    from prime_rl.trainer.process.world import Process

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2**20,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {"dense": MODEL, "experts": MODEL | EXPERTS}
MESHES = {"dense": "dp_shard cp2 cp4 tp2 tp4 cp2-tp2", "experts": "dp_shard cp2 tp2 ep2 ep4 cp2-ep4"}


def group_names(mesh: Mesh) -> dict[str, str]:
    """The key of the mesh that a process group serves, by the group's name."""
    axes = {"ep": mesh.expert_axis, "tp": mesh.tensor_axis}
    names = {axis.sharing.get_group().group_name: key for key, axis in axes.items() if axis is not None}
    if mesh.context_axis is not None:
        names[mesh.context_axis.group.group_name] = "cp"
    for fsdp in (mesh.fsdp, *(axis.fsdp for axis in axes.values() if axis is not None)):
        names |= {group.group_name: "dp_replicate" for group in fsdp.get_all_groups()[:-1]}
    return names


def counting(names: dict[str, str], sent: Counter[str]) -> Any:
    """A context in which `sent` counts the bytes that this process's collectives must send, by the names of groups."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def size_of(tensors: Any) -> int:
        return sum(each.numel() * each.element_size() for each in tree_leaves(tensors))

    def bytes_of(kind: str, values: dict[str, Any], group: dist.ProcessGroup) -> int:
        given = values.get("input_tensor", values.get("input", values.get("tensors", values.get("input_tensors"))))
        others = group.size() - 1
        if "gather" in kind:
            return others * size_of(given)
        if "reduce_scatter" in kind:
            return others * size_of(given) // group.size()
        if "alltoall" in kind or "all_to_all" in kind:
            splits = values.get("input_split_sizes")
            own = splits[group.rank()] / max(1, sum(splits)) if splits else 1 / group.size()
            return round(size_of(given) * (1 - own))
        if "allreduce" in kind or "all_reduce" in kind:
            return 2 * others * size_of(given) // group.size()
        raise ValueError(f"{kind} is not counted")

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace not in ("c10d", "_c10d_functional"):
                return result
            values = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **(kwargs or {})}
            group = values.get("process_group", values.get("group_name"))
            if group is None:  # waits for a collective
                return result
            if isinstance(group, str):
                group = _resolve_process_group(group)
            elif not isinstance(group, dist.ProcessGroup):
                group = dist.ProcessGroup.unbox(group)
            # FSDP may share a group of all processes with another axis, and alone uses these two operations.
            is_fsdp = func.__name__.split(".")[0] in ("_allgather_base_", "_reduce_scatter_base_")
            key = "dp_shard" if is_fsdp else names.get(group.group_name, "numbers")
            sent[key] += bytes_of(func.__name__, values, group)
            return result

    return Counted()


def run(arguments: argparse.Namespace) -> None:
    from prime_rl.trainer.process.world import destroy_world, setup_world

    process = setup_world(arguments.device, timeout_s=3600)
    steps = {mesh: prepared(arguments, mesh, process) for mesh in arguments.meshes}
    found: dict[str, Any] = {mesh: measured() for mesh, (_, measured) in steps.items()}
    seconds: dict[str, list[float]] = {mesh: [] for mesh in steps}
    for _ in range(arguments.steps):  # in turn: another load meets all alike
        for mesh, (step, _) in steps.items():
            started_s = clock_s(process.device)
            step()
            seconds[mesh].append(summed(clock_s(process.device) - started_s, process.device))
    if process.is_main:
        rows = rows_of(found, {mesh: statistics.median(each or [0]) for mesh, each in seconds.items()})
        print_rows(rows)
        if arguments.result is not None:
            arguments.result.write_text(json.dumps(rows))
    destroy_world()


def clock_s(device: torch.device) -> float:
    """CPU time, or time once the GPU has finished."""
    import torch

    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def summed(value: float, device: torch.device) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return float(total)


def prepared(
    arguments: argparse.Namespace, name: str, process: Process
) -> tuple[Callable[[], object], Callable[[], dict[str, Any]]]:
    """A step on a mesh, and what measures the memory and the bytes of one."""
    import torch
    from trainer_peaks import recording
    from trainer_step import sft_pass

    from prime_rl.configs.model import ModelConfig
    from prime_rl.configs.optim import AdamWConfig
    from prime_rl.trainer.model.build import setup_model
    from prime_rl.trainer.optim.optimizer import setup_optimizer
    from prime_rl.trainer.process.mesh import setup_mesh

    axes: dict[str, Any] = {axis: int(size) for axis, size in re.findall(r"([a-z_]+)(\d+)", name)}
    config = ModelConfig(
        name=str(arguments.directory), attn="sdpa", seq_len=arguments.tokens, debug={"random_init": True}, **axes
    )
    mesh = setup_mesh(config, process)
    model = setup_model(config, mesh)
    optimizer = setup_optimizer(AdamWConfig(), model)
    rows = process.world_size // mesh.data_axis.data_size
    forward_backward = sft_pass(model, model.config.vocab_size, [arguments.tokens], rows, mesh)

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured() -> dict[str, Any]:
        sent: Counter[str] = Counter()
        before = torch.cuda.memory_allocated() if process.device.type == "cuda" else 0
        with counting(group_names(mesh), sent), recording(process.device) as peak_of:
            forward_backward()
        return {
            "peak": peak_of(0) - before,
            "sent": dict(sent),
            "expected": expected(config, process.world_size, rows, process.device.type),
        }

    return step, measured


def expected(config: ModelConfig, processes: int, rows: int, device: Any) -> dict[str, int]:
    from prime_rl.checks.memory import ModelShape
    from prime_rl.checks.memory.traffic import traffic_of_row
    from prime_rl.checks.memory.training import Training

    tokens = -(-config.seq_len // config.cp)
    shape = ModelShape.of(config.name)
    training = Training(shape, config, "adamw", tokens, config.seq_len, processes, rows, device, is_rl=False)
    return {axis: rows * size for axis, size in traffic_of_row(training).items()}


def rows_of(found: dict[str, Any], seconds: dict[str, float]) -> list[dict[str, Any]]:
    first = next(iter(found))
    rows = []
    for mesh, of in found.items():
        kinds = (f"{axis} {mib(size)} ({mib(of['expected'].get(axis, 0))})" for axis, size in of["sent"].items())
        rows.append(
            {
                "mesh": mesh,
                "seconds": round(seconds[mesh], 2),
                "x": round(seconds[mesh] / (seconds[first] or 1), 2),
                "memory, MiB": mib(of["peak"]),
                "x of memory": round(of["peak"] / found[first]["peak"], 3),
                "sent, MiB": mib(sum(of["sent"].values())),
                "expected, MiB": mib(sum(of["expected"].values())),
                "of which": ", ".join(kinds),
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")


def largest_of(mesh: str) -> int:
    """The number of processes that a mesh of the defaults needs: with `cp2-ep4` 4, as they overlap."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z_]+)(\d+)", mesh)}
    return max(sizes.get("ep", 1), sizes.get("cp", 1) * sizes.get("tp", 1))


def mib(size: int) -> float:
    return round(size / 2**20, 1)


def launch(arguments: argparse.Namespace, words: Iterable[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[arguments.model] | json.loads(arguments.sizes)))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", str(arguments.processes), *words, "--directory", folder]
        return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--meshes", nargs="+", default=[])
    parser.add_argument("--sizes", default="{}", help="JSON of other sizes of the model: '{\"hidden_size\": 256}'")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--result", type=Path, help="file for the rows as JSON")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    fitting = (mesh for mesh in MESHES[parsed.model].split() if parsed.processes >= largest_of(mesh))
    parsed.meshes = parsed.meshes or list(fitting)
    if "RANK" not in os.environ:
        sys.exit(launch(parsed, sys.argv))
    from prime_rl.trainer.process.errors import leaving_at_once

    with leaving_at_once():
        run(parsed)
