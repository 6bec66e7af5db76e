"""Copies the shared settings of `rl` into the sections of its components.

It works on raw tables, before validation. Each component is then validated once, with the values that it will run with,
so its bounds, rules and derived values take every shared setting into account.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from prime_rl.configs.algorithms import MaskedLossConfig, preset, top_measure_of
from prime_rl.configs.distillation import DistillationConfig
from prime_rl.configs.inference import InferenceConfig, ParallelConfig, ServerConfig
from prime_rl.configs.model import ImageLimitsConfig
from prime_rl.configs.orchestrator import DEFAULT_BATCH_SIZE
from prime_rl.configs.rl.sections import MultiNodeDeploymentConfig, SharedSettings, SingleNodeDeploymentConfig
from prime_rl.configs.rollouts.sampling import SamplingConfig
from prime_rl.configs.shared import BaseModelConfig
from prime_rl.configs.trainer import LoRAConfig, ModelConfig, TrainerConfig
from prime_rl.utils.pydantic_config import ConfigWarning, explicit_values
from prime_rl.utils.pydantic_config.base import Derivation, note_derivation
from prime_rl.utils.pydantic_config.layers import set_at, value_at

Table = dict[str, Any]
SectionT = TypeVar("SectionT", bound=BaseModel)
_ABSENT = object()
RESUMED_WEIGHTS_TIMEOUT_S = 600
METRICS_PORT_OFFSET = 2
"""Distance of the trainer's metrics port from the server's. The teacher's is between; the orchestrator's follows."""
_OF_A_POLICY = (
    "enable_lora",
    "max_lora_rank",
    "enable_sleep_mode",
    "weight_broadcast",
    "enable_return_routed_experts",
)
"""Keys of `[inference]` for a model that is trained."""
_BENCH_TOKEN_BATCH = 32
"""Number of fake samples in a benchmark with `token_batch_size`."""


@dataclass
class RunTables:
    """The raw sections of a run's components, changed in place; None for a component that does not run."""

    shared: SharedSettings
    trainer: Table
    orchestrator: Table
    inference: Table | None
    teacher_inference: Table | None

    @property
    def single_node(self) -> SingleNodeDeploymentConfig | None:
        return self.shared.deployment if self.shared.deployment.type == "single_node" else None

    @property
    def multi_node(self) -> MultiNodeDeploymentConfig | None:
        return self.shared.deployment if self.shared.deployment.type == "multi_node" else None

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of a dotted key (`trainer.model.name`)."""
        component, *path = key.split(".")
        return value_at(getattr(self, component), tuple(path), default)

    def fill(self, key: str, value: Any, source: str) -> None:
        """Set a key that is absent or None, unless its component does not run."""
        if self.get(key) is None:
            self.put(key, value, source)

    def override(self, key: str, value: Any, source: str) -> None:
        """Set a key, and warn if the config gives it another value. `source` is the shared setting."""
        given = self.get(key, _ABSENT)
        if given is not _ABSENT and _differ(given, value):
            text = f"{source} makes {key} {value!r}; the config's own {key} = {given!r} has no effect"
            warnings.warn(text, ConfigWarning, stacklevel=4)
        self.put(key, value, source)

    def put(self, key: str, value: Any, source: str) -> None:
        """Set a key of a component that runs. `source` is the setting that it follows."""
        component, *path = key.split(".")
        table = getattr(self, component)
        above = [value_at(table, tuple(path[:length])) for length in range(1, len(path))]
        # A section that is not a table is a fault; keep it, so that validation reports it.
        if table is not None and all(section is None or isinstance(section, dict) for section in above):
            if _differ(self.get(key, _ABSENT), value):
                note_derivation(Derivation(key, source))
            set_at(table, tuple(path), value)


def propagate(data: Table) -> Table:
    """`data` of an `RLConfig`, with every shared setting copied into the components' tables.

    A faulty shared setting is not copied, so that its fault is reported only once.
    """
    trainer, orchestrator = _component(data.get("trainer", {})), _component(data.get("orchestrator", {}))
    if trainer is None or orchestrator is None:
        return data
    if "inference" not in data and not _uses_other_servers(data, orchestrator):
        data = data | {"inference": {}}
    servers = {name: _component(data.get(name)) for name in ("inference", "teacher_inference")}
    run = RunTables(_readable_shared(data), trainer, orchestrator, **servers)
    gpus = _follow_gpu_ids(run)
    for step in (
        _place_output,
        _share_device,
        _share_judges,
        _share_log,
        _share_ckpt,
        _share_early_stop,
        _wait_for_weights,
        _share_wandb,
        _share_monitors,
        _share_model,
        _share_limits,
        _expand_algorithm,
        _share_bench,
        _share_lora,
        _share_context,
        _share_sleep,
        _share_routes,
        _split_gpus,
        _share_weight_broadcast,
        _add_teacher,
        _ask_for_top_tokens,
        _place_metrics,
    ):
        step(run)
    tables = {"trainer": run.trainer, "orchestrator": run.orchestrator} | {name: getattr(run, name) for name in servers}
    return data | gpus | {name: table for name, table in tables.items() if table is not None}


def peek(section: type[SectionT], raw: Any) -> SectionT | None:
    """The validated section, or None; its faults are reported when the whole config is validated."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            return section.model_validate(raw if isinstance(raw, dict) else {})
    except ValidationError:
        return None


