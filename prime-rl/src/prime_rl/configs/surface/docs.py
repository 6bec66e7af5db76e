"""Generates the reference of every config key from the classes.

`python -m prime_rl.configs.surface.docs > docs/config.md`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import cleandoc

from pydantic.fields import FieldInfo

from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.rm import RewardModelConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.not_built import NOT_BUILT, NotBuilt
from prime_rl.configs.surface.resuming import RESUME_RULES, ResumeRule
from prime_rl.configs.surface.root import RootConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config.describe import bounds_text, default_text, field_doc, type_text
from prime_rl.utils.pydantic_config.schema import NAMED, Section, alternatives, list_items, sections_among, table_items

ROOTS: tuple[type[RootConfig], ...] = (
    RLConfig,
    SFTConfig,
    DPOConfig,
    RewardModelConfig,
    TrainerConfig,
    OrchestratorConfig,
    InferenceConfig,
    EnvServerConfig,
    OfflineEvalConfig,
)

INTRODUCTION = """\
# Config keys

Generated with `python -m prime_rl.configs.surface.docs > docs/config.md`; a test checks that it is up to date.

| command | root class |
|---|---|
| `rl`, `medarc_train rl`, `medarc_slurm rl` | `RLConfig` |
| `sft`, `medarc_train sft`, `medarc_slurm sft` | `SFTConfig` |
| `medarc_train dpo`, `medarc_slurm dpo` | `DPOConfig` |
| `medarc_train rm`, `medarc_slurm rm` | `RewardModelConfig` |
| `trainer` | `TrainerConfig` |
| `orchestrator` | `OrchestratorConfig` |
| `inference` | `InferenceConfig` |
| `env-server` | `EnvServerConfig` |
| `eval`, `medarc_train eval` | `OfflineEvalConfig` |

## Where values come from

```bash
uv run medarc_train rl examples/reverse_text/rl_cpu.toml --trainer.optim.lr 1e-4 --max-steps 40
```

Options override files, files override environment variables, and those override defaults. Tables are merged key by key
at every depth; all other values, including lists, are replaced as a whole. An unknown key is an error everywhere.

| write | for |
|---|---|
| `@ a.toml`, `@a.toml` | a file; of several, the last one takes precedence |
| `--trainer @ a.toml`, `--trainer.model.ac @ a.toml` | a file that holds one section |
| `toml_files = ["base.toml"]` at the top of a file | files to inherit from, relative to it; its own keys win |
| `--trainer.optim.lr 1e-6`, `--trainer.optim.lr=1e-6` | an option |
| `weight-decay = 0.1`, `--optim.weight_decay 0.1` | dashes and underscores are equivalent, in files and options |
| `--bench`, `--no-trainer.model.reshard-after-forward` | a boolean |
| `--ckpt`, `--ckpt '{"interval": 5}'`, `--no-ckpt` | an optional section: on, on with values, off |
| `--client.base-url a,b`, `--client.base-url a --client.base-url b`, `'["a", "b"]'` | a list |
| `--env '{"id": "x"}' --env '{"id": "y"}'` | a list of sections |
| `--env.0.id x`, `--env.1 '{"id": "y"}'` | one item of a list of sections; the next index appends one |
| `--client.headers k=v,k2=v2`, `'{"k": "v"}'` | a table |
| `"None"` (anywhere), `null` (options) | no value |
| `PRIME_RL_MAX_STEPS=10`, `PRIME_RL_MODEL__NAME=x` (or `PRIME_…`) | a key of the root class, from the environment |

A table without a `type` has the default type. If a file or option changes the `type` that another
source chose, keys of that source that the new type does not have are ignored, with a warning. Keys that both types have
keep their values.

In `rl`, shared settings at the top are copied into the components' sections. If one replaces another value, the
log has a warning.
"""

NOT_BUILT_TEXT = """\
## Not supported yet

These keys are accepted, so that files written for PRIME-RL load. A run that sets one to anything except its default (or
to one of the listed values) is refused at the start, or ignores it with a warning.

