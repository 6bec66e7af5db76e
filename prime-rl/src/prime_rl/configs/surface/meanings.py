"""Keys of other versions of PRIME-RL that need more than a new name. Read by `medarc_train migrate`.

`renamed` lists the new names. This module lists what depends on a value or on the version that a file was written for:
keys to drop, keys whose meaning changed, and defaults that changed. Keys are written as in `renamed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Version = Literal["older", "newer"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a key, or some of its values, mean in another version."""

    key: str
    why: str
    instead: str = ""
    """What the user should do."""
    values: tuple[Any, ...] = ()
    """Values that the entry applies to; empty means every value."""
    version: Version | None = None
    """Version of PRIME-RL that the entry applies to; None means any."""

    def applies(self, key: str, value: Any, versions: Iterable[Version]) -> bool:
        """Whether the entry applies to `key = value` in a file for `versions`. `key` starts with its component."""
        parts = key.split(".")
        tables = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
        return (
            (self.version is None or self.version in versions)
            and (not self.values or any(type(each) is type(value) and each == value for each in self.values))
            and any(fnmatchcase(table, self.key) for table in tables)
        )


@dataclass(frozen=True, slots=True)
class Default:
    """A default that differs between another version and this one."""

    key: str
    theirs: str
    ours: str
    needs: str = ""
    """Table or key that must be set for the default to matter; empty means the component of `key`."""


SAME_HERE: tuple[Meaning, ...] = (
    Meaning("orchestrator.mask_env_responses", "text from the environment is never trained on", values=(True,)),
    Meaning("orchestrator.mask_truncated_completions", "off here too", values=(False,)),
    Meaning("orchestrator.zero_truncated_completions", "off here too", values=(False,)),
    Meaning("orchestrator.buffer.type", "this is the default buffer", values=("simple",)),
    Meaning("*.client.server_type", "vLLM's API is always used", values=("vllm",)),
    Meaning("*.clean", "the default here", values=(False,)),
    Meaning("*.deployment.orchestrator_on_inference", "off here too", values=(False,)),
    Meaning("*.ckpt.skip_optimizer", "off here too", values=(False,)),
    Meaning("*.monitors.file", "metrics.jsonl is always written", values=({},)),
    Meaning("*.model.attn", "the default falls back to a kernel that the GPU supports", values=("auto",)),
    Meaning("*.model.ep", "the default is 1: experts are not divided", values=("auto",)),
    Meaning("trainer.enable_token_export", "off here too", values=(False,)),
    Meaning("orchestrator.train.filter_zero_advantages", "off here too", values=(False,)),
    Meaning("orchestrator.collect_inference_metrics", "off here too", values=(False,)),
    Meaning("inference.dry_run", "off here too", values=(False,)),
)
"""Settings to drop: this version behaves the same without them."""

_NO_EFFECT = "0 at the top of an rl config was ignored, and is used here"
_OTHER_LOSS = "newer versions have a different default loss (DPPO)"

DIFFERENT: tuple[Meaning, ...] = (
    Meaning("rl.teacher_gpu_ids", "GPUs of a teacher are counted, not named", "set deployment.num_teacher_gpus"),
    Meaning("rl.async_level", _NO_EFFECT, "set max_async_level to the value that you want", (0,)),
    Meaning("rl.max_steps", _NO_EFFECT, "remove it, or set the number of steps that you want", (0,), "older"),
    Meaning("rl.ckpt.resume_step", _NO_EFFECT, "remove it, or set the step that you want", (0,), "older"),
    Meaning(
        "rl.tokenizer",
        "every component shared it; the inference server here uses its model's tokenizer",
        "set [trainer.tokenizer] if only the trainer needs it",
    ),
    Meaning(
        "orchestrator.tokenizer",
        "the inference server here uses its model's tokenizer",
        "save the tokenizer in the model's directory",
    ),
    Meaning(
        "orchestrator.algo",
        "it selects the advantage function; `algorithm` here also selects the loss",
        "set `algorithm` at the top (docs/algorithms.md), or keep the default: reward minus the group's mean",
    ),
    Meaning(
        "inference.backend_port",
        "it is the port of a server behind a router, and there is no router here",
        "set inference.server.port to the port that clients use",
    ),
    Meaning(
        "inference.vllm.reasoning_parser",
        "the parser is not selected automatically here",
        "set the name of a vLLM parser",
        ("auto",),
    ),
    Meaning("*.weight_broadcast.type", "NIXL is not supported", "use nccl or filesystem", ("nixl",)),
    Meaning(
        "*.model.quantization.type",
        "products are not computed in fp8",
        'use bfloat16, or [model.lora] with model.quantization = "nf4" (docs/lora.md)',
        ("fp8",),
    ),
    Meaning("*.optim.type", "SignSGD is not supported", "use adamw, muon or sgd", ("sign_sgd",)),
    Meaning("trainer.loss", _OTHER_LOSS, "choose a loss: docs/algorithms.md", version="newer"),
    Meaning("trainer.loss.type", _OTHER_LOSS, "choose a loss: docs/algorithms.md", ("ipo",)),
    *(
        Meaning(
            f"{table}.source",
            "of a source, only env.taskset.id, ratio, group_size and num_examples have equivalents",
            "pass it in the environment's `args` if it takes such an argument",
        )
        for table in ("orchestrator.train", "orchestrator.eval", "eval")
    ),
    Meaning("sft.val", "validation is configured differently", "write [val] again: docs/sft.md", version="newer"),
)
"""Settings to list: the key with the same or the new name has a different meaning here."""

NEWER_VALUES: tuple[Meaning, ...] = (
    *(each for each in DIFFERENT if each.values in (("nixl",), ("sign_sgd",), ("ipo",))),
    *(each for each in SAME_HERE if each.values == ("auto",)),
)
"""Values that only newer versions have. They tell which version a file is for."""

DEFAULTS: dict[Version, tuple[Default, ...]] = {
    "older": (
        Default("rl.ckpt.interval", "50", "None: save at the end only", needs="rl.ckpt"),
        Default("rl.max_async_level", "2 (1 from 3 November 2025)", "1"),
        Default("trainer.max_async_level", "2 (1 from 3 November 2025)", "1"),
        Default("orchestrator.max_async_level", "2 (1 from 3 November 2025)", "1"),
    ),
    "newer": (
        Default("rl.weight_broadcast.type", "nccl, with a server and without LoRA", "filesystem"),
        Default("trainer.rollout_transport.type", "zmq", "filesystem"),
        Default("trainer.loss", "DPPO masks and kl_tau = 0.001", "masks on the importance ratio, kl_tau = 0"),
        Default("trainer.model.compile", "on", "off"),
        Default("trainer.model.ac", "on", "off"),
        Default("trainer.model.ac_offloading", "on", "off"),
        Default("trainer.model.optim_cpu_offload", "on", "off"),
        Default("trainer.dist_timeout_seconds", "3600", "600"),
        Default("orchestrator.max_async_level", "not limited", "1"),
        Default("orchestrator.max_inflight_rollouts", "adaptive, up to 1024", "batch_size"),
        Default("inference.model.reasoning_parser", "auto", "none"),
    ),
}
"""Defaults that differ. A file that leaves the key out gets ours."""