def _component(value: Any) -> Table | None:
    """The raw table of a component. A section given as an instance becomes a table."""
    table = explicit_values(value) if isinstance(value, BaseModel) else value
    if not isinstance(table, dict):
        return None
    return {key: _component(item) if isinstance(item, BaseModel | dict) else item for key, item in table.items()}


def _readable_shared(data: Table) -> SharedSettings:
    values = {name: data[name] for name in SharedSettings.model_fields if name in data}
    try:
        return SharedSettings.model_validate(values)
    except ValidationError as error:
        faulty = {detail["loc"][0] for detail in error.errors()}
        return SharedSettings.model_validate({name: value for name, value in values.items() if name not in faulty})


def _uses_other_servers(data: Table, orchestrator: Table) -> bool:
    """Whether the run names servers that it does not start, or has no GPU for one."""
    client = [value_at(orchestrator, ("client", key)) for key in ("base_url", "elastic")]
    return any(value is not None for value in client) or str(value_at(data, ("deployment", "num_infer_gpus"))) == "0"


def _differ(given: Any, value: Any) -> bool:
    """Whether two values differ. A raw value may still be text from the command line."""
    return given != value and str(given).lower() != str(value).lower()


def _follow_gpu_ids(run: RunTables) -> Table:
    """Set the GPU counts to the lengths of the id lists. Returns the changed `deployment`, if any."""
    deployment = run.single_node
    lists = {"num_infer_gpus": run.shared.inference_gpu_ids, "num_train_gpus": run.shared.trainer_gpu_ids}
    counts = {key: len(ids) for key, ids in lists.items() if ids is not None}
    if deployment is None or not counts:
        return {}
    for key, count in counts.items():
        if key in deployment.model_fields_set and getattr(deployment, key) != count:
            text = (
                f"the GPU ids make deployment.{key} {count}; the config's own {getattr(deployment, key)} has no effect"
            )
            warnings.warn(text, ConfigWarning, stacklevel=4)
    counted = deployment.model_copy(update=counts)
    run.shared = run.shared.model_copy(update={"deployment": counted})
    return {"deployment": explicit_values(counted) | {"type": deployment.type}}


def _place_output(run: RunTables) -> None:
    root = run.shared.output_dir
    run.override("trainer.output_dir", root, "output_dir")
    run.override("orchestrator.output_dir", root / "run_default", "output_dir")


