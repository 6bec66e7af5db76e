"""Optimizers compared with references, and states in host memory compared with states on the device."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from prime_rl.checks.memory.training import quantized_bytes
from prime_rl.configs.optim import LOW_BITS
from prime_rl.configs.trainer import (
    AdafactorConfig,
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
)
from prime_rl.trainer.checkpoints.state import TrainedModel
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import (
    _rounded,
    clip_gradients,
    global_norm,
    offload_states,
    orthogonalised,
    setup_optimizer,
    split_for_muon,
)
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.transport.loading import full_tensor
from prime_rl.utils.logger import setup_logger

CPU = torch.device("cpu")
OPTIMIZERS = [
    pytest.param(AdamWConfig(lr=1e-2, weight_decay=0.1), id="adamw"),
    pytest.param(SGDConfig(lr=1e-2, weight_decay=0.1), id="sgd"),
    pytest.param(MuonConfig(lr=1e-2, weight_decay=0.1), id="muon"),
    pytest.param(AdafactorConfig(lr=1e-2, weight_decay=0.1), id="adafactor"),
]
LOW_BIT = [
    pytest.param(AdamW8bitConfig(lr=1e-2, weight_decay=0.1), id="adamw8bit"),
    pytest.param(AdamW4bitConfig(lr=1e-2, weight_decay=0.1), id="adamw4bit"),
]


class Net(nn.Module):
    """One parameter of each kind that optimizers treat differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(12, 6)
        self.wide = nn.Linear(6, 10)
        self.tall = nn.Linear(10, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 4, 8))
        self.lm_head = nn.Linear(8, 12, bias=False)


def give_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def updated(config: OptimizerConfig, schedule: SchedulerConfig | None = None) -> dict[str, Tensor]:
    """The parameters after four updates."""
    net = Net()
    optimizer = setup_optimizer(config, net)
    scheduler = setup_scheduler(schedule or ConstantSchedulerConfig(), optimizer, 4)
    for seed in range(4):
        give_gradients(net, seed)
        optimizer.step()
        scheduler.step()
    return dict(net.named_parameters())


