"""The plan of a run on GPUs: values only, so no GPU is needed to look at it."""

from pathlib import Path

import pytest

from medarc_rl.launchers.rl_plan import Ports, Site, plan_run
from prime_rl.configs.rl import RLConfig
from prime_rl.launch import ProcessSpec
from prime_rl.launch.devices import GpuAssignment
from prime_rl.launch.programs import Programs
from prime_rl.run.paths import RunPaths

PATHS = RunPaths(Path("out"))


def config(**values: object) -> RLConfig:
    return RLConfig.model_validate({"trainer": {}, "orchestrator": {}, "inference": {}, "output_dir": "out", **values})


def site(device: str = "cuda", gpus: GpuAssignment | None = None, **env: str) -> Site:
    return Site(
        programs=Programs("/venv/python", "/venv/torchrun", "/venv/inference", "/venv/orchestrator"),
        device=device,
        gpus=gpus or GpuAssignment(("0",), ("1",)),
        gpu_indices={"GPU-aa": "4", "GPU-bb": "5"},
        cores=8,
        env=env,
        caches=Path("/caches"),
        ports=Ports(inference=8001, rendezvous=8002, broadcast=8003),
        launch_id="launch",
    )


def plan(config: RLConfig, site: Site, resume_step: int | None = None) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan_run(config, PATHS, site, resume_step)}


def test_children_start_in_the_order_in_which_they_need_each_other() -> None:
    assert list(plan(config(), site())) == ["inference", "orchestrator", "trainer"]


def test_a_trainer_on_gpus_always_runs_under_torchrun() -> None:
    trainer = plan(config(), site())["trainer"]
    assert trainer.argv[0] == "/venv/torchrun"
    assert {"--rdzv-endpoint=localhost:8002", "--rdzv-id=launch", "--nproc-per-node=1"} <= set(trainer.argv)
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert trainer.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "OMP_NUM_THREADS" not in trainer.env


def test_what_the_user_set_for_the_allocator_stays() -> None:
    assert "PYTORCH_CUDA_ALLOC_CONF" not in plan(config(), site(PYTORCH_ALLOC_CONF="backend:native"))["trainer"].env


@pytest.mark.parametrize(("backend", "mask"), [("auto", "4"), ("vllm", "4"), ("embedded", "GPU-aa")])
def test_only_what_may_be_vllm_gets_an_index_for_an_id(backend: str, mask: str) -> None:
    gpus = GpuAssignment(("GPU-aa",), ("GPU-bb",))
    specs = plan(config(inference={"backend": backend}), site(gpus=gpus))
    assert specs["inference"].env["CUDA_VISIBLE_DEVICES"] == mask
    assert specs["trainer"].env["CUDA_VISIBLE_DEVICES"] == "GPU-bb"


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


def test_resuming_from_the_latest_names_the_step_and_from_a_step_says_it_once() -> None:
    latest = plan(config(ckpt={"resume_step": -1}), site(), resume_step=6)
    assert latest["trainer"].argv[-2:] == latest["orchestrator"].argv[-2:] == ("--ckpt.resume-step", "6")
    assert "--ckpt.resume-step" not in plan(config(ckpt={"resume_step": 6}), site(), resume_step=6)["trainer"].argv
