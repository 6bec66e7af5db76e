"""Parent of the root config classes, and the classes by the command that reads them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from pydantic import model_validator

from prime_rl.configs.surface.not_built import ignored_keys
from prime_rl.configs.surface.renamed import (
    SECTIONS_OF_RL,
    SFT_COMMANDS,
    find_renamed,
    hint_for_renamed,
    split_component,
)
from prime_rl.utils.pydantic_config import BaseSettings, ConfigWarning
from prime_rl.utils.pydantic_config.faults import MOST_PLACES
from prime_rl.utils.pydantic_config.schema import has_key, sections_below
from prime_rl.utils.tables import leaves

# Which command a file is for, from its keys.


class _Roots(Mapping[str, type[BaseSettings]]):
    """Root classes by component, imported when asked for: most commands read one of them, and each of them asks here
    whether a file with faults is for another command."""

    names: ClassVar[Mapping[str, str]] = {
        "rl": "prime_rl.configs.rl:RLConfig",
        "sft": "prime_rl.configs.sft:SFTConfig",
        "dpo": "prime_rl.configs.dpo:DPOConfig",
        "rm": "prime_rl.configs.rm:RewardModelConfig",
        "eval": "prime_rl.configs.eval:OfflineEvalConfig",
        "trainer": "prime_rl.configs.trainer:TrainerConfig",
        "orchestrator": "prime_rl.configs.orchestrator:OrchestratorConfig",
        "inference": "prime_rl.configs.inference:InferenceConfig",
    }

    def __getitem__(self, component: str) -> type[BaseSettings]:
        root: type[BaseSettings] = resolve_name(self.names[component])
        return root

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


ROOTS = _Roots()


def taken_from(argv: list[str]) -> type[BaseSettings]:
    """The root of the command of SFT's loop that `argv` names first, as in `dpo @ dpo.toml`, and that is removed from
    it. Without one it is SFT's."""
    return ROOTS[argv.pop(0) if argv and argv[0] in SFT_COMMANDS else "sft"]


def unknown_counts(keys: Iterable[str]) -> dict[str, int]:
    """For each component, how many of these dotted keys neither this nor another version of it has."""
    keys = list(keys)
    return {kind: sum(not _is_known(kind, key) for key in keys) + (not _is_meant(kind, keys)) for kind in ROOTS}


def fault_of_file(component: str, name: str, data: Mapping[str, Any]) -> str | None:
    """What to do with the file `name` with content `data`, if it is a config of something else than `component`."""
    keys = [".".join(str(part) for part in path if isinstance(part, str)).replace("-", "_") for path, _ in leaves(data)]
    # A table named after the command has a hint of its own.
    if component in data or all(_may_have(ROOTS[component], key.split(".")) for key in keys):
        return None
    fitting = [kind for kind in ROOTS if all(_is_known(kind, key) for key in keys) and _is_meant(kind, keys)]
    if not 0 < len(fitting) <= MOST_PLACES or component in fitting:
        return None
    sections = [kind for kind in fitting if component == "rl" and kind in SECTIONS_OF_RL]
    commands = [kind for kind in fitting if kind not in sections]
    ways = [f"pass it as `--{section} @ {name}`" for section in sections]
    ways += [f"pass it to {_either(commands)}"] if commands else []
    return f"{name}: is a config of {_either(fitting)}, not of {component}: {_either(ways)}"


def _may_have(root: type[BaseSettings], path: Sequence[str]) -> bool:
    """Whether `root` has the key, or has the table that a misspelt one stands in."""
    return has_key(root, path) or (has_key(root, path[:1]) and bool(sections_below((root,), path[0])))


def _is_meant(kind: str, keys: Sequence[str]) -> bool:
    """Whether a file with these keys may be for `kind`, if it has them all.

    `dpo` and `rm` have every key of `sft`. Only their loss, together with data, distinguishes a file from those of
    `sft` and `trainer`.
    """
    if kind == "sft" or kind not in SFT_COMMANDS:
        return True
    heads = {".".join(key.split(".")[:2]) for key in keys}
    return any(head.startswith("loss.") for head in heads) and not heads.isdisjoint(("data.name", "data.sources"))


def _either(words: list[str]) -> str:
    return " or ".join(words)


def _is_known(kind: str, key: str) -> bool:
    return has_key(ROOTS[kind], key.split(".")) or find_renamed(*split_component(kind, key)) is not None


class RootConfig(BaseSettings):
    """What a command reads: files, environment variables and arguments."""

    shortcuts: ClassVar[Mapping[str, str]] = {"resume": "ckpt.resume_step"}

    @model_validator(mode="after")
    def _warn_of_ignored_keys(self) -> Self:
        for text in ignored_keys(self):
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    @classmethod
    def fault_of_file(cls, name: str, data: Mapping[str, Any]) -> str | None:
        """What to do with a file that is a config of another command; None if it is not."""
        return fault_of_file(cls.component, name, data) if cls.component in ROOTS else None

    @classmethod
    def advice_for_key(cls, key: str, as_flag: bool = False) -> str | None:
        return hint_for_renamed(cls, cls.component, key, as_flag)
