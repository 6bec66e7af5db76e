"""The trainer's loss and gradients on a packed row against Transformers: kernels of attention, compiled, offloaded.

With LoRA, against PEFT: the gradients of the adapters. With NF4 too, against PEFT on bitsandbytes, where
that runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from findings import Findings, findings_of_command_line
from shapes import SHAPES, config_dir
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl.checks.model_files import no_quantization
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.kernels.attention import FLEX, VARLEN
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import cross_entropy_sum, score_tokens
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import setup_world

LENGTHS = (70, 130, 1, 300)
VOCABULARY = 512
LORA: dict[str, Any] = {"attn": "sdpa", "lora": {"rank": 8, "alpha": 16.0}}
NF4: dict[str, Any] = {"quantization": {"type": "nf4"}}
PRECISIONS = {"float32": ("highest", 2e-5), "TF32": ("high", 5e-3), "bfloat16": ("high", 3e-2)}
"""PyTorch's precision of float32 products, and the largest relative error of a loss or gradient,
|ours - reference| / |reference|. A run on a GPU multiplies float32 matrices in TF32."""


def main(findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        mesh = ParallelDims(1, 1).mesh(setup_world(findings.device, timeout_s=600, environ={}))
        directory = model_dir(Path(scratch))
        expected = reference(directory, findings.device)
        for precision, (products, limit) in PRECISIONS.items():
            if precision == "TF32" and findings.device == "cpu":
                continue
            torch.set_float32_matmul_precision(products)
            dtype = "bfloat16" if precision == "bfloat16" else "float32"
            for name, kernel, settings in cases(findings.device, dtype):
                findings.attempt(
                    f"{precision}, {name}",
                    lambda kernel=kernel, settings=settings, dtype=dtype, limit=limit: compared(
                        ours(directory, mesh, kernel, settings | {"compute_dtype": dtype}), expected, limit
                    ),
                )
            for name, settings in lora_cases(findings.device).items():
                findings.attempt(
                    f"{precision}, {name}, against PEFT",
                    lambda settings=settings, dtype=dtype, limit=limit: compared(
                        ours(directory, mesh, None, LORA | settings | {"compute_dtype": dtype}),
                        reference(directory, findings.device, with_lora=True, nf4=settings.get("quantization")),
                        limit,
                    ),
                )


def cases(device: str, dtype: str) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Name, kernel to force, and keys of `[model]`."""
    sdpa: dict[str, Any] = {"attn": "sdpa"}
    plain: list[tuple[str, str | None, dict[str, Any]]] = [
        ("sdpa", None, sdpa),
        ("the default kernel", None, {}),
        ("activation checkpointing", None, sdpa | {"ac": {}}),
        ("activation checkpointing of every second block", None, sdpa | {"ac": {"freq": 2}}),
    ]
    compiled = ("compiled", None, sdpa | {"compile": {}})
    if device == "cpu":
        # Compiling for a CPU takes minutes where its cores are busy.
        return [*plain, compiled] if dtype == "float32" else plain
    flash = [("varlen", VARLEN, {}), ("varlen, compiled", VARLEN, {"compile": {}})] if dtype == "bfloat16" else []
    return [
        *plain,
        compiled,
        ("flex", FLEX, {}),
        *flash,
        ("offloaded activations", None, sdpa | {"ac": {}, "ac_offloading": {}}),
        ("offloaded parameters", None, sdpa | {"fsdp_cpu_offload": True}),
    ]