def _share_device(run: RunTables) -> None:
    if run.shared.device != "auto":
        for component in ("trainer", "inference", "teacher_inference"):
            run.override(f"{component}.device", run.shared.device, "device")


def _share_judges(run: RunTables) -> None:
    for name, judge in run.shared.judge.items():
        run.override(f"orchestrator.judge.{name}", explicit_values(judge), f"judge.{name}")


def _share_log(run: RunTables) -> None:
    for key, value in run.shared.log:
        if value is not None:
            run.override(f"trainer.log.{key}", value, f"log.{key}")
            run.override(f"orchestrator.log.{key}", value, f"log.{key}")


def _share_ckpt(run: RunTables) -> None:
    if run.shared.ckpt is None:
        return
    for component in ("trainer", "orchestrator"):
        run.fill(f"{component}.ckpt", {}, "ckpt")
        for key, value in run.shared.ckpt:
            if value is not None:
                run.override(f"{component}.ckpt.{key}", value, f"ckpt.{key}")


def _share_early_stop(run: RunTables) -> None:
    rules = run.shared.early_stop
    if rules is not None:
        run.fill("orchestrator.early_stop", {}, "early_stop")
        for key, value in explicit_values(rules).items():
            run.override(f"orchestrator.early_stop.{key}", value, f"early_stop.{key}")


def _wait_for_weights(run: RunTables) -> None:
    """Let a resumed orchestrator wait: the trainer publishes the weights once it has loaded its checkpoint."""
    key = "orchestrator.ckpt.wait_for_weights_timeout"
    if run.get("orchestrator.ckpt.resume_step") is not None and run.get(key, _ABSENT) is _ABSENT:
        run.put(key, RESUMED_WEIGHTS_TIMEOUT_S, "ckpt.resume_step")


def _share_wandb(run: RunTables) -> None:
    wandb = run.shared.wandb
    if wandb is None:
        return
    for component in ("trainer", "orchestrator"):
        run.fill(f"{component}.wandb", {}, "wandb")
        if wandb.project:
            run.override(f"{component}.wandb.project", wandb.project, "wandb.project")
        if wandb.name:
            run.override(f"{component}.wandb.name", f"{wandb.name}-{component}", "wandb.name")
        if wandb.offline:
            run.override(f"{component}.wandb.offline", True, "wandb.offline")


def _share_monitors(run: RunTables) -> None:
    for sink, section in run.shared.monitor:
        for component in ("trainer", "orchestrator") if section is not None else ():
            run.fill(f"{component}.monitor.{sink}", {}, f"monitor.{sink}")
            for key, value in explicit_values(section).items():
                run.override(f"{component}.monitor.{sink}.{key}", value, f"monitor.{sink}.{key}")


def _share_model(run: RunTables) -> None:
    if run.shared.model is not None:
        for component in ("trainer", "orchestrator", "inference"):
            run.override(f"{component}.model.name", run.shared.model.name, "model.name")
        if (alone := run.shared.model.language_model_only) is not None:
            for component in ("trainer", "inference"):
                run.override(f"{component}.model.language_model_only", alone, "model.language_model_only")
        if run.shared.model.vision is not None:
            run.override("trainer.model.vision", explicit_values(run.shared.model.vision), "model.vision")
    if (vision := run.get("trainer.model.vision")) is not None:
        of_images = {
            key: vision[key] for key in ImageLimitsConfig.model_fields if isinstance(vision, dict) and key in vision
        }
        run.fill("orchestrator.model.vision", of_images, "trainer.model.vision")
    # The engine renders the prompts, the orchestrator checks its environments with the same template, and the trainer's
    # tokenizer is exported with the weights.
    keys = ["trainer.tokenizer.chat_template", "orchestrator.model.chat_template"]
    keys += [] if run.inference is None else ["inference.model.chat_template"]
    given = [template for key in keys if (template := run.get(key)) is not None]
    for key in keys if given else ():
        run.fill(key, given[0], "every component has the same chat template")