| key | value | a run that sets it | why, or what to do instead |
|---|---|---|---|"""

RESUMING_TEXT = """\
## Changed keys of a run that resumes

A checkpoint holds the configs of its run. A resume lists every key that has another value now, and does one of these:

- `applied`: the new value holds from the resumed step on. The learning rate is the new schedule's at that step.
- `refused`: the run would not continue the old one, so it does not start.
- `none`: the training does not depend on the key.
- `attempt`: the key says how to start, and is not compared.

A rule for a table applies to every key in it for which the list has no other rule.

| key | effect | why |
|---|---|---|"""


def reference() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for root in ROOTS:
        parts.append(f"## {root.__name__}\n")
        # The keys of a root that another one extends stand there.
        known = set() if (base := base_of(root)) is None else sections_of_root(base).keys()
        sections = {section: places for section, places in sections_of_root(root).items() if section not in known}
        parts += [_section_text(section, places) for section, places in sections.items()]
    parts.append("\n".join([NOT_BUILT_TEXT, *(_unbuilt_row(entry) for entry in NOT_BUILT)]) + "\n")
    rules = sorted(((key, rule) for rule in RESUME_RULES for key in rule.keys), key=lambda pair: pair[0])
    parts.append("\n".join([RESUMING_TEXT, *(_resume_row(key, rule) for key, rule in rules)]) + "\n")
    return "\n".join(parts)


def sections_of_root(root: type[RootConfig]) -> dict[Section, list[str]]:
    """The classes of a root's sections and their keys, in the order of the keys, without other roots."""
    found: dict[Section, list[str]] = {root: []}
    for key, section in _sections_below(root, ""):
        found.setdefault(section, []).append(key)
    return found


def _sections_below(section: Section, prefix: str) -> Iterator[tuple[str, Section]]:
    for name, field in section.model_fields.items():
        kinds = alternatives(field.annotation)
        in_list, named = sections_among(list_items(kinds) or ()), sections_among(table_items(kinds) or ())
        for child in (*sections_among(kinds), *in_list, *named):
            key = f"{prefix}{name}[]" if in_list else f"{prefix}{name}.{NAMED}" if named else f"{prefix}{name}"
            if child not in ROOTS:
                yield key, child
                yield from _sections_below(child, f"{key}.")


def base_of(root: type[RootConfig]) -> type[RootConfig] | None:
    """The root whose keys this one has, besides its own: `SFTConfig` of `DPOConfig`."""
    return next((each for each in ROOTS if each is not root and issubclass(root, each)), None)


def _section_text(section: Section, places: list[str]) -> str:
    title = [f"### {', '.join(f'`{place}`' for place in places)}: {section.__name__}", ""] if places else []
    base = base_of(section) if issubclass(section, RootConfig) else None
    elsewhere = {"toml_files"} if places else set() if base is None else base.model_fields.keys()
    rows = [_row(section, name, field) for name, field in section.model_fields.items() if name not in elsewhere]
    table = ["| key | type | default | bounds | meaning |", "|---|---|---|---|---|", *rows] if rows else []
    return "\n".join([*title, cleandoc(section.__doc__ or ""), "", *table]) + "\n"


def _row(section: Section, name: str, field: FieldInfo) -> str:
    cells = (
        f"`{name}`",
        f"`{type_text(field.annotation)}`",
        f"`{default_text(field)}`",
        bounds_text(field),
        field_doc(section, name),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _unbuilt_row(entry: NotBuilt) -> str:
    values = ", ".join(f"`{value!r}`" for value in entry.values) or "any"
    outcome = "is refused" if entry.refused else "is warned"
    return f"| `{entry.key}` | {values} | {outcome} | {entry.why} |"


def _resume_row(key: str, rule: ResumeRule) -> str:
    shown = f"sft.{key[2:]}`, `trainer.{key[2:]}" if key.startswith("*.") else key
    why = "; ".join(filter(None, (rule.why, f"applied with `{rule.unless}`" if rule.unless else "")))
    return f"| `{shown}` | {rule.effect} | {why} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
