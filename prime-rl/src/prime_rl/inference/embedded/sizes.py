"""Sizes that tensors are rounded up to, so that few different ones occur."""

from __future__ import annotations


def rounded_up(size: int, least_step: int, steps_per_doubling: int) -> int:
    """A multiple of `least_step`, or of a larger power of two that divides each doubling into that many steps.

    Both must be powers of two. Adds less than `least_step` or at most `size / steps_per_doubling`.
    """
    step = max(least_step, (1 << (size - 1).bit_length()) // (2 * steps_per_doubling))
    return -(-size // step) * step


def padded_tokens(count: int) -> int:
    """The number of tokens to compute instead of `count`: up to 7 more, or up to an eighth more.

    oneDNN compiles a kernel for every new number of tokens, which takes some 0.3 ms, and keeps a limited number.
    """
    return count if count <= 8 else rounded_up(count, least_step=8, steps_per_doubling=8)
