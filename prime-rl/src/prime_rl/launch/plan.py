"""Plans jobs: from a config and a placement to the processes of `sft`, `rl` and `eval`.

Plans are pure. They start nothing, write nothing and read no environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prime_rl.configs.rollouts.judges import (
    TEACHER,
    FrozenModel,
    JudgeConfig,
    frozen_judges,
    started_judges,
)
from prime_rl.configs.sft import evaluation_of
from prime_rl.launch.caches import cache_env, cuda_allocator_env
from prime_rl.launch.devices import mask, mask_for_vllm, spin_env, thread_env
from prime_rl.launch.job import Job, Resources
from prime_rl.launch.placement import Placement, ResourceRequest
from prime_rl.launch.programs import (
    RL_TRAINER,
    SFT_TRAINER,
    TrainerRanks,
    beside_training,
    evaluator_process,
    frozen_process,
    inference_process,
    interface_env,
    orchestrator_process,
)
from prime_rl.launch.spec import ProcessSpec
from prime_rl.launch.stalling import StallLimits
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import CLEARANCE_VARIABLE, SERVERS_VARIABLE, replica_name
from prime_rl.utils.engine_keys import (
    ENGINE_KEY_VARIABLE,
    JUDGE_SERVER_KEY_VARIABLE,
    JUDGE_SERVERS_VARIABLE,
    TEACHER_KEY_VARIABLE,
    TRANSPORT_KEY_VARIABLE,
    named_key,
)

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.configs.shared import ClientConfig, StallConfig, TraceConfig
    from prime_rl.utils.pydantic_config import BaseSettings


def sft_request(config: SFTConfig) -> ResourceRequest:
    request = ResourceRequest(config.device, infer=config.infer_gpus_per_node, train=config.train_gpus_per_node)
    deployment = config.deployment
    if deployment.type == "single_node":
        judges = {} if config.eval is None else config.eval.judge
        return replace(request, frozen=_gpus_of(frozen_judges(judges, config.device)))
    return replace(request, train_nodes=deployment.num_nodes, interface=deployment.network_interface)


def rl_request(config: RLConfig) -> ResourceRequest:
    deployment = config.deployment
    if deployment.type == "multi_node":
        gpus = deployment.gpus_per_node
        request = ResourceRequest(config.device, gpus, gpus, interface=deployment.network_interface)
        return replace(request, infer_nodes=deployment.num_infer_nodes, train_nodes=deployment.num_train_nodes)
    infer_ids, train_ids = config.inference_gpu_ids, config.trainer_gpu_ids
    infer = deployment.num_infer_gpus if infer_ids is None else len(infer_ids)
    return ResourceRequest(
        config.device,
        infer=0 if config.inference is None else infer,
        train=deployment.num_train_gpus if train_ids is None else len(train_ids),
        infer_ids=None if infer_ids is None else tuple(infer_ids),
        train_ids=None if train_ids is None else tuple(train_ids),
        frozen=_gpus_of(config.frozen_models),
    )


def eval_request(config: OfflineEvalConfig) -> ResourceRequest:
    judges = _gpus_of(frozen_judges(config.judge, config.device))
    if config.inference is None:
        return ResourceRequest(config.device if judges else "cpu", frozen=judges)
    gpus = config.inference.parallel.tp * config.inference.parallel.dp
    return ResourceRequest(config.inference.device, infer=gpus, frozen=judges)


def _gpus_of(models: Sequence[FrozenModel]) -> tuple[int, ...]:
    return tuple(each.gpus for each in models)


def plan_sft(config: SFTConfig, paths: RunPaths, placement: Placement, resume_step: int | None) -> Job:
    """The ranks of the trainer of `sft`, `dpo` or `rm`, and what evaluates its exports. `resume_step` is the step that
    "the latest" (-1) in the config stands for."""
    request, evaluation = sft_request(config), evaluation_of(config)
    own_cores = _spins(placement) if evaluation is None else {}
    envs = [_threads(each, request.train) | own_cores for each in placement.each]
    command = config.component
    other = None if command == "sft" else command  # the module's default
    ranks = TrainerRanks(SFT_TRAINER, paths.config(command), request.train, placement.meeting_place, command=other)
    processes = _trainer(command, ranks, paths, placement.each, envs, *_resume_flags(config.ckpt, resume_step))
    configs: dict[str, BaseSettings] = {command: config}
    if evaluation is not None:
        # After the trainer: its start removes the marker of an earlier one's end.
        processes += _evaluation_beside(evaluation, paths, placement, request.train + request.infer)
        configs |= _eval_configs(evaluation)
    return Job(
        command,
        paths,
        processes,
        _resources(processes),
        configs,
        stopping=_stopping(config.ckpt),
        stall_limits=_stall_limits(config.stall),
        trace_mib=_trace_mib(config.trace),
        nodes=tuple(each.name for each in placement.nodes),
        resume=_resume(config.ckpt),
    )


def _evaluation_beside(
    evaluation: OfflineEvalConfig, paths: RunPaths, placement: Placement, at_once: int
) -> tuple[ProcessSpec, ...]:
    """An inference server on each node, and the evaluator on the first, next to a training.

    `at_once`: processes of a node that compute at the same time.
    """
    on_cpu = placement.device == "cpu"
    envs = [_threads(each, at_once) for each in placement.each]
    return tuple(
        beside_training(each, paths, on_cpu) for each in _evaluating("sft", evaluation, paths, placement.each, envs)
    )


def _evaluating(
    command: str,
    config: OfflineEvalConfig,
    paths: RunPaths,
    placements: Sequence[Placement],
    envs: Sequence[Mapping[str, str]],
) -> tuple[ProcessSpec, ...]:
    head = placements[0]
    env = _child_env(command, "evaluator", head, _server_names(placements))
    evaluator = evaluator_process(paths, head.programs.python, env, *_client_flags(config.inference, placements))
    servers = _servers(command, config.inference, paths, placements, envs)
    judges = _frozen_servers(command, frozen_judges(config.judge, config.device), paths, head, envs[0])
    return *judges, *_with_key(servers, _with_judges(evaluator, config.judge, head), config.client, head)


def _eval_configs(config: OfflineEvalConfig) -> dict[str, BaseSettings]:
    judges = frozen_judges(config.judge, config.device)
    own: dict[str, BaseSettings] = {"eval": config, **{each.process: each.server for each in judges}}
    return own if config.inference is None else {**own, "inference": config.inference}


def plan_rl(config: RLConfig, paths: RunPaths, placement: Placement, resume_step: int | None) -> Job:
    """Inference server (unless the config has none), orchestrator and the ranks of the trainer."""
    request, resume = rl_request(config), _resume_flags(config.trainer.ckpt, resume_step)
    infer_placements, train_placements = (
        placement.each[: request.infer_nodes] or placement.servers,
        placement.each[request.infer_nodes :],
    )
    infer_at_once, train_at_once = _processes_at_once(request, config)
    head = train_placements[0]
    broadcast, sockets = _broadcast_flags(config, head), _socket_flags(config, head)
    members = _member_flags(config, head, len(infer_placements))
    turns = _spins_in_turns(config, placement)
    envs = [_threads(each, train_at_once) | turns for each in train_placements]
    ranks = TrainerRanks(RL_TRAINER, paths.config("trainer"), request.train, placement.meeting_place)
    flags = (*_client_flags(config.inference, infer_placements), *broadcast, *sockets, *resume)
    env = _child_env("rl", "orchestrator", head, _threads(head, train_at_once)) | _server_names(infer_placements)
    orchestrator = orchestrator_process(paths, placement.programs.orchestrator, env, *flags)
    waits = {CLEARANCE_VARIABLE: str(paths.orchestrator.environments_checked)}
    infer_envs = [_threads(each, infer_at_once) | turns | waits for each in infer_placements]
    servers = _servers("rl", config.inference, paths, infer_placements, infer_envs)
    orchestrator = _with_judges(replace(orchestrator, node=head.node), config.orchestrator.judge, head)
    orchestrator = _with_teacher(orchestrator, config, head)
    processes = _with_transport_key(
        (
            *_frozen_servers("rl", config.frozen_models, paths, head, _threads(head, infer_at_once) | waits),
            *_with_key(servers, orchestrator, config.orchestrator.client, placement),
            *_trainer("rl", ranks, paths, train_placements, envs, *broadcast, *members, *sockets, *resume),
        ),
        placement,
    )
    return Job(
        "rl",
        paths,
        processes,
        _resources(processes),
        component_configs(config),
        _headline(request, config, placement),
        _stopping(config.trainer.ckpt),
        _stall_limits(config.stall),
        _trace_mib(config.trace),
        tuple(each.name for each in placement.nodes),
        _resume(config.trainer.ckpt),
    )


def plan_eval(config: OfflineEvalConfig, paths: RunPaths, placement: Placement, resume_step: int | None = None) -> Job:
    """Inference server (unless the config has none) and evaluator, which finds by itself what is left to do."""
    own_cores = {} if frozen_judges(config.judge, config.device) else _spins(placement)
    processes = _evaluating("eval", config, paths, (placement,), (_threads(placement, 1) | own_cores,))
    kept = "stopping; finished rollouts are kept"
    limits = _stall_limits(config.stall)
    return Job(
        "eval",
        paths,
        processes,
        _resources(processes),
        _eval_configs(config),
        stopping=kept,
        stall_limits=limits,
        trace_mib=_trace_mib(config.trace),
        resume=(),
    )


def plan_server(
    command: str, config: InferenceConfig, paths: RunPaths, placement: Placement, waits_for: Path
) -> ProcessSpec:
    """An inference server alone, on `inference_url(placement)`. It loads its model once the file `waits_for` exists."""
    env = _threads(placement, 1) | _spins(placement) | {CLEARANCE_VARIABLE: str(waits_for)}
    (server,) = _servers(command, config, paths, (placement,), (env,))
    return replace(server, secrets={ENGINE_KEY_VARIABLE: placement.engine_key})


def inference_url(placement: Placement) -> str:
    """The address of an inference server on the port that the launch has chosen."""
    return f"http://{placement.address}:{placement.ports.inference}"


def component_configs(config: RLConfig) -> dict[str, BaseSettings]:
    """Configs that an RL run writes to `OUT/configs`: the whole, and each component's section."""
    sections: dict[str, BaseSettings] = {
        "rl": config,
        "trainer": config.trainer,
        "orchestrator": config.orchestrator,
        **{each.process: each.server for each in config.frozen_models},
    }
    return sections if config.inference is None else {**sections, "inference": config.inference}


