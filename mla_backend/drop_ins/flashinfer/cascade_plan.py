"""One level of the cascade wrapper as planned: its pages, and the query tiles of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend_core.contracts import (
    expect_device,
    expect_dtype,
    expect_shape,
    expect_stride,
    expect_tensors,
)

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


@dataclass(frozen=True)
class Level:
    """Tables of a level that ``run`` reads, int32 on the device.

    Attributes:
        qo_indptr: ``[groups + 1]``; kv_indptr: ``[groups + 1]`` offsets into ``kv_indices``.
        last_page_len: ``[groups]``.
        tile_request: ``[tiles]`` the group of a tile; tile_start: ``[tiles]`` its first query token
            in the group, beyond them all for a tile that is spare.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    tile_request: torch.Tensor
    tile_start: torch.Tensor
    causal: bool


@dataclass(frozen=True)
class Given:
    """A level as ``plan`` was given it: the four arrays, and the query tokens of each group."""

    arrays: Arrays
    counts: torch.Tensor

    @property
    def groups(self) -> int:
        return self.counts.shape[0]

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def tiles(self, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Group and first token of each tile of ``block_tokens`` query tokens."""
        tiles = -(-self.counts // block_tokens)
        count = functools.partial(torch.arange, device=tiles.device)
        request = torch.repeat_interleave(count(self.groups), tiles)
        first = (tiles.cumsum(0) - tiles)[request]
        return request, (count(len(request)) - first) * block_tokens


def check_given(arrays: Sequence[list[torch.Tensor]], levels: int, page_size: int) -> list[Given]:
    """The levels of a plan.

    Raises:
        ValueError: an array is not as `plan` describes it.
    """
    lists = [array for array in arrays if isinstance(array, list | tuple)]
    if len(lists) < len(arrays) or any(len(array) != levels for array in lists):
        raise ValueError(f"every array must be a list of {levels} tensors, one for each level")
    found = []
    for number, parts in enumerate(zip(*arrays, strict=True)):
        qo_indptr, kv_indptr, kv_indices, last_page_len = parts
        names = [f"{name}_arr[{number}]" for name in _NAMES]
        expect_tensors(**dict(zip(names, parts, strict=True)))
        expect_shape(names[3], last_page_len, ("groups",))
        groups = last_page_len.shape[0]
        expect_shape(names[0], qo_indptr, (groups + 1,))
        expect_shape(names[1], kv_indptr, (groups + 1,))
        expect_shape(names[2], kv_indices, ("pages",))
        for name, part in zip(names, parts, strict=True):
            expect_dtype(name, part, torch.int32, torch.int64)
        _expect_offsets(names[0], qo_indptr.cpu())
        if kv_indptr.is_cpu:
            _expect_offsets(names[1], kv_indptr)
            if int(kv_indptr[-1]) > len(kv_indices):
                raise ValueError(
                    f"{names[1]} must end at {len(kv_indices)} pages at most, got"
                    f" {int(kv_indptr[-1])}"
                )
        if kv_indices.is_cpu and kv_indptr.is_cpu:
            used = kv_indices[: int(kv_indptr[-1])]
            if len(used) and int(used.min()) < 0:
                raise ValueError(f"{names[2]} must not be negative, got {int(used.min())}")
        if last_page_len.is_cpu and groups:
            least, most = int(last_page_len.min()), int(last_page_len.max())
            if least < 0 or most > page_size:
                raise ValueError(
                    f"{names[3]} must be 0 to the page size {page_size}, got {least} to {most}"
                )
        found.append(Given(parts, qo_indptr.cpu().long().diff()))
    rows = [given.rows for given in found]
    if len(set(rows)) > 1:
        raise ValueError(f"every level must have as many query tokens, got {rows}")
    return found


def _expect_offsets(name: str, offsets: torch.Tensor) -> None:
    if int(offsets[0]) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{name} must begin at 0 and not decrease, got {offsets.tolist()}")


def planned(given: Given, device: torch.device, block_tokens: int, causal: bool) -> Level:
    """A level on the device, its tables without gaps, as the kernel reads them."""
    given_and_made = (*given.arrays, *given.tiles(block_tokens))
    tensors = [x.to(device, torch.int32).contiguous() for x in given_and_made]
    qo_indptr, kv_indptr, kv_indices, last_page_len, request, start = tensors
    return Level(qo_indptr, kv_indptr, kv_indices, last_page_len, request, start, causal)


class LevelBuffers:
    """The memory of one level that CUDA graphs keep: the caller's four buffers, and tiles for as
    many query tokens as the first plan has.

    Raises:
        ValueError: a buffer is not int32 on the device, or their lengths do not fit one another.
    """

    def __init__(self, number: int, buffers: Arrays, device: torch.device) -> None:
        self._number, self._buffers = number, buffers
        names = [f"{name}_buf_arr[{number}]" for name in _NAMES]
        expect_tensors(**dict(zip(names, buffers, strict=True)))
        expect_shape(names[3], buffers[3], ("groups",))
        self.groups = buffers[3].shape[0]
        lengths: tuple[int | str, ...] = (self.groups + 1, self.groups + 1, "pages", self.groups)
        for name, buffer, length in zip(names, buffers, lengths, strict=True):
            expect_dtype(name, buffer, torch.int32)
            expect_shape(name, buffer, (length,))
            expect_device(name, buffer, device)
            expect_stride(name, buffer, 0, 1)
        self._level: Level | None = None
        self.rows = 0

    def check(self, given: Given) -> None:
        """Whether a plan fits.

        Raises:
            ValueError: it has other groups, more pages, or more query tokens than the first.
        """
        where = f"level {self._number}"
        if given.groups != self.groups:
            raise ValueError(f"{where} must have {self.groups} groups, got {given.groups}")
        pages, capacity = given.arrays[2].shape[0], self._buffers[2].shape[0]
        if pages > capacity:
            raise ValueError(f"{where} must have at most {capacity} pages, got {pages}")
        if self._level is not None and given.rows > self.rows:
            raise ValueError(
                f"{where} must have at most the {self.rows} query tokens of the first plan, got"
                f" {given.rows}"
            )

    def write(self, given: Given, block_tokens: int, causal: bool) -> Level:
        """A plan that `check` allows, in the same memory as the plans before."""
        if self._level is None:
            # a group has at most one tile that is not full
            tiles = max(self.groups + given.rows // block_tokens, 1)
            request, start = self._buffers[0].new_empty(2, tiles).unbind(0)
            self._level = Level(*self._buffers, request, start, causal)
            self.rows = given.rows
        self._copy(self._level, given, block_tokens)
        return self._level

    @torch.inference_mode()  # in which the memory may have been made
    def _copy(self, level: Level, given: Given, block_tokens: int) -> None:
        request, start = given.tiles(block_tokens)
        spare = level.tile_request.shape[0] - request.shape[0]
        request = torch.cat([request, request.new_zeros(spare)])
        start = torch.cat([start, start.new_full((spare,), self.rows)])
        for buffer, array in zip(self._buffers, given.arrays, strict=True):
            buffer[: array.shape[0]].copy_(array)
        level.tile_request.copy_(request)
        level.tile_start.copy_(start)
