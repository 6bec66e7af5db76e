"""Records computations as CUDA graphs. Nothing here runs without a GPU."""

from __future__ import annotations

import torch

from prime_rl.inference.embedded.cuda.decode_graphs import Compute

_LEAST_FREE_BYTES = 1 << 30
"""Free memory of the device below which nothing more is recorded: trainer and engine may share it."""


class CudaRecorder:
    """Records functions as CUDA graphs, all in one memory pool.

    A graph's intermediate results may lie where those of another do, because one is replayed after the other. Its
    inputs lie elsewhere, and its result stays where it is as long as someone holds it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all recordings, because cuBLAS keeps a workspace for each.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """Returns a function that replays the graph on the current stream."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # This block restores the caller's stream if the recording fails, which `torch.cuda.graph` then does not.
        with torch.cuda.stream(self._stream):
            compute()  # cuBLAS and Triton allocate and choose kernels at the first call, which cannot be recorded
            # Other threads of the server may use CUDA meanwhile, which the default mode would count as a failure.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def has_room(self) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + kept >= _LEAST_FREE_BYTES

    def forget(self) -> None:
        # PyTorch does not record into a pool that all graphs have left.
        self._pool = torch.cuda.graph_pool_handle()
