"""A custom loss is called on made-up tensors before a model is loaded, and a fault is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from prime_rl.configs.algorithms import CustomLossConfig
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.rl.loss_trial import try_loss

IMPORTS = "import torch\nfrom prime_rl.trainer.rl.loss import LossOutputs\n"
LOGPROBS = "inputs.trainer_logprobs[inputs.loss_mask]"

GOOD = {
    "reinforce": f"return LossOutputs(-({LOGPROBS} * inputs.advantages[inputs.loss_mask]).sum())",
    "shape [1]": f"return LossOutputs({LOGPROBS}.sum()[None], {{'kl': {LOGPROBS}}})",
    "from a teacher": f"return LossOutputs((({LOGPROBS} - inputs.teacher_logprobs[inputs.loss_mask]) ** 2).sum())",
}
FAULTS = {
    "not summed": (f"return LossOutputs({LOGPROBS})", "its loss has the shape [3], not one number: sum it"),
    "tensor": (f"return {LOGPROBS}.sum()", "it returned a Tensor: return LossOutputs(loss)"),
    "nothing": ("pass", "it returned None: return LossOutputs(loss)"),
    "number": (f"return LossOutputs({LOGPROBS}.sum().item())", "it returned an object whose `loss` is a float"),
    "detached": (f"return LossOutputs({LOGPROBS}.detach().sum())", "its loss has no gradient: compute it from"),
    "other parameter": (
        "return LossOutputs(torch.ones(1, requires_grad=True).sum())",
        "its loss does not depend on `inputs.trainer_logprobs`",
    ),
    "deviation of one token": (
        f"return LossOutputs({LOGPROBS}.sum() / {LOGPROBS}.std())",
        "its loss is nan for a sequence with 1 trained tokens",
    ),
    "gradient of a root at 0": (
        f"return LossOutputs(({LOGPROBS} * 0).sqrt().sum())",
        "its gradient is nan for a sequence with 3 trained tokens",
    ),
    "raises": (
        "return LossOutputs(inputs.logprobs.sum())",
        "called on 6 tokens, it raised AttributeError: 'LossInputs' object has no attribute 'logprobs' (raises.py, "
        "line 4)",
    ),
    "metrics": (f"return LossOutputs({LOGPROBS}.sum(), [1.0])", "its metrics are a list, not a dict of tensors"),
    "metric": (
        f"return LossOutputs({LOGPROBS}.sum(), {{'kl': 0.5}})",
        "its metric 'kl' is a float, not a tensor: write torch.tensor(value)",
    ),
}


def tried(name: str, body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = name.replace(" ", "_").replace("[", "").replace("]", "")
    (folder / f"{module}.py").write_text(f"{IMPORTS}def loss(inputs):\n    {body}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", list(sys.path))  # the import adds the folder
    try_loss(CustomLossConfig(type="custom", import_path=f"{module}:loss"), torch.device("cpu"))


@pytest.mark.parametrize("name", GOOD)
def test_a_loss_that_trains_is_not_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(name, GOOD[name], tmp_path, monkeypatch)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, fault = FAULTS[name]
    with pytest.raises(TrainerError) as caught:
        tried(name, body, tmp_path, monkeypatch)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("trainer.loss.import_path = '")
    assert fault in line


def test_a_loss_that_asks_for_a_gpu_is_left_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    body = "raise RuntimeError('No CUDA GPUs are available')"
    tried("on a gpu", body, tmp_path, monkeypatch)
