"""A call, the launches bound to its layer, and the cache that keeps them between calls.

What belongs to a layer and its caches is packed once, what belongs to a step plan once per step for
all layers that share it; a call adds its input.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from backend_core.contracts import expect_kernel_device
from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target
from dsv4_backend.spec import CompressorLayer
from dsv4_backend.step_plan import CompressorStepPlan

if TYPE_CHECKING:
    from backend_core.launch.triton import Argument, Grid, KernelLaunch, Packed

Plan = TypeVar("Plan", bound=CompressorStepPlan, contravariant=True)
T = TypeVar("T")

_INPUT = ("input_ptr", "stride_input_t")
_POOLED_INPUT = (*_INPUT, "pooled_ptr")
_KEPT = 64  # kinds of calls in one cache


@dataclass(slots=True, eq=False)
class CompressorCall:
    """A layer with the tensors of one call, as the operators take them.

    Attributes:
        second_cache: of the record formats that have a second tensor.
        pooled: [windows, head_dim] fp32, between the launches that split the channels.
    """

    layer: CompressorLayer
    kv_score: torch.Tensor
    state: torch.Tensor
    cache: torch.Tensor
    second_cache: torch.Tensor | None = None
    pooled: torch.Tensor | None = None

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """The tensors that records lie in."""
        second = self.second_cache
        return (self.cache,) if second is None else (self.cache, second)

    def input_arguments(self) -> tuple[Argument, ...]:
        """In the order of ``_INPUT``, or of ``_POOLED_INPUT`` where there are pooled rows."""
        kv_score, pooled = self.kv_score, self.pooled
        stride = kv_score.stride()[0]
        return (kv_score, stride) if pooled is None else (kv_score, stride, pooled)

    def layer_arguments(self) -> dict[str, Argument]:
        """The kernels' arguments that stay while the layer and its caches do."""
        layer, second = self.layer, self.second_cache
        stride_state_b, stride_state_r, _ = self.state.stride()
        stride_ape_r, stride_ape_c, _ = layer.ape.stride()
        return {
            "state_ptr": self.state,
            "stride_state_b": stride_state_b,
            "stride_state_r": stride_state_r,
            "ape_ptr": layer.ape,
            "stride_ape_r": stride_ape_r,
            "stride_ape_c": stride_ape_c,
            "weight_ptr": layer.norm_weight,
            "table_ptr": layer.rope_table,
            "stride_table_p": layer.rope_table.stride()[0],
            "cache_ptr": self.cache,
            "stride_cache_p": self.cache.stride()[0],
            "second_ptr": second,
            "stride_second_p": None if second is None else second.stride()[0],
            "eps": layer.spec.eps,
        }


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel with its constants: constexprs, and options of the compiler and the launch."""

    kernel: Any
    constexprs: dict[str, Any]
    options: dict[str, Any]

    def launch(self, layer_names: tuple[str, ...], plan_names: tuple[str, ...]) -> KernelLaunch:
        """The launch that all layers share whose arguments have these names."""
        constexprs, options = tuple(self.constexprs.items()), tuple(self.options.items())
        return _shared_launch(self.kernel, constexprs, options, layer_names, plan_names)


@functools.cache
def _shared_launch(
    kernel: Any,
    constexprs: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
    layer_names: tuple[str, ...],
    plan_names: tuple[str, ...],
) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch

    inputs = _POOLED_INPUT if "pooled_ptr" in kernel.arg_names else _INPUT
    return KernelLaunch(kernel, dict(constexprs), dict(options), (inputs, layer_names, plan_names))


class BoundLaunch:
    """A kernel with the arguments of one layer and its caches.

    Arguments that neither the layer nor the step plan has are ``None``: the kernel reads them for
    the other layout of the state, or for other record formats.
    """

    def __init__(
        self,
        variant: Variant,
        call: CompressorCall,
        step_plan: CompressorStepPlan,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """``own``: tensors of the path itself, by the kernel's names for them.

        Raises:
            ValueError: the call's tensors are on a CPU, and no interpreter runs the kernel there.
        """
        expect_kernel_device("kv_score", call.kv_score)
        self._own = dict(own or {})
        plan_names = tuple(step_plan.kernel_arguments())
        others = {*_POOLED_INPUT, *plan_names, *variant.constexprs}
        layer_names = tuple(name for name in variant.kernel.arg_names if name not in others)
        values = call.layer_arguments() | self._own
        self._launch = variant.launch(layer_names, plan_names)
        self._layer: Packed = self._launch.pack([values.get(name) for name in layer_names])

    def __call__(
        self,
        grid: Grid,
        call: CompressorCall,
        step_plan: CompressorStepPlan,
        packed_input: Packed | None = None,
    ) -> None:
        """Launch for a call of the same layer and caches.

        Args:
            packed_input: what ``pack_input`` returned for this call, for another launch of it.
        """
        launch = self._launch
        packs = (packed_input or self.pack_input(call), self._layer, step_plan.packed)
        launch.packed(grid, packs, lambda: self.in_order(call, step_plan))

    def pack_input(self, call: CompressorCall) -> Packed:
        """The call's own arguments, prepared for all of its launches."""
        return self._launch.pack(call.input_arguments())

    def warm_up(self, call: CompressorCall, step_plan: CompressorStepPlan) -> None:
        """Compile what a call like this one launches."""
        self._launch.warm_up(*self.in_order(call, step_plan))

    def in_order(self, call: CompressorCall, step_plan: CompressorStepPlan) -> tuple[Argument, ...]:
        """The run-time arguments in the order of the kernel's signature."""
        values: dict[str, Argument] = dict(zip(_POOLED_INPUT, call.input_arguments(), strict=False))
        values |= call.layer_arguments() | self._own | step_plan.kernel_arguments()
        return tuple(values.get(name) for name in self._launch.argument_names)


