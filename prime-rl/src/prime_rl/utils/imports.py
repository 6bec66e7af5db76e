"""Importing thousands of modules, as torch and Transformers are, without what makes it slow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
