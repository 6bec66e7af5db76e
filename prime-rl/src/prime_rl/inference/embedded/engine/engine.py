"""The embedded engine: one thread that generates completions for queued requests by continuous batching."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from prime_rl.inference.embedded.engine.generation import Generation, GenerationRequest, TopLogprobs
from prime_rl.inference.embedded.engine.generation import Sequence as Sample
from prime_rl.inference.embedded.engine.lora import AdapterStore
from prime_rl.inference.embedded.engine.model import ModelRunner
from prime_rl.inference.embedded.engine.sampling import BatchSampler, Drawn, prompt_logprobs
from prime_rl.inference.embedded.engine.scheduler import EngineLimits, PrefillBatch, Scheduler
from prime_rl.inference.embedded.engine.tensors import on_device
from prime_rl.inference.embedded.engine.weights import WeightSource, read_weights
from prime_rl.inference.embedded.errors import EngineBusy, EngineStopped, GenerationFailed
from prime_rl.inference.model_files import WeightError, check_base_version
from prime_rl.monitors.trace import own_trace
from prime_rl.run.paths import step_of
from prime_rl.run.process import ANYONE, own_beats
from prime_rl.utils.logger import get_logger

Draw = tuple[Sample, int, float, TopLogprobs | None]
"""A sample with its next token, the token's log-probability, and the most likely tokens if requested."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the weights were last swapped."""

    tokens: int = 0
    busy_s: float = 0.0
    steps: int = 0
    replayed: int = 0
    """Steps that a captured graph computed."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.busy_s if self.busy_s else 0.0

    def __str__(self) -> str:
        replayed = f", {self.replayed} of {self.steps} steps replayed" if self.replayed else ""
        return f"{self.tokens} tokens at {self.tokens_per_s:.0f} tokens/s{replayed}"


@dataclass(frozen=True, slots=True)
class _Command:
    """An action to run on the engine's thread between two steps, and the future for its result."""

    action: Callable[[], Any]
    result: Future[Any]
    is_last: bool = False
    """Whether it waits until all requests have ended."""

    def perform(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.action())
        except Exception as exc:  # noqa: BLE001 - passed on to the caller; the engine keeps running
            self.result.set_exception(exc)

    def fail(self, error: Exception) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


