"""Importing thousands of modules, as torch and Transformers are, without what makes it slow."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def importing() -> Iterator[None]:
    """Import in the block; garbage is not collected meanwhile, nor ever looked for among what is then there.

    Modules make a million objects and throw few away. Python looks through all of them again each time that their
    number has grown by a quarter: a sixth of the time of importing torch and Transformers, and each full collection
    afterwards takes a tenth of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_transformers() -> None:
    """Import Transformers and its package of models, which read the same 3,000 files each to list what they define.

    Here the package of models gets its list from that of Transformers: a fifth of a second less. It is the same list.
    """
    import transformers

    try:
        from transformers.utils import import_utils

        list_again = import_utils.define_import_structure
    except (ImportError, AttributeError):
        # Another version, which does it in another way.
        return
    directory = Path(transformers.__file__).parent / "models"

    # Cached, as the function that it stands in for.
    @functools.lru_cache
    def known_list(path: str, prefix: str | None = None) -> dict[frozenset[str], dict[str, set[str]]]:
        if Path(path) != directory / "__init__.py" or prefix is not None:
            return list_again(path, prefix)
        # Listed before, with these very arguments, so this is looked up.
        of_transformers = list_again(directory, prefix="models")
        return {
            backends: {
                name.removeprefix("models."): objects for name, objects in of.items() if name.startswith("models.")
            }
            for backends, of in of_transformers.items()
        }

    import_utils.define_import_structure = known_list
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = list_again
