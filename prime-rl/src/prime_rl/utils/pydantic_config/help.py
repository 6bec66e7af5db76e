"""The text of `--help`: every option of a command."""

from __future__ import annotations

from prime_rl.utils.pydantic_config.describe import bounds_text, default_text, field_doc, type_text
from prime_rl.utils.pydantic_config.schema import (
    Section,
    alternatives,
    find_key,
    list_items,
    sections_among,
    walk_fields,
)

_USAGE = """\
usage: {name} [@ FILE | --SECTION @ FILE | --OPTION VALUE] ...

{doc}

Files are TOML; later files win over earlier ones, options over files. Dashes and underscores are the same.
  --flag / --no-flag        switch a boolean
  --section / --no-section  switch an optional section on or off
  --list a,b                items by commas, by repeating the option, or as a JSON array
  --key null                no value
{extras}
"""


def help_text(root: Section, allow_extras: bool = False) -> str:
    """Usage and one line for each option: type, default, bounds and meaning."""
    extras = "Options that are not listed here are passed on to the engine.\n" if allow_extras else ""
    name = getattr(root, "component", "") or root.__name__
    lines = [_USAGE.format(name=name.replace("_", "-"), doc=root.__doc__, extras=extras).rstrip(), "", "options:"]
    seen: set[tuple[str, ...]] = set()
    for path, owner, field in walk_fields(root):
        in_list = any(_is_list_below(root, path, length) for length in range(1, len(path)))
        if path in seen or in_list or path[-1] == "toml_files":
            continue
        seen.add(path)
        kind = "section" if sections_among(alternatives(field.annotation)) else type_text(field.annotation)
        facts = ", ".join(part for part in (kind, bounds_text(field), f"default {default_text(field)}") if part)
        flag = "--" + ".".join(path).replace("_", "-")
        lines += [f"  {flag}  ({facts})", f"      {field_doc(owner, path[-1])}"]
    return "\n".join(lines) + "\n"


def _is_list_below(root: Section, path: tuple[str, ...], length: int) -> bool:
    site = find_key(root, ".".join(path[:length]))
    return site is None or list_items(site.kinds) is not None
