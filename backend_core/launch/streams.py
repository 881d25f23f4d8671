"""The GPU and the stream of a call, and the order of calls that share a memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
"""The handle of a device's current stream. A torch without GPUs has none, and no caller here."""


_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one, where kernels are launched."""
    try:
        index = tensor.get_device()
    except AttributeError:  # no tensor, which the operator's checks say
        return False
    return index >= 0 and index != _current_device()


def run_there(
    tensor: torch.Tensor, function: Callable[..., Result], arguments: Mapping[str, Any]
) -> Result:
    """``function(**arguments)`` with a tensor's GPU as the current one, hence on the stream that is
    current there.

    An operator whose tensors may be elsewhere begins with ::

        if is_elsewhere(q):
            return run_there(q, operator, locals())
    """
    with torch.cuda.device(tensor.device):
        return function(**arguments)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream, for tensors of a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """Puts the uses of one scratch memory in order.

    Calls on one stream run one after another anyway. A call on another stream than the last waits
    for what that one holds, so that two streams that share a scratch memory take turns instead of
    overwriting each other's. They gain nothing then: give each stream a scratch memory of its own.
    Inside a CUDA graph's capture nothing is waited for. A graph holds the addresses that it has
    seen, and replays beside other calls with the same scratch memory must be ordered by the caller.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._index = device.index
        self._raw = -1
        self._stream: torch.cuda.Stream | None = None

    def enter(self, *memory: torch.Tensor) -> None:
        """Before a call's launches on the current stream, which will use ``memory``."""
        if not self._is_gpu:
            return
        if self._index is None:
            self._index = torch.cuda.current_device()
        raw = _raw_stream(self._index)
        if raw != self._raw:
            self._change(raw, memory)

    def _change(self, raw: int, memory: tuple[torch.Tensor, ...]) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
            for tensor in memory:
                tensor.record_stream(stream)  # freed when it grows, while this stream uses it
        self._raw, self._stream = raw, stream
