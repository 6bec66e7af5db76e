"""What a change of each key means for a run that resumes. Printed in `docs/config.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Effect = Literal["applied", "refused", "none", "attempt"]
"""What happens to a changed key.

`applied`: the new value holds from the resumed step on. `refused`: the run would not be a continuation. `none`: the
training does not depend on the key. `attempt`: the key says how to start, and is not compared.
"""


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """The rule for a key, or for a table and everything in it that has no rule of its own."""

    keys: tuple[str, ...]
    """Dotted keys, each with its component. `*` is `sft` and `trainer`. Items of lists have no index."""
    effect: Effect
    why: str = ""
    unless: str = ""
    """Key of the same component that turns `refused` into `applied`."""


def _rule(effect: Effect, why: str, *keys: str, unless: str = "") -> ResumeRule:
    return ResumeRule(keys, effect, why, unless)


_ROWS = "the saved position in the data would not be valid"
_PACKING = f"{_ROWS} (earlier versions took cat where the config did not say)"
_SPLIT = "other rows would be trained, some of which have been held out"
_ORDER = "the data order would change"
_SHAPES = "the checkpoint does not fit another adapter"
_DRAWS = "examples would be drawn in another order"

RESUME_RULES: tuple[ResumeRule, ...] = (
    # Both trainers.
    _rule("applied", "", "*.optim", "*.scheduler", "*.max_steps"),
    _rule("refused", "the saved optimizer state is that of another optimizer", "*.optim.type"),
    _rule("refused", "the saved moments have another precision", "*.optim.stochastic_rounding"),
    _rule("none", "the weights are those of the checkpoint", "*.model.name"),
    _rule("applied", "", "*.model"),
    _rule("refused", _SHAPES, "*.model.lora"),
    _rule("applied", "", "*.model.lora.dropout"),
    _rule("refused", "the optimizer would have other groups", "*.model.lora.loraplus_lr_ratio"),
    _rule("refused", "the checkpoint holds another class of the model", "*.model.vision"),
    _rule("refused", "the optimizer would have other groups", "*.model.vision.tower_lr"),
    _rule("applied", "", "*.model.vision.max_images", "*.model.vision.max_pixels"),
    _rule("none", "the weights are those of the checkpoint", "*.model.adapter", "*.model.lora.path"),
    _rule("refused", "the adapter was trained on other weights", "*.model.quantization"),
    _rule("refused", "the checkpoint holds another model", "*.model.debug"),
    _rule("refused", "other weights would be trained", "*.model.freeze_moe_router"),
    _rule(
        "none",
        "any number of processes can load the checkpoint",
        "*.model.dp_replicate",
        "*.model.ep",
        "*.model.tp",
        "*.model.cp",
        "sft.deployment",
    ),
    _rule("applied", "", "*.ckpt"),
    _rule(
        "attempt",
        "says how to resume",
        "*.ckpt.resume_step",
        "*.ckpt.skip_progress",
        "*.ckpt.skip_scheduler",
        "*.ckpt.skip_dataloader",
    ),
    _rule(
        "none",
        "",
        "*.log",
        "*.wandb",
        "*.monitor",
        "*.heartbeat",
        "*.output_dir",
        "*.memory_profiler_path",
        "*.trace_path",
        "*.bench",
        "*.dist_timeout_seconds",
        "*.device",
        "*.toml_files",
    ),
    # SFT.
    _rule("none", "the tokenizer itself is compared", "sft.tokenizer"),
    _rule("refused", _ROWS, "sft.data", "sft.model.seq_len", unless="ckpt.skip_dataloader"),
    _rule("refused", _PACKING, "sft.data.pack_function", unless="ckpt.skip_dataloader"),
    _rule(
        "refused", _ORDER, "sft.data.seed", "sft.data.shuffle", "sft.data.probabilities", unless="ckpt.skip_dataloader"
    ),
    _rule("none", "the contents are compared", "sft.data.name", "sft.data.sources.name"),
    _rule("applied", "", "sft.data.batch_size", "sft.data.max_untrainable_share", "sft.data.ignored_keys"),
    _rule("applied", "validation losses before and after may not be comparable", "sft.val"),
    _rule("refused", _SPLIT, "sft.val.size", "sft.val.fraction", unless="ckpt.skip_dataloader"),
    _rule("applied", "evaluations before and after may not be comparable", "sft.eval"),
    _rule("none", "", "sft.inference"),
    _rule("applied", "", "sft.loss", "sft.loss_impl", "sft.num_epochs", "sft.early_stop", "sft.distillation"),
    _rule("attempt", "says how to start", "sft.clean_output_dir", "sft.dry_run", "sft.file_access", "sft.slurm"),
    _rule("attempt", "says how to start", "sft.allocation_mode", "sft.launcher", "sft.recover"),
    _rule("none", "", "sft.stall", "sft.storage", "sft.trace"),
    # The RL trainer.
    _rule(
        "applied",
        "",
        "trainer.tokenizer",
        "trainer.data",
        "trainer.loss",
        "trainer.distillation",
        "trainer.reference",
        "trainer.demonstrations",
        "trainer.parity",
        "trainer.minibatches",
        "trainer.epochs_per_batch",
    ),
    _rule(
        "applied",
        "without it the reference is again the model that the run started from",
        "trainer.reference.reset_every",
    ),
    _rule("none", "", "trainer.offload_while_sampling"),
    _rule("applied", "adding or removing it is refused", "trainer.critic"),
    _rule("none", "the weights are those of the checkpoint", "trainer.critic.name", "trainer.critic.lora.path"),
    _rule("refused", _SHAPES, "trainer.critic.lora"),
    _rule("applied", "", "trainer.critic.lora.dropout"),
    _rule("refused", "the optimizer would have other groups", "trainer.critic.lora.loraplus_lr_ratio"),
    _rule("refused", "the saved optimizer state is that of another optimizer", "trainer.critic.optim.type"),
    _rule("refused", "the saved moments have another precision", "trainer.critic.optim.stochastic_rounding"),
    _rule("refused", _ROWS, "trainer.demonstrations.data", unless="ckpt.skip_dataloader"),
    _rule(
        "refused",
        _ORDER,
        "trainer.demonstrations.data.seed",
        "trainer.demonstrations.data.shuffle",
        "trainer.demonstrations.data.probabilities",
        unless="ckpt.skip_dataloader",
    ),
    _rule(
        "none",
        "the contents are compared",
        "trainer.demonstrations.data.name",
        "trainer.demonstrations.data.sources.name",
    ),
    _rule(
        "applied",
        "",
        "trainer.demonstrations.data.batch_size",
        "trainer.demonstrations.data.max_untrainable_share",
        "trainer.demonstrations.data.ignored_keys",
    ),
    _rule("applied", "with kl_target, the weight in the checkpoint goes on", "trainer.loss.kl_coef"),
    _rule("applied", "", "trainer.max_async_level", "trainer.max_concurrent_runs", "trainer.enable_router_replay"),
    _rule(
        "none",
        "",
        "trainer.rollout_transport",
        "trainer.weight_broadcast",
        "trainer.metrics_server",
        "trainer.batch_timeout",
    ),
    _rule(
        "attempt",
        "the launcher may choose it",
        "trainer.weight_broadcast.host",
        "trainer.weight_broadcast.port",
    ),
    # The orchestrator.
    _rule(
        "applied",
        "",
        *(
            f"orchestrator.{key}"
            for key in (
                "sampling",
                "env",
                "eval",
                "early_stop",
                "judge",
                "val",
                "buffer",
                "advantage",
                "filters",
                "teacher_model",
                "teachers",
                "optim",
                "batch_size",
                "token_batch_size",
                "oversampling_factor",
                "max_inflight_rollouts",
                "max_concurrent",
                "tasks_per_minute",
                "rollouts_per_example",
                "seq_len",
                "max_steps",
                "max_off_policy_steps",
                "max_async_level",
                "bound_lag",
                "strict_async_level",
                "use_token_client",
                "model",
                "ckpt",
            )
        ),
    ),
    _rule("refused", _DRAWS, "orchestrator.buffer.seed", "orchestrator.seed", unless="ckpt.skip_buffer"),
    _rule(
        "refused", "saved examples would not be recognised", "orchestrator.buffer.hash_keys", unless="ckpt.skip_buffer"
    ),
    _rule(
        "none",
        "the weights are those of the checkpoint",
        "orchestrator.model.name",
        "orchestrator.await_first_version",
    ),
    _rule("refused", _SHAPES, "orchestrator.model.lora.rank", "orchestrator.model.lora.alpha"),
    _rule(
        "attempt",
        "says how to resume",
        "orchestrator.ckpt.resume_step",
        "orchestrator.ckpt.wait_for_weights_timeout",
        "orchestrator.ckpt.skip_progress",
        "orchestrator.ckpt.skip_buffer",
    ),
    _rule(
        "none",
        "",
        *(
            f"orchestrator.{key}"
            for key in (
                "client",
                "env_servers",
                "log",
                "wandb",
                "monitor",
                "metrics_server",
                "prime_monitor",
                "heartbeat",
                "output_dir",
                "rollout_transport",
                "weight_broadcast",
                "max_model_len",
                "num_train_workers",
                "servers_sleep",
                "trainer_timeout",
                "bench",
                "save_rollouts",
                "keep_rollouts",
                "toml_files",
            )
        ),
    ),
    # The inference server.
    _rule("applied", "", "inference"),
    _rule("none", "the weights are those of the checkpoint", "inference.model.name"),
    _rule(
        "none",
        "",
        "inference.server",
        "inference.device",
        "inference.parallel",
        "inference.enable_sleep_mode",
        "inference.weight_broadcast",
        "inference.toml_files",
    ),
    # Preferences.
    _rule("applied", "", "dpo.loss", "rm.loss"),
    _rule("applied", "refused between losses of pairs, apo_zero_unpaired and kto, whose rows differ", "dpo.loss.type"),
    _rule("applied", "the log-probabilities are computed again under another reference", "dpo.reference"),
    # A whole RL run.
    _rule("attempt", "its values are in the components' sections, which are compared", "rl"),
)


def rule_for(component: str, key: str) -> ResumeRule:
    """The rule for a dotted key of a component, that of the nearest table around it included.

    Raises:
        KeyError: there is no rule yet.
    """
    parts = [component, *(part for part in key.split(".") if part and not part.isdigit())]
    for length in range(len(parts), 0, -1):
        for table in _spellings(parts[:length]):
            if table in _BY_KEY:
                return _BY_KEY[table]
    raise KeyError(f"{component}.{key}: add a rule to RESUME_RULES")


def _spellings(parts: Sequence[str]) -> tuple[str, ...]:
    component, *key = parts
    # A rule for `sft` holds for `dpo` and `rm`, which have all of its keys.
    also = {"sft": ("*",), "dpo": ("sft", "*"), "rm": ("sft", "*"), "trainer": ("*",)}.get(component, ())
    return tuple(".".join([each, *key]) for each in (component, *also))


_BY_KEY = {key: rule for rule in RESUME_RULES for key in rule.keys}
