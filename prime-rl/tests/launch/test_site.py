"""Who gets which GPU of a job. Ids are opaque: they are moved around, never computed with."""

from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.launch.devices import GpuAssignment, mask_for_vllm
from prime_rl.launch.placement import Device, ResourceRequest, Sharing, place
from prime_rl.launch.plan import rl_request
from prime_rl.utils.errors import DeviceError


@pytest.fixture
def gpu_machine(tmp_path: Path) -> Path:
    """A `/dev` with four GPUs."""
    for index in range(4):
        (tmp_path / f"nvidia{index}").touch()
    return tmp_path


INDICES = {"GPU-1a2b3c": "0", "GPU-1a9999": "1", "GPU-77": "2"}


def config(**values: object) -> RLConfig:
    return RLConfig.model_validate({"trainer": {}, "orchestrator": {}, "inference": {}, "device": "cpu", **values})


def placed(ids: str, demand: ResourceRequest, **sharing: bool) -> GpuAssignment:
    """Where a demand goes on a machine without GPUs, for which ids are only words."""
    return place(demand, Sharing(**sharing), {"CUDA_VISIBLE_DEVICES": ids})[1]


def test_the_first_go_to_inference_and_the_next_to_the_trainer() -> None:
    assert placed("6,GPU-x,0", ResourceRequest("cpu", 1, 2)) == GpuAssignment(("6",), ("GPU-x", "0"))


def test_more_gpus_than_needed_are_left_alone() -> None:
    assert placed("7,GPU-3,5,1", ResourceRequest("cpu", 1, 2)) == GpuAssignment(("7",), ("GPU-3", "5"))


def test_in_single_gpu_mode_both_get_the_one() -> None:
    assert placed("MIG-1", ResourceRequest("cpu", 1, 1), shares_gpus=True, exact_gpus=True) == GpuAssignment(
        ("MIG-1",), ("MIG-1",)
    )


@pytest.mark.parametrize(
    ("gpus", "single", "fault"),
    [
        ("0,1", False, r"1 inference \+ 2 training GPUs are 3, but 2 can be used here \(0,1\)"),
        ("0,1,2,3", False, r"are 3, but 4 can be used here \(0,1,2,3\): set CUDA_VISIBLE_DEVICES"),
        ("0,1,2", True, r"2 shared GPUs are needed, but 3 can be used here"),
    ],
)
def test_where_gpus_are_granted_any_other_number_is_refused(
    gpus: str, single: bool, fault: str, gpu_machine: Path
) -> None:
    sharing = Sharing(exact_gpus=True, shares_gpus=single)
    with pytest.raises(DeviceError, match=fault):
        place(ResourceRequest("cuda", 1, 2), sharing, {"CUDA_VISIBLE_DEVICES": gpus}, gpu_machine)


def test_vllm_gets_indices_for_ids_because_it_reads_integers() -> None:
    assert mask_for_vllm(["GPU-77", "GPU-1a2b3c"], INDICES) == {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_the_beginning_of_an_id_is_enough_when_it_fits_one_gpu() -> None:
    assert mask_for_vllm(["GPU-1a2"], INDICES)["CUDA_VISIBLE_DEVICES"] == "0"
    assert mask_for_vllm(["GPU-1a"], INDICES) == {"CUDA_VISIBLE_DEVICES": "GPU-1a"}


@pytest.mark.parametrize("gpus", [["3", "1"], ["MIG-5"], ["GPU-unknown"], ["GPU-77", "MIG-5"]])
def test_other_masks_stay_as_they_were_given(gpus: list[str]) -> None:
    assert mask_for_vllm(gpus, INDICES) == {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def on_cpu(mask: str | None, **values: object) -> tuple[Device, GpuAssignment]:
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return place(rl_request(config(**values)), Sharing(exact_gpus=True), env)


def test_on_the_cpu_ids_are_split_when_they_fit_and_ignored_when_they_do_not() -> None:
    assert on_cpu("4,2") == ("cpu", GpuAssignment(("4",), ("2",)))
    assert on_cpu("4,2,3") == ("cpu", GpuAssignment())
    assert on_cpu(None) == ("cpu", GpuAssignment())


def test_a_config_may_name_its_gpus_itself() -> None:
    assert on_cpu("2,3", inference_gpu_ids=[3], trainer_gpu_ids=[3]) == ("cpu", GpuAssignment(("3",), ("3",)))
