"""Broadcasts weights from the trainer directly to inference engines, through NCCL on GPUs or gloo on CPUs.

The process group is separate from those of the trainer and of the engines: rank 0 is the trainer's main process, and
every other rank is an engine worker. Rank 0 broadcasts all messages:

    for each bundle: int64 [1], int64 [header size in bytes], the header, then one flat tensor per dtype
    int64 [0]

The header is MessagePack: the policy version, and the name and shape of each tensor, grouped by dtype. The first bundle
has the tensors outside the decoder layers, and each further bundle has one layer's, so that neither side ever holds a
second copy of the model: the trainer gathers a bundle when it sends it. Tensors are named as on the hub.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.transport.endpoints import TransportError
from prime_rl.utils.waiting import REMIND_EVERY_S, Wait

_LAYER = re.compile(r"\.(?:layers|h|blocks|block|layer)\.(\d+)\.")
_NEXT, _END = 1, 0
_GROUP_INFO = "info"
_BACKLOG = 1024
_POLL_S = 2e-4
"""Short next to a broadcast, which takes milliseconds."""
NCCL_LATER_S = 60.0
"""Seconds by which NCCL's own limit is later than ours. At its limit, torch's watchdog ends the process at once."""
SENDER = 0


class TensorSpec(msgspec.Struct, array_like=True):
    """Name and shape of one tensor in a bundle."""

    name: str
    shape: list[int]


class BundleHeader(msgspec.Struct, array_like=True):
    """The contents of a bundle, in the order in which they are sent."""

    version: int
    tensors_by_dtype: dict[str, list[TensorSpec]]


class GroupInfo(msgspec.Struct, array_like=True):
    """The group's size and device type, published by the trainer so that joining workers can check theirs."""

    size: int
    device: str


class WeightGroup:
    """One process's membership in the group of the trainer (rank 0) and all engine workers."""

    def __init__(self, address: tuple[str, int], rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Rendezvous at `address`: rank 0 opens the port and returns at once; all other ranks wait for rank 0.

        Connections are established when the first weights are sent.

        Raises:
            TransportError: the port cannot be opened, rank 0 does not appear within `timeout_s` seconds, or its group
                has another size or device type.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._backend: dist.ProcessGroupNCCL | dist.ProcessGroupGloo | None = None
        host, port = address
        with _as_transport_error(f"process {rank} of {size} could not join the group at {host}:{port}"):
            self._store = tcp_store(host, port, rank == SENDER, self._timeout)
            if rank == SENDER:
                # torch's stub accepts only text, but the store takes and returns bytes.
                self._store.set(_GROUP_INFO, msgspec.msgpack.encode(GroupInfo(size, device.type)))  # type: ignore[arg-type]
            else:
                self._check(msgspec.msgpack.decode(self._store.get(_GROUP_INFO), type=GroupInfo))

    def send(self, bundles: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Send weights (on any device, named as on the hub) to every engine worker, bundle by bundle. Rank 0 only.

        Raises:
            TransportError: a worker has exited or does not receive the weights within the group's timeout.
        """
        broken = f"version {version} did not reach the inference servers"
        for weights in bundles:
            by_dtype: dict[torch.dtype, list[str]] = {}
            for name in weights:
                by_dtype.setdefault(weights[name].dtype, []).append(name)
            with _as_transport_error(broken):
                self._send_number(_NEXT)
                self._send_bytes(msgspec.msgpack.encode(_header_of(weights, by_dtype, version)))
                for members in by_dtype.values():
                    self._broadcast(torch.cat([weights[name].to(self.device).flatten() for name in members]))
        with _as_transport_error(broken):
            self._send_number(_END)

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of every weight of `version` as they arrive, on this process's device. Not on rank 0.

        Exhaust the iterator, because all other ranks wait for this one. Each tensor is a view of its bundle.

        Raises:
            TransportError: the trainer has exited, sends nothing within the group's timeout, or sends another version.
        """
        broken = f"did not receive version {version} from the trainer"
        while True:
            with _as_transport_error(broken):
                if self._receive_number() == _END:
                    return
                header = msgspec.msgpack.decode(self._receive_bytes(), type=BundleHeader)
            if header.version != version:
                raise TransportError(f"expected the weights of version {version}, but received {header.version}")
            for dtype, specs in header.tensors_by_dtype.items():
                sizes = [math.prod(spec.shape) for spec in specs]
                flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device)
                with _as_transport_error(broken):
                    self._broadcast(flat)
                for spec, part in zip(specs, flat.split_with_sizes(sizes), strict=True):
                    yield spec.name, part.view(spec.shape)

    def _check(self, info: GroupInfo) -> None:
        if info.device != self.device.type:
            raise TransportError(
                f"the trainer sends weights from a {info.device} device, but this engine is on a {self.device.type} "
                "device: weight_broadcast.type = 'nccl' needs both on GPUs or both on CPUs"
            )
        if info.size != self.size:
            raise TransportError(
                f"the trainer expects {info.size - 1} inference workers, but there are {self.size - 1}: set "
                f"trainer.weight_broadcast.inference_world_size = {self.size - 1}"
            )

    def _broadcast(self, tensor: Tensor) -> None:
        if self._backend is None:
            self._backend = _backend(self._store, self.rank, self.size, self.device, self._timeout)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        # torch's stub omits the backend's methods.
        work = self._backend.broadcast([tensor], options)  # type: ignore[union-attr]
        # NCCL's `wait` marks work that is late as failed, and its watchdog then ends the process before we can say why.
        wait = Wait(
            "the trainer and each inference server to take part in a broadcast of weights",
            "their logs show which one is stuck",
            self._timeout.total_seconds(),
            "weight_broadcast.timeout",
            quiet_s=REMIND_EVERY_S,
        )
        while not work.is_completed():
            if wait.is_over():
                raise TimeoutError(wait.fault)
            time.sleep(_POLL_S)
        # Raises the error of work that failed.
        work.wait(self._timeout)

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


def tcp_store(host: str, port: int, is_master: bool, timeout: timedelta) -> dist.TCPStore:
    """Open a store for several machines. Its master listens on the address of `host` alone; torch's would on all."""
    if not is_master:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        # The store closes the socket.
        descriptor = listening.detach()
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


@contextmanager
def _as_transport_error(fault: str) -> Iterator[None]:
    """Convert errors from torch into a one-line TransportError."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
        raise TransportError(f"weight_broadcast: {fault}: {str(error).splitlines()[0]}") from error


def bundles_of(names: Iterable[str]) -> list[list[str]]:
    """Group names into bundles: those outside decoder layers first, then one bundle per layer, in order."""
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
    # Constructed directly: the process may be in other groups already, and an engine worker must not create a default.
    store = dist.PrefixStore("weights", store)
    # NCCL connects without a limit, also to a process that has ended.
    store.set(f"here_{rank}", "")
    store.wait([f"here_{other}" for other in range(size)], timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout + timedelta(seconds=NCCL_LATER_S)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


# Moves what the host has computed to the model's device without waiting for the device.


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; itself if it is there already.

    A copy from ordinary host memory waits until the GPU has done all its work; one from pinned memory is queued behind
    that work. The allocator of pinned memory keeps the source until the copy is done.
    """
    if device.type == "cpu" or host.device.type != "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
