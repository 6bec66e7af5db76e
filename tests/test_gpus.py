"""Who gets which GPU of a job. Ids are opaque: they are moved around, never computed with."""

import pytest

from medarc_rl.errors import UsageError
from medarc_rl.launchers.gpus import mask_for_vllm, split_gpus
from medarc_rl.launchers.rl_local import choose_gpus
from prime_rl.configs.rl import RLConfig
from prime_rl.launch.devices import GpuAssignment

INDICES = {"GPU-1a2b3c": "0", "GPU-1a9999": "1", "GPU-77": "2"}


def config(**values: object) -> RLConfig:
    return RLConfig.model_validate({"trainer": {}, "orchestrator": {}, "inference": {}, "device": "cpu", **values})


def test_the_first_go_to_inference_and_the_next_to_the_trainer() -> None:
    assert split_gpus(["6", "GPU-x", "0"], 1, 2, single=False) == GpuAssignment(("6",), ("GPU-x", "0"))


def test_in_single_gpu_mode_both_get_the_one() -> None:
    assert split_gpus(["MIG-1"], 1, 1, single=True) == GpuAssignment(("MIG-1",), ("MIG-1",))


@pytest.mark.parametrize(
    ("gpus", "single", "fault"),
    [
        (["0", "1"], False, r"1 inference \+ 2 training GPUs are 3, but 2 can be used here \(0,1\)"),
        (["0", "1", "2", "3"], False, r"are 3, but 4 can be used here \(0,1,2,3\): set CUDA_VISIBLE_DEVICES"),
        ([], False, r"but 0 can be used here \(none\)"),
        (["0", "1"], True, r"single-GPU mode needs 1, but 2 can be used here"),
    ],
)
def test_any_other_number_of_gpus_is_refused(gpus: list[str], single: bool, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        split_gpus(gpus, 1, 2, single=single)


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


def test_on_the_cpu_ids_are_split_when_they_fit_and_ignored_when_they_do_not() -> None:
    assert choose_gpus(config(), {"CUDA_VISIBLE_DEVICES": "4,2"}) == ("cpu", GpuAssignment(("4",), ("2",)))
    assert choose_gpus(config(), {"CUDA_VISIBLE_DEVICES": "4,2,3"}) == ("cpu", GpuAssignment())
    assert choose_gpus(config(), {}) == ("cpu", GpuAssignment())


def test_a_config_may_name_its_gpus_itself() -> None:
    named = config(inference_gpu_ids=[3], trainer_gpu_ids=[3])
    assert choose_gpus(named, {"CUDA_VISIBLE_DEVICES": "2,3"}) == ("cpu", GpuAssignment(("3",), ("3",)))
