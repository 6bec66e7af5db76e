"""NCCL: gloo on the memory of the host. It refuses tensors of the CPU, as NCCL does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_KERNELS = torch.library.Library("c10d", "IMPL")
_OPERATORS = (
    "broadcast_",
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
)


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        if not all(tensor.is_cuda for tensor in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        return super().broadcast(_on_host(tensors), options)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ops.simulated_gpu.on_host(value) if value.is_cuda else value
    return type(value)(map(_on_host, value)) if isinstance(value, (list, tuple)) else value


def _of_gloo(operator: Any) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        result = operator(*_on_host(args), **kwargs)
        # Operators of c10d return the tensors that they write, which come first.
        return (args[0], *result[1:]) if isinstance(result, tuple) else result

    return compute


def install() -> None:
    with warnings.catch_warnings(action="ignore"):
        for name in _OPERATORS:
            _KERNELS.impl(name, _of_gloo(getattr(torch.ops.c10d, name).default), "CUDA", allow_override=True)
    joined = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        joined("cpu:gloo" if backend is not None and "nccl" in backend else backend, *args, **options)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
    dist.is_nccl_available = distributed_c10d.is_nccl_available = lambda: True
    dist.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
    torch.cuda.nccl.version = lambda: (2, 27, 0)
