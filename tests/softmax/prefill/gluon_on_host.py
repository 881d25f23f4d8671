"""The Gluon kernels of block-sparse attention for Hopper run by Python, with their warp roles.

The sources are executed as they are with another ``gluon``: numpy for tensors, a thread for each
warp role, and one schedule at random in which a role, a copy of TMA or a product of a warpgroup
goes on; by the seed some of them are slow. What Hopper leaves undefined is made visible: memory
that a copy will fill is NaN from when the copy is issued, a product reads its operands any time
until it is waited for, and its result cannot be used before. A schedule in which nothing can go on
is an error, and so is a barrier with more arrivals than it expects. Layouts, registers, the order
of memory between threads of a warpgroup and PTX are not modelled: ``compile_report.py`` and a GPU
see those.
"""

from __future__ import annotations

import builtins
import random
import re
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[3] / "softmax_backend" / "kernels" / "sm90"
Condition = Callable[[], bool]
SPEEDS = (1.0, 0.02)


class StoppedError(Exception):
    """Another role has failed."""


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """Values in registers."""

    def to(self, dtype: Any) -> Tensor:
        return self


class Scalar(int):
    """A loaded integer."""

    def to(self, dtype: Any) -> Scalar:
        return self


def tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


class Role:
    """A warp role: a thread that runs only when the machine lets it."""

    def __init__(self, machine: Machine, program: int, body: Callable[[], None]) -> None:
        self.machine, self.program, self.body = machine, program, body
        self.go = threading.Semaphore(0)
        self.ready: Condition | None = None
        self.is_done = False
        self.products: list[Product] = []
        self.speed = 1.0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        self.machine.local.role = self
        try:
            if not self.machine.failure:
                self.body()
                if self.products:
                    raise AssertionError("a role ends with products that it has not awaited")
        except StoppedError:
            pass
        except BaseException as reason:  # handed to the test's thread
            self.machine.failure = self.machine.failure or reason
        self.is_done = True
        self.machine.turn.release()

    def pause(self, ready: Condition | None = None) -> None:
        self.ready = ready
        self.machine.turn.release()
        self.go.acquire()
        if self.machine.failure:
            raise StoppedError


class Machine:
    """All CTAs of a launch, in one random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turn = threading.Semaphore(0)
        self.local = threading.local()
        self.roles: list[Role] = []
        self.copies: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        self.speed_of_copies, self.speed_of_products = self.random.choices(SPEEDS, k=2)
        self.hardware: dict[tuple[int, int], list[int]] = {}

    def start(self, program: int, body: Callable[[], None]) -> Role:
        role = Role(self, program, body)
        role.speed = self.random.choice(SPEEDS)
        self.roles.append(role)
        return role

    def run(self) -> None:
        while True:
            live = [r for r in self.roles if not r.is_done]
            if self.failure is None and not live and not self.copies:
                return
            able: list[Callable[[], None]] = list(self.copies)
            speeds = [self.speed_of_copies] * len(able)
            able += [r.products[0].compute for r in live if r.products]
            speeds += [self.speed_of_products] * (len(able) - len(speeds))
            going = [r for r in live if r.ready is None or r.ready()]
            able += [self._resume(r) for r in going]
            speeds += [r.speed for r in going]
            if self.failure is not None or not able:
                self.failure = self.failure or AssertionError("nothing can go on")
                for role in live:
                    role.go.release()
                for role in live:
                    role.thread.join()
                raise self.failure
            self.random.choices(able, speeds)[0]()

    def _resume(self, role: Role) -> Callable[[], None]:
        def resume() -> None:
            role.go.release()
            self.turn.acquire()

        return resume


class Product:
    """A product of a warpgroup under way; the result before it is awaited."""

    def __init__(self, role: Role, operands: tuple[Any, Any, Any], use_acc: bool) -> None:
        self.role, self.operands, self.use_acc = role, operands, use_acc
        self.done = False
        self.value: Tensor | None = None

    def compute(self) -> None:
        a, b, acc = (x.data if isinstance(x, Memory) else x for x in self.operands)
        self.value = tensor(a @ b + (acc if self.use_acc else 0.0))
        self.done = True
        self.role.products.remove(self)


class Memory:
    """A view of shared memory."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.shape = data, dtype, list(data.shape)

    def index(self, i: int) -> Memory:
        return Memory(self.data[int(i)], self.dtype)

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.data.reshape(shape), self.dtype)

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.transpose(order), self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        assert dim == 0
        return Memory(self.data[start : start + length], self.dtype)

    def load(self, layout: Any) -> Tensor:
        return tensor(self.data.copy())

    def store(self, value: Any) -> None:
        self.data[...] = value