def lora_cases(device: str) -> dict[str, dict[str, Any]]:
    """Keys of `[model]` beside those of the adapters, by name."""
    cases: dict[str, dict[str, Any]] = {"LoRA": {}, "LoRA, activation checkpointing": {"ac": {}}}
    if no_quantization():
        return cases
    cases |= {"NF4": NF4, "NF4, activation checkpointing": NF4 | {"ac": {}}}
    cases["NF4, float32 scales"] = {"quantization": {"type": "nf4", "double": False}}
    return cases if device == "cpu" else cases | {"NF4, offloaded parameters": NF4 | {"fsdp_cpu_offload": True}}


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def reference(
    directory: Path, device: str, with_lora: bool = False, nf4: dict[str, Any] | None = None
) -> tuple[float, Tensor]:
    """Summed loss and gradient of Transformers' own model in float32, one sequence after another.

    With LoRA, the model is PEFT's, and the gradient is that of the adapters. `nf4`: `[model.quantization]`.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if nf4 is not None:
        put_in_4_bits(model, nf4.get("double", True))
    if with_lora:
        from peft import LoraConfig, get_peft_model

        lora = LORA["lora"]
        options = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules="all-linear", lora_dropout=0.0)
        model = get_peft_model(model, options)
        fill_adapters(
            (name.replace("base_model.model.", "").replace(".default.weight", ""), tensor)
            for name, tensor in model.named_parameters()
        )
    # Without dropout there is no difference, except that bitsandbytes may compute in bfloat16 in evaluation on a CPU.
    model.to(device).train()
    total = torch.zeros((), device=device)
    for tokens in rows():
        if len(tokens) > 1:
            logits = model(input_ids=tokens[None].to(device), use_cache=False).logits[0, :-1].float()
            total = total + torch.nn.functional.cross_entropy(logits, tokens[1:].to(device), reduction="sum")
    total.backward()
    torch.set_float32_matmul_precision(before)
    return float(total.detach()), flat(parameter.grad for parameter in model.parameters() if parameter.requires_grad)


def model_dir(scratch: Path) -> Path:
    """A model with larger weights than those that training starts from, so that rounding shows."""
    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(config_dir("tiny", scratch))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    model.save_pretrained(scratch / "model")
    return scratch / "model"


def put_in_4_bits(model: PreTrainedModel, is_double: bool) -> None:
    """Replace the linear layers of the decoder blocks by those of bitsandbytes, which quantize when they are moved."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, layer in list(model.base_model.layers.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            quantized = Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, torch.float32)
            quantized.weight = Params4bit(
                layer.weight.data, compress_statistics=is_double, quant_type="nf4", module=quantized
            )
            quantized.bias = layer.bias
            model.base_model.layers.set_submodule(path, quantized)
    model.is_loaded_in_4bit = True  # so that PEFT adapts such layers


@torch.no_grad()
def fill_adapters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Give adapters the same values, not zero, under PEFT's names for them: `….q_proj.lora_A`."""
    for name, tensor in named:
        if "lora_" in name:
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def ours(directory: Path, mesh: Mesh, kernel: str | None, settings: dict[str, Any]) -> tuple[float, Tensor]:
    """The same of the trainer's model on one packed row."""
    model = setup_model(ModelConfig.model_validate({"name": str(directory), **settings}), mesh)
    named = ((name.replace(".lora.", ".lora_"), local_part(each)) for name, each in model.named_parameters())
    fill_adapters(named)
    if kernel is not None:
        model.set_attn_implementation(kernel)
    device = mesh.process.device
    sequences = rows()
    tokens = torch.cat(sequences).to(device)
    places = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    wanted = torch.cat([torch.arange(length) < length - 1 for length in LENGTHS]).to(device)
    targets = tokens.roll(-1)[wanted]

    def loss_of(hidden: Tensor, logits_of: Any) -> Tensor:
        return cross_entropy_sum(hidden[wanted], targets, logits_of, SHAPES["tiny"]["vocab_size"])

    loss = score_tokens(model, tokens[None], places[None], loss_of)
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return float(loss.detach()), flat(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)


def local_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().float().flatten().cpu() for tensor in tensors])


def compared(found: tuple[float, Tensor], expected: tuple[float, Tensor], limit: float) -> tuple[bool, str]:
    loss_error = abs(found[0] / expected[0] - 1)
    gradient_error = float((found[1] - expected[1]).norm() / expected[1].norm())
    text = f"loss {found[0]:.4f}, off by {loss_error:.1e}; gradient off by {gradient_error:.1e} (limit {limit:.0e})"
    return max(loss_error, gradient_error) < limit, text


if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
