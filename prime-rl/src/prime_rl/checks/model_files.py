"""Finds faults of local model folders, tokenizers and chat templates. Hub ids cannot be checked here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.adapters import ADAPTER_CONFIG, adapter_folder, lora_fault, read_settings
from prime_rl.checks.chat_templates import template_faults
from prime_rl.checks.disk import default_hub_cache, packed_fault, snapshot_in_cache, tensor_shapes
from prime_rl.checks.model_description import OF_ROUTERS, ModelDescription, vision_fault
from prime_rl.checks.start_dir import NotDownloaded, NotInstalled, StartDir, looks_like_path
from prime_rl.configs.model import DebugModelConfig, ModelConfig, TokenizerConfig
from prime_rl.utils.errors import StartFault, one_line
from prime_rl.utils.files import missing_advice

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_SHARDS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

PROCESSOR_CONFIGS = ("processor_config.json", "preprocessor_config.json")
"""Files that describe how a checkpoint with a vision tower reads images; each checkpoint has one of them or both."""


def trained_model_fault(model: ModelConfig, start: StartDir, *, is_frozen: bool = False) -> str | None:
    """Why a model cannot be trained; None where that does not show before it is loaded.

    `is_frozen`: nothing of it is trained.
    """
    if fault := model_fault(model.name, start, needs_weights=False):
        return fault
    description = describe(model.name, start)
    if description is not None:
        fault = description.training_fault(model.seq_len, model.trust_remote_code)
        fault = fault or description.division_fault(model)
        fault = fault or description.storing_fault(model, is_frozen=is_frozen)
        has_images = model.vision is not None
        if fault := fault or description.adapter_fault(model.lora, _tensors(model, start), has_images=has_images):
            return fault
        if fault := description.routers_fault(model):
            return fault
        if model.vision is not None and (fault := vision_fault(description.family) or _no_processor(model.name, start)):
            return fault
    return None if model.debug.random_init else model_fault(model.name, start)


def _tensors(model: ModelConfig, start: StartDir) -> dict[str, tuple[int, ...]]:
    folder = None if model.lora is None else _local_folder(model.name, start)
    try:
        return {} if folder is None else tensor_shapes(folder)
    except StartFault:
        return {}  # loading it says what is wrong with the file


def _no_processor(name: str, start: StartDir) -> str | None:
    folder = _local_folder(name, start)
    if folder is None or any((folder / each).is_file() for each in PROCESSOR_CONFIGS):
        return None
    return f"model.vision needs the checkpoint's image processor, and it has no {PROCESSOR_CONFIGS[-1]}"


def other_model_fault(name: str, model: ModelConfig, start: StartDir, *, is_scored: bool = False) -> str | None:
    """Why the model at `name` cannot be loaded beside the trained one of `model`, and divided alike.

    `is_scored`: it is to have one value for each token, as critics and reward models do.
    """
    description = describe(name, start)
    # A critic is stored as the trained model is.
    of_trained = {"vision": None, **OF_ROUTERS}
    of_trained |= {} if is_scored else {"quantization": None, "lora": None, "mlp_chunk_tokens": None}
    other = model.model_copy(update={"name": name, "debug": DebugModelConfig(), **of_trained})
    fault = trained_model_fault(other, start, is_frozen=not is_scored)
    return fault or (description.scoring_fault() if description and is_scored else None)


def describe(name: str, start: StartDir) -> ModelDescription | None:
    """The model at `name`, a folder or a hub id in this machine's cache; None if nothing here describes it."""
    folder = _local_folder(name, start)
    try:
        return None if folder is None else ModelDescription(read_config(folder))
    except StartFault:
        return None


def model_fault(name: str, start: StartDir, needs_weights: bool = True) -> str | None:
    """Why no model can be loaded from `name`; None for a good folder and for a hub id."""
    folder = start.find(name)
    if not folder.is_dir():
        return _no_folder(name, start)
    try:
        is_packed = ModelDescription(read_config(folder)).packed is not None
    except StartFault as fault:
        return str(fault)
    try:
        if needs_weights:
            _check_weights(folder)
    except StartFault as fault:
        return NotDownloaded(fault)
    if needs_weights and is_packed and (damage := packed_fault(folder)):
        return f"its weights in 4 bits are damaged: {damage}; copy or download it again"
    return None


def adapter_faults(key: str, model: ModelConfig, start: StartDir, *, adds_tokens: bool) -> Iterator[str]:
    """Faults of the adapters that the training starts from. `key` is that of the model."""
    lora = model.lora
    if model.adapter is not None:
        try:
            settings = read_settings(adapter_folder(start.find(model.adapter)))
        except StartFault as fault:
            yield f"{key}.adapter = {model.adapter}: {fault}"
        else:
            if settings.use_dora and model.tp > 1:
                yield f"{key}.adapter = {model.adapter} is DoRA, which needs whole rows: remove {key}.tp = {model.tp}"
            if not adds_tokens and (more := _more_embeddings(model, start.find(model.adapter), start)):
                yield f"{key}.adapter = {model.adapter}: {more}"
    if lora is not None and lora.path is not None:
        unfit = lora_fault(lora, start.find(lora.path))
        if unfit is None and not adds_tokens:
            unfit = _more_embeddings(model, start.find(lora.path), start)
        if unfit:
            yield f"{key}.lora.path = {lora.path}: {unfit}"