def test_adamw_follows_its_formula() -> None:
    config = AdamWConfig(lr=1e-2, betas1=0.8, betas2=0.9, weight_decay=0.1)
    net = Net()
    expected = net.wide.weight.detach().double()
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for update in range(1, 5):
        give_gradients(net, update - 1)
        gradient = net.wide.weight.grad.double()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        step = (mean / (1 - 0.8**update)) / ((square / (1 - 0.9**update)).sqrt() + 1e-8)
        expected = expected * (1 - 1e-2 * 0.1) - 1e-2 * step
    torch.testing.assert_close(updated(config)["wide.weight"].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("config", LOW_BIT)
def test_adamw_of_few_bits_is_that_of_its_package(
    config: AdamW8bitConfig | AdamW4bitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, where rows are whole blocks; otherwise as if they were filled up with zeros."""
    low = LOW_BITS[config.type]
    if config.type == "adamw4bit":
        # In no extra: Transformers would load it in every process, which takes seconds.
        theirs_of = pytest.importorskip("torchao.optim", reason="needs torchao: `uv pip install torchao==0.18.0`")
        kinds = (theirs_of.AdamW4bit, partial(theirs_of.AdamW4bit, block_size=torch.inf))
        # Compiled, it takes minutes.
        monkeypatch.setattr("torch.compile", lambda update, **_: update)
    else:
        theirs_of = pytest.importorskip("bitsandbytes.optim", reason="needs the extra quantization")
        kinds = (theirs_of.AdamW8bit, theirs_of.AdamW32bit)
    torch.manual_seed(0)
    # The first is updated in several pieces.
    shapes = [(2100, 512), (3, 8, 256), (4096,), (512, 4), (3, 100), (20, 300)]
    net = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    columns = [low.columns(shape) or shape[-1] for shape in shapes]
    filled = [nn.functional.pad(own, (0, last - own.shape[-1])) for own, last in zip(net, columns, strict=True)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in filled]
    optimizer = setup_optimizer(config, net)
    # The packages quantize vectors and narrow matrices too.
    small = [parameter for parameter in theirs if parameter.ndim == 1 or parameter.shape[-1] < low.block]
    large = [parameter for parameter in theirs if parameter.ndim > 1 and parameter.shape[-1] >= low.block]
    references = [kind(of, lr=1e-2, weight_decay=0.1) for kind, of in zip(kinds, (large, small), strict=True)]
    for _ in range(5):
        for own, other in zip(net, theirs, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = nn.functional.pad(own.grad, (0, other.shape[-1] - own.shape[-1]))
        for each in (optimizer, *references):
            each.step()
    for own, other in zip(net, theirs, strict=True):
        assert torch.equal(own, other[..., : own.shape[-1]])
    held = [sum(each.nbytes for each in states_of(optimizer, parameter)) for parameter in net]
    assert held == [quantized_bytes(config.type, parameter.shape) for parameter in net], "what --estimate says"
    assert held[0] == net[0].numel() * low.state_bytes
    assert held[3] == net[3].numel() * 8


def test_4_bit_adamw_follows_its_formula() -> None:
    """Moments are the nearest of 16 levels, times the largest of their block, in the next update."""
    positive = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    signed = torch.tensor([-each for each in positive] + [0, *positive, 1], dtype=torch.float64)
    unsigned = torch.arange(1, 17, dtype=torch.float64) / 16

    def stored(moment: Tensor, levels: Tensor) -> Tensor:
        blocks = moment.view(-1, 128)
        largest = blocks.abs().amax(1, keepdim=True)
        return (levels[(blocks / largest).unsqueeze(-1).sub(levels).abs().argmin(-1)] * largest).view_as(moment)

    torch.manual_seed(0)
    net = nn.ParameterList([torch.randn(64, 256)])
    optimizer = setup_optimizer(AdamW4bitConfig(lr=1e-2, betas1=0.8, betas2=0.9, weight_decay=0.1), net)
    expected = net[0].detach().double()
    mean, square = torch.zeros_like(expected), torch.full_like(expected, 1e-12 / 16)
    for update in range(1, 5):
        net[0].grad = torch.randn_like(net[0])
        optimizer.step()
        gradient = net[0].grad.double()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        step = (mean / (1 - 0.8**update)) / ((square / (1 - 0.9**update)).sqrt() + 1e-8)
        expected = expected * (1 - 1e-2 * 0.1) - 1e-2 * step
        mean, square = stored(mean, signed), stored(square, unsigned)
    # A value between two levels may go to the other one in float32.
    assert ((net[0].detach() - expected).abs() > 1e-6).float().mean() < 1e-3


def needs_package_of(config: OptimizerConfig) -> None:
    if config.type == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return [state for name, state in optimizer.state[parameter].items() if name != "step"]


def test_sgd_follows_its_formula() -> None:
    config = SGDConfig(lr=1e-2, momentum=0.8, nesterov=True, weight_decay=0.1)
    net = Net()
    expected = net.wide.weight.detach().double()
    momentum = torch.zeros_like(expected)
    for seed in range(4):
        give_gradients(net, seed)
        gradient = net.wide.weight.grad.double() + 0.1 * expected
        momentum = gradient if seed == 0 else 0.8 * momentum + gradient
        expected = expected - 1e-2 * (gradient + 0.8 * momentum)
    torch.testing.assert_close(updated(config)["wide.weight"].double(), expected, atol=1e-6, rtol=0)


def test_adafactor_is_that_of_pytorch() -> None:
    config = AdafactorConfig(lr=1e-2, weight_decay=0.1)
    net = Net()
    reference = torch.optim.Adafactor(net.parameters(), lr=1e-2, weight_decay=0.1)
    for seed in range(4):
        give_gradients(net, seed)
        reference.step()
    expected = dict(net.named_parameters())
    for name, parameter in updated(config).items():
        torch.testing.assert_close(parameter, expected[name], atol=1e-7, rtol=1e-6)


def test_adafactor_updates_weights_in_bfloat16_from_means_in_float32() -> None:
    own, exact = Net().bfloat16(), Net().bfloat16().float()
    for net in (own, exact):
        optimizer = setup_optimizer(AdafactorConfig(lr=1e-2, weight_decay=0.0), net)
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    for parameter, expected in zip(own.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected.bfloat16(), rtol=2**-8, atol=0)


def test_noise_leaves_what_is_no_number() -> None:
    """On a GPU, NaN is 0x7fffffff: with noise, its bits are those of 0."""
    values = torch.tensor([2**31 - 1, -1, 0x7F800000], dtype=torch.int32).view(torch.float32).repeat(100)
    rounded = _rounded(values, torch.Generator().manual_seed(0))
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(rounded.isinf(), values.isinf())


ROUNDED = [
    pytest.param(AdamWConfig(lr=1e-4, weight_decay=0.0, stochastic_rounding=True), id="adamw"),
    pytest.param(AdamW8bitConfig(lr=1e-4, weight_decay=0.0, stochastic_rounding=True), id="adamw8bit"),
    pytest.param(AdamW4bitConfig(lr=1e-4, weight_decay=0.0, stochastic_rounding=True), id="adamw4bit"),
    pytest.param(AdafactorConfig(lr=1e-4, weight_decay=0.0, stochastic_rounding=True), id="adafactor"),
]


@pytest.mark.parametrize("config", ROUNDED)
def test_the_mean_of_rounded_updates_is_the_update(config: OptimizerConfig) -> None:
    """Of 100 updates, each is a fortieth of what the nearest number in bfloat16 is away."""
    needs_package_of(config)

    def moved(config: OptimizerConfig, dtype: torch.dtype) -> Tensor:
        net = nn.ParameterList([torch.ones(64, 512, dtype=dtype)])
        optimizer = setup_optimizer(config, net)
        for _ in range(100):
            net[0].grad = torch.ones_like(net[0])
            optimizer.step()
        return (1 - net[0].detach().float()).flatten()

    rounded, again = (moved(config, torch.bfloat16) for _ in range(2))
    wanted = moved(config.model_copy(update={"stochastic_rounding": False}), torch.float32)
    assert torch.equal(rounded, again)
    assert rounded.std() > 0.1 * wanted.mean(), "each value has its own noise"
    spread = float(rounded.std()) / math.sqrt(len(rounded))
    assert abs(float(rounded.mean() - wanted.mean())) < 4 * spread
    if config.type == "adamw":
        assert not moved(config.model_copy(update={"stochastic_rounding": False}), torch.bfloat16).any()


@pytest.mark.parametrize("config", ROUNDED)
def test_rounding_continues_bit_by_bit(config: OptimizerConfig) -> None:
    """From saved states in their own dtypes, also if they are on the host."""
    needs_package_of(config)
    straight, halves = Net().bfloat16(), Net().bfloat16()
    one, other = setup_optimizer(config, straight), setup_optimizer(config, halves)
    for seed in range(4):
        if seed == 2:
            saved = copy.deepcopy(other.state_dict())
            other = setup_optimizer(config, halves)
            if config.type == "adamw":
                offload_states(other, CPU, 1)
            other.load_state_dict(saved)
        for net, optimizer in ((straight, one), (halves, other)):
            give_gradients(net, seed)
            optimizer.step()
    assert all(map(torch.equal, straight.parameters(), halves.parameters()))
    dtypes = {state.dtype for states in other.state.values() for state in states.values()}
    assert torch.bfloat16 not in dtypes


def test_muon_is_that_of_pytorch_for_matrices_and_adamw_for_the_rest() -> None:
    config = MuonConfig(lr=1e-2, weight_decay=0.1)
    net = Net()
    matrices = [net.wide.weight, net.tall.weight]
    others = [net.embed_tokens.weight, net.wide.bias, net.lm_head.weight]
    references = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    for seed in range(4):
        give_gradients(net, seed)
        for reference in references:
            reference.step()
    expected = dict(net.named_parameters())
    for name, parameter in updated(config).items():
        if name != "experts":
            torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=0)


def test_muon_orthogonalizes_each_stacked_expert_separately() -> None:
    stack = torch.randn(3, 40, 16)
    together = orthogonalised(stack)
    assert all(torch.equal(one, orthogonalised(alone)) for one, alone in zip(together, stack, strict=True))
    singular = torch.linalg.svdvals(together.float())
    assert float(singular.min()) > 0.6
    assert float(singular.max()) < 1.3


def test_muon_moves_a_matrix_as_far_as_adamw_would() -> None:
    """Both move weights by about 0.2 lr (root mean square) per update if gradients have no common direction."""
    net = nn.Sequential(nn.Linear(64, 256, bias=False))
    before = net[0].weight.detach().clone()
    optimizer = setup_optimizer(MuonConfig(lr=1e-2, weight_decay=0), net)
    give_gradients(net, 0)
    optimizer.step()
    assert float((net[0].weight.detach() - before).square().mean().sqrt()) == pytest.approx(0.2e-2, rel=0.2)


def test_muon_leaves_embeddings_and_vectors_to_adamw(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    model.base_model.layers[0].mlp.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = ({names[id(parameter)] for parameter in group} for group in split_for_muon(model))
    attention = {f"model.layers.{n}.self_attn.{part}_proj.weight" for n in (0, 1) for part in "qkvo"}
    assert matrices == attention | {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert "model.embed_tokens.weight" in others
    assert "model.layers.0.input_layernorm.weight" in others
    assert len(others) == 1 + 2 * 4 + 1


@pytest.mark.parametrize("config", OPTIMIZERS)
def test_a_schedule_sets_the_rate_of_every_parameter(config: OptimizerConfig) -> None:
    net = Net()
    optimizer = setup_optimizer(config.model_copy(update={"weight_decay": 0.0}), net)
    scheduler = setup_scheduler(ConstantSchedulerConfig(), optimizer, None)
    assert scheduler.get_last_lr() == [1e-2] * len(optimizer.param_groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    give_gradients(net, 0)
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in net.named_parameters())


@pytest.mark.parametrize("config", OPTIMIZERS)
@pytest.mark.parametrize("slice_bytes", [1, 400, 2**30])
def test_states_on_the_host_give_bit_identical_results(config: OptimizerConfig, slice_bytes: int) -> None:
    schedule = LinearSchedulerConfig(warmup_steps=2, decay_steps=2)
    expected = updated(config, schedule)
    net, (optimizer, scheduler) = Net(), (None, None)
    for seed in range(4):
        if seed in (0, 2):  # the run starts, and later resumes
            saved = None if optimizer is None else (optimizer.state_dict(), scheduler.state_dict())
            optimizer = setup_optimizer(config, net)
            offload_states(optimizer, CPU, slice_bytes)
            scheduler = setup_scheduler(schedule, optimizer, 4)
            if saved is not None:
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
        give_gradients(net, seed)
        optimizer.step()
        scheduler.step()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in net.named_parameters())


@pytest.mark.parametrize("config", [*OPTIMIZERS, *LOW_BIT])
def test_a_checkpoint_before_the_first_update_changes_no_update(config: OptimizerConfig) -> None:
    """PPO's critic is trained, and checkpoints are saved, before the policy's first update."""

    def start() -> TrainedModel:
        net = Net()
        optimizer = setup_optimizer(config, net)
        optimizer.state.clear()  # as on a GPU, where the first update makes the states
        return TrainedModel(
            cast("PreTrainedModel", net), optimizer, setup_scheduler(ConstantSchedulerConfig(), optimizer, 4)
        )

    needs_package_of(config)
    plain, saved, resumed = start(), start(), start()
    resumed.restore(copy.deepcopy(saved.tensors()), None)
    for each in (plain, saved, resumed):
        for seed in range(2):
            give_gradients(each.model, seed)
            each.optimizer.step()
        assert all(map(torch.equal, each.model.parameters(), plain.model.parameters()))


def test_states_stay_in_the_same_host_memory() -> None:
    net = Net()
    optimizer = setup_optimizer(AdamWConfig(lr=1e-2), net)
    offload_states(optimizer, CPU)
    places = []
    for seed in range(3):
        give_gradients(net, seed)
        optimizer.step()
        places.append([state["exp_avg"].data_ptr() for state in optimizer.state.values()])
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("config", OPTIMIZERS)
def test_loading_puts_no_state_on_the_device_of_its_parameter(config: OptimizerConfig) -> None:
    net, on_device = Net(), []
    saving, loading = (setup_optimizer(config, net) for _ in range(2))
    # This hook runs before the one that moves states to the host.
    loading.register_load_state_dict_post_hook(lambda loaded: on_device.extend(large_states(loaded)))
    for optimizer in (saving, loading):
        offload_states(optimizer, CPU)
        give_gradients(net, 0)
        optimizer.step()
    give_gradients(net, 1)
    saving.step()
    places = [state.data_ptr() for state in large_states(loading)]
    loading.load_state_dict(saving.state_dict())
    assert on_device == []
    assert [state.data_ptr() for state in large_states(loading)] == places
    assert len(places) >= len(list(net.parameters()))
    for parameter, states in saving.state.items():
        loaded = loading.state[parameter]
        assert loaded.keys() == states.keys()
        assert all(torch.equal(loaded[name], state) for name, state in states.items())


def large_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = (state for states in optimizer.state.values() for state in states.values())
    return [state for state in found if isinstance(state, Tensor) and state.ndim > 0]


def test_offloading_on_a_cpu_logs_that_it_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logger("info")
    optimizer = setup_optimizer(AdamWConfig(lr=1e-2), Net(), states_on_host=True)
    assert "step" not in vars(optimizer)
    assert "model.optim_cpu_offload has no effect on a CPU" in capsys.readouterr().out


def test_the_returned_norm_is_the_norm_before_clipping() -> None:
    net = Net()
    give_gradients(net, 0)
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in net.parameters()))
    assert clip_gradients(net, 0.5) == pytest.approx(norm)
    clipped = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in net.parameters()))
    assert clipped == pytest.approx(0.5, rel=1e-4)


class Lists(TorchDispatchMode):
    """Counts the operations on lists of tensors, by name and by whether a tensor in them is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [tensor for arg in args if isinstance(arg, (list, tuple)) for tensor in arg]
        if any(isinstance(tensor, Tensor) for tensor in tensors):
            self.seen[func.overloadpacket.__name__, any(isinstance(tensor, DTensor) for tensor in tensors)] += 1
        return func(*args, **(kwargs or {}))


def sharded_net(mesh: Mesh) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    fully_shard(net, mesh=mesh.fsdp)
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().normal_(generator=generator)
    return net


def test_a_sharded_model_is_updated_as_by_pytorchs_adamw_and_clipping_and_keeps_sharded_states(mesh: Mesh) -> None:
    net, reference = sharded_net(mesh), sharded_net(mesh)
    optimizer = setup_optimizer(AdamWConfig(lr=1e-2, weight_decay=0.1), net)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(2):
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, foreach=True)
        assert clip_gradients(net, 0.5) == pytest.approx(float(norm.full_tensor()), rel=1e-6)
        optimizer.step()
        expected.step()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local(), rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=0, atol=1e-7)
        assert optimizer.state[ours].keys() == expected.state[theirs].keys()
        assert isinstance(optimizer.state[ours]["exp_avg_sq"], DTensor)


@pytest.mark.parametrize("config", [OPTIMIZERS[0], OPTIMIZERS[2]])
def test_no_operation_gets_a_list_of_sharded_tensors(config: OptimizerConfig, mesh: Mesh) -> None:
    """The first call of such an operation takes time in proportion to the square of the list's length."""
    net = sharded_net(mesh)
    optimizer = setup_optimizer(config, net)
    with Lists() as lists:
        clip_gradients(net, 0.5)
        optimizer.step()
    assert {"_foreach_norm", "_foreach_mul_", "_fused_adamw_"} <= {name for name, _ in lists.seen}
    assert [name for name, is_sharded in lists.seen if is_sharded] == []


def test_the_norm_is_of_all_tensors_also_if_they_are_sharded_in_different_ways(mesh: Mesh) -> None:
    sharded = next(sharded_net(mesh).parameters()).grad
    whole = torch.cat([full_tensor(sharded).flatten(), torch.ones(3)])
    torch.testing.assert_close(global_norm([sharded, torch.ones(3)]), whole.norm())