def port_fault(config: RLConfig) -> str | None:
    """Tell if the orchestrator would look for the server on a port that the server does not use."""
    if config.inference is None or config.orchestrator.client.is_elastic:
        return None
    url, port = config.orchestrator.client.base_url[0], config.inference.server.port
    if urlsplit(url).netloc.endswith(f":{port}"):
        return None
    return (
        f"orchestrator.client.base_url is {url}, but the server listens on port {port} (inference.server.port): "
        "set both to the same port"
    )


def _threads(placement: Placement, processes: int) -> dict[str, str]:
    return {} if placement.device == "cuda" else thread_env(placement.cores, processes, placement.env)


def _processes_at_once(request: ResourceRequest, config: RLConfig) -> tuple[int, int]:
    """Number of processes that compute at the same time, on a node of inference and on one of the trainer."""
    if request.infer_nodes:
        return request.infer, request.train
    # At async level 0 inference and trainer take turns.
    both = request.infer + request.train if config.orchestrator.max_async_level else max(request.infer, request.train)
    return both, both


def _spins(placement: Placement) -> dict[str, str]:
    """Let the threads of a CPU process spin. Only if no other process of the launch computes at the same time."""
    return spin_env(placement.env) if placement.device == "cpu" else {}


def _spins_in_turns(config: RLConfig, placement: Placement) -> dict[str, str]:
    """At async level 0, inference and trainer take turns, so their threads may spin. A judge or teacher takes none."""
    takes_turns = config.orchestrator.max_async_level == 0 and not config.frozen_models
    return _spins(placement) if takes_turns else {}


