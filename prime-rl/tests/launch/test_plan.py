"""Plans of `sft`, `rl` and `eval`: values only, so that GPUs can be planned without any."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch import ProcessSpec
from prime_rl.launch.devices import GpuAssignment
from prime_rl.launch.job import Job, Resources
from prime_rl.launch.placement import Device, Placement, Ports, ResourceRequest
from prime_rl.launch.plan import plan_eval, plan_rl, plan_server, plan_sft, sft_request
from prime_rl.launch.programs import Programs
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import CLEARANCE_VARIABLE, SERVERS_VARIABLE

PATHS = RunPaths(Path("out"))


def config(**values: object) -> RLConfig:
    return RLConfig.model_validate({"trainer": {}, "orchestrator": {}, "inference": {}, "output_dir": "out", **values})


def site(device: Device = "cuda", gpus: GpuAssignment | None = None, **env: str) -> Placement:
    return Placement(
        programs=Programs("/venv/python", "/venv/inference", "/venv/orchestrator"),
        device=device,
        gpus=gpus or GpuAssignment(("0",), ("1",)),
        gpu_indices={"GPU-aa": "4", "GPU-bb": "5"},
        cores=8,
        env=env,
        caches=Path("/caches"),
        ports=Ports(inference=8001, broadcast=8003),
        meeting_place="/run/ranks/store",
        engine_key="the-key",
        arguments=("@", "rl.toml"),
    )


def plan(config: RLConfig, site: Placement, resume_step: int | None = None) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan_rl(config, PATHS, site, resume_step).processes}


def jobs_on(gpus: GpuAssignment, backend: str = "auto") -> dict[str, Job]:
    """The same trio planned by every command."""
    here = site(gpus=gpus)
    eval_values = {"environment_ids": ["x"], "inference": {"backend": backend}, "output_dir": "out"}
    return {
        "rl": plan_rl(config(inference={"backend": backend}), PATHS, here, None),
        "eval": plan_eval(OfflineEvalConfig.model_validate(eval_values), PATHS, here),
        "sft": plan_sft(SFTConfig.model_validate({"output_dir": "out"}), PATHS, here, None),
    }


def test_children_start_in_the_order_in_which_they_need_each_other() -> None:
    assert list(plan(config(), site())) == ["inference", "orchestrator", "trainer"]


def test_the_key_of_the_server_reaches_only_the_processes_that_need_it_and_is_never_printed() -> None:
    job = plan_rl(config(orchestrator={"client": {"api_key_var": "MY_KEY"}}), PATHS, site(), None)

    assert {spec.name: spec.secrets for spec in job.processes} == {
        "inference": {"VLLM_API_KEY": "the-key"},
        "orchestrator": {"MY_KEY": "the-key"},
        "trainer": {},
    }
    assert "the-key" not in "\n".join([*job.describe(), repr(job), repr(site())])


def test_a_key_that_the_user_sets_is_kept() -> None:
    processes = plan(config(), site(VLLM_API_KEY="mine"))

    assert processes["inference"].secrets == processes["orchestrator"].secrets == {"VLLM_API_KEY": "mine"}


def test_a_teacher_elsewhere_never_gets_the_key_of_the_policys_servers() -> None:
    """Both clients name VLLM_API_KEY by default, in which the launch passes the key that it makes."""
    elsewhere = config(orchestrator={"teacher_model": {"client": {"base_url": ["http://teacher:8000/v1"]}}})
    orchestrator = plan(elsewhere, site())["orchestrator"]
    assert orchestrator.secrets == {"VLLM_API_KEY": "the-key"}
    assert orchestrator.argv[-2:] == ("--teacher-model.client.api-key-var", "TEACHER_KEY")
    named = {"base_url": ["http://teacher:8000/v1"], "api_key_var": "MINE"}
    orchestrator = plan(config(orchestrator={"teacher_model": {"client": named}}), site(MINE="own"))["orchestrator"]
    assert orchestrator.secrets == {"VLLM_API_KEY": "the-key", "TEACHER_KEY": "own"}


@pytest.mark.parametrize("chosen", [True, False])
def test_a_teacher_of_the_run_has_gpus_a_key_and_a_port(chosen: bool) -> None:
    here = site(gpus=GpuAssignment(("0",), ("1",), (("2", "3"),)))
    here = replace(here, ports=replace(here.ports if chosen else Ports(), frozen=(8005,)))
    processes = plan(config(deployment={"num_teacher_gpus": 2}), here)
    teacher, orchestrator = processes["teacher_inference"], processes["orchestrator"]
    assert (teacher.gpus, teacher.env["CUDA_VISIBLE_DEVICES"]) == (("2", "3"), "2,3")
    assert teacher.secrets == {"VLLM_API_KEY": "the-key"}
    assert orchestrator.secrets == {"VLLM_API_KEY": "the-key", "TEACHER_KEY": "the-key"}
    # Ports are those of the config unless the launch chooses ports.
    assert ("--server.port" in teacher.argv) == chosen
    url = "http://127.0.0.1:8005/v1" if chosen else "http://localhost:8001/v1"
    assert (url in orchestrator.argv) == chosen
    assert json.loads(orchestrator.env[SERVERS_VARIABLE]) == {url: "teacher_inference"}


def test_the_key_of_a_foreign_server_is_left_to_the_environment() -> None:
    values = {"inference": None, "output_dir": "out"}

    (orchestrator,) = (
        spec
        for spec in plan_rl(RLConfig.model_validate(values), PATHS, site(), None).processes
        if spec.name == "orchestrator"
    )

    assert orchestrator.secrets == {}


def test_a_job_names_the_gpus_of_each_component_once() -> None:
    here = site(gpus=GpuAssignment(("0",), ("1", "2")))
    two_ranks = config(deployment={"num_train_gpus": 2})
    assert plan_rl(two_ranks, PATHS, here, None).gpus == {"inference": ("0",), "trainer": ("1", "2")}


def test_a_job_counts_each_gpu_once() -> None:
    assert plan_rl(config(), PATHS, site(), None).resources == Resources(nodes=1, gpus_per_node=2)
    shared = site(gpus=GpuAssignment(("0",), ("0",)))
    assert plan_rl(config(), PATHS, shared, None).resources == Resources(nodes=1, gpus_per_node=1)


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_every_rank_of_a_trainer_is_a_process_that_meets_the_others_on_loopback(command: str) -> None:
    deployment = {"deployment": {"num_train_gpus": 2}} if command == "rl" else {"deployment": {"num_gpus": 2}}
    here = site(gpus=GpuAssignment(("0",), ("1", "2")))
    if command == "rl":
        job = plan_rl(config(**deployment), PATHS, here, None)
    else:
        job = plan_sft(SFTConfig.model_validate({"output_dir": "out", **deployment}), PATHS, here, None)
    ranks = [spec for spec in job.processes if spec.name.startswith("trainer")]
    assert [(spec.name, spec.rank, spec.env["RANK"], spec.env["LOCAL_RANK"]) for spec in ranks] == [
        ("trainer", 0, "0", "0"),
        ("trainer_rank_1", 1, "1", "1"),
    ]
    for spec in ranks:
        assert spec.argv[:3] == ("/venv/python", "-m", f"prime_rl.trainer.{command}.train")
        assert spec.gpus == ("1", "2")
        assert spec.completes_run
        expected = {
            "WORLD_SIZE": "2",
            "PRIME_RL_STORE": "/run/ranks/store",
            "CUDA_VISIBLE_DEVICES": "1,2",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert {name: spec.env[name] for name in expected} == expected
    assert [spec.log.name for spec in ranks] == ["trainer.log", "trainer_rank_1.log"]


def test_one_rank_keeps_all_threads() -> None:
    assert "OMP_NUM_THREADS" not in plan(config(), site())["trainer"].env


def test_what_the_user_set_stays() -> None:
    user = {"PYTORCH_ALLOC_CONF": "backend:native", "GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "3"}
    here = site(gpus=GpuAssignment(("0",), ("1", "2")), **user)
    trainer = plan(config(deployment={"num_train_gpus": 2}), here)["trainer"]
    assert not {"PYTORCH_CUDA_ALLOC_CONF", *user} & set(trainer.env)


@pytest.mark.parametrize(("backend", "mask"), [("auto", "4"), ("vllm", "4"), ("embedded", "GPU-aa")])
def test_every_command_gives_vllm_an_index_for_an_id(backend: str, mask: str) -> None:
    jobs = jobs_on(GpuAssignment(("GPU-aa",), ("GPU-bb",)), backend)
    assert {jobs[name].process("inference").env["CUDA_VISIBLE_DEVICES"] for name in ("rl", "eval")} == {mask}
    assert {jobs[name].process("trainer").env["CUDA_VISIBLE_DEVICES"] for name in ("rl", "sft")} == {"GPU-bb"}


def test_every_process_of_every_command_has_caches_of_its_own() -> None:
    jobs = jobs_on(GpuAssignment(("0",), ("1",)))
    for job in jobs.values():
        assert [spec.env["XDG_CACHE_HOME"] for spec in job.processes] == [
            f"/caches/{spec.name}/xdg" for spec in job.processes
        ]


def test_a_compile_cache_that_the_user_names_stays_warm() -> None:
    env = plan(config(), site(TRITON_CACHE_DIR="/warm"))["trainer"].env
    assert "TRITON_CACHE_DIR" not in env
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/caches/trainer/inductor"


def test_without_ports_of_its_own_a_launch_uses_those_of_the_config() -> None:
    here = replace(site(), ports=Ports())
    specs = plan(config(), here)
    assert specs["inference"].argv[1:] == ("@", "out/configs/inference.toml")
    assert specs["orchestrator"].argv[1:] == ("@", "out/configs/orchestrator.toml")


def test_the_evaluator_asks_the_server_that_was_started_for_it() -> None:
    evaluator = jobs_on(GpuAssignment(("0",), ()))["eval"].process("evaluator")
    assert evaluator.argv[-2:] == ("--client.base-url", "http://127.0.0.1:8001/v1")
    assert evaluator.env["CUDA_VISIBLE_DEVICES"] == ""


def test_both_ends_of_an_nccl_broadcast_get_its_port() -> None:
    specs = plan(config(weight_broadcast={"type": "nccl"}), site())
    for name in ("orchestrator", "trainer"):
        argv = specs[name].argv
        assert argv[argv.index("--weight_broadcast.port") + 1] == "8003"
        assert argv[argv.index("--weight_broadcast.host") + 1] == "127.0.0.1"
    assert "--weight_broadcast.port" not in plan(config(), site())["trainer"].argv


@pytest.mark.parametrize(("level", "threads"), [(1, "4"), (0, "8")])
def test_on_the_cpu_the_cores_are_shared_by_those_who_compute_at_once(level: int, threads: str) -> None:
    specs = plan(config(max_async_level=level), site("cpu"))
    assert {spec.env["OMP_NUM_THREADS"] for spec in specs.values()} == {threads}


@pytest.mark.parametrize(
    ("values", "spins"),
    [
        ({"max_async_level": 0}, True),
        ({"max_async_level": 1}, False),
        ({"max_async_level": 0, "orchestrator": {"judge": {"strict": {"model": "judge"}}}}, False),
    ],
)
def test_threads_spin_where_inference_and_trainer_take_turns(values: dict, spins: bool) -> None:
    here = site("cpu")
    judges = len(values.get("orchestrator", {}))
    here = replace(here, ports=replace(here.ports, frozen=(8005,) * judges))
    found = plan(config(device="cpu", **values), here)
    assert {name for name in ("inference", "trainer") if "GOMP_SPINCOUNT" in found[name].env} == (
        {"inference", "trainer"} if spins else set()
    )
    assert "GOMP_SPINCOUNT" not in found["orchestrator"].env


@pytest.mark.parametrize("judges", [{}, {"strict": {"model": "judge"}}], ids=["alone", "with a judge"])
def test_threads_of_an_evaluation_spin_unless_a_judge_computes_too(judges: dict) -> None:
    here = site("cpu")
    here = replace(here, ports=replace(here.ports, frozen=(8005,) * len(judges)))
    values = {"environment_ids": ["x"], "inference": {"device": "cpu"}, "judge": judges, "output_dir": "out"}
    processes = {each.name: each for each in plan_eval(OfflineEvalConfig.model_validate(values), PATHS, here).processes}
    assert ("GOMP_SPINCOUNT" in processes["inference"].env) is (not judges)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_threads_of_a_server_that_is_planned_alone_spin_on_a_cpu(device: str) -> None:
    server = plan_server("lm-eval", InferenceConfig.model_validate({}), PATHS, site(device), Path("tasks_found"))
    assert ("GOMP_SPINCOUNT" in server.env) is (device == "cpu")


TCMALLOC = "/usr/lib/libtcmalloc_minimal.so.4"
ALLOCATOR = {"LD_PRELOAD": TCMALLOC}


def preloads_of(job: Job) -> dict[str, str | None]:
    return {each.name: each.env.get("LD_PRELOAD") for each in job.processes}


def test_processes_that_compute_on_a_cpu_allocate_with_tcmalloc() -> None:
    here = replace(site("cpu"), allocator=ALLOCATOR)
    evaluation = {"environment_ids": ["x"], "inference": {"device": "cpu"}, "output_dir": "out"}
    judge = {"strict": {"model": "judge"}}
    judged = replace(here, ports=replace(here.ports, frozen=(8005,)))

    assert preloads_of(plan_sft(SFTConfig.model_validate({"output_dir": "out"}), PATHS, here, None)) == {
        "trainer": TCMALLOC
    }
    assert preloads_of(plan_rl(config(orchestrator={"judge": judge}), PATHS, judged, None)) == {
        "judge_strict": TCMALLOC,
        "inference": TCMALLOC,
        "orchestrator": None,
        "trainer": TCMALLOC,
    }
    assert preloads_of(plan_eval(OfflineEvalConfig.model_validate(evaluation), PATHS, here)) == {
        "inference": TCMALLOC,
        "evaluator": None,
    }


def test_processes_on_a_gpu_keep_the_systems_allocator() -> None:
    here = replace(site("cuda"), allocator=ALLOCATOR)
    assert set(preloads_of(plan_rl(config(), PATHS, here, None)).values()) == {None}


def test_resuming_from_the_latest_names_the_step_and_from_a_step_says_it_once() -> None:
    latest = plan(config(ckpt={"resume_step": -1}), site(), resume_step=6)
    assert latest["trainer"].argv[-2:] == latest["orchestrator"].argv[-2:] == ("--ckpt.resume-step", "6")
    assert "--ckpt.resume-step" not in plan(config(ckpt={"resume_step": 6}), site(), resume_step=6)["trainer"].argv
    auto = plan(config(ckpt={"resume_step": "auto"}), site(), resume_step=None)
    assert auto["trainer"].argv[-1] == auto["orchestrator"].argv[-1] == "--no-ckpt.resume-step"


def test_the_engine_of_an_rl_run_waits_for_its_environments() -> None:
    processes = plan(config(), site())
    assert processes["inference"].env[CLEARANCE_VARIABLE] == str(PATHS.orchestrator.environments_checked)
    assert CLEARANCE_VARIABLE not in processes["trainer"].env
    evaluation = jobs_on(GpuAssignment(("0",), ()))["eval"]
    assert all(CLEARANCE_VARIABLE not in process.env for process in evaluation.processes)


def on_nodes(count: int) -> Placement:
    """Nodes 10.0.0.1, 10.0.0.2 and so on."""
    each = tuple(
        replace(site(), node=node, name=f"n{node}", address=f"10.0.0.{node + 1}", interface=f"eth{node}")
        for node in range(count)
    )
    return replace(each[0], nodes=each)


def test_the_orchestrator_knows_the_process_behind_each_of_several_servers() -> None:
    nodes = {"type": "multi_node", "num_train_nodes": 1, "num_infer_nodes": 2, "gpus_per_node": 1}
    processes = plan(config(slurm={}, deployment=nodes), on_nodes(3))
    servers = {name: spec.heartbeat for name, spec in processes.items() if spec.heartbeat and "inference" in name}
    assert servers == {name: PATHS.heartbeat(name) for name in ("inference", "inference_1")}
    names = {"http://10.0.0.1:8001/v1": "inference", "http://10.0.0.2:8001/v1": "inference_1"}
    assert json.loads(processes["orchestrator"].env[SERVERS_VARIABLE]) == names
    assert SERVERS_VARIABLE not in plan(config(), site())["orchestrator"].env


def test_on_several_nodes_each_has_a_server_for_the_evaluation_and_trains_on_its_other_gpus() -> None:
    nodes = {"type": "multi_node", "num_nodes": 2, "gpus_per_node": 3, "network_interface": "eth0,eth1"}
    values = {"output_dir": "out", "slurm": {}, "deployment": nodes, "eval": {"env": [{"id": "x"}]}}
    sft = SFTConfig.model_validate({**values, "data": {"type": "fake", "batch_size": 4}})
    assert sft_request(sft) == ResourceRequest("auto", infer=1, train=2, train_nodes=2, interface="eth0,eth1")
    here = on_nodes(2)
    nodes_of = tuple(
        replace(each, gpus=GpuAssignment(("0",), ("1", "2")), is_interface_configured=True) for each in here.each
    )
    job = plan_sft(sft, PATHS, replace(nodes_of[0], nodes=nodes_of), None)
    assert {spec.name: (spec.node, spec.gpus, spec.if_lost is not None) for spec in job.processes} == {
        "trainer": (0, ("1", "2"), False),
        "trainer_rank_1": (0, ("1", "2"), False),
        "trainer_rank_2": (1, ("1", "2"), False),
        "trainer_rank_3": (1, ("1", "2"), False),
        "inference": (0, ("0",), True),
        "inference_1": (1, ("0",), True),
        "evaluator": (0, (), True),
    }
    assert "--client.base-url http://10.0.0.1:8001/v1,http://10.0.0.2:8001/v1" in " ".join(
        job.process("evaluator").argv
    )
    for name, interface in (("trainer", "eth0"), ("trainer_rank_2", "eth1"), ("inference_1", "eth1")):
        env = job.process(name).env
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")


@pytest.mark.parametrize(
    ("device", "backend", "members"), [("cpu", "auto", "2"), ("cpu", "vllm", None), ("cuda", "auto", None)]
)
def test_an_embedded_engine_on_a_cpu_is_one_receiver_of_weights_whatever_its_number_of_gpus(
    device: Device, backend: str, members: str | None
) -> None:
    nodes = {"type": "multi_node", "num_train_nodes": 1, "num_infer_nodes": 2, "gpus_per_node": 4}
    run = config(
        slurm={}, deployment=nodes, weight_broadcast={"type": "nccl"}, max_async_level=1, inference={"backend": backend}
    )
    assert run.trainer.weight_broadcast.inference_world_size == 8
    here = tuple(replace(each, device=device) for each in on_nodes(3).each)
    processes = plan(run, replace(here[0], nodes=here))
    flag = "--weight_broadcast.inference_world_size"
    assert flag not in processes["orchestrator"].argv
    argv = processes["trainer"].argv
    assert (argv[argv.index(flag) + 1] if flag in argv else None) == members
