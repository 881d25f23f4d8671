"""A CUDA graph without a GPU: what a call launches, recorded once and run again on the same memory.
On a GPU it is a CUDA graph.

As in a captured graph, the host's part of the call is over when the recording ends. Every operator
of torch and every Triton kernel (under the interpreter) is kept with the very tensors and numbers
that it was launched with; `DeviceGraph.replay` runs them in their order, and reads of the world
only what lies in those tensors then. What a capture cannot do is refused while recording: a value
that the host reads from the device. No tensor of the recording is freed, so what a memory pool does
that hands out addresses again is the one thing of a graph that this does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from kda_backend.step_plan import StepPlan, build_chunk_table, build_step_plan

_READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")


class DeviceGraph:
    """The launches of one recorded call.

    Attributes:
        kernels: names of the Triton kernels, in the order of their launches; empty on a GPU.
    """

    def __init__(self) -> None:
        self._nodes: list[Callable[[], Any]] = []
        self.kernels: list[str] = []

    def record(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` and keep its launches; returns its result, which replays write again.

        Raises:
            RuntimeError: the host reads a tensor's value.
        """
        if torch.cuda.is_available():
            call()  # kernels compile and load at their first use
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = call()
            graph.replay()
            self._nodes.append(graph.replay)
            return result
        upstream = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.kernels.append(executor.fn.__name__)
            self._nodes.append(lambda: upstream(executor, *args, **kwargs))
            with torch._C._DisableTorchDispatch():
                upstream(executor, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, _Recording(self._nodes):
            patch.setattr(GridExecutor, "__call__", launch)
            # as on a GPU, contracts take a tensor's values on trust
            patch.setattr(torch.Tensor, "is_cpu", False, raising=False)
            return call()

    def replay(self) -> None:
        for node in self._nodes:
            node()


class _Recording(TorchDispatchMode):
    def __init__(self, nodes: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if name in _READS:
            raise RuntimeError(f"{func} reads a value on the host, which no capture allows")
        result = func(*args, **kwargs)
        given = {_storage(x) for x in _tensors((args, kwargs))}
        made = [x for x in _tensors(result) if _storage(x) not in given]
        if func._schema.is_mutable:
            self._nodes.append(lambda: func(*args, **kwargs))
        elif made and not name.startswith(("empty", "new_empty")):  # a view makes nothing
            self._nodes.append(lambda: _again(func, args, kwargs, made))
        return result


def plan_of_a_gpu(
    cu_seqlens: torch.Tensor, num_tokens: int, *, chunk_table: bool, **known: Any
) -> StepPlan:
    """`build_step_plan` of offsets that are not in host memory."""
    assert chunk_table
    plan = build_step_plan(cu_seqlens.to("meta"), num_tokens, chunk_table=False, **known)
    table = build_chunk_table(cu_seqlens, plan.num_chunks)
    return replace(plan, cu_seqlens=cu_seqlens, chunk_table=table)


def _again(func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
    """An operator that makes tensors, into those of the recording."""
    for target, source in zip(written, _tensors(func(*args, **kwargs)), strict=True):
        target.copy_(source)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
