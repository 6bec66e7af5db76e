"""GPUs are found without torch, and their ids stay the text that they were given as."""

import stat
from pathlib import Path

import pytest

from prime_rl.launch import devices
from prime_rl.launch.devices import GpuAssignment
from prime_rl.utils.errors import DeviceError
from prime_rl.utils.gpus import choose_device, masked_gpus, usable_gpus


def machine_with(dev: Path, gpus: int) -> Path:
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{index}" for index in range(gpus))):
        (dev / name).touch()
    return dev


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("3,5", ("3", "5")),
        (" 0 , 1 ", ("0", "1")),
        ("GPU-1a2b,MIG-GPU-3c/1/0", ("GPU-1a2b", "MIG-GPU-3c/1/0")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,-1,3", ("2",)),
    ],
)
def test_the_mask_is_read_as_cuda_reads_it(value: str, gpus: tuple[str, ...]) -> None:
    assert masked_gpus({"CUDA_VISIBLE_DEVICES": value}) == gpus


def test_no_mask_is_not_an_empty_one() -> None:
    assert masked_gpus({}) is None


def test_a_gpu_named_twice_is_an_error() -> None:
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES=1,1 lists a GPU twice"):
        masked_gpus({"CUDA_VISIBLE_DEVICES": "1,1"})


def test_a_machine_is_known_by_its_device_files_and_not_by_a_mask(tmp_path: Path) -> None:
    machine_with(tmp_path, 0)
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == ()
    machine_with(tmp_path, 4)
    assert usable_gpus({}, tmp_path) == ("0", "1", "2", "3")
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}, tmp_path) == ("3", "1")
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize(
    ("requested", "usable", "device"),
    [("auto", ["0"], "cuda"), ("auto", [], "cpu"), ("cpu", ["0"], "cpu"), ("cuda", ["0"], "cuda")],
)
def test_auto_takes_gpus_when_there_are_any(requested: str, usable: list[str], device: str) -> None:
    assert choose_device(requested, usable) == device


def test_cuda_without_a_gpu_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match='device = "cpu" runs on the CPU'):
        choose_device("cuda", [])


def test_inference_gets_the_first_and_the_trainer_the_next() -> None:
    assert devices.assign_gpus(("4", "7", "GPU-a", "1"), 1, 2) == GpuAssignment(("4",), ("7", "GPU-a"))


def test_named_gpus_may_overlap_and_leave_the_rest_to_the_other_side() -> None:
    assert devices.assign_gpus(("0", "1"), 1, 1, [0], [0]) == GpuAssignment(("0",), ("0",))
    assert devices.assign_gpus(("0", "1", "2"), 1, 2, [1], None) == GpuAssignment(("1",), ("0", "2"))


def test_gpus_that_are_not_there_are_named() -> None:
    with pytest.raises(DeviceError, match="GPU 6 cannot be used here; 0,1 can"):
        devices.assign_gpus(("0", "1"), 1, 1, [6], [1])
    with pytest.raises(DeviceError, match=r"2 inference \+ 1 training GPUs are more than can be used: 0,1"):
        devices.assign_gpus(("0", "1"), 2, 1)


def test_each_process_on_the_cpu_gets_its_share_of_the_cores_unless_told_otherwise() -> None:
    assert devices.thread_env(8, 3, {}) == {"OMP_NUM_THREADS": "2"}
    assert devices.thread_env(1, 3, {}) == {"OMP_NUM_THREADS": "1"}
    assert devices.thread_env(8, 3, {"OMP_NUM_THREADS": "4"}) == {}


def test_threads_with_cores_of_their_own_spin_for_a_moment_unless_told_otherwise() -> None:
    assert devices.spin_env({}) == {"GOMP_SPINCOUNT": "2000"}
    assert devices.spin_env({"GOMP_SPINCOUNT": "0"}) == {}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "--query-gpu=index,uuid) echo '0, GPU-aa11'; echo '1, GPU-bb22' ;;\n"
        "--query-compute-apps=pid,name) echo '4711, python' ;;\nesac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def test_nvidia_smi_tells_indices_and_who_computes(nvidia_smi: Path) -> None:
    assert devices.indices_by_uuid() == {"GPU-aa11": "0", "GPU-bb22": "1"}
    assert devices.processes_on(["0", "1"]) == ["4711, python"]


def test_without_nvidia_smi_nothing_is_known_and_nothing_fails(nvidia_smi: Path) -> None:
    nvidia_smi.unlink()
    assert devices.indices_by_uuid() == {}
    assert devices.processes_on(["0"]) == []
