"""Nodes of a run and their GPUs (or CPU processes, without GPUs), and the config keys that they set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from medarc_rl.backends.options import NODE_GPUS, RlGpus, RlShape
from medarc_rl.errors import UsageError
from medarc_rl.utils import GivenConfig, OwnedKeys
from prime_rl.configs.areal import GPUS_PER_NODE, Allocation, AllocationError, with_derived_keys
from prime_rl.configs.areal import parse as parse_allocation
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.rollouts.judges import frozen_judges
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch.placement import ResourceRequest
from prime_rl.launch.plan import eval_request, rl_request, sft_request
from prime_rl.utils.pydantic_config import ConfigError

MOST_TRAIN_GPUS = 4
"""GPUs of a node that inference shares with the trainer."""

FULL_GPU_UTILIZATION = 0.9
"""At this utilization an inference server leaves almost no memory for a trainer on the same GPU."""


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Numbers of GPUs that train and that serve. With `shares_gpus` those that train also serve, each by itself."""

    train: int
    infer: int
    shares_gpus: bool
    allocation_mode: str | None = None
    """The value to write where trainer and servers share GPUs: the trainer, and one server. None keeps the config's."""

    def __post_init__(self) -> None:
        """Raises UsageError if a node does not have enough GPUs."""
        if self.shares_gpus:
            if self.infer != 1:
                raise UsageError(f"a server has one of the GPUs that are shared, not {self.infer}")
        elif self.train > MOST_TRAIN_GPUS:
            raise UsageError(f"--train-gpus {self.train}: the trainer takes 1 to {MOST_TRAIN_GPUS} GPUs of one node")
        elif self.total > NODE_GPUS:
            raise UsageError(
                f"--train-gpus {self.train} + --infer-gpus {self.infer} = {self.total} GPUs: "
                f"RL takes 2 to {NODE_GPUS} of one node, or shares them: --single-gpu, --colocate N"
            )

    @property
    def option(self) -> str:
        """The options that mean it."""
        if not self.shares_gpus:
            return f"--train-gpus {self.train} --infer-gpus {self.infer}"
        return "--single-gpu" if self.train == 1 else f"--colocate {self.train}"

    @property
    def total(self) -> int:
        return self.train if self.shares_gpus else self.train + self.infer

    @property
    def owned(self) -> OwnedKeys:
        """The keys of `RLConfig` that it sets."""
        keys: dict[str, Any] = {
            "deployment.type": "single_node",
            "deployment.num_train_gpus": self.train,
            "deployment.num_infer_gpus": self.infer,
            "inference_gpu_ids": None,
            "trainer_gpu_ids": None,
        }
        if self.train + self.infer > NODE_GPUS:  # the server's are counted twice
            keys["deployment.gpus_per_node"] = self.train + self.infer
        return keys if self.allocation_mode is None else {**keys, "allocation_mode": self.allocation_mode}


@dataclass(frozen=True, slots=True)
class RlNodes:
    """Nodes that train and that serve, each with the same number of GPUs."""

    train: int
    infer: int
    gpus_per_node: int

    @property
    def total(self) -> int:
        return self.train + self.infer

    @property
    def owned(self) -> OwnedKeys:
        """The keys of `RLConfig` that it sets."""
        return {
            "deployment.type": "multi_node",
            "deployment.num_train_nodes": self.train,
            "deployment.num_infer_nodes": self.infer,
            "deployment.gpus_per_node": self.gpus_per_node,
            "inference_gpu_ids": None,
            "trainer_gpu_ids": None,
        }


