"""Weights from the trainer straight into the memory of inference engines, through NCCL, or gloo without GPUs.

The group is apart from the trainer's own and from the engine's: rank 0 is the trainer's main process, every other rank
an engine's worker. Rank 0 broadcasts all messages:

    int64 [number of bundles]
    for each bundle: int64 [bytes of the header], the header, then one flat tensor for each of its dtypes

The header is MessagePack: the policy version, and name and shape of each tensor, by dtype. Bundles are the tensors
outside the decoder layers, then each layer's (runtime behaviour, section 5.9), so that neither side ever holds a second
copy of the model. Names are those of the hub.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.transport.errors import TransportError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_OFFER = "offer"
SENDER = 0


class TensorSpec(msgspec.Struct, array_like=True):
    """One tensor of a bundle."""

    name: str
    shape: list[int]


class BundleHeader(msgspec.Struct, array_like=True):
    """What a bundle holds, in the order in which it comes."""

    version: int
    tensors_by_dtype: dict[str, list[TensorSpec]]


class Offer(msgspec.Struct, array_like=True):
    """What the trainer says of the group at its door."""

    size: int
    device: str


class WeightGroup:
    """One process's place among the trainer and the engines' workers."""

    def __init__(self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Meet at `address`, where rank 0 opens a port and returns at once; the others wait for it.

        The connections themselves are made with the first weights.

        Raises:
            TransportError: the port cannot be opened, or rank 0 does not come in `timeout_s`, or means another group.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._backend: dist.ProcessGroupNCCL | dist.ProcessGroupGloo | None = None
        host, port = address
        with _telling(f"process {rank} of {size} could not join the group at {host}:{port}"):
            self._store = dist.TCPStore(
                host, port, is_master=rank == SENDER, timeout=self._timeout, wait_for_workers=False
            )
            if rank == SENDER:
                # torch's stub takes text alone; the store takes bytes, and gives bytes back.
                self._store.set(_OFFER, msgspec.msgpack.encode(Offer(size, device.type)))  # type: ignore[arg-type]
            else:
                self._check(msgspec.msgpack.decode(self._store.get(_OFFER), type=Offer))

    def send(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give `weights` (any device, hub naming) to every engine worker. Rank 0 only.

        Raises:
            TransportError: a worker is gone, or does not take them in the group's time.
        """
        with _telling(f"version {version} did not reach the inference servers"):
            bundles = bundles_of(weights)
            self._send_number(len(bundles))
            for names in bundles:
                by_dtype: dict[torch.dtype, list[str]] = {}
                for name in names:
                    by_dtype.setdefault(weights[name].dtype, []).append(name)
                self._send_bytes(msgspec.msgpack.encode(_header_of(weights, by_dtype, version)))
                for members in by_dtype.values():
                    self._broadcast(torch.cat([weights[name].to(self.device).flatten() for name in members]))

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of all weights of `version`, on this process's device, as they come. Every rank but 0.

        The iterator must be used up: the others wait for this process. A tensor is a view of its bundle.

        Raises:
            TransportError: the trainer is gone, sends nothing in the group's time, or sends another version.
        """
        broken = f"version {version} did not come from the trainer"
        with _telling(broken):
            count = self._receive_number()
        for _ in range(count):
            with _telling(broken):
                header = msgspec.msgpack.decode(self._receive_bytes(), type=BundleHeader)
            if header.version != version:
                raise TransportError(f"expected the weights of version {version}, and {header.version} came")
            for dtype, specs in header.tensors_by_dtype.items():
                sizes = [math.prod(spec.shape) for spec in specs]
                flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device)
                with _telling(broken):
                    self._broadcast(flat)
                for spec, part in zip(specs, flat.split_with_sizes(sizes), strict=True):
                    yield spec.name, part.view(spec.shape)

    def _check(self, offer: Offer) -> None:
        if offer.device != self.device.type:
            raise TransportError(
                f"the trainer sends weights from a {offer.device} device, and this engine is on a {self.device.type} "
                "one: weight_broadcast.type = 'nccl' needs both on GPUs, or both on CPUs"
            )
        if offer.size != self.size:
            raise TransportError(
                f"the trainer waits for {offer.size - 1} inference workers, and there are {self.size - 1}: set "
                f"trainer.weight_broadcast.inference_world_size = {self.size - 1}"
            )

    def _broadcast(self, tensor: Tensor) -> None:
        if self._backend is None:
            self._backend = _backend(self._store, self.rank, self.size, self.device, self._timeout)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        # torch's stub leaves out what a backend can do.
        self._backend.broadcast([tensor], options).wait()  # type: ignore[union-attr]

    def _send_number(self, number: int) -> None:
        self._broadcast(torch.tensor([number], dtype=torch.int64, device=self.device))

    def _receive_number(self) -> int:
        number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(number)
        return int(number)

    def _send_bytes(self, payload: bytes) -> None:
        self._send_number(len(payload))
        self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device))

    def _receive_bytes(self) -> bytes:
        payload = torch.empty(self._receive_number(), dtype=torch.uint8, device=self.device)
        self._broadcast(payload)
        return payload.cpu().numpy().tobytes()


@contextmanager
def _telling(fault: str) -> Iterator[None]:
    """Turn what torch raises into one line."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        raise TransportError(f"weight_broadcast: {fault}: {str(error).splitlines()[0]}") from error


def bundles_of(names: Iterable[str]) -> list[list[str]]:
    """The names outside decoder layers, then those of each layer, in order."""
    bundles: dict[int, list[str]] = {}
    for name in names:
        layer = _LAYER.search(name)
        bundles.setdefault(-1 if layer is None else int(layer[1]), []).append(name)
    return [bundles[index] for index in sorted(bundles)]


def _header_of(weights: Mapping[str, Tensor], by_dtype: Mapping[torch.dtype, list[str]], version: int) -> BundleHeader:
    return BundleHeader(
        version,
        {
            str(dtype).removeprefix("torch."): [TensorSpec(name, list(weights[name].shape)) for name in names]
            for dtype, names in by_dtype.items()
        },
    )


def _backend(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroupNCCL | dist.ProcessGroupGloo:
    # Made directly: a process may be in other groups already, or, as an engine's worker, must not start a default one.
    store = dist.PrefixStore("weights", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
