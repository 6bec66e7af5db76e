"""Shapes of a model's tensors, from the headers of its weights or from its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from prime_rl.checks.disk import default_hub_cache, snapshot_in_cache, tensor_shapes
from prime_rl.checks.memory.families import Tensors, head_dim, is_tied, tensors_of_config, with_usual_names
from prime_rl.checks.model_files import read_config
from prime_rl.utils.errors import StartFault

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(\w+)\.weight$")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


@dataclass(frozen=True)
class ModelShape:
    """A causal language model: its text config and the shapes of its tensors."""

    config: Mapping[str, Any]
    tensors: Tensors
    """As named on the hub, without a tied head. The experts of a layer are stacked: [experts, out, in]."""

    @classmethod
    def of(cls, name: str, num_layers: int | None = None) -> ModelShape:
        """The model at `name`: a directory, or a hub id in the local cache. `num_layers` keeps only the first.

        Raises:
            StartFault: there is no config, or neither weights nor a known family.
        """
        folder = Path(name) if Path(name).is_dir() else snapshot_in_cache(name, default_hub_cache())
        if folder is None:
            raise StartFault(f"not in the local cache: run `hf download {name} config.json` first")
        config = with_usual_names(read_config(folder))
        tensors = _stacked(tensor_shapes(folder)) or tensors_of_config(config)
        if is_tied(config):
            tensors = {key: shape for key, shape in tensors.items() if not key.endswith("lm_head.weight")}
        if num_layers is not None:
            config = {**config, "num_hidden_layers": min(num_layers, config["num_hidden_layers"])}
            tensors = {key: shape for key, shape in tensors.items() if _layer_of(key) < num_layers}
        return cls(config, tensors)

    @cached_property
    def blocks(self) -> list[Tensors]:
        """The tensors of each decoder block, by their names within it."""
        blocks: list[Tensors] = [{} for _ in range(self.layers)]
        for name, shape in self.tensors.items():
            # Layers beyond the last are those of multi-token prediction, which Transformers does not load.
            if 0 <= (index := _layer_of(name)) < self.layers:
                blocks[index][name.split(f".{index}.", 1)[1]] = shape
        return blocks

    @cached_property
    def root(self) -> Tensors:
        """Embedding, head and final norm."""
        return {name: shape for name, shape in self.tensors.items() if _layer_of(name) < 0}

    @property
    def parameters(self) -> int:
        return count(self.root) + sum(map(count, self.blocks))

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        rows = [shape[0] for name, shape in self.root.items() if any(part in name for part in _EMBEDDINGS)]
        return rows[0] if rows else int(self.config["vocab_size"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.heads)

    @property
    def key_dim(self) -> int:
        """Channels of a query or key head. Multi-head latent attention joins a part with positions and one without."""
        if rope := self.config.get("qk_rope_head_dim"):
            return int(rope) + int(self.config.get("qk_nope_head_dim") or 0)
        return head_dim(self.config)

    @property
    def value_dim(self) -> int:
        return int(self.config.get("v_head_dim") or head_dim(self.config))

    @property
    def context(self) -> int | None:
        longest = self.config.get("max_position_embeddings")
        return int(longest) if longest else None


def count(tensors: Tensors) -> int:
    return sum(map(prod, tensors.values()))


def _stacked(tensors: Tensors) -> Tensors:
    """Join `experts.<j>.gate_proj.weight` and so on, of which a model may have tens of thousands."""
    stacked: Tensors = {}
    for name, shape in tensors.items():
        if found := _EXPERT.match(name):
            path = f"{found[1]}.{found[2]}"
            stacked[path] = (stacked.get(path, (0,))[0] + 1, *shape)
        else:
            stacked[name] = shape
    return stacked


def _layer_of(name: str) -> int:
    """Index of the decoder block that a tensor belongs to; -1 for the rest."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1