class Barrier:
    """An mbarrier; ``index`` of one is one of its row."""

    def __init__(self, count: int) -> None:
        self.row = [self] + [Barrier(1) for _ in range(count - 1)]
        self.expected = self.pending = self.bytes = self.phase = 0

    def index(self, i: int) -> Barrier:
        return self.row[int(i)]

    def arrive(self, count: int) -> None:
        assert self.expected, "a barrier is used before it is initialised"
        self.pending -= count
        assert self.pending >= 0, "more arrivals than the barrier expects"
        self.complete()

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.expected


class Pointer:
    """Into a flat array, with one offset or a tensor of them."""

    def __init__(self, data: Any, offset: Any = 0) -> None:
        self.data, self.offset = data, offset
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)


class Descriptor:
    """A tensor descriptor of a [B, H, L, D] array."""

    def __init__(self, data: Any, rows: int) -> None:
        self.data, self.dtype, self.layout = data, data.dtype, None
        shape = [1, 1, rows, data.shape[3]]
        nbytes = data.itemsize * rows * data.shape[3]
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=nbytes)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _identity(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _jit(fn: Any = None, **_: Any) -> Any:
    return _identity if fn is None else fn


class Language:
    """``triton.experimental.gluon.language`` and Hopper's part of it, on a machine."""

    constexpr = staticmethod(_identity)
    int32, int64, float32 = np.int32, np.int64, np.float32
    convert_layout = staticmethod(_identity)
    NVMMADistributedLayout = SliceLayout = DotOperandLayout = BlockedLayout = staticmethod(_nothing)
    MBarrierLayout = staticmethod(_nothing)
    static_range = range
    shared_memory_descriptor = object
    thread_barrier = fence_async_shared = staticmethod(_nothing)

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.mbarrier = self.tma = self.async_copy = self

    @property
    def role(self) -> Role:
        return self.machine.local.role  # type: ignore[no-any-return]

    def program_id(self, axis: int) -> Scalar:
        return Scalar(self.role.program)

    def arange(self, start: int, end: int, layout: Any) -> Tensor:
        return tensor(np.arange(start, end))

    def zeros(self, shape: Sequence[int], dtype: Any, layout: Any) -> Tensor:
        return tensor(np.zeros(shape, dtype))

    def full(self, shape: Sequence[int], value: Any, dtype: Any, layout: Any) -> Tensor:
        return tensor(np.full(shape, value, dtype))

    def where(self, condition: Any, x: Any, y: Any) -> Tensor:
        return tensor(np.where(condition, x, y))

    def zeros_like(self, x: Any) -> Tensor:
        return tensor(np.zeros_like(x))

    def log2(self, x: Any) -> Tensor:
        return tensor(np.log2(x))

    def minimum(self, x: int, y: int) -> int:
        return min(x, y)

    def load(self, at: Pointer) -> Scalar:
        return Scalar(at.data[int(at.offset)])

    def store(self, at: Pointer, value: Any, mask: Any) -> None:
        offset, value, mask = np.broadcast_arrays(at.offset, value, mask)
        assert np.isnan(at.data[offset[mask]]).all(), "an output is written twice"
        at.data[offset[mask]] = value[mask]

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype is np.int64:
            return Barrier(shape[0])
        return Memory(np.full(shape, np.nan, dtype), dtype)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.expected = barrier.pending = count

    def wait(self, barrier: Barrier, phase: int) -> None:
        assert phase in (0, 1)
        self.role.pause(lambda: barrier.phase != phase)

    def arrive(self, barrier: Barrier, count: int) -> None:
        self.role.pause()
        barrier.arrive(count)

    def expect(self, barrier: Barrier, count: int) -> None:
        self.role.pause()
        barrier.bytes += count
        barrier.arrive(1)

    def async_copy_global_to_shared(
        self, desc: Descriptor, at: Sequence[int], barrier: Barrier, out: Memory
    ) -> None:
        out.data[...] = np.nan

        def copy() -> None:
            self.machine.copies.remove(copy)
            batch, head, start, _ = (int(x) for x in at)
            rows = desc.data[batch, head, start : start + out.shape[2]]
            out.data[...] = 0
            out.data[0, 0, : len(rows)] = rows
            barrier.bytes -= desc.block_type.nbytes
            assert barrier.bytes >= 0, "more bytes than the barrier expects"
            barrier.complete()

        self.machine.copies.append(copy)
        self.role.pause()

    def warpgroup_mma(
        self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        product = Product(self.role, (a, b, acc), use_acc)
        self.role.products.append(product)
        self.role.pause()
        return product if is_async else self.warpgroup_mma_wait(0, [product])

    def warpgroup_mma_wait(self, pending: int, deps: Sequence[Product]) -> Any:
        role = self.role
        role.pause(lambda: len(role.products) <= pending)
        (product,) = deps
        assert product.value is not None, "a product is used that was not awaited"
        return product.value

    def inline_asm_elementwise(
        self, text: str, operands: str, args: Sequence[Any], **_: Any
    ) -> Any:
        """What the four pieces of PTX of ``block_forms.py`` do; no other is known."""
        if (found := re.match(r"bar\.(sync|arrive) (\d+), 256;", text)) is not None:
            return self._hardware_barrier(found[1] == "sync", int(found[2]))
        if "nanosleep" in text:
            return args[0]
        if "vote.sync.any" in text:
            warps = (args[0] != 1.0).reshape(-1, 16).any(1)
            return tensor(np.repeat(warps, 16).astype(np.int32))
        assert "mul.f32 $0, $0" in text
        acc, alpha, moved = args
        return tensor(np.where(moved != 0, acc * alpha, acc))

    def _hardware_barrier(self, is_sync: bool, number: int) -> None:
        """Complete with two warpgroups; a list of those that have come, and how often it was."""
        role = self.role
        state = self.machine.hardware.setdefault((role.program, number), [0, 0])
        role.pause()
        state[0] += 1
        target = state[1] + 1
        if state[0] == 2:
            state[0], state[1] = 0, target
        elif is_sync:
            role.pause(lambda: state[1] >= target)

    def warp_specialize(
        self, roles: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any
    ) -> None:
        (first, arguments), *others = roles
        role = self.role
        started = [
            self.machine.start(role.program, lambda fn=fn, given=given: fn(*given))  # type: ignore[misc]
            for fn, given in others
        ]
        first(*arguments)
        role.pause(lambda: all(other.is_done for other in started))


def load(
    names: Sequence[str], machine: Machine, changes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The functions of kernel files, with passages of their sources changed; each must be there."""
    language = Language(machine)
    fake = types.SimpleNamespace(jit=_jit, constexpr_function=_identity, language=language)
    found: dict[str, Any] = {}
    left = dict(changes or {})

    def importer(name: str, *_: Any) -> Any:
        if name.startswith("softmax_backend"):
            return types.SimpleNamespace(**found)
        if name == "triton.experimental":
            return types.SimpleNamespace(gluon=fake)
        return fake if name.endswith("gluon") else language

    for name in names:
        source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        for old in list(left):
            if old in source:
                source = source.replace(old, left.pop(old))
        scope = {"__builtins__": {**vars(builtins), "__import__": importer}}
        exec(compile(source, f"{name}.py", "exec"), scope)
        found |= {key: x for key, x in scope.items() if not key.startswith("__")}
    assert not left, f"not in the sources: {list(left)}"
    return found


def launch(machine: Machine, kernel: Any, programs: int, arguments: Mapping[str, Any]) -> None:
    """Run a kernel's CTAs to their end."""
    for program in range(programs):
        machine.start(program, lambda: kernel(**arguments))
    machine.run()