class Pipeline(Protocol[Plan]):
    """One kernel path bound to a layer and its caches."""

    def __call__(self, call: CompressorCall, step_plan: Plan) -> None: ...

    def warm_up(self, call: CompressorCall, step_plan: Plan) -> None: ...


class ByGrid(Generic[T]):
    """Something for each path of a selection, looked up by grid."""

    def __init__(self, selection: PathSelection, build: Callable[[KernelPath], T]) -> None:
        # only the last path may be open
        self._bounds = [path.max_grid or 0 for path in selection.paths[:-1]]
        self.values = tuple(build(path) for path in selection.paths)

    def at(self, grid: int) -> T:
        return self.values[bisect_left(self._bounds, grid)]


Bind = Callable[
    [CompressorCall, Any, "Target | None", "PathSelection | None"], ByGrid[Pipeline[Any]]
]
"""Checks a call, selects its paths and binds them."""


class LaunchCache:
    """The checks and packed arguments of earlier calls, for later calls that agree with them.

    The caller of the operators makes one, for instance an engine's adapter of one layer, and keeps
    it as long as that layer lives. Two calls agree if they have the same layer and kind of step
    plan, and if shapes, strides, dtypes, devices and addresses of weights, state and cache are the
    same. A `LaunchCache` keeps no state and no cache alive. It keeps the memory of paths that split
    channels as long as it lives itself, since a CUDA graph may hold that memory.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], ByGrid[Pipeline[Any]]] = {}
        self._outlived: list[Pipeline[Any]] = []

    def find(
        self,
        bind: Bind,
        call: CompressorCall,
        step_plan: CompressorStepPlan,
        target: Target | None,
        selection: PathSelection | None,
    ) -> ByGrid[Pipeline[Any]]:
        """What ``bind`` returned for a call that agrees with this one, or returns for this one.

        Raises:
            ValueError: the call breaks its operator's contract.
            LookupError: there are no kernel paths for the target.
        """
        layer, kv_score, state, cache = call.layer, call.kv_score, call.state, call.cache
        second = call.second_cache
        rows, width = kv_score.shape
        # An address tells the device, so of state and cache that one is not asked. Every step of
        # every layer makes this key: one flat tuple, and a GPU's number, which is compared faster
        # than a torch.device (-1 is any other device).
        key: tuple[object, ...] = (
            layer,
            type(step_plan),
            step_plan.device,
            step_plan.pdl_prefetch_safe,
            target,
            selection,
            width,
            kv_score.stride(),
            kv_score.dtype,
            kv_score.get_device() + 1 or kv_score.device,
            state.data_ptr(),
            state.shape,
            state.stride(),
            state.dtype,
            cache.data_ptr(),
            cache.shape,
            cache.stride(),
            cache.dtype,
            layer.ape.data_ptr(),
            layer.norm_weight.data_ptr(),
            layer.rope_table.data_ptr(),
        )
        if second is not None:
            key += (second.data_ptr(), second.shape, second.stride(), second.dtype)
        found = self._found.get(key)
        if found is None or rows < step_plan.num_tokens:
            found = bind(call, step_plan, target, selection)
            if len(self._found) >= _KEPT:
                pipelines = (p for kind in self._found.values() for p in kind.values)
                self._outlived += [p for p in pipelines if getattr(p, "has_memory", False)]
                self._found.clear()
            self._found[key] = found
        return found
