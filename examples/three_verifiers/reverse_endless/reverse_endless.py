"""Write two terms backwards, as a taskset of verifiers v1 that never ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

TERMS = "acid bone cell dose edema fever graft heart kidney lung nerve organ pulse rash serum tumor vein wound".split()


class TextData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[TextData, vf.State]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """How close the answer comes to the reversed text: 1 is exact."""
        said = str(trace.branches[-1].messages[-1].content or "")
        return SequenceMatcher(None, said, self.data.answer).ratio()


class ReverseConfig(vf.TasksetConfig):
    seed: int = 0


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    INFINITE = True

    def load(self) -> Iterator[ReverseTask]:
        draw = random.Random(self.config.seed)
        while True:
            text = " ".join(draw.sample(TERMS, 2))
            yield ReverseTask(TextData(prompt=text, answer=text[::-1]), self.config.task)


__all__ = ["ReverseTaskset"]
