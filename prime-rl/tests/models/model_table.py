"""Compares trainer and embedded engine with Transformers' eager attention, for every family of `model_cases`.

`python prime-rl/tests/models/model_table.py > docs/models.md`
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import torch
from model_cases import LEFT_OUT, ORIGINAL_CONTEXT, SEQ_LEN, VOCABULARY, WINDOW, Case, cases, save_tiny_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from prime_rl.checks.model_description import SEPARABLE_FAMILIES
from prime_rl.configs.model import ALL_LINEAR
from prime_rl.configs.trainer import LoRAConfig, ModelConfig, WeightCheckpointConfig
from prime_rl.inference.embedded.engine.common_start import CommonStart
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.trainer.checkpoints.weights import export_model, save_adapter
from prime_rl.trainer.kernels.attention import FLEX
from prime_rl.trainer.model.build import check_scoring, setup_model
from prime_rl.trainer.model.lora import gather_adapter, lost_in_peft
from prime_rl.trainer.model.scoring import enable_scoring, score_tokens
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world
from prime_rl.trainer.rl.batches import pack_batch
from prime_rl.trainer.rl.rows import Row, score_row
from prime_rl.transport.loading import put_own
from prime_rl.transport.messages import TrainingBatch, TrainingSample

TOLERANCE = 1e-4
"""Largest difference of a log-probability, in nats. With linear attention, rounding alone makes 3e-5 on some CPUs."""
GRADIENT_TOLERANCE = 3e-5
"""Largest norm of the difference of all gradients, relative to their norm."""

INTRODUCTION = f"""\
# Models

Generated with `python prime-rl/tests/models/model_table.py > docs/models.md`; a test checks that it is up to date.

Which causal language models the trainer and the embedded engine run. For the table, every family that Transformers
registers is made tiny, with windows of {WINDOW} tokens, rotary frequencies that change after {ORIGINAL_CONTEXT} tokens,
and sequences of up to {SEQ_LEN} tokens. The reference is Transformers with eager attention, one sequence at a time, in
float32 on a CPU.

- *equal*: log-probabilities differ by less than {TOLERANCE:g} nats, and the trainer's gradients by less than
  {GRADIENT_TOLERANCE:g} of their norm.
- *refused*: loading the model fails with this line.

| column | compares |
|---|---|
| trainer | one packed row of three groups with shared prompts, with the mode and the attention of RL on a CPU |
| flex | the forward pass with flex attention, which the trainer selects on GPUs without flash attention |
| embedded engine | several samples of two prompts, decoded together, then a second turn on kept prefixes |
| export round trip | the export of a model with trained adapters, merged, and the checkpoint |
| LoRA in PEFT | the adapter of the same model in PEFT on the published class, also merged by PEFT |

An export is *equal* if it has every tensor of the checkpoint under the hub's name, bit for bit where no adapter is, and
Transformers loads it as the same class, with the trainer's log-probabilities. Adapters are at every linear layer
(`target_modules = ["all-linear", "experts"]`). *Without experts* means that adapters of experts are refused (the line
names what to remove), or that PEFT does not load them (a warning at the start says so; merged weights hold them).
*As its family* stands where the weights have the same names and shapes.

In the flex column, *not used* means that Transformers has no flex attention for the family, and *needs a GPU* that its
attention has sinks.

At the start of every run, trainer and engine compare a few tokens of the real model with eager attention too. For this
check, windows are 4 tokens and caps on attention scores are 1, so that ignoring them shows.

Length-dependent rotary frequencies (longrope, dynamic NTK) are those of the run's longest sequence: `model.seq_len` in
the trainer, `inference.model.max_model_len` in the engine. An RL run in which the two differ in effect is refused.

RL trains without dropout and router jitter. SFT applies those of the model's config, and `model.lora.dropout`.

Hybrid models have layers that carry a state from token to token: gated delta rules, state spaces, short convolutions.
Packed rows keep their samples apart. The embedded engine holds one state for each running sequence, and reuses no
prefix: the column compares second turns that are computed from their first token. Adapters may be on all linear layers
of these; those that a model never calls, as `dt_proj` of Mamba and Jamba, are refused.

Of quantized models, those in bitsandbytes' 4 bits are trained ([QLoRA](lora.md#qlora)); of others (FP8, MXFP4, AWQ),
name a version in bfloat16. Transformers 4 loads exports too, except those of models with rotary frequencies for each
kind of layer, such as Gemma 3 and OLMo 3.

"""


COLUMNS = ("trainer", "flex", "embedded engine", "export round trip", "LoRA in PEFT")
TABLE_HEAD = f"| family | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|"
WHOLE_HEAD = """\
## Checkpoints with a vision tower

