"""vLLM worker extension that loads new weights into the live model, from files or from the trainer's weight group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.inference.model_files import WeightError, open_checkpoint
from prime_rl.inference.protocol import InitBroadcasterBody
from prime_rl.inference.weight_group import join_group, received_tensors
from prime_rl.run.process import end_with_launch
from prime_rl.transport.endpoints import TransportError
from prime_rl.transport.weights import WeightGroup

# vLLM imports this module in each of its engine processes, which otherwise outlive a server that is killed.
end_with_launch()


class CheckpointLoading:
    """Mixin for vLLM's worker class (`worker_extension_cls`). Its methods are called through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    rank: int
    device: torch.device
    weight_group: WeightGroup | None = None

    def load_checkpoint(self, directory: str) -> None:
        """Reload the model in place from the safetensors files in `directory` (hub tensor names)."""
        self._reload(_tensors(Path(directory)))

    def join_weight_group(self, body: dict[str, Any], workers: int) -> str | None:
        """Join the trainer's weight group as one of the server's `workers`. Returns an error message or None."""
        parallel = self.vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.tensor_parallel_size + self.rank
        try:
            self.weight_group = join_group(InitBroadcasterBody(**body), self.device, worker, workers)
        except TransportError as error:
            return str(error)
        return None

    def receive_checkpoint(self, directory: str) -> str | None:
        """Receive the version that `directory` names from the trainer and load it. Returns an error message or None.

        If the transfer fails halfway, the weights are a mix of old and new ones.
        """
        try:
            self._reload(received_tensors(self.weight_group, Path(directory)))
        except (TransportError, WeightError) as error:
            return str(error)
        return None

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Replace all weights.

        Uses vLLM's reload, which reverts the backend's post-processing of weights (packing, fusing) and applies it
        again. Loading into the packed parameters directly would fail halfway.
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors)
        self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """Repack tied heads: the CPU backend keeps a packed copy, which the reload in vLLM 0.32 leaves stale."""
        for module in self.model_runner.get_model().modules():
            packed = hasattr(module, "cpu_linear") and hasattr(module, "quant_method")
            if packed and getattr(module, "weight", None) is not None and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with open_checkpoint(directory) as files:
        for file in files.values():
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield name, tensors.get_tensor(name)