def _servers(
    command: str,
    config: InferenceConfig | None,
    paths: RunPaths,
    placements: Sequence[Placement],
    envs: Sequence[Mapping[str, str]],
) -> tuple[ProcessSpec, ...]:
    """An inference server on each node."""
    if config is None:
        return ()
    return tuple(
        _server(command, config, paths, replica, (placement, env))
        for replica, (placement, env) in enumerate(zip(placements, envs, strict=True))
    )


def _server(
    command: str, config: InferenceConfig, paths: RunPaths, replica: int, place: tuple[Placement, Mapping[str, str]]
) -> ProcessSpec:
    placement, env = place
    gpus = placement.gpus.inference
    may_be_vllm = placement.device == "cuda" and config.backend != "embedded"
    visible = mask_for_vllm(gpus, placement.gpu_indices) if may_be_vllm else mask(gpus)
    env = _computing_env(command, "inference", placement, env) | visible
    if placement.name:
        env |= interface_env(placement.env, placement.interface, placement.is_interface_configured)
    server = inference_process(
        paths, placement.programs.inference, env, gpus, *_server_flags(placement), replica=replica
    )
    return replace(server, node=placement.node)


def _with_key(
    servers: Sequence[ProcessSpec], user: ProcessSpec, client: ClientConfig, placement: Placement
) -> tuple[ProcessSpec, ...]:
    """The launch's own servers and the process that sends them requests, with the key that both need."""
    if not servers:
        return (user,)
    key = named_key(client.api_key_var, placement.env) or placement.engine_key
    keyed = (replace(server, secrets={ENGINE_KEY_VARIABLE: key}) for server in servers)
    return *keyed, replace(user, secrets={**user.secrets, client.api_key_var: key})