Of a checkpoint with a vision tower, the language part is trained alone, and the tower stays on the disk. An export is
the whole checkpoint again: the same class, names and processor files, the tower's tensors bit for bit. The embedded
engine serves the language part too. Adapters have the module names of the whole class, so PEFT and vLLM load them on
it. `[model.vision]` trains some families on images, with the tower ([images](images.md)).

`model.language_model_only = true` exports the language part alone, as its causal class; with
`inference.model.language_model_only = true`, vLLM does not load the tower. vLLM on a CPU runs gated delta rules
(qwen3_5) in bfloat16 only.

Transformers' classes of aya_vision and cohere2_vision leave out the language model's `logit_scale`, and PaliGemma's its
`final_logit_softcapping`. vLLM applies them, and so does training. The prompts of PaliGemma are trained causally, as
text without images runs in its class. The rows of Gemma 3n may not hold tokens of images or sound. Of Mllama, the
layers that attend to images are skipped on text, and stay on the disk; vLLM has no such class since 0.11.

| family | trainer | embedded engine | export round trip | LoRA in PEFT |
|---|---|---|---|---|"""
WITHOUT_EXPERTS = "equal, without experts"
REFUSED_BY_ENGINE = {
    "gemma3n": "refused: its layers have no embeddings for some of the tokens that it samples",
    "llama4": "refused: layers of type chunked_attention",
}
"""Families with a vision tower that only vLLM serves."""
AS_FAMILY = "as its family"


@dataclass(frozen=True)
class Outcome:
    """What the table says about a case: `equal`, or the line that refuses it."""

    trainer: str
    flex: str
    engine: str
    export: str
    adapter: str


def outcome_of(case: Case, mesh: Mesh) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        reference = save_tiny_model(case, directory)
        # One for both columns, unless it is refused, which both say.
        built = cache(lambda: setup_model(ModelConfig(name=str(directory), seq_len=case.seq_len), mesh))
        return Outcome(
            trainer=_outcome(lambda: _compare_trainer(case, built(), reference)),
            flex=_outcome(lambda: _compare_flex(case, built(), reference)),
            engine=_outcome(lambda: _compare_engine(case, directory, reference)),
            # Last, because PEFT changes the reference.
            **(_export_outcomes(case, directory, reference, mesh) if case.has_other_weights else _AS_FAMILY),
        )


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The document, from the outcome of each case by name."""
    rows = [f"| {name} | {' | '.join(astuple(found))} |" for name, found in outcomes.items()]
    left_out = [f"- {reason}: {', '.join(sorted(names))}." for reason, names in LEFT_OUT.items()]
    table = "\n".join([TABLE_HEAD, *rows])
    whole = [f"| {name} | {' | '.join(columns_of_whole(name))} |" for name in sorted(SEPARABLE_FAMILIES)]
    return "\n".join([f"{INTRODUCTION}{table}\n\n{WHOLE_HEAD}", *whole, "\n## Not in the table\n", *left_out, ""])


def columns_of_whole(family: str) -> tuple[str, ...]:
    """What the page says about a checkpoint with a vision tower; `test_language_parts.py` compares."""
    has_experts = family.endswith("_moe") or family == "llama4"
    return ("equal", REFUSED_BY_ENGINE.get(family, "equal"), "equal", WITHOUT_EXPERTS if has_experts else "equal")


def outcomes_on(text: str) -> dict[str, Outcome]:
    """The outcomes that a page shows, by the name of the case."""
    _, _, table = text.partition(TABLE_HEAD)
    table, _, _ = table.partition("\n\n")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: Outcome(*found) for name, *found in rows}


class Different(Exception):
    """The results are not those of the reference."""


class NotCompared(Exception):
    """The comparison is not possible here."""


def _outcome(compare: Callable[[], None]) -> str:
    try:
        compare()
    except (ModelError, EngineError) as refusal:
        return f"refused: {refusal}"
    except NotCompared as reason:
        return str(reason)
    except Different as difference:
        return f"WRONG: {difference}"
    return "equal"