def quantization_faults(key: str, model: ModelConfig, start: StartDir) -> Iterator[str]:
    """That packages for quantized weights are not installed. `key` is that of the model."""
    description = describe(model.name, start)
    comes_packed = description is not None and description.packed is not None
    if (comes_packed or model.quantization is not None) and start.has_our_packages and (fault := no_quantization()):
        what = f".name = {model.name}: its weights are in 4 bits, which" if comes_packed else ".quantization"
        yield NotInstalled(f"{key}{what} needs {fault}")


def no_quantization() -> str | None:
    """What quantized weights need and this installation lacks; None if nothing."""
    if find_spec("bitsandbytes") is None:
        return "the package bitsandbytes: install it with `uv sync --inexact --extra quantization`"
    installed = version("torch")
    if tuple(map(int, installed.split(".")[:2])) < (2, 13):
        return f"torch 2.13: FSDP of torch {installed}, which is installed, cannot shard whole numbers"
    return None


def _more_embeddings(model: ModelConfig, path: Path, start: StartDir) -> str | None:
    """That the adapter at `path` was trained with added tokens, which the model lacks; None if it was not."""
    description, folder = describe(model.name, start), adapter_folder(path)
    if description is None:
        return None
    held, width = description.setting("vocab_size"), description.setting("hidden_size")
    rows = [shape[0] for name, shape in tensor_shapes(folder).items() if ".lora_" not in name and shape[1:] == (width,)]
    if not held or max(rows, default=0) <= held:
        return None
    return (
        f"it has {max(rows)} embeddings, for added tokens, and the model {held}: set model.name to the export of that "
        "run (weights/step_N), which holds both, and start a new adapter"
    )


_NAMED_TENSORS = 5


def loading_fault(report: Mapping[str, Any]) -> str | None:
    """Why a loaded model is not the one in its files, by the report of Transformers' `output_loading_info`.

    Without this check, a weight that is missing or of another shape would be random.
    """
    if missing := sorted(report["missing_keys"]):
        return f"its files lack {_named(missing)}: copy or download them again"
    if mismatched := sorted(report["mismatched_keys"]):
        name, given, wanted = mismatched[0]
        more = f" ({len(mismatched) - 1} more differ)" if len(mismatched) > 1 else ""
        return f"{name} has shape {list(given)} in its files, and {list(wanted)} by its config.json{more}"
    return None


def unused_tensors(report: Mapping[str, Any]) -> str | None:
    """The tensors in a model's files that its class does not use, which exports do not contain."""
    unused = sorted(report["unexpected_keys"])
    return (
        f"the model's class does not use {_named(unused)} of its files, and exports leave them out" if unused else None
    )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_TENSORS])
    more = f" and {len(names) - _NAMED_TENSORS} more" if len(names) > _NAMED_TENSORS else ""
    return f"{len(names)} weight{'s' if len(names) > 1 else ''} ({shown}{more})"


def tokenizer_faults(
    config: TokenizerConfig, model: ModelConfig, start: StartDir, *, reads_rows: bool = True
) -> Iterator[str]:
    """Faults of the tokenizer's folder and of its chat template. A model's own tokenizer shares the model's folder.

    `reads_rows`: the trainer tokenizes rows with it, for which the model needs an embedding of each token.
    """
    name = config.name or model.name
    description = describe(model.name, start)
    texts = _texts_by_id(_local_folder(name, start), are_special=False) if reads_rows else {}
    held = None if description is None else description.setting("vocab_size")
    if texts and held and not config.add_tokens and (fault := embeddings_fault(model.name, held, max(texts) + 1)):
        yield fault
    if texts and held and config.add_tokens and description is not None:
        known = _texts_by_id(_local_folder(name, start))
        needed = max(known) + 1 + len({*config.add_tokens} - {*known.values()})
        if needed > held and (fault := description.enlarging_fault):
            yield f"tokenizer.add_tokens: {fault}, and model.name = {model.name} cannot get more: remove it"
    if start.find(name).is_dir():
        trusted = model.trust_remote_code if config.trust_remote_code is None else config.trust_remote_code
        if not trusted and not _has_any(start.find(name), _TOKENIZERS):
            yield NotDownloaded(f"tokenizer.name = {name}: the folder holds no tokenizer")
    elif name != model.name and (fault := _no_folder(name, start)):
        yield f"tokenizer.name = {name}: {fault}"
    yield from template_faults("tokenizer.chat_template", config.chat_template, start)