def _share_limits(run: RunTables) -> None:
    shared = run.shared
    # A benchmark sets its own number of steps, and its orchestrator does not wait for the trainer.
    if shared.max_steps is not None and not shared.bench:
        run.override("trainer.max_steps", shared.max_steps, "max_steps")
        run.override("orchestrator.max_steps", shared.max_steps, "max_steps")
    if shared.max_async_level is not None:
        run.override("trainer.max_async_level", shared.max_async_level, "max_async_level")
        if not shared.bench:
            run.override("orchestrator.max_async_level", shared.max_async_level, "max_async_level")
    if shared.seq_len is not None:
        run.fill("trainer.model.seq_len", shared.seq_len, "seq_len")
        run.fill("orchestrator.seq_len", shared.seq_len, "seq_len")


def _expand_algorithm(run: RunTables) -> None:
    """Fill in the keys of the algorithm. Values in the config, including None, are kept."""
    sampling = peek(SamplingConfig, run.get("orchestrator.sampling"))
    model = peek(ModelConfig, run.get("trainer.model"))
    if sampling is None or model is None:
        return
    for section, values in preset(run.shared.algorithm, sampling.max_tokens, model.seq_len).items():
        given = run.get(section, {})
        if not isinstance(given, dict) or given.get("type", values.get("type")) != values.get("type"):
            continue  # turned off, or of another type
        for key, value in values.items():
            if key not in given:
                run.put(f"{section}.{key}", value, f"algorithm = {run.shared.algorithm!r}")


def _share_bench(run: RunTables) -> None:
    if not run.shared.bench:
        return
    run.fill("trainer.bench", {}, "bench")
    run.override("orchestrator.bench", True, "bench")
    in_tokens = run.get("orchestrator.token_batch_size") is not None
    rollouts = run.get("orchestrator.batch_size")
    samples = _BENCH_TOKEN_BATCH if in_tokens else DEFAULT_BATCH_SIZE if rollouts is None else rollouts
    run.override("trainer.data.fake.batch_size", samples, "bench")


def _share_lora(run: RunTables) -> None:
    raw = run.get("trainer.model.lora")
    lora = peek(LoRAConfig, raw) if raw is not None else None
    for key in ("trainer.model.adapter", "trainer.model.lora.path", "trainer.model.quantization"):
        if run.get(key) is not None:
            run.override("orchestrator.await_first_version", True, key)
    others = ("trainer.model.adapter", "trainer.model.quantization", "trainer.model.vision.tower_lr")
    if lora is None or lora.modules_to_save or lora.use_dora or any(run.get(key) is not None for key in others):
        return  # the engines get whole weights
    adapter = {"rank": lora.rank, "alpha": lora.alpha, "name": f"r{lora.rank}-a{lora.alpha}"}
    for key, value in adapter.items():
        run.fill(f"orchestrator.model.lora.{key}", value, "trainer.model.lora")
    if run.inference is None:
        text = "trainer.model.lora is set, but no [inference]: start the server with LoRA yourself"
        warnings.warn(text, ConfigWarning, stacklevel=3)
        return
    run.override("inference.enable_lora", True, "trainer.model.lora")
    run.put("inference.max_lora_rank", lora.largest_rank, "trainer.model.lora.rank")


def _share_context(run: RunTables) -> None:
    server = None if run.inference is None else peek(InferenceConfig, run.get("inference"))
    if server is not None and server.model.max_model_len is not None:
        run.fill("orchestrator.max_model_len", server.model.max_model_len, "inference.model.max_model_len")


def _share_sleep(run: RunTables) -> None:
    server = None if run.inference is None else peek(InferenceConfig, run.get("inference"))
    if server is not None and server.enable_sleep_mode:
        run.fill("orchestrator.servers_sleep", True, "inference.enable_sleep_mode")


