"""The engine: one thread that turns a queue of requests into answers, a token of every sequence at a time."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prime_rl.inference.adapter_files import check_base_version
from prime_rl.inference.checkpoint_files import WeightError
from prime_rl.inference.embedded.engine.generation import Generation, GenerationRequest, TopLogprobs
from prime_rl.inference.embedded.engine.lora import AdapterStore
from prime_rl.inference.embedded.engine.model import ModelRunner
from prime_rl.inference.embedded.engine.sampling import BatchSampler, prompt_logprobs
from prime_rl.inference.embedded.engine.scheduler import Limits, Prompts, Scheduler
from prime_rl.inference.embedded.engine.weights import NewWeights, read_weights
from prime_rl.inference.embedded.errors import EngineBusy, EngineStopped, GenerationFailed
from prime_rl.run.paths import step_of
from prime_rl.utils.logger import get_logger


@dataclass(slots=True)
class EngineStats:
    """Counts since the weights were last swapped."""

    tokens: int = 0
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True, slots=True)
class _Command:
    """Work for the engine's thread between two steps, and where its caller waits for the outcome."""

    action: Callable[[], Any]
    result: Future[Any]

    def perform(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.action())
        except Exception as exc:  # noqa: BLE001 - the caller gets it; the engine itself is unharmed
            self.result.set_exception(exc)

    def fail(self, error: Exception) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