def embeddings_fault(model: str, held: int, needed: int) -> str | None:
    """Why a model with `held` embeddings does not read the ids of a tokenizer, which needs more; None if it does."""
    if needed <= held:
        return None
    return (
        f"the tokenizer has token ids up to {needed - 1}, but model.name = {model} has embeddings for 0..{held - 1}; "
        "to give it more, list the new tokens in tokenizer.add_tokens of SFT"
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """A model folder's `config.json`.

    Raises:
        StartFault: there is none, or it cannot be read.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / ADAPTER_CONFIG).is_file():
            raise StartFault("the folder holds an adapter, not a model: give its base model") from None
        raise StartFault("the folder has no config.json") from None
    except (OSError, ValueError) as error:
        raise StartFault(f"its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise StartFault("its config.json is not a JSON object")
    return config


def context_length(folder: Path) -> int | None:
    """The longest context of a local model folder; None if it states none, or is not such a folder."""
    try:
        longest = ModelDescription(read_config(folder)).setting("max_position_embeddings")
    except StartFault:
        return None
    return longest if isinstance(longest, int) else None


def rotary_choice(folder: Path, longest: int | None) -> str | None:
    """Rotary frequencies that a model uses in a run with sequences of up to `longest` tokens, for comparison.

    None stands for the model's context length. The result is None if the frequencies do not depend on lengths, or if
    there is no such folder.
    """
    try:
        setting = ModelDescription(read_config(folder)).setting
    except StartFault:
        return None
    rope = setting("rope_parameters") or setting("rope_scaling") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "")
    context = setting("max_position_embeddings") or 0
    length = longest or context
    if kind in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings") or setting("original_max_position_embeddings")
        short = original is None or length <= original
        return f"{'short' if short else 'long'} factors ({kind}, up to {original} tokens)"
    return f"the base for {max(length, context)} tokens ({kind})" if "dynamic" in kind else None


def vocab_size(folder: Path) -> int:
    """The vocabulary size that a model folder states.

    Raises:
        StartFault: there is no config.json, or it states no size.
    """
    size = ModelDescription(read_config(folder)).setting("vocab_size")
    if not size:
        raise StartFault("its config.json states no vocab_size, which filters need")
    return int(size)


def known_vocab_size(model: str) -> int | None:
    """The vocabulary size of a model that is a folder or in the local cache; None if nothing here states it."""
    folder = Path(model) if Path(model).is_dir() else snapshot_in_cache(model, default_hub_cache())
    try:
        return None if folder is None else vocab_size(folder)
    except StartFault:
        return None


def other_token(model: str, other: str, start: StartDir) -> str | None:
    """The first token of `model` that is another one in the tokenizer of `other`, or none. Tokens that only `other` has
    do not matter.

    None if there is none, or if one of them has no `tokenizer.json` on this machine.
    """
    ours, theirs = (_texts_by_id(_local_folder(name, start)) for name in (model, other))
    for number in sorted(ours) if theirs else ():
        if ours[number] != theirs.get(number):
            return f"{number} ({ours[number]!r} and {repr(theirs[number]) if number in theirs else 'nothing'})"
    return None


def lacks_fast_tokenizer(name: str, start: StartDir) -> bool:
    """Whether it is a folder without `tokenizer.json`."""
    folder = start.find(name)
    return (looks_like_path(name) or folder.is_dir()) and not (folder / "tokenizer.json").is_file()


def loaded_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, without truncation and padding.

    Reads it without Transformers, whose import takes seconds.

    Raises:
        StartFault: the file is damaged, or another program's.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # its only class
        raise StartFault(f"{file} cannot be read as a tokenizer: {one_line(str(error))}; save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _local_folder(name: str, start: StartDir) -> Path | None:
    folder = start.find(name)
    return folder if folder.is_dir() else snapshot_in_cache(name, default_hub_cache())


def _texts_by_id(folder: Path | None, *, are_special: bool = True) -> dict[int, str]:
    """The tokens of a `tokenizer.json`, special ones too if `are_special`; empty if it is missing or damaged, which is
    reported when it is loaded."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) if folder is not None else {}
        tokens = tokenizer.get("model", {}).get("vocab", {})
        # A vocabulary is a table of ids, or a list of texts with their scores.
        texts = (
            {number: text for text, number in tokens.items()}
            if isinstance(tokens, dict)
            else dict(enumerate(text for text, _ in tokens))
        )
        for each in tokenizer.get("added_tokens", []):
            if are_special or not each.get("special"):
                texts[each["id"]] = each["content"]
            else:
                texts.pop(each["id"], None)
        return texts
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _check_weights(folder: Path) -> None:
    if not _has_any(folder, _WEIGHTS):
        raise StartFault("the folder holds no weights (*.safetensors or *.bin)")
    if (folder / "model.safetensors").is_file():
        return
    for index in (folder / name for name in _SHARDS):
        if not index.is_file():
            continue
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StartFault(f"its {index.name} cannot be read: {error}") from error
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        # Transformers reads the first index that it finds.
        if missing:
            raise StartFault(f"{len(missing)} of {len(shards)} files of weights are missing, such as {missing[0]}")
        return


def _no_folder(name: str, start: StartDir) -> str | None:
    if not looks_like_path(name) or not start.lacks(name):
        return None
    return "no such directory" + missing_advice(name, start.path)


def _has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)