def _share_routes(run: RunTables) -> None:
    given = {"enable_router_replay": run.get("trainer.enable_router_replay", False)}
    trainer = peek(TrainerConfig, given)
    if run.inference is not None and trainer is not None and trainer.enable_router_replay:
        run.override("inference.enable_return_routed_experts", True, "trainer.enable_router_replay")


def _split_gpus(run: RunTables) -> None:
    model = peek(ModelConfig, run.get("trainer.model"))
    deployment = run.shared.deployment
    if isinstance(deployment, SingleNodeDeploymentConfig):
        train_gpus = deployment.num_train_gpus
        _fill_parallel(run, "inference", deployment.num_infer_gpus)
    else:
        train_gpus = deployment.num_train_nodes * deployment.gpus_per_node
        _fill_parallel(run, "inference", deployment.gpus_per_node)
        if deployment.nodes_per_fsdp_group is not None:
            copies = max(1, deployment.num_train_nodes // deployment.nodes_per_fsdp_group)
            run.override("trainer.model.dp_replicate", copies, "deployment.nodes_per_fsdp_group")
    server = peek(InferenceConfig, run.get("inference")) if run.inference is not None else None
    # The embedded engine, which `auto` may choose elsewhere, has no such key.
    is_vllm = server is not None and (server.backend == "vllm" or (server.backend, server.device) == ("auto", "cuda"))
    if server is not None and is_vllm and model is not None and model.ep > 1 and server.parallel.gpus > 1:
        run.fill("inference.enable_expert_parallel", True, "trainer.model.ep")
    if train_gpus > 1 and model is not None:
        workers = max(1, train_gpus // (model.cp * model.tp))
        run.override("orchestrator.num_train_workers", workers, "deployment")


def _fill_parallel(run: RunTables, component: str, gpus: int) -> None:
    """Use every GPU of a server: of `tp` and `dp`, the one that is given decides. What does not divide the GPUs is
    kept; a rule reports it."""
    if getattr(run, component) is None:
        return
    parallel = peek(ParallelConfig, run.get(f"{component}.parallel"))
    if parallel is None or gpus in (0, parallel.dp * parallel.tp):
        return
    if parallel.dp > 1 and run.get(f"{component}.parallel.tp") is None:
        if gpus % parallel.dp == 0:
            run.fill(f"{component}.parallel.tp", gpus // parallel.dp, "deployment")
    elif gpus % parallel.tp == 0:
        run.override(f"{component}.parallel.dp", gpus // parallel.tp, "deployment")


def _share_weight_broadcast(run: RunTables) -> None:
    shared = run.shared.weight_broadcast
    if shared is not None:
        for component in ("trainer", "orchestrator", "inference"):
            _set_broadcast_type(run, component, shared.type)
        if shared.type == "nccl":
            for component in ("trainer", "orchestrator"):
                run.override(f"{component}.weight_broadcast.port", shared.port, "weight_broadcast.port")
                run.override(f"{component}.weight_broadcast.timeout", shared.timeout, "weight_broadcast.timeout")
    kind = run.get("trainer.weight_broadcast.type", "filesystem")
    run.fill("inference.weight_broadcast.type", kind, "trainer.weight_broadcast.type")
    if kind == "nccl":
        if run.multi_node is not None and shared is not None:
            run.override("trainer.weight_broadcast.host", "0.0.0.0", "deployment")
        _count_inference_gpus(run, always=shared is not None)


def _set_broadcast_type(run: RunTables, component: str, kind: str) -> None:
    """Change the type. Keys of another type are removed with it."""
    key = f"{component}.weight_broadcast"
    given = run.get(key)
    if isinstance(given, dict) and given.get("type", "filesystem") != kind:
        run.override(f"{key}.type", kind, "weight_broadcast.type")
        given.clear()
    run.override(f"{key}.type", kind, "weight_broadcast.type")


def _count_inference_gpus(run: RunTables, always: bool) -> None:
    """Set the size of the NCCL group to the number of inference GPUs, unless the config sets it."""
    key = "trainer.weight_broadcast.inference_world_size"
    parallel = peek(ParallelConfig, run.get("inference.parallel")) if run.inference is not None else None
    if run.multi_node is not None:
        size = run.multi_node.gpus_per_node * run.multi_node.num_infer_nodes
    elif parallel is not None:
        size = parallel.dp * parallel.tp
    else:
        return
    if always:
        run.override(key, size, "weight_broadcast")
    else:
        run.fill(key, size, "the number of inference GPUs")


def _place_metrics(run: RunTables) -> None:
    """Give the metrics a port of their own. By itself each server has the same default port."""
    server = peek(ServerConfig, run.get("inference.server")) if run.inference is not None else None
    for offset, component in enumerate(("trainer", "orchestrator"), METRICS_PORT_OFFSET):
        if server is not None and isinstance(run.get(f"{component}.metrics_server"), dict):
            run.fill(f"{component}.metrics_server.port", server.port + offset, "inference.server.port")


def _remove(table: Table, key: str) -> None:
    *path, name = key.split(".")
    above = value_at(table, tuple(path), None) if path else table
    if isinstance(above, dict):
        above.pop(name, None)


def _add_teacher(run: RunTables) -> None:
    """A server for the teacher: with GPUs of its own, or as `[teacher_inference]` says. By itself it is as the
    inference server, and serves the model that the run starts from."""
    gpus = (run.single_node.num_teacher_gpus or 0) if run.single_node is not None else 0
    if run.multi_node is not None or (gpus == 0 and run.teacher_inference is None):
        return
    server = peek(ServerConfig, run.get("inference.server")) or ServerConfig()
    if run.teacher_inference is None:
        run.teacher_inference = copy.deepcopy(run.inference or {})
        # What belongs to the server that is copied: its address, its GPUs and its updates.
        for key in ("server.port", "parallel.dp", *_OF_A_POLICY):
            _remove(run.teacher_inference, key)
        served = peek(InferenceConfig, run.get("inference"))
        if served is not None and served.model.max_model_len is not None:
            longest = served.model.max_model_len + 1
            run.put("teacher_inference.model.max_model_len", longest, "a teacher generates a token to score others")
    run.fill("teacher_inference.server.port", server.port + 1, "inference.server.port")
    trained = run.get("trainer.model.name", BaseModelConfig().name)
    run.fill("teacher_inference.model.name", trained, "the model that the run starts from")
    _fill_parallel(run, "teacher_inference", gpus)
    own = peek(ServerConfig, run.get("teacher_inference.server"))
    model = peek(BaseModelConfig, {"name": run.get("teacher_inference.model.name")})
    if own is not None and model is not None:
        url = f"http://{own.host or 'localhost'}:{own.port}/v1"
        run.override("orchestrator.teacher_model.client.base_url", [url], "teacher_inference.server")
        run.override("orchestrator.teacher_model.model.name", model.name, "teacher_inference.model.name")


def _ask_for_top_tokens(run: RunTables) -> None:
    loss = run.get("trainer.loss")
    own = peek(MaskedLossConfig, loss) if isinstance(loss, dict) and loss.get("type") == "masked" else None
    if own is not None and top_measure_of(own) is not None:
        run.override("orchestrator.sampling.top_logprobs", own.top_k, "trainer.loss.top_k")
    distillation, more = run.get("trainer.distillation"), run.get("orchestrator.teachers")
    wanted = peek(DistillationConfig, distillation) if isinstance(distillation, dict) else None
    if wanted is None:
        return
    if isinstance(run.get("orchestrator.teacher_model"), dict):
        run.override("orchestrator.teacher_model.top_k", wanted.top_k, "trainer.distillation.top_k")
    if isinstance(more, list):
        same = [{**each, "top_k": wanted.top_k} if isinstance(each, dict) else each for each in more]
        run.put("orchestrator.teachers", same, "trainer.distillation.top_k")
