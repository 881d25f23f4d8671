"""Whether an interpreted kernel stays inside of the memory that its arguments have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


@contextmanager
def checked(*tensors: torch.Tensor) -> Iterator[None]:
    """Within, every load and store of Triton's interpreter lies in the storage of one of these.

    Raises:
        AssertionError: in the kernel, if one does not.
    """
    memory = [tensor.untyped_storage() for tensor in tensors]
    ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in memory]
    upstream = interpreter._interpreter

    def check(pointers: Any, mask: Any, size: int) -> None:
        at = np.asarray(pointers)[np.asarray(mask).astype(bool)].astype(np.int64)
        inside = np.zeros(at.shape, bool)
        for begin, end in ranges:
            inside |= (at >= begin) & (at + size <= end)
        assert inside.all(), f"{(~inside).sum()} of {at.size} accesses are outside of all tensors"

    class Checked:
        def __getattr__(self, name: str) -> Any:
            return getattr(upstream, name)

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            check(pointers, mask, np.dtype(dtype).itemsize)
            return upstream.load(pointers, mask, other, dtype)

        def store(self, pointers: Any, value: Any, mask: Any) -> Any:
            check(pointers, mask, np.asarray(value).dtype.itemsize)
            return upstream.store(pointers, value, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", Checked())
        yield