class Engine:
    """Continuous batching over a model. Public methods may be called from any thread; `run` is the engine's own.

    Weights are swapped between two decode steps. Running sequences go on with the keys and values they have, and every
    completion says which of its tokens came from which version.
    """

    def __init__(self, runner: ModelRunner, limits: Limits | None = None, adapters: AdapterStore | None = None) -> None:
        self.limits = limits or Limits()
        self.adapters = adapters
        """None when the engine was not started for adapters."""
        self.new_weights = NewWeights(runner.device)
        self.version = 0
        """Of the base weights."""
        self.paused = False
        self.stats = EngineStats()
        self._runner = runner
        self._scheduler = Scheduler(self.limits, runner.slots)
        self._sampler: BatchSampler | None = None
        self._inbox: queue.SimpleQueue[GenerationRequest | _Command | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._num_queued = 0
        self._stopped = False

    @property
    def load(self) -> int:
        """Samples that run or wait."""
        return self._num_queued

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Queue a request; its `result` is set by the engine's thread.

        Raises:
            EngineBusy: the queue is full.
            EngineStopped: the engine is stopping.
        """
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine is stopping")
            if self._num_queued + request.n > self.limits.max_waiting + self.limits.max_running:
                raise EngineBusy(f"{self._num_queued} samples are running or waiting already; try again later")
            self._num_queued += request.n
            request.result.add_done_callback(lambda result: self._forget(request.n, result))
            self._inbox.put(request)
        return request.result

    def update_weights(self, directory: Path | None) -> Future[int]:
        """Swap in the weights of `directory`, or those of the start for None; the result is the version now live.

        The version is the number in a name `step_<n>`; another name counts one up, and the start is version 0.
        The result's error is a `WeightError` when the directory does not fit, and a `TransportError` when nothing
        comes; the old weights then stay.
        """
        return self._call(lambda: self._swap(directory))

    def load_adapter(self, name: str, directory: Path) -> Future[int]:
        """Serve the adapter in `directory` under `name`, in place of an earlier version; the result is its version.

        The result's error is a `WeightError` when it cannot be served; an earlier version then stays.
        """
        return self._call(lambda: self._swap_adapter(name, directory))

    def pause(self) -> Future[None]:
        """Stop between two decode steps and keep everything; requests queue up until `resume`."""
        return self._call(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        return self._call(lambda: self._set_paused(False))

    def stop(self) -> None:
        """Let `run` return after its current step. Unanswered requests fail with `EngineStopped`."""
        with self._lock:
            self._stopped = True
        self._inbox.put(None)

    @torch.inference_mode()
    def run(self) -> None:
        """Work until `stop`. An error in a step ends the engine: all that wait get an error, and it is raised."""
        try:
            while self._take_inbox():
                if not self.paused:
                    self._step()
        finally:
            self.stop()
            self._fail_unanswered()

    def _take_inbox(self) -> bool:
        """Handle what has arrived; wait for something when there is nothing to generate. False once stopped."""
        while True:
            idle = self.paused or not (self._scheduler.running or self._scheduler.waiting)
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, GenerationRequest):
                self._scheduler.waiting.extend(item.sequences)
                self._fail_unless_loaded(item)
            else:
                item.perform()

    def _step(self) -> None:
        started = time.perf_counter()
        scheduler = self._scheduler
        scheduler.drop_unwanted()
        scheduler.make_room()
        num_decode = len(scheduler.running)
        prompts = scheduler.admit()
        if not scheduler.running:
            return
        logits = self._forward(num_decode, prompts)
        self._sample(logits)
        followed = {tell for sequence in scheduler.running if (tell := sequence.request.on_progress) is not None}
        for sequence in scheduler.retire_finished():
            sequence.request.answer_if_complete()
        for tell in followed:
            tell()
        self.stats.busy_s += time.perf_counter() - started

    def _forward(self, num_decode: int, prompts: Prompts) -> torch.Tensor:
        """Logits of the next token of every running sequence."""
        running = self._scheduler.running
        leaders = [prompts.sequences[index] for index in prompts.leaders]
        full = [row for row, leader in enumerate(leaders) if leader.request.wants_prompt_logprobs]
        logits, full_logits = self._runner.forward(
            running=[sequence.tokens for sequence in running[:num_decode]],
            prompts=[leader.tokens for leader in leaders],
            prompt_rows=[num_decode + index for index in prompts.leaders],
            known=prompts.known,
            full_prompts=full,
            adapters=[sequence.request.adapter for sequence in (*running[:num_decode], *leaders)],
            origins=[sequence.origin for sequence in running[:num_decode]],
        )
        for row, prompt_logits in zip(full, full_logits, strict=True):
            request = leaders[row].request
            request.prompt_logprobs = prompt_logprobs(
                prompt_logits[: len(request.prompt) - 1], request.prompt, request.num_prompt_logprobs or 0
            )
        if len(leaders) < len(prompts.sequences):
            logits = self._share(logits, num_decode, prompts)
        return logits

    def _share(self, logits: torch.Tensor, num_decode: int, prompts: Prompts) -> torch.Tensor:
        """Give the followers of each prompt its keys, values and logits."""
        followers: dict[int, list[int]] = {}
        for index, source in enumerate(prompts.source):
            if index != prompts.leaders[source]:
                followers.setdefault(prompts.leaders[source], []).append(num_decode + index)
        for leader, rows in followers.items():
            self._runner.slots.copy(num_decode + leader, rows, len(prompts.sequences[leader].tokens))
        return logits[[*range(num_decode), *(num_decode + source for source in prompts.source)]]

    def _sample(self, logits: torch.Tensor) -> None:
        running = self._scheduler.running
        if self._sampler is None or not self._sampler.fits(running):
            self._sampler = BatchSampler([sequence.params for sequence in running], logits.device)
        drawn = self._sampler.draw(logits, running)
        tops: Sequence[TopLogprobs | None] = drawn.top or [None] * len(running)
        for sequence, token, logprob, top in zip(running, drawn.tokens, drawn.logprobs, tops, strict=True):
            adapter = sequence.request.adapter
            version = self.version if adapter is None else adapter.version
            if math.isfinite(logprob):
                sequence.append(token, logprob, top, version)
            else:
                sequence.request.fail(GenerationFailed(f"weights of version {version} give logits that are NaN"))
        self.stats.tokens += len(running)

    def _swap(self, directory: Path | None) -> int:
        started = time.perf_counter()
        source = directory or self._runner.weights_dir
        if source is None:
            raise WeightError("this engine was built without a directory of start weights")
        tensors = self.new_weights.of(source) if directory else read_weights(source)
        self._runner.load_weights(tensors, source)
        if self.adapters is not None:
            self.adapters.unload_all()
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._fail_unless_loaded(sequence.request)
        step = step_of(source) if directory else 0
        self.version = self.version + 1 if step is None else step
        self._tell_swap(f"Weights: version {self.version}", started)
        return self.version

    def _swap_adapter(self, name: str, directory: Path) -> int:
        started = time.perf_counter()
        if self.adapters is None:
            raise WeightError("this server was started without enable_lora")
        check_base_version(self.version)
        version = self.adapters.load(name, directory).version
        self._tell_swap(f"Adapter {name}: version {version}", started)
        return version

    def _tell_swap(self, what: str, started: float) -> None:
        get_logger().info(
            f"{what} live after {time.perf_counter() - started:.2f}s | "
            f"{len(self._scheduler.running)} running, {len(self._scheduler.waiting)} waiting | "
            f"{self.stats.tokens} tokens at {self.stats.tokens_per_s:.0f} tokens/s before it"
        )
        self.stats = EngineStats()
        self._scheduler.prefixes.forget()

    @staticmethod
    def _fail_unless_loaded(request: GenerationRequest) -> None:
        adapter = request.adapter
        if adapter is not None and not adapter.is_loaded:
            request.fail(GenerationFailed(f"adapter {adapter.name!r} was unloaded: the weights under it were replaced"))

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused

    def _call(self, action: Callable[[], Any]) -> Future[Any]:
        """Have `action` run on the engine's thread, between two steps."""
        command = _Command(action, Future())
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine is stopping")
            self._inbox.put(command)
        return command.result

    def _forget(self, count: int, result: Future[Generation]) -> None:
        with self._lock:
            self._num_queued -= count
        if result.cancelled() or result.exception() is not None:
            self._scheduler.has_unwanted = True

    def _fail_unanswered(self) -> None:
        error = EngineStopped("the engine stopped before it had answered")
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            sequence.request.fail(error)
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None:
                item.fail(error)