def rl_nodes(given: GivenConfig[RLConfig], options: RlShape) -> RlNodes | None:
    """The nodes of trainer and inference that the options or the config give; None: the run has one node.

    Raises:
        UsageError: nodes would have different numbers of GPUs, or both would have to share some.
    """
    table, shared = _deployment(given), _shared(options)
    nodes, gpus = (options.train_nodes, options.infer_nodes), (options.train_gpus, options.infer_gpus)
    if nodes == (None, None) and table.get("type") != "multi_node":
        return None
    if shared is not None:
        what = _typed(("--train-nodes", nodes[0]), ("--infer-nodes", nodes[1])) or "deployment.type = 'multi_node'"
        raise UsageError(
            f"{shared.option}, {what}: trainer and inference share GPUs of one node or have nodes of their own; "
            "leave one out"
        )
    counts = {each for each in gpus if each is not None}
    if len(counts) > 1:
        raise UsageError(
            f"--train-gpus {gpus[0]}, --infer-gpus {gpus[1]}: the nodes of a job have the same number of GPUs, "
            "so give both the same number"
        )
    train, infer = (
        option or _number(table, key, 1)
        for option, key in zip(nodes, ("num_train_nodes", "num_infer_nodes"), strict=True)
    )
    default = GPUS_PER_NODE if table.get("type") == "multi_node" else 1
    return RlNodes(train, infer, _gpus_of_node(counts.pop() if counts else _number(table, "gpus_per_node", default)))


def _shared(options: RlGpus) -> GpuSplit | None:
    """The GPUs that the options share between trainer and servers. Raises UsageError."""
    if options.single_gpu and options.colocate is not None:
        raise UsageError(f"--single-gpu, --colocate {options.colocate}: leave one out")
    shared = 1 if options.single_gpu else options.colocate
    return None if shared is None else GpuSplit(shared, 1, shares_gpus=True)


def _typed(*options: tuple[str, int | None]) -> str:
    return " ".join(f"{option} {value}" for option, value in options if value is not None)


def _number(table: Mapping[str, Any], key: str, default: int) -> int:
    """Raises UsageError: it is no whole number."""
    try:
        return int(str(table.get(key, default)))  # 2.5 is none, either
    except ValueError:
        raise UsageError(f"deployment.{key} = {table[key]!r}: write a whole number") from None


