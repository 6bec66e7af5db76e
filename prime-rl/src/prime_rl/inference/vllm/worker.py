"""What each vLLM worker can do beyond vLLM: load a checkpoint directory into the live model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from prime_rl.inference.checkpoints import checkpoint_files


class CheckpointLoading:
    """Mixed into vLLM's worker class (`worker_extension_cls`); called through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def load_checkpoint(self, directory: str) -> None:
        """Reload the model from the safetensors of `directory`, hub key naming, in place.

        vLLM's reload undoes and redoes what the backend did to the weights after loading (packing, fusing); loading
        into the packed parameters themselves would fail halfway.
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=_tensors(Path(directory)))
        self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """The CPU backend packs a copy of the head, which the reload of vLLM 0.32 leaves stale when it is tied."""
        for module in self.model_runner.get_model().modules():
            packed = hasattr(module, "cpu_linear") and hasattr(module, "quant_method")
            if packed and getattr(module, "weight", None) is not None and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in checkpoint_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)
