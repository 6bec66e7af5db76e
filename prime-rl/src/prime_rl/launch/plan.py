"""Plans jobs: from a config and a site to the processes of `sft`, `rl` and `eval`.

Plans are pure. They start nothing, write nothing and read no environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prime_rl.configs.rollouts.frozen import TEACHER, FrozenModel, frozen_judges, frozen_models
from prime_rl.configs.rollouts.judges import JudgeConfig, started_judges
from prime_rl.configs.sft import evaluation_of
from prime_rl.launch.allocators import cuda_allocator_env
from prime_rl.launch.caches import cache_env
from prime_rl.launch.devices import mask, mask_for_vllm, spin_env, thread_env
from prime_rl.launch.job import Job, Resources
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
from prime_rl.launch.site import Demand, Site
from prime_rl.launch.spec import ProcessSpec
from prime_rl.launch.stalls.watchdog import StallLimits
from prime_rl.run.beats import SERVERS_VARIABLE, replica_name
from prime_rl.run.clearance import CLEARANCE_VARIABLE
from prime_rl.run.paths import RunPaths
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


def sft_demand(config: SFTConfig) -> Demand:
    demand = Demand(config.device, infer=config.infer_gpus_per_node, train=config.train_gpus_per_node)
    deployment = config.deployment
    if deployment.type == "single_node":
        judges = {} if config.eval is None else config.eval.judge
        return replace(demand, frozen=_gpus_of(frozen_judges(judges, config.device)))
    return replace(demand, train_nodes=deployment.num_nodes, interface=deployment.network_interface)


def rl_demand(config: RLConfig) -> Demand:
    deployment = config.deployment
    if deployment.type == "multi_node":
        gpus = deployment.gpus_per_node
        demand = Demand(config.device, gpus, gpus, interface=deployment.network_interface)
        return replace(demand, infer_nodes=deployment.num_infer_nodes, train_nodes=deployment.num_train_nodes)
    infer_ids, train_ids = config.inference_gpu_ids, config.trainer_gpu_ids
    infer = deployment.num_infer_gpus if infer_ids is None else len(infer_ids)
    return Demand(
        config.device,
        infer=0 if config.inference is None else infer,
        train=deployment.num_train_gpus if train_ids is None else len(train_ids),
        infer_ids=None if infer_ids is None else tuple(infer_ids),
        train_ids=None if train_ids is None else tuple(train_ids),
        frozen=_gpus_of(frozen_models(config)),
    )


def eval_demand(config: OfflineEvalConfig) -> Demand:
    judges = _gpus_of(frozen_judges(config.judge, config.device))
    if config.inference is None:
        return Demand(config.device if judges else "cpu", frozen=judges)
    gpus = config.inference.parallel.tp * config.inference.parallel.dp
    return Demand(config.inference.device, infer=gpus, frozen=judges)


def _gpus_of(models: Sequence[FrozenModel]) -> tuple[int, ...]:
    return tuple(each.gpus for each in models)


def plan_sft(config: SFTConfig, paths: RunPaths, site: Site, resume_step: int | None) -> Job:
    """The ranks of the SFT trainer, and what evaluates its exports. `resume_step` is the step that "the latest" (-1) in
    the config stands for."""
    demand, evaluation = sft_demand(config), evaluation_of(config)
    own_cores = _spins(site) if evaluation is None else {}
    envs = [_threads(each, demand.train) | own_cores for each in site.each]
    ranks = TrainerRanks(SFT_TRAINER, paths.config("sft"), demand.train, site.meeting_place)
    processes = _trainer("sft", ranks, paths, site.each, envs, *_resume_flags(config.ckpt, resume_step))
    configs: dict[str, BaseSettings] = {"sft": config}
    if evaluation is not None:
        # After the trainer: its start removes the marker of an earlier one's end.
        processes += _evaluation_beside(evaluation, paths, site, demand.train + demand.infer)
        configs |= _eval_configs(evaluation)
    return Job(
        "sft",
        paths,
        processes,
        _resources(processes),
        configs,
        stopping=_stopping(config.ckpt),
        stall_limits=_stall_limits(config.stall),
        trace_mib=_trace_mib(config.trace),
        nodes=tuple(each.name for each in site.nodes),
        resume=_resume(config.ckpt),
    )


def _evaluation_beside(
    evaluation: OfflineEvalConfig, paths: RunPaths, site: Site, at_once: int
) -> tuple[ProcessSpec, ...]:
    """An inference server on each node, and the evaluator on the first, next to a training.

    `at_once`: processes of a node that compute at the same time.
    """
    on_cpu = site.device == "cpu"
    envs = [_threads(each, at_once) for each in site.each]
    return tuple(
        beside_training(each, paths, on_cpu) for each in _evaluating("sft", evaluation, paths, site.each, envs)
    )


def _evaluating(
    command: str,
    config: OfflineEvalConfig,
    paths: RunPaths,
    sites: Sequence[Site],
    envs: Sequence[Mapping[str, str]],
) -> tuple[ProcessSpec, ...]:
    head = sites[0]
    env = _child_env(command, "evaluator", head, _server_names(sites))
    evaluator = evaluator_process(paths, head.programs.python, env, *_client_flags(config.inference, sites))
    servers = _servers(command, config.inference, paths, sites, envs)
    judges = _frozen_servers(command, frozen_judges(config.judge, config.device), paths, head, envs[0])
    return *judges, *_with_key(servers, _with_judges(evaluator, config.judge, head), config.client, head)


def _eval_configs(config: OfflineEvalConfig) -> dict[str, BaseSettings]:
    judges = frozen_judges(config.judge, config.device)
    own: dict[str, BaseSettings] = {"eval": config, **{each.process: each.server for each in judges}}
    return own if config.inference is None else {**own, "inference": config.inference}


def plan_rl(config: RLConfig, paths: RunPaths, site: Site, resume_step: int | None) -> Job:
    """Inference server (unless the config has none), orchestrator and the ranks of the trainer."""
    demand, resume = rl_demand(config), _resume_flags(config.trainer.ckpt, resume_step)
    infer_sites, train_sites = site.each[: demand.infer_nodes] or (site,), site.each[demand.infer_nodes :]
    infer_at_once, train_at_once = _processes_at_once(demand, config)
    head = train_sites[0]
    broadcast, sockets = _broadcast_flags(config, head), _socket_flags(config, head)
    members = _member_flags(config, head, len(infer_sites))
    turns = _spins_in_turns(config, site)
    envs = [_threads(each, train_at_once) | turns for each in train_sites]
    ranks = TrainerRanks(RL_TRAINER, paths.config("trainer"), demand.train, site.meeting_place)
    flags = (*_client_flags(config.inference, infer_sites), *broadcast, *sockets, *resume)
    env = _child_env("rl", "orchestrator", head, _threads(head, train_at_once)) | _server_names(infer_sites)
    orchestrator = orchestrator_process(paths, site.programs.orchestrator, env, *flags)
    waits = {CLEARANCE_VARIABLE: str(paths.orchestrator.environments_checked)}
    infer_envs = [_threads(each, infer_at_once) | turns | waits for each in infer_sites]
    servers = _servers("rl", config.inference, paths, infer_sites, infer_envs)
    orchestrator = _with_judges(replace(orchestrator, node=head.node), config.orchestrator.judge, head)
    orchestrator = _with_teacher(orchestrator, config, head)
    processes = _with_transport_key(
        (
            *_frozen_servers("rl", frozen_models(config), paths, head, _threads(head, infer_at_once) | waits),
            *_with_key(servers, orchestrator, config.orchestrator.client, site),
            *_trainer("rl", ranks, paths, train_sites, envs, *broadcast, *members, *sockets, *resume),
        ),
        site,
    )
    return Job(
        "rl",
        paths,
        processes,
        _resources(processes),
        component_configs(config),
        _headline(demand, config, site),
        _stopping(config.trainer.ckpt),
        _stall_limits(config.stall),
        _trace_mib(config.trace),
        tuple(each.name for each in site.nodes),
        _resume(config.trainer.ckpt),
    )


def plan_eval(config: OfflineEvalConfig, paths: RunPaths, site: Site, resume_step: int | None = None) -> Job:
    """Inference server (unless the config has none) and evaluator, which finds by itself what is left to do."""
    own_cores = {} if frozen_judges(config.judge, config.device) else _spins(site)
    processes = _evaluating("eval", config, paths, (site,), (_threads(site, 1) | own_cores,))
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


def plan_server(command: str, config: InferenceConfig, paths: RunPaths, site: Site, waits_for: Path) -> ProcessSpec:
    """An inference server by itself, on `inference_url(site)`. It loads its model once the file `waits_for` exists."""
    env = _threads(site, 1) | _spins(site) | {CLEARANCE_VARIABLE: str(waits_for)}
    (server,) = _servers(command, config, paths, (site,), (env,))
    return replace(server, secrets={ENGINE_KEY_VARIABLE: site.engine_key})


def inference_url(site: Site) -> str:
    """The address of an inference server on the port that the launch has chosen."""
    return f"http://{site.address}:{site.ports.inference}"


def component_configs(config: RLConfig) -> dict[str, BaseSettings]:
    """What an RL run writes to `OUT/configs`: the whole, and each component's section."""
    sections: dict[str, BaseSettings] = {
        "rl": config,
        "trainer": config.trainer,
        "orchestrator": config.orchestrator,
        **{each.process: each.server for each in frozen_models(config)},
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


def _threads(site: Site, processes: int) -> dict[str, str]:
    return {} if site.device == "cuda" else thread_env(site.cores, processes, site.env)


def _processes_at_once(demand: Demand, config: RLConfig) -> tuple[int, int]:
    """Number of processes that compute at the same time, on a node of inference and on one of the trainer."""
    if demand.infer_nodes:
        return demand.infer, demand.train
    # At async level 0 inference and trainer take turns.
    both = demand.infer + demand.train if config.orchestrator.max_async_level else max(demand.infer, demand.train)
    return both, both


def _spins(site: Site) -> dict[str, str]:
    """Let the threads of a CPU process spin. Only if no other process of the launch computes at the same time."""
    return spin_env(site.env) if site.device == "cpu" else {}


def _spins_in_turns(config: RLConfig, site: Site) -> dict[str, str]:
    """At async level 0, inference and trainer take turns, so their threads may spin. A judge or teacher takes none."""
    takes_turns = config.orchestrator.max_async_level == 0 and not frozen_models(config)
    return _spins(site) if takes_turns else {}


def _servers(
    command: str,
    config: InferenceConfig | None,
    paths: RunPaths,
    sites: Sequence[Site],
    envs: Sequence[Mapping[str, str]],
) -> tuple[ProcessSpec, ...]:
    """An inference server on each node."""
    if config is None:
        return ()
    return tuple(
        _server(command, config, paths, replica, (site, env))
        for replica, (site, env) in enumerate(zip(sites, envs, strict=True))
    )


def _server(
    command: str, config: InferenceConfig, paths: RunPaths, replica: int, place: tuple[Site, Mapping[str, str]]
) -> ProcessSpec:
    site, env = place
    gpus = site.gpus.inference
    may_be_vllm = site.device == "cuda" and config.backend != "embedded"
    visible = mask_for_vllm(gpus, site.gpu_indices) if may_be_vllm else mask(gpus)
    env = _computing_env(command, "inference", site, env) | visible
    if site.name:
        env |= interface_env(site.env, site.interface, site.is_interface_configured)
    server = inference_process(paths, site.programs.inference, env, gpus, *_server_flags(site), replica=replica)
    return replace(server, node=site.node)


def _with_key(
    servers: Sequence[ProcessSpec], user: ProcessSpec, client: ClientConfig, site: Site
) -> tuple[ProcessSpec, ...]:
    """The launch's own servers and the process that sends them requests, with the key that both need."""
    if not servers:
        return (user,)
    key = named_key(client.api_key_var, site.env) or site.engine_key
    keyed = (replace(server, secrets={ENGINE_KEY_VARIABLE: key}) for server in servers)
    return *keyed, replace(user, secrets={**user.secrets, client.api_key_var: key})


def _frozen_servers(
    command: str, models: Sequence[FrozenModel], paths: RunPaths, site: Site, env: Mapping[str, str]
) -> Iterator[ProcessSpec]:
    """A server for each judge and for the teacher, with the launch's key."""
    gpus_of_each = site.gpus.frozen or ((),) * len(models)
    for model, port, own in zip(models, site.ports.frozen, gpus_of_each, strict=True):
        gpus = () if model.server.device == "cpu" else own or site.gpus.inference
        may_be_vllm = site.device == "cuda" and model.server.backend != "embedded" and bool(gpus)
        visible = mask_for_vllm(gpus, site.gpu_indices) if may_be_vllm else mask(gpus)
        is_as_configured = model.process == TEACHER and site.ports.inference is None
        flags = () if is_as_configured else ("--server.host", site.address, "--server.port", str(port))
        child = _computing_env(command, model.process, site, env) | visible
        server = frozen_process(paths, site.programs.inference, child, gpus, model.process, *flags)
        yield replace(server, node=site.node, secrets={ENGINE_KEY_VARIABLE: site.engine_key})


def _with_teacher(user: ProcessSpec, config: RLConfig, site: Site) -> ProcessSpec:
    """The orchestrator, with the key of the teacher and, if the run starts it, with its address.

    The key is in a variable of its own: the configured one may be that of the policy's servers, whose key it must not
    get.
    """
    teacher = config.orchestrator.teacher_model
    if teacher is None:
        return user
    flags: tuple[str, ...] = ("--teacher-model.client.api-key-var", TEACHER_KEY_VARIABLE)
    key, env = named_key(teacher.client.api_key_var, site.env), user.env
    ports = dict(zip((each.process for each in frozen_models(config)), site.ports.frozen, strict=True))
    if TEACHER in ports:
        key, url = site.engine_key, teacher.client.base_url[0]
        if site.ports.inference is not None:
            url = f"http://{site.address}:{ports[TEACHER]}/v1"
            flags = (*flags, "--teacher-model.client.base-url", url)
        names = json.loads(env.get(SERVERS_VARIABLE, "{}")) | {url: TEACHER}
        env = {**env, SERVERS_VARIABLE: json.dumps(names)}
    secrets = {} if key is None else {TEACHER_KEY_VARIABLE: key}
    return replace(user, argv=(*user.argv, *flags), env=env, secrets={**user.secrets, **secrets})


def _with_judges(user: ProcessSpec, judges: Mapping[str, JudgeConfig], site: Site) -> ProcessSpec:
    """The process whose environments ask the judges, with the addresses of those that the run starts and their key."""
    ours = started_judges(judges)
    if not ours:
        return user
    urls = {name: f"http://{site.address}:{port}/v1" for name, port in zip(ours, site.ports.frozen, strict=False)}
    env = {**user.env, JUDGE_SERVERS_VARIABLE: json.dumps(urls)}
    return replace(user, env=env, secrets={**user.secrets, JUDGE_SERVER_KEY_VARIABLE: site.engine_key})


def _with_transport_key(processes: tuple[ProcessSpec, ...], site: Site) -> tuple[ProcessSpec, ...]:
    """Orchestrator and trainer, which may talk through sockets, with the key of these."""
    if site.transport_key is None:
        return processes
    key = {TRANSPORT_KEY_VARIABLE: site.transport_key}
    return tuple(
        replace(process, secrets={**process.secrets, **key}) if process.completes_run else process
        for process in processes
    )


def _trainer(
    command: str,
    ranks: TrainerRanks,
    paths: RunPaths,
    sites: Sequence[Site],
    envs: Sequence[Mapping[str, str]],
    *flags: str,
) -> tuple[ProcessSpec, ...]:
    """The ranks on each node, `ranks.count` on each."""
    total = len(sites) * ranks.count
    processes: list[ProcessSpec] = []
    for site, own in zip(sites, envs, strict=True):
        here = replace(ranks, first=len(processes), total=total)
        env = _computing_env(command, "trainer", site, own) | mask(site.gpus.trainer)
        if site.device == "cuda":
            env |= cuda_allocator_env(site.env)
        if total > 1:
            # One thread per rank on GPUs, as under torchrun. On CPUs the share of the cores is set already.
            env = {**thread_env(1, 1, site.env), **env}
            env |= interface_env(site.env, site.interface, site.is_interface_configured)
        on_node = here.processes(paths, site.programs.python, env, site.gpus.trainer, *flags)
        processes += [replace(process, node=site.node) for process in on_node]
    return tuple(processes)


def _child_env(command: str, child: str, site: Site, env: Mapping[str, str]) -> dict[str, str]:
    caches = cache_env(site.caches, child, site.env)
    return {**site.bytecode, **caches, **env, "WANDB_PROGRAM": command, "WANDB_ARGS": json.dumps(site.arguments)}


def _computing_env(command: str, child: str, site: Site, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a trainer or a server. Others do not get the allocator: the programs that an orchestrator's
    environments start would inherit it."""
    allocator = site.allocator if site.device == "cpu" else {}
    return {**_child_env(command, child, site, env), **allocator}


def _server_flags(site: Site) -> tuple[str, ...]:
    """Where a server listens, if its port was chosen at run time."""
    port = site.ports.inference
    return () if port is None else ("--server.host", site.address, "--server.port", str(port))


def _client_flags(config: InferenceConfig | None, sites: Sequence[Site]) -> tuple[str, ...]:
    """The addresses of the launch's own servers, if their ports were chosen at run time."""
    if config is None or any(site.ports.inference is None for site in sites):
        return ()
    return ("--client.base-url", ",".join(f"{inference_url(site)}/v1" for site in sites))


def _server_names(sites: Sequence[Site]) -> dict[str, str]:
    """The variable that tells a process which of several servers it waits for."""
    if len(sites) == 1:
        return {}
    names = {f"{inference_url(site)}/v1": replica_name(replica) for replica, site in enumerate(sites)}
    return {SERVERS_VARIABLE: json.dumps(names)}


def _broadcast_flags(config: RLConfig, head: Site) -> tuple[str, ...]:
    port = head.ports.broadcast
    if config.trainer.weight_broadcast.type != "nccl" or port is None:
        return ()
    return ("--weight_broadcast.host", head.address, "--weight_broadcast.port", str(port))


def _member_flags(config: RLConfig, head: Site, servers: int) -> tuple[str, ...]:
    """The number of receivers of weights where it is not that of GPUs: on a CPU, one embedded engine is one process."""
    is_embedded = head.device == "cpu" and config.inference is not None and config.inference.backend != "vllm"
    if config.trainer.weight_broadcast.type != "nccl" or not is_embedded:
        return ()
    return ("--weight_broadcast.inference_world_size", str(servers))


def _socket_flags(config: RLConfig, head: Site) -> tuple[str, ...]:
    """Where the trainer receives rollouts, on several nodes. On one, sockets need no address."""
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


def _headline(demand: Demand, config: RLConfig, site: Site) -> str:
    if site.nodes:
        return ""
    if site.device == "cuda":
        return f"inference on GPU {','.join(site.gpus.inference)}, trainer on GPU {','.join(site.gpus.trainer)}"
    why = 'device = "cpu"' if config.device == "cpu" else "no GPU here"
    counts = f"{demand.infer} inference + {demand.train} training, {site.cores} cores"
    return f"{why}: everything runs on the CPU ({counts})"
