"""Ranges of numbers that many keys share. NaN and infinity are refused everywhere, by the base classes of configs."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

LARGEST = 1_000_000_000
"""Largest count, step and number of seconds. The product of two of them fits into 64 bits."""

Count = Annotated[int, Field(ge=1, le=LARGEST)]
WholeNumber = Annotated[int, Field(ge=0, le=LARGEST)]
CountOrAll = Annotated[int, Field(ge=-1, le=LARGEST)]
"""-1 is all."""
Seconds = Annotated[int, Field(ge=1, le=LARGEST)]
TransferSeconds = Annotated[int, Field(ge=1, le=604_800)]
"""At most a week, which the inference servers accept."""
SessionSeconds = Annotated[float, Field(gt=0, le=604_800)]
"""At most a week."""
Gpus = Annotated[int, Field(ge=1, le=1024)]
"""GPUs, or processes, of one node."""
Nodes = Annotated[int, Field(ge=1, le=100_000)]
Processes = Annotated[int, Field(ge=1, le=100_000)]
"""Processes, or GPUs, of all nodes."""
NetworkInterfaces = Annotated[str, Field(pattern=r"^[^\s,/:=^]{1,15}(,[^\s,/:=^]{1,15})*$")]
"""Names of network interfaces of Linux, with commas between."""
Port = Annotated[int, Field(ge=1, le=65535)]
Seed = Annotated[int, Field(ge=-(10**18), le=10**18)]
"""Fits into 64 bits after a number of requests or epochs is added to it."""
NaturalSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed for NumPy."""

LATEST = -1
"""As a step to resume from: the newest one that can be resumed."""
AUTO = -2
"""As a step to resume from: the newest one, or a new run if there is none."""
_RESUME_WORDS = {"latest": LATEST, "auto": AUTO}


def _step_of_word(value: Any) -> Any:
    if not isinstance(value, str) or value.strip().lstrip("-").isdecimal():
        return value
    if value not in _RESUME_WORDS:
        words = ", ".join(_RESUME_WORDS)
        raise PydanticCustomError("resume_step", "is neither a step nor one of {words}", {"words": words})
    return _RESUME_WORDS[value]


ResumeStep = Annotated[int, Field(ge=AUTO, le=LARGEST), BeforeValidator(_step_of_word)]
"""The words `latest` and `auto` are kept as -1 and -2."""


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise PydanticCustomError("tiny_temperature", f"should be 0, or from {MIN_TEMPERATURE} to 100")
    return temperature


MIN_TEMPERATURE = 0.0001
"""Logits divided by a much smaller one overflow."""

Fraction = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, le=100)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Share of a running average that a step keeps."""
TrainTemperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=100)]
EvalTemperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_not_tiny)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