def _frozen_servers(
    command: str, models: Sequence[FrozenModel], paths: RunPaths, placement: Placement, env: Mapping[str, str]
) -> Iterator[ProcessSpec]:
    """A server for each judge and for the teacher, with the launch's key."""
    gpus_of_each = placement.gpus.frozen or ((),) * len(models)
    for model, port, own in zip(models, placement.ports.frozen, gpus_of_each, strict=True):
        gpus = () if model.server.device == "cpu" else own or placement.gpus.inference
        may_be_vllm = placement.device == "cuda" and model.server.backend != "embedded" and bool(gpus)
        visible = mask_for_vllm(gpus, placement.gpu_indices) if may_be_vllm else mask(gpus)
        is_as_configured = model.process == TEACHER and placement.ports.inference is None
        flags = () if is_as_configured else ("--server.host", placement.address, "--server.port", str(port))
        child = _computing_env(command, model.process, placement, env) | visible
        server = frozen_process(paths, placement.programs.inference, child, gpus, model.process, *flags)
        yield replace(server, node=placement.node, secrets={ENGINE_KEY_VARIABLE: placement.engine_key})


def _with_teacher(user: ProcessSpec, config: RLConfig, placement: Placement) -> ProcessSpec:
    """The orchestrator, with the key of the teacher and, if the run starts it, with its address.

    The key has its own variable: the configured one may be that of the policy's servers, whose key it must not
    get.
    """
    teacher = config.orchestrator.teacher_model
    if teacher is None:
        return user
    flags: tuple[str, ...] = ("--teacher-model.client.api-key-var", TEACHER_KEY_VARIABLE)
    key, env = named_key(teacher.client.api_key_var, placement.env), user.env
    ports = dict(zip((each.process for each in config.frozen_models), placement.ports.frozen, strict=True))
    if TEACHER in ports:
        key, url = placement.engine_key, teacher.client.base_url[0]
        if placement.ports.inference is not None:
            url = f"http://{placement.address}:{ports[TEACHER]}/v1"
            flags = (*flags, "--teacher-model.client.base-url", url)
        names = json.loads(env.get(SERVERS_VARIABLE, "{}")) | {url: TEACHER}
        env = {**env, SERVERS_VARIABLE: json.dumps(names)}
    secrets = {} if key is None else {TEACHER_KEY_VARIABLE: key}
    return replace(user, argv=(*user.argv, *flags), env=env, secrets={**user.secrets, **secrets})


def _with_judges(user: ProcessSpec, judges: Mapping[str, JudgeConfig], placement: Placement) -> ProcessSpec:
    """The process whose environments ask the judges, with the addresses of those that the run starts and their key."""
    ours = started_judges(judges)
    if not ours:
        return user
    urls = {
        name: f"http://{placement.address}:{port}/v1" for name, port in zip(ours, placement.ports.frozen, strict=False)
    }
    env = {**user.env, JUDGE_SERVERS_VARIABLE: json.dumps(urls)}
    return replace(user, env=env, secrets={**user.secrets, JUDGE_SERVER_KEY_VARIABLE: placement.engine_key})


def _with_transport_key(processes: tuple[ProcessSpec, ...], placement: Placement) -> tuple[ProcessSpec, ...]:
    """Orchestrator and trainer, which may talk through sockets, with the key of these."""
    if placement.transport_key is None:
        return processes
    key = {TRANSPORT_KEY_VARIABLE: placement.transport_key}
    return tuple(
        replace(process, secrets={**process.secrets, **key}) if process.completes_run else process
        for process in processes
    )


def _trainer(
    command: str,
    ranks: TrainerRanks,
    paths: RunPaths,
    placements: Sequence[Placement],
    envs: Sequence[Mapping[str, str]],
    *flags: str,
) -> tuple[ProcessSpec, ...]:
    """The ranks on each node, `ranks.count` on each."""
    total = len(placements) * ranks.count
    processes: list[ProcessSpec] = []
    for placement, own in zip(placements, envs, strict=True):
        here = replace(ranks, first=len(processes), total=total)
        env = _computing_env(command, "trainer", placement, own) | mask(placement.gpus.trainer)
        if placement.device == "cuda":
            env |= cuda_allocator_env(placement.env)
        if total > 1:
            # One thread per rank on GPUs, as under torchrun. On CPUs the share of the cores is set already.
            env = {**thread_env(1, 1, placement.env), **env}
            env |= interface_env(placement.env, placement.interface, placement.is_interface_configured)
        on_node = here.processes(paths, placement.programs.python, env, placement.gpus.trainer, *flags)
        processes += [replace(process, node=placement.node) for process in on_node]
    return tuple(processes)


