"""Reports what an SFT run would train on, without loading a model: `medarc_train sft CONFIG --preflight`.

By itself: `python -m prime_rl.trainer.sft.preflight @ sft.toml`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_rl.checks import refuse_unstartable
from prime_rl.configs.data import DataConfig, SFTDataConfig
from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.sft import TRAINED_VALIDATION, SFTConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.configs.surface.root import taken_from
from prime_rl.run.process import end_with_launch
from prime_rl.trainer.process.errors import exit_on_error
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.examination import (
    Examination,
    examine,
    image_worries,
    label_worries,
    made_rows,
    packed_whole,
    repeats,
    steps_of,
    steps_per_epoch,
    untrainable_fault,
    worries,
)
from prime_rl.trainer.sft.data.samples import BadRows, Made, SampleMaker
from prime_rl.trainer.sft.data.sources import setup_entries
from prime_rl.utils.logger import count_of, get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_ROWS = 10_000
_MAX_TOKENS = 2_000_000
_HISTOGRAM_BARS = 8
_BAR_WIDTH = 40
_SHOWN_CHARACTERS = 600
"""Maximum length of each shown stretch of trained or untrained text."""
_SHOWN_FAULTS = 20
_SAY_EVERY_S = 3


def main() -> None:
    """Print the report. Exit codes: 0 ok, 1 the run would not start, 2 bad config."""
    end_with_launch()
    start_program()
    argv = sys.argv[1:]
    config = cast("SFTConfig", parse_argv_or_exit(taken_from(argv), argv=argv))
    refuse_unbuilt(config)
    refuse_unstartable(config)
    setup_logger("warning")
    if not (config.model.trust_remote_code or config.tokenizer.trust_remote_code):
        load_no_torch()
    raise SystemExit(preflight(config, Console(soft_wrap=True), _say))


def load_no_torch() -> None:
    """Have this process do without torch, which tokenizers do not need. Its import takes most of a preflight's time.

    Transformers imports torch for everything as soon as it finds it, and scikit-learn with it.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # or it tells that no model can be loaded
    for package in ("torch", "sklearn"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # Python's way to say: not installed


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def preflight(config: SFTConfig, console: Console, say: Callable[[str], None] = lambda line: None) -> int:
    """Inspect the data of a run and print a report. Returns the exit code. `say` is told what takes time.

    Raises:
        SystemExit: with code 1, if the data cannot be read. The log says why.
    """
    datasets: dict[str, DataConfig] = {f"{config.component.upper()} data": config.data}
    if config.val is not None:
        datasets["Validation data"] = packed_whole(config.val.data)
    if config.validates_on_training_rows:
        console.print(f"warning: {TRAINED_VALIDATION}", style="yellow", markup=False, highlight=False)
    codes = [_inspected(title, data, config, console, say) for title, data in datasets.items()]
    return max(codes)


def _inspected(title: str, data: DataConfig, config: SFTConfig, console: Console, say: Callable[[str], None]) -> int:
    """Inspect one dataset. Returns the exit code."""
    if not isinstance(data, SFTDataConfig):
        console.print(f'data.type = "{data.type}": generated samples, nothing to inspect')
        return 0
    with exit_on_error():
        say(f"{title}: reading {data.label.partition(' = ')[2]}")
        entries = setup_entries(data)
        say(f"{title}: loading the tokenizer of {config.tokenizer.name or config.model.name}")
        # This import takes seconds. Faults of the data are found before it.
        from prime_rl.trainer.model.images import setup_images
        from prime_rl.trainer.model.tokenizer import embeddings_held, setup_tokenizer

        tokenizer = setup_tokenizer(config.tokenizer, config.model)
        images = setup_images(config.model, tokenizer)
        faults = BadRows()
        held = embeddings_held(config.model, config.tokenizer, tokenizer)
        make = faults.collecting(SampleMaker(data, tokenizer, images=images, embeddings=held))
        rows = made_rows(entries, make, _MAX_ROWS, _MAX_TOKENS)
        found = examine(_counted(rows, f"{title}: tokenized", entries.row_count, say), entries.row_count, data)
        if lines := faults.lines():
            if (more := len(lines) - _SHOWN_FAULTS) > 0:
                lines[_SHOWN_FAULTS:] = [f"and {count_of('more kind', more)} of faults; those above are the first"]
            if advice := faults.advice(data.section):
                lines[-1] += f"; {advice}"
            for line in lines:
                get_logger().error(line)
            raise SystemExit(1)
        if data.streaming and found.row_count == 0 and entries.row_count:
            found.row_count = entries.row_count
    figures = _figures(title, found, data)
    if data is config.data:
        _add_steps(figures, found, data, config.num_epochs)
    console.print(figures)
    console.print(_histogram(found, data))
    for number, sample in enumerate(found.shown, start=1):
        console.print(Text(f"\nSample {number}: {sample.inputs} tokens, {sample.targets} trained", style="bold"))
        console.print(rendered(sample, tokenizer, in_colour=console.is_terminal))
    others = [] if images is None else [*image_worries(found, data)]
    if data is config.data:
        loss = config.loss if isinstance(config, DPOConfig) and config.loss.is_unpaired else None
        others += [*(() if loss is None else label_worries(found, loss)), *repeats(found, data)]
    return _verdict(title, found, data, console, others)


def _counted(rows: Iterable[Made], what: str, row_count: int, say: Callable[[str], None]) -> Iterator[Made]:
    """`rows`, with a line about how far they are every few seconds."""
    total = f" of {min(_MAX_ROWS, row_count):,}" if row_count else ""
    told_s = time.monotonic()
    for number, made in enumerate(rows, start=1):
        yield made
        if time.monotonic() - told_s >= _SAY_EVERY_S:
            told_s = time.monotonic()
            say(f"{what} {number:,}{total} rows")


def rendered(sample: TokenizedSample, tokenizer: PreTrainedTokenizerBase, in_colour: bool) -> Text:
    """The text of a sample. Trained parts are green, or between « and » on a terminal without colours."""
    text = Text()
    # The first token is never predicted.
    flags = [False, *sample.is_trained[1:].tolist()]
    for is_trained, group in groupby(zip(flags, sample.token_ids.tolist(), strict=True), key=lambda pair: pair[0]):
        decoded = tokenizer.decode([token for _, token in group])
        assert isinstance(decoded, str), "one sequence is one text"
        part = _shortened(decoded)
        if in_colour:
            text.append(part, style="black on green" if is_trained else "dim")
        else:
            text.append(f"«{part}»" if is_trained else part)
    return text


def _figures(title: str, found: Examination, config: SFTDataConfig) -> Table:
    counts, factor = found.counts, found.per_epoch
    table = Table(
        title=f"{title}: {config.label.partition(' = ')[2]}", title_justify="left", show_header=False, box=None
    )

    def add(name: str, value: str) -> None:
        table.add_row(name, value)

    rows_of_epoch = f"{found.row_count:,}" if found.row_count else "unknown (streamed)"
    about = "" if found.is_complete else "about "
    basis = "all" if found.is_complete else f"{counts.seen:,}; figures per epoch are extrapolated from these"
    add("rows per epoch", rows_of_epoch)
    add("rows inspected", basis)
    if config.split is not None and config.split.is_validation:
        add(f"rows held out by {config.split}", f"{found.row_count:,}")
    if config.holds in ("labels", "mismatched labels"):
        add("good answers", f"{found.desirable:,} of {found.samples:,} ({found.desirable / max(found.samples, 1):.1%})")
    add("samples per epoch", f"{about}{found.samples * factor:,.0f}")
    add("tokens per epoch", f"{about}{found.tokens * factor:,.0f}")
    add("  trained", f"{found.targets / max(found.tokens, 1):.1%}")
    if found.images:
        add("images per epoch", f"{about}{found.images * factor:,.0f}")
        add("  tokens of an image", f"{found.image_tokens / found.images:,.0f} on average")
    for name, count in (
        (f"cut to {config.section}.seq_len", counts.truncated),
        *([("split into several samples", counts.split)] if config.overlong == "split" else []),
        ("skipped, too long", counts.overlong),
        ("skipped, no trained token", counts.untrainable),
        ("skipped, messages not found", counts.unmaskable),
        ("skipped, no conversation or answer", counts.bad),
        ("duplicates", found.duplicates),
    ):
        add(name, f"{count:,} ({found.share(count):.1%})")
    add(f"tokens lost to {config.section}.seq_len", f"{found.lost / max(sum(found.lengths), 1):.2%}")
    add(f"rows filled by {config.pack_function}", f"{found.fill:.2%}")
    add("tokens cut off by packing", f"{found.discarded:.2%}")
    return table


def _add_steps(table: Table, found: Examination, config: SFTDataConfig, num_epochs: float | None) -> None:
    about, steps = "" if found.is_complete else "about ", steps_per_epoch(found, config)
    table.add_row("steps per epoch", f"{about}{steps:,.1f}")
    if num_epochs is not None:
        table.add_row(f"steps of num_epochs = {num_epochs:g}", f"{about}{steps_of(num_epochs, steps):,}")


def _histogram(found: Examination, config: SFTDataConfig) -> Table:
    """Histogram of row lengths. Bins have equal width; the last one includes everything beyond the 99th percentile."""
    table = Table(title="\nLengths in tokens", title_justify="left", show_header=False, box=None)
    lengths = np.array(found.lengths or [0])
    width = max(1, int(np.ceil((np.percentile(lengths, 99) + 1) / _HISTOGRAM_BARS)))
    places = np.minimum(lengths // width, _HISTOGRAM_BARS - 1)
    counts = np.bincount(places, minlength=_HISTOGRAM_BARS)
    for place, count in enumerate(counts.tolist()):
        last = int(lengths.max()) if place == _HISTOGRAM_BARS - 1 else (place + 1) * width - 1
        bar = "█" * round(_BAR_WIDTH * count / counts.max())
        limit = f"  <- {config.section}.seq_len" if place * width <= config.seq_len <= last else ""
        table.add_row(f"{place * width:,} to {max(last, place * width):,}", f"{count:,}", bar + limit)
    return table


def _verdict(title: str, found: Examination, config: SFTDataConfig, console: Console, more: list[str]) -> int:
    """Print the warnings of one dataset, and `more` of them. Returns the exit code."""
    lines = [*worries(found, config), *more]
    fault = untrainable_fault(found, config)
    console.print()
    for line in lines:
        console.print(f"warning: {line}", style="yellow", markup=False, highlight=False)
    if fault:
        sys.stdout.flush()
        sys.stderr.write(f"error: {fault}\n")
        return 1
    if not lines:
        console.print(f"{title}: no problems found.", style="green")
    return 0


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} […{len(text) - 2 * half:,} characters…] {text[-half:]}"


if __name__ == "__main__":
    main()