def reference_logprobs(case: Case, model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of all tokens but the first, by plain Transformers on this sequence alone."""
    filled = list(tokens)
    if case.rope_depends_on_length:
        filled += [3] * (case.seq_len - len(tokens))
    logits = model(input_ids=torch.tensor([filled]), use_cache=False).logits[0, : len(tokens) - 1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def _packed_row(case: Case) -> Row:
    """Three groups with prompts and completions of different lengths, one of them as long as the run allows."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    longest = case.seq_len
    prompts = [draw(longest // 3), draw(longest // 2), draw(3)]
    sizes = [(0, 5), (0, longest - longest // 3), (0, 12), (1, longest // 2), (1, 4), (2, 6)]
    batch = TrainingBatch([_sample(prompts[index], draw(count)) for index, count in sizes], step=0)
    ((message,),) = pack_batch(batch, case.seq_len, row_tokens=1024, data_ranks=1, group_tokens=512)
    return Row.from_message(message, torch.device("cpu"))


def _compare_trainer(case: Case, model: PreTrainedModel, reference: PreTrainedModel) -> None:
    row = _packed_row(case)
    logprobs, _ = score_row(model, row, row.layout.trained_M, vocab_chunk=512)
    expected = _expected(case, reference, row)
    _check_logprobs(logprobs[row.loss_mask], expected[row.loss_mask])
    (logprobs * row.advantages)[row.loss_mask].sum().backward()
    reference.zero_grad()
    (expected * row.advantages)[row.loss_mask].sum().backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    if own.keys() != wanted.keys():
        raise Different(f"gradients of {', '.join(sorted(own.keys() ^ wanted.keys()))}")
    distance = torch.cat([(own[name].full_tensor() - wanted[name]).flatten() for name in wanted]).norm()
    relative = float(distance / torch.cat([gradient.flatten() for gradient in wanted.values()]).norm())
    if not relative < GRADIENT_TOLERANCE:
        raise Different(f"gradients by {relative:.1e} of their norm")


@torch.no_grad()
def _compare_flex(case: Case, model: PreTrainedModel, reference: PreTrainedModel) -> None:
    row = _packed_row(case)
    if not model._supports_flex_attn:
        raise NotCompared("not used")
    model.config._attn_implementation = FLEX
    enable_scoring(model)
    try:
        check_scoring(model, torch.device("cpu"), case.seq_len, ())
    except ValueError as error:  # flex attention has sinks only on a GPU
        raise NotCompared("needs a GPU") from error
    # Compiling for a CPU takes a minute per model.
    with torch.compiler.set_stance("force_eager"):
        logprobs, _ = score_row(model, row, row.layout.trained_M, vocab_chunk=512)
    _check_logprobs(logprobs[row.loss_mask], _expected(case, reference, row)[row.loss_mask])


def _expected(case: Case, reference: PreTrainedModel, row: Row) -> Tensor:
    """The reference's log-probabilities of a row's tokens; 0 for the first of each sequence."""
    sequences = row.input_ids.split(row.layout.lengths)
    scored = [reference_logprobs(case, reference, tokens.tolist()) for tokens in sequences]
    return torch.cat([torch.cat([logprobs.new_zeros(1), logprobs]) for logprobs in scored])


def _check_logprobs(ours: Tensor, expected: Tensor) -> None:
    largest = float((ours - expected).detach().abs().max())
    if not largest < TOLERANCE:
        raise Different(f"log-probabilities by {largest:.1e} nats")


_AS_FAMILY = {"export": AS_FAMILY, "adapter": AS_FAMILY}


def _export_outcomes(case: Case, directory: Path, reference: PreTrainedModel, mesh: Mesh) -> dict[str, str]:
    """What the columns of exports and adapters say: with adapted experts, without them, or for a model without LoRA."""
    export, found = directory / "export", dict[str, str]()
    for targets in ([ALL_LINEAR, "experts"], [ALL_LINEAR], []):
        lora = LoRAConfig(rank=4, alpha=8.0, target_modules=targets) if targets else None
        try:
            model = setup_model(ModelConfig(name=str(directory), seq_len=case.seq_len, lora=lora), mesh)
        except ModelError as refusal:
            found["adapter" if targets else "export"] = f"refused: {refusal}"
            continue
        if lora is not None:
            draw_trained(model)
        expected = score(model, torch.arange(3, 3 + min(40, case.seq_len)))
        if "export" not in found:
            found["export"] = _outcome(partial(_compare_export, case, model, directory, export, expected))
        if lora is None:
            break
        if lost := lost_in_peft(model):
            found["adapter"] = f"PEFT does not load {lost}"
            if len(targets) > 1:
                continue
            break
        save_adapter(gather_adapter(model, torch.float32), export / "lora_adapters")
        found["adapter"] = _outcome(partial(_compare_adapter, case, reference, export / "lora_adapters", expected))
        if found["adapter"] == "equal" and len(targets) == 1:
            found["adapter"] = WITHOUT_EXPERTS
        break
    return found


@torch.no_grad()
def draw_trained(model: PreTrainedModel) -> None:
    """Change what a model with adapters trains, by random numbers."""
    generator = torch.Generator().manual_seed(1)
    for parameter in (each for each in model.parameters() if each.requires_grad and isinstance(each, DTensor)):
        put_own(parameter, parameter.full_tensor() + 0.1 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def score(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The trainer's log-probabilities of all words after each of `tokens`."""
    positions = torch.arange(len(tokens))[None]
    logits: Tensor = score_tokens(model, tokens[None], positions, lambda hidden, logits_of: logits_of(hidden))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass, weights stay gathered
    return logits.log_softmax(-1)


@torch.no_grad()
def _by_transformers(case: Case, model: Any, count: int) -> Tensor:
    filled = [*range(3, 3 + count), *[3] * (case.seq_len - count if case.rope_depends_on_length else 0)]
    logits: Tensor = model(input_ids=torch.tensor([filled]), use_cache=False).logits[0, :count]
    return logits.log_softmax(-1)


def _compare_export(case: Case, model: PreTrainedModel, directory: Path, export: Path, expected: Tensor) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    export_model(model, tokenizer, export, WeightCheckpointConfig(), torch.float32)
    before, after = (load_file(folder / "model.safetensors") for folder in (directory, export))
    if others := before.keys() ^ after.keys():
        raise Different(f"tensors {', '.join(sorted(others))}")
    # Adapters are at matrices alone.
    changed = [name for name in before if before[name].ndim < 2 and not torch.equal(before[name], after[name])]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    reloaded, report = loaded
    if changed or any(report.values()) or type(model).__name__ != f"FSDP{type(reloaded).__name__}":
        raise Different(f"{type(reloaded).__name__}, {report}, {changed}")
    _check_logprobs(_by_transformers(case, reloaded.eval(), len(expected)), expected)


def _compare_adapter(case: Case, reference: PreTrainedModel, adapter: Path, expected: Tensor) -> None:
    before = _by_transformers(case, reference, len(expected))
    loaded: Any = peft.PeftModel.from_pretrained(reference, adapter)
    for model in (loaded.eval(), loaded.merge_and_unload()):
        _check_logprobs(_by_transformers(case, model, len(expected)), expected)
    if not (before - expected).abs().max() > 100 * TOLERANCE:
        raise Different("nothing: the adapter has no effect")


def _sample(prompt: list[int], completion: list[int]) -> TrainingSample:
    count = len(completion)
    return TrainingSample(
        prompt_ids=prompt,
        prompt_mask=[False] * len(prompt),
        completion_ids=completion,
        completion_mask=[True] * count,
        inference_logprobs=[-1.0] * count,
        completion_temperatures=[1.0] * count,
        advantage=1.0 - 0.1 * count,
    )


@torch.no_grad()
def _compare_engine(case: Case, directory: Path, reference: PreTrainedModel) -> None:
    """Samples that run together: groups of a prompt, then second turns with kept prefixes."""
    model, source = load_model(str(directory), "float32", torch.device("cpu"), max_model_len=case.seq_len)
    runner = ModelRunner(model, 1 << 28, source, partial(CommonStart.from_origins, fewest_rows=6))
    with Engine(runner, EngineLimits(max_prefix_bytes=1 << 24)).in_thread() as engine:
        sampled = _sampled(engine, [([*range(5, 5 + case.seq_len // 2)], 6), ([7, 8, 9], 2)], case.seq_len // 4)
        # Second turns, whose first tokens are kept.
        turns = [[*tokens, 9] for tokens, _ in (sampled[0], sampled[-1])]
        sampled += _sampled(engine, [(tokens, 2) for tokens in turns], 4)
    for tokens, logprobs in sampled:
        expected = reference_logprobs(case, reference, tokens)[-len(logprobs) :]
        _check_logprobs(torch.tensor(logprobs), expected)


def _sampled(
    engine: Engine, prompts: Sequence[tuple[list[int], int]], count: int
) -> list[tuple[list[int], list[float]]]:
    """All tokens of the samples of each prompt, which run together, and the log-probabilities of the sampled ones."""
    params = SamplingParams(max_tokens=count, top_k=VOCABULARY)
    engine.pause().result()
    requests = [GenerationRequest(prompt=tuple(prompt), params=params, seed=1, n=n) for prompt, n in prompts]
    futures = [engine.submit(request) for request in requests]
    engine.resume().result()
    return [
        ([*request.prompt, *completion.token_ids], completion.logprobs)
        for request, future in zip(requests, futures, strict=True)
        for completion in future.result().completions
    ]


def main() -> None:
    mesh = ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600, environ={}))
    outcomes = {}
    for case in cases():
        if sys.argv[1:] and case.family not in sys.argv[1:]:
            continue
        outcomes[case.name] = outcome_of(case, mesh)
        sys.stderr.write(f"{case.name}: {outcomes[case.name]}\n")
    destroy_world()
    sys.stdout.write(page(outcomes))


if __name__ == "__main__":
    main()