def _child_env(command: str, child: str, placement: Placement, env: Mapping[str, str]) -> dict[str, str]:
    caches = cache_env(placement.caches, child, placement.env)
    return {
        **placement.bytecode,
        **caches,
        **env,
        "WANDB_PROGRAM": command,
        "WANDB_ARGS": json.dumps(placement.arguments),
    }


def _computing_env(command: str, child: str, placement: Placement, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a trainer or a server. Others do not get the allocator: the programs that an orchestrator's
    environments start would inherit it."""
    allocator = placement.allocator if placement.device == "cpu" else {}
    return {**_child_env(command, child, placement, env), **allocator}


def _server_flags(placement: Placement) -> tuple[str, ...]:
    """Options that name the address of a server whose port was chosen at run time."""
    port = placement.ports.inference
    return () if port is None else ("--server.host", placement.address, "--server.port", str(port))


def _client_flags(config: InferenceConfig | None, placements: Sequence[Placement]) -> tuple[str, ...]:
    """The addresses of the launch's own servers, if their ports were chosen at run time."""
    if config is None or any(placement.ports.inference is None for placement in placements):
        return ()
    return ("--client.base-url", ",".join(f"{inference_url(placement)}/v1" for placement in placements))


def _server_names(placements: Sequence[Placement]) -> dict[str, str]:
    """The variable that tells a process which of several servers it waits for."""
    if len(placements) == 1:
        return {}
    names = {f"{inference_url(placement)}/v1": replica_name(replica) for replica, placement in enumerate(placements)}
    return {SERVERS_VARIABLE: json.dumps(names)}


def _broadcast_flags(config: RLConfig, head: Placement) -> tuple[str, ...]:
    port = head.ports.broadcast
    if config.trainer.weight_broadcast.type != "nccl" or port is None:
        return ()
    return ("--weight_broadcast.host", head.address, "--weight_broadcast.port", str(port))


def _member_flags(config: RLConfig, head: Placement, servers: int) -> tuple[str, ...]:
    """The number of receivers of weights where it is not that of GPUs: on a CPU, one embedded engine is one process."""
    is_embedded = head.device == "cpu" and config.inference is not None and config.inference.backend != "vllm"
    if config.trainer.weight_broadcast.type != "nccl" or not is_embedded:
        return ()
    return ("--weight_broadcast.inference_world_size", str(servers))


def _socket_flags(config: RLConfig, head: Placement) -> tuple[str, ...]:
    """Address at which the trainer receives rollouts on several nodes. On one node, sockets need none."""
    is_needed = bool(head.name) and config.trainer.rollout_transport.type == "zmq"
    return ("--rollout_transport.host", head.address) if is_needed else ()


def _resume_flags(ckpt: object, resume_step: int | None) -> tuple[str, ...]:
    """Flags for a step that differs from the one in the config, as "the latest" does once it is known."""
    configured = getattr(ckpt, "resume_step", None)
    if resume_step == configured:
        return ()
    return ("--no-ckpt.resume-step",) if resume_step is None else ("--ckpt.resume-step", str(resume_step))


def _stall_limits(stall: StallConfig) -> StallLimits:
    return StallLimits(stall.timeout_s, stall.startup_timeout_s, stall.stopped_timeout_s)


def _trace_mib(trace: TraceConfig | None) -> int | None:
    return None if trace is None else trace.max_mib


def _stopping(ckpt: object) -> str:
    return "stopping after this step" if ckpt is None else "stopping after this step, with a checkpoint"


def _resume(ckpt: object) -> tuple[str, ...] | None:
    return None if ckpt is None else ("--resume", "latest")


def _resources(processes: tuple[ProcessSpec, ...]) -> Resources:
    gpus = {(process.node, gpu) for process in processes for gpu in process.gpus}
    nodes = 1 + max(process.node for process in processes)
    return Resources(nodes, max(sum(node == each for each, _ in gpus) for node in range(nodes)))


def _headline(request: ResourceRequest, config: RLConfig, placement: Placement) -> str:
    if placement.nodes:
        return ""
    if placement.device == "cuda":
        return (
            f"inference on GPU {','.join(placement.gpus.inference)}, trainer on GPU {','.join(placement.gpus.trainer)}"
        )
    why = 'device = "cpu"' if config.device == "cpu" else "no GPU here"
    counts = f"{request.infer} inference + {request.train} training, {placement.cores} cores"
    return f"{why}: everything runs on the CPU ({counts})"