def _deployment(given: GivenConfig[Any]) -> Mapping[str, Any]:
    """The table `deployment` as the config's sources and its `allocation_mode` give it.

    Empty if they do not fit together, which loading reports.
    """
    try:
        written = given.table()
        asked = {key: written[key] for key in ("deployment", "allocation_mode") if written.get(key) is not None}
        table = with_derived_keys(given.sources.root.component, asked).get("deployment")
    except (ConfigError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _gpus_of_node(gpus: int) -> int:
    if not 1 <= gpus <= NODE_GPUS:
        raise UsageError(f"deployment.gpus_per_node = {gpus}: a node has 1 to {NODE_GPUS} GPUs")
    return gpus


def rl_split(given: GivenConfig[RLConfig], options: RlGpus) -> GpuSplit:
    """The GPUs that the options give. What they leave out follows from the config's `allocation_mode`, or is 1.

    Raises:
        UsageError: one node does not have the GPUs, or would have to share several between trainer and server.
    """
    trainer, servers, together = _allocated(given)
    shared, train, infer = _shared(options), options.train_gpus, options.infer_gpus
    name = "allocation_mode" if shared is None else shared.option
    if trainer is not None or servers is not None:
        _check_allocated(given, trainer, servers, is_split=together or bool(shared or train or infer))
    allocated = (trainer.sizes.gpus if trainer else None, servers.sizes.gpus if servers else None)
    if shared is None and together and trainer is not None and servers is not None:
        if servers.sizes.tensor > 1:
            raise UsageError(
                f"allocation_mode: {servers.text}: each shared GPU has a server of its own with the whole model: write "
                f"{servers.text.partition(':')[0]}:d{servers.sizes.gpus}, or use `rl @ CONFIG`"
            )
        shared = GpuSplit(trainer.sizes.gpus, 1, True, f"{servers.backend}:d1+{trainer.text}")
        allocated = (shared.train, shared.infer)
    default = shared or GpuSplit(1, 1, shares_gpus=False)
    counts = (train or allocated[0] or default.train, infer or allocated[1] or default.infer)
    if shared is not None and counts != (shared.train, shared.infer):
        several = _typed(("--train-gpus", train), ("--infer-gpus", infer)) or "allocation_mode"
        gpus = "one GPU" if shared.train == 1 else f"{shared.train} GPUs"
        raise UsageError(f"{name} takes {gpus} for trainer and server: leave it out, or {several}")
    return shared or GpuSplit(*counts, shares_gpus=False)


def _check_allocated(
    given: GivenConfig[RLConfig],
    trainer: Allocation | None,
    servers: Allocation | None,
    *,
    is_split: bool,
) -> None:
    """Raises UsageError, in the words of the `allocation_mode`, for what it asks of this command.

    `is_split`: something else says which GPUs train and which serve.
    """
    mode = str(given.table()["allocation_mode"])
    try:
        # Kinds and letters that are not supported come before numbers of GPUs.
        with_derived_keys(given.sources.root.component, {"allocation_mode": mode})
    except ValueError as error:
        faults = [line for line in str(error).splitlines() if "not a whole number of nodes" not in line]
        if faults:
            raise UsageError(*faults) from error
    if servers is None:
        raise UsageError(
            f"allocation_mode = {mode!r} names no server, and this command starts one: add it, as in vllm:d1+fsdp:d1"
        )
    if is_split or trainer is None:
        return
    train, infer = trainer.sizes.gpus, servers.sizes.gpus
    if train > MOST_TRAIN_GPUS or train + infer > NODE_GPUS:
        raise UsageError(
            f"allocation_mode = {mode!r} takes {train} GPUs for the trainer and {infer} for the server: this "
            f"command uses one node, with at most {MOST_TRAIN_GPUS} for the trainer and {NODE_GPUS} for both; for "
            "several nodes use `medarc_slurm rl`"
        )


def _allocated(given: GivenConfig[RLConfig]) -> tuple[Allocation | None, Allocation | None, bool]:
    """Trainer and servers of the `allocation_mode`, and whether they share GPUs. None without them, or with a fault."""
    try:
        mode = parse_allocation(str(given.table().get("allocation_mode") or ""))
    except (AllocationError, ConfigError):
        return None, None, False  # loading the config reports it
    found = {each.role: each for each in mode.allocations}
    return found.get("training"), found.get("inference"), len(mode.components) == 1


def check_rl(config: RLConfig, split: GpuSplit | None = None) -> None:
    """Raises UsageError with one line for each broken rule. Loading a submission has checked its split."""
    faults = []
    if config.inference is None:
        named = "elastic" if config.orchestrator.client.is_elastic else "base_url"
        faults.append(
            f"this command starts the inference server: remove orchestrator.client.{named}, or add an [inference] table"
        )
    if split is not None:
        faults += sharing_faults(config, split)
    if faults:
        raise UsageError(*faults)


def sharing_faults(config: RLConfig, split: GpuSplit) -> Iterator[str]:
    """One line for each setting that GPUs for trainer and server exclude."""
    if not split.shares_gpus:
        return
    if config.trainer.weight_broadcast.type == "nccl":
        yield f"{split.option}: weight_broadcast.type = 'nccl' needs two GPUs, one on each side; set it to 'filesystem'"


def advice(config: RLConfig, split: GpuSplit) -> list[str]:
    """One line for each setting that works but probably not well."""
    if not split.shares_gpus or config.inference is None or config.device == "cpu" or config.takes_turns:
        return []
    utilization = config.inference.gpu_memory_utilization
    if utilization < FULL_GPU_UTILIZATION:
        return []
    return [
        f"{split.option}: inference.gpu_memory_utilization = {utilization} leaves the trainer little memory; "
        "0.7 to 0.8 is usual, as in --inference.gpu-memory-utilization 0.75"
    ]


def sft_owned(given: GivenConfig[SFTConfig], gpus: int | None, nodes: int | None = None) -> OwnedKeys:
    """The keys of `SFTConfig` that `--gpus` and `--nodes` set. Without the options the config's numbers are used."""
    several = nodes > 1 if nodes is not None else _deployment(given).get("type") == "multi_node"
    if not several:
        kind: dict[str, str | int | None] = {} if nodes is None else {"deployment.type": "single_node"}
        return kind if gpus is None else {**kind, "deployment.num_gpus": gpus}
    owned: dict[str, str | int | None] = {"deployment.type": "multi_node"}
    if nodes is not None:
        owned["deployment.num_nodes"] = nodes
    if gpus is not None:
        owned["deployment.gpus_per_node"] = gpus
    return owned


def sft_nodes(config: SFTConfig) -> int:
    """Number of nodes of an SFT run."""
    return config.deployment.num_nodes if config.deployment.type == "multi_node" else 1


def sft_nodes_of(given: GivenConfig[SFTConfig]) -> int:
    """Number of nodes that the sources of an SFT config ask for, before it is loaded."""
    table = _deployment(given)
    nodes = str(table.get("num_nodes") or 1)
    # Loading the config reports what is no number.
    return int(nodes) if table.get("type") == "multi_node" and nodes.isdecimal() else 1


def training_gpus(config: SFTConfig) -> int:
    """Number of GPUs that an SFT run trains on, on all of its nodes. Raises UsageError as `sft_gpus` does."""
    return (sft_gpus(config) - config.infer_gpus_per_node - frozen_gpus(config)) * sft_nodes(config)


def frozen_gpus(config: SFTConfig | RLConfig | OfflineEvalConfig) -> int:
    """Number of GPUs of the judges and of the teacher that a run starts, which are on one node."""
    if isinstance(config, RLConfig):
        models = config.frozen_models
    else:
        asking = config.eval if isinstance(config, SFTConfig) else config
        models = () if asking is None else frozen_judges(asking.judge, config.device)
    return sum(model.gpus for model in models)


def sft_gpus(config: SFTConfig) -> int:
    """Number of GPUs of an SFT run on each of its nodes, with those of the server and the judges of `[eval]`.

    Raises:
        UsageError: a node does not have as many.
    """
    if config.deployment.type == "multi_node":
        return _gpus_of_node(config.deployment.gpus_per_node)
    train, infer, judges = config.deployment.num_gpus, config.infer_gpus_per_node, frozen_gpus(config)
    if train + infer + judges > NODE_GPUS:
        added = f" + deployment.num_infer_gpus = {infer}" if infer else ""
        added += f" + {judges} of judges" if judges else ""
        raise UsageError(f"deployment.num_gpus = {train}{added}: one node has 1 to {NODE_GPUS} GPUs")
    return train + infer + judges


def check_one_node(config: SFTConfig) -> None:
    """Raises UsageError for a config for several nodes."""
    if config.deployment.type != "single_node":
        raise UsageError(
            f"deployment.type = {config.deployment.type!r}: this command runs on one node; "
            "submit with `medarc_slurm sft --nodes N`"
        )


def gpus_of_nodes(config: SFTConfig | RLConfig | OfflineEvalConfig, shares_gpus: bool) -> list[int]:
    """GPUs (or CPU processes) that a run takes on each of its nodes; inference nodes come first.

    Raises:
        UsageError: a node does not have as many.
    """
    if isinstance(config, SFTConfig):
        sft_gpus(config)
    needed = _needed(config)
    if shares_gpus and needed.nodes == 1:
        return [needed.train + sum(needed.frozen)]
    return list(needed.gpus_of_nodes)


def device_of(config: SFTConfig | RLConfig | OfflineEvalConfig) -> str:
    """`auto`, `cuda` or `cpu`."""
    return _needed(config).device


def _needed(config: SFTConfig | RLConfig | OfflineEvalConfig) -> ResourceRequest:
    if isinstance(config, SFTConfig):
        return sft_request(config)
    return rl_request(config) if isinstance(config, RLConfig) else eval_request(config)