@contextlib.contextmanager
def _failing(request: GenerationRequest) -> Iterator[None]:
    """Fail the request, and no other, with an error of the block. The error is logged with the request's id."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - the boundary between a request and the engine
        get_logger().error(f"Request {request.id} failed: {exc!r}", exc_info=exc)
        request.fail(GenerationFailed(f"Request {request.id} failed: {exc!r}"))


def _zipped(sequences: Sequence[Sample], drawn: Drawn) -> list[Draw]:
    tops: Sequence[TopLogprobs | None] = drawn.top or [None] * len(sequences)
    return list(zip(sequences, drawn.tokens, drawn.logprobs, tops, strict=True))


class Engine:
    """Continuous batching over a model. Any thread may call the public methods, except `run`, the engine's own loop.

    Weights are swapped between two decode steps. Running sequences keep their keys and values, and every completion
    records which weight version generated each of its tokens.
    """

    def __init__(
        self, runner: ModelRunner, limits: EngineLimits | None = None, adapters: AdapterStore | None = None
    ) -> None:
        self.limits = limits or EngineLimits()
        self.adapters = adapters
        """None if LoRA is not enabled."""
        self.weight_source = WeightSource(runner.device)
        self.version = 0
        """Version of the base weights."""
        self.paused = False
        self.is_asleep = False
        """Whether weights, keys and values have left the device, until the next update of weights or adapters."""
        self._falling_asleep: list[_Command] = []
        """Performed once the engine is asleep."""
        self.stats = EngineStats()
        self._earlier = EngineStats()
        """Counts of all earlier weights."""
        self._runner = runner
        self._scheduler = Scheduler(self.limits, runner.slots)
        self._unproven: list[GenerationRequest] = []
        """Requests whose images the vision tower has not seen yet."""
        self._sampler: BatchSampler | None = None
        self._beats = own_beats()
        self._inbox: queue.SimpleQueue[GenerationRequest | _Command | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._num_queued = 0
        self._stopped = False

    @property
    def load(self) -> int:
        """Number of samples running or waiting."""
        return self._num_queued

    @property
    def num_running(self) -> int:
        """Number of samples that grow by a token with each step."""
        return len(self._scheduler.running)

    @property
    def total_tokens(self) -> int:
        """Tokens since the start."""
        return self._earlier.tokens + self.stats.tokens

    @property
    def total_busy_s(self) -> float:
        """Seconds of work since the start."""
        return self._earlier.busy_s + self.stats.busy_s

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Queue a request and return its `result`, which the engine's thread sets.

        Raises:
            EngineBusy: the request queue is full.
            EngineStopped: the engine is stopping.
        """
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine is stopping")
            if self._num_queued + request.n > self.limits.max_waiting + self.limits.max_running:
                raise EngineBusy(f"the request queue is full ({self._num_queued} samples); retry later")
            self._num_queued += request.n
            request.result.add_done_callback(lambda result: self._release(request.n, result))
            self._record(request)
            self._inbox.put(request)
        return request.result

    def _record(self, request: GenerationRequest) -> None:
        """Show the request in the trace, from its arrival to its answer."""
        trace = own_trace()
        if trace.is_on:
            trace.begin("request", request.id, samples=request.n, prompt_tokens=len(request.prompt))
            request.result.add_done_callback(lambda result: trace.end("request", request.id))

    def update_weights(self, directory: Path | None) -> Future[int]:
        """Load the weights in `directory`, or the initial weights for None. The future's result is the new version.

        The version is n for a directory named `step_<n>`, otherwise the current version plus one. The initial weights
        are version 0. The future fails with a `WeightError` if the directory does not fit the model and with a
        `TransportError` if the trainer does not send the weights; the old weights then stay live.
        """
        return self._call(lambda: self._swap(directory))

    def load_adapter(self, name: str, directory: Path) -> Future[int]:
        """Serve the adapter in `directory` under `name`, replacing an earlier version. The result is its version.

        The future fails with a `WeightError` if the adapter cannot be served; an earlier version then stays live.
        """
        return self._call(lambda: self._swap_adapter(name, directory))

    def pause(self) -> Future[None]:
        """Pause after the current step. Running sequences stay in place and new requests queue up until `resume`."""
        return self._call(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        return self._call(lambda: self._set_paused(False))

    def sleep(self) -> Future[None]:
        """Free the device's memory once all requests have ended. The next update of weights or adapters wakes it up;
        requests that arrive before wait for it."""
        return self._call(lambda: None, is_last=True)

    def stop(self) -> None:
        """Make `run` return after its current step. Pending requests fail with `EngineStopped`."""
        with self._lock:
            self._stopped = True
        self._inbox.put(None)

    @contextlib.contextmanager
    def in_thread(self, name: str | None = None) -> Iterator[Self]:
        """Run in a new thread during the block, then stop."""
        thread = threading.Thread(target=self.run, name=name, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()

    @torch.inference_mode()
    def run(self) -> None:
        """Generate until `stop`.

        An error in the work for one request fails that request. An error in work that requests share, such as the
        forward pass, ends the engine: pending requests fail, and the error is raised.
        """
        try:
            while self._drain_inbox():
                if self._falling_asleep and (self.is_asleep or not self._has_work):
                    self._fall_asleep()
                elif not (self.paused or self.is_asleep):
                    self._step()
        finally:
            self.stop()
            self._fail_pending()

    def _drain_inbox(self) -> bool:
        """Process arrived requests and commands; block while there is nothing to generate. Returns False on stop."""
        while True:
            falls_asleep = self._falling_asleep and (self.is_asleep or not self._has_work)
            idle = not falls_asleep and (self.paused or self.is_asleep or not self._has_work)
            if idle and self._inbox.empty():
                self._say_idle()
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, _Command):
                if item.is_last:
                    self._falling_asleep.append(item)
                else:
                    item.perform()
            elif not item.result.done():  # a step may have dropped what was cancelled while this one lay in the inbox
                self._scheduler.waiting.extend(item.sequences)
                self._unproven.append(item)
                self._fail_unless_loaded(item)

    @property
    def _has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _fall_asleep(self) -> None:
        if not self.is_asleep:
            self._scheduler.prefixes.clear()
            self._runner.leave_device()
            self.is_asleep = True
            get_logger().info(f"Asleep until the next weights | {self.stats}")
        for asleep in self._falling_asleep:
            asleep.perform()
        self._falling_asleep = []

    def _wake_up(self) -> None:
        if self.is_asleep:
            self._runner.come_back()
            self.is_asleep = False

    def _say_idle(self) -> None:
        if self.is_asleep:
            self._beats.say("sleeping until the next weights", waits_for=ANYONE)
        elif self.paused:
            self._beats.say(f"paused, with {self._num_queued} samples in the queue, until a request to /resume")
        else:
            self._beats.say("waiting for requests", waits_for=ANYONE)

    def _step(self) -> None:
        started = time.perf_counter()
        self._beats.say("generating")
        self._beats.tick()
        scheduler = self._scheduler
        # Not on arrival: the tower of an engine that sleeps is not on its device.
        for request in self._unproven:
            with _failing(request):
                self._runner.prove(request.images)
        self._unproven.clear()
        scheduler.drop_aborted()
        scheduler.make_room()
        num_decode = len(scheduler.running)
        prompts = scheduler.admit()
        if not scheduler.running:
            return
        replayed_before = self._runner.num_replayed
        logits = self._forward(num_decode, prompts)
        self.stats.steps += 1
        self.stats.replayed += self._runner.num_replayed - replayed_before
        self._sample(logits)
        self._hand_over_routes()
        grown = {sequence.request for sequence in scheduler.running if sequence.request.on_progress is not None}
        for sequence in scheduler.retire_finished():
            sequence.request.resolve_if_complete()
        for request in grown:
            with _failing(request):
                request.notify()
        self.stats.busy_s += time.perf_counter() - started

    def _forward(self, num_decode: int, prompts: PrefillBatch) -> torch.Tensor:
        """Logits [R, V] of the next token of every running sequence."""
        running = self._scheduler.running
        leaders = [prompts.sequences[index] for index in prompts.leaders]
        full = [row for row, leader in enumerate(leaders) if leader.request.wants_prompt_logprobs]
        logits, full_logits = self._runner.forward(
            running=[sequence.tokens for sequence in running[:num_decode]],
            prompts=[leader.tokens for leader in leaders],
            prompt_rows=[num_decode + index for index in prompts.leaders],
            num_cached=prompts.num_cached,
            full_prompts=full,
            adapters=[sequence.request.adapter for sequence in (*running[:num_decode], *leaders)],
            origins=[sequence.origin for sequence in (*running[:num_decode], *leaders)],
        )
        for row, parts in zip(full, full_logits, strict=True):
            request = leaders[row].request
            with _failing(request):
                request.prompt_logprobs = prompt_logprobs(parts, request.prompt, request.num_prompt_logprobs or 0)
        if len(leaders) < len(prompts.sequences):
            logits = self._copy_to_followers(logits, num_decode, prompts)
        return logits

    def _copy_to_followers(self, logits: torch.Tensor, num_decode: int, prompts: PrefillBatch) -> torch.Tensor:
        """Copy each prompt's keys, values and logits from its leader to the sequences with the same prompt."""
        followers: dict[int, list[int]] = {}
        for index, source in enumerate(prompts.source):
            if index != prompts.leaders[source]:
                followers.setdefault(prompts.leaders[source], []).append(num_decode + index)
        for leader, rows in followers.items():
            self._runner.slots.copy(num_decode + leader, rows, len(prompts.sequences[leader].tokens))
        rows = [*range(num_decode), *(num_decode + source for source in prompts.source)]
        return logits[on_device(rows, logits.device)]

    def _sample(self, logits: torch.Tensor) -> None:
        running = self._scheduler.running
        for sequence, token, logprob, top in self._draws(logits):
            adapter = sequence.request.adapter
            version = self.version if adapter is None else adapter.version
            if not math.isfinite(logprob):
                # The next sequence in this row would read the keys and values past its own end, masked but NaN.
                self._runner.slots.erase(next(row for row, each in enumerate(running) if each is sequence))
                sequence.request.fail(GenerationFailed(f"weights of version {version} produced NaN logits"))
                continue
            with _failing(sequence.request):
                sequence.append(token, logprob, top, version)
        self.stats.tokens += len(running)

    def _hand_over_routes(self) -> None:
        """Give finished samples the experts of their tokens. A sample leaves its slot row after this."""
        if self._runner.routers is None:
            return
        for row, sequence in enumerate(self._scheduler.running):
            if sequence.completion is not None:
                routes = self._runner.routes_of(row, len(sequence.tokens) - 1)
                sequence.completion = replace(sequence.completion, routed_experts=routes)

    def _draws(self, logits: torch.Tensor) -> list[Draw]:
        """The next token of every running sequence, sampled at once.

        If that fails, because of what some request asks for, each request is sampled alone and those that fail end.
        """
        running = self._scheduler.running
        try:
            if self._sampler is None or not self._sampler.fits(running):
                self._sampler = BatchSampler([each.params for each in running], logits.shape[1], logits.device)
            return _zipped(running, self._sampler.draw(logits, running))
        except Exception as exc:  # noqa: BLE001 - raised again for the requests at fault, which it then ends
            get_logger().warning(
                f"Could not sample {len(running)} sequences in one batch; sampling each request alone: {exc!r}"
            )
        self._sampler = None
        rows: dict[GenerationRequest, list[int]] = {}
        for row, sequence in enumerate(running):
            rows.setdefault(sequence.request, []).append(row)
        draws: list[Draw] = []
        for request, own in rows.items():
            with _failing(request):
                sampler = BatchSampler([request.params] * len(own), logits.shape[1], logits.device)
                sequences = [running[row] for row in own]
                draws += _zipped(sequences, sampler.draw(logits[own], sequences))
        return draws

    def _swap(self, directory: Path | None) -> int:
        started = time.perf_counter()
        self._beats.say(f"loading the weights {directory or 'of the base model'}")
        source = directory or self._runner.weights_dir
        if source is None:
            raise WeightError(
                "this engine was started without a directory of weights, so it cannot reload its initial ones"
            )
        self._wake_up()
        tensors = self.weight_source.read(source) if directory else read_weights(source)
        self._runner.load_weights(tensors, source)
        if self.adapters is not None:
            self.adapters.unload_all()
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._fail_unless_loaded(sequence.request)
        step = step_of(source) if directory else 0
        self.version = self.version + 1 if step is None else step
        self._log_swap(f"Weights: version {self.version}", started)
        return self.version

    def _swap_adapter(self, name: str, directory: Path) -> int:
        started = time.perf_counter()
        self._beats.say(f"loading the adapter {directory}")
        if self.adapters is None:
            raise WeightError("this server was started without enable_lora")
        check_base_version(self.version)
        self._wake_up()
        version = self.adapters.load(name, directory).version
        self._log_swap(f"Adapter {name}: version {version}", started)
        return version

    def _log_swap(self, what: str, started: float) -> None:
        get_logger().info(
            f"{what} live after {time.perf_counter() - started:.2f}s | "
            f"{len(self._scheduler.running)} running, {len(self._scheduler.waiting)} waiting | "
            f"previous version: {self.stats}"
        )
        self._earlier.tokens += self.stats.tokens
        self._earlier.busy_s += self.stats.busy_s
        self.stats = EngineStats()
        self._scheduler.prefixes.clear()

    @staticmethod
    def _fail_unless_loaded(request: GenerationRequest) -> None:
        adapter = request.adapter
        if adapter is not None and not adapter.is_loaded:
            request.fail(GenerationFailed(f"adapter {adapter.name!r} was unloaded: its base weights were replaced"))

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused

    def _call(self, action: Callable[[], Any], *, is_last: bool = False) -> Future[Any]:
        """Run `action` on the engine's thread between two steps. `is_last`: and once all requests have ended."""
        command = _Command(action, Future(), is_last)
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine is stopping")
            self._inbox.put(command)
        return command.result

    def _release(self, count: int, result: Future[Generation]) -> None:
        with self._lock:
            self._num_queued -= count
        if result.cancelled() or result.exception() is not None:
            self._scheduler.has_aborted = True

    def _fail_pending(self) -> None:
        error = EngineStopped("the engine stopped before the request was complete")
        for asleep in self._falling_asleep:
            asleep.fail(error)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            sequence.request.fail(error)
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None:
                item.fail(error)
