"""KernelLaunch against Triton's own dispatch; a stand-in driver compiles but runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import CompiledKernel  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from backend_core.launch.head import flat  # noqa: E402
from backend_core.launch.triton import OPTIONS, KernelLaunch  # noqa: E402


def scale_rows(
    x_ptr,
    y_ptr,
    mask_ptr,
    num_rows,
    stride_x,
    factor,
    BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_n = tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + i_row * stride_x + o_n, mask=i_row < num_rows)
    if HAS_MASK:
        b_x *= tl.load(mask_ptr + o_n)
    tl.store(y_ptr + i_row * stride_x + o_n, b_x * factor, mask=i_row < num_rows)


class RecordingDriver:
    """Compiles for ``target``; a launch appends (source of the compiled variant, arguments)."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.device = 0
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 65536},
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            self.launches.append((source, args))

        return launch


_PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
_LANGUAGE = [(part, dict(vars(part))) for part in _PATCHED]  # as these tests are collected


@pytest.fixture
def compilers_language(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's language as its compiler knows it.

    The interpreter puts functions of its own into it and does not always take them out again, and
    other tests of this process have interpreted kernels.
    """
    for part, attributes in _LANGUAGE:
        for name, value in attributes.items():
            if vars(part).get(name) is not value:
                monkeypatch.setattr(part, name, value)


RECORD = (6, 7, 8)  # of a launch's arguments: what launch hooks are told, and the hooks
NVIDIA = GPUTarget("cuda", 90, 32)
AMD = GPUTarget("hip", "gfx942", 64)


@pytest.fixture(params=[NVIDIA, AMD], ids=["sm90", "gfx942"])
def recorder(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    compilers_language: None,
) -> Iterator[RecordingDriver]:
    recorder = RecordingDriver(request.param)
    monkeypatch.setattr(torch.version, "hip", "7.0" if request.param is AMD else None)
    previous = driver._active
    driver.set_active(recorder)
    loaded: list[Any] = []
    load = CompiledKernel._init_handles

    def remember(kernel: Any) -> None:
        loaded.append(kernel)
        load(kernel)

    monkeypatch.setattr(CompiledKernel, "_init_handles", remember)
    yield recorder
    for kernel in loaded:  # newer releases unload a freed kernel, by whatever driver there is then
        kernel.module = None
    driver.set_active(previous)


def _launch(fn: Any, **constexprs: Any) -> KernelLaunch:
    return KernelLaunch(
        fn, {"BLOCK": 16, "HAS_MASK": False, **constexprs}, {"num_warps": 1, "num_stages": 1}
    )


def _tensor(dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    return torch.zeros(64 + offset, dtype=dtype)[offset:]


def _beyond_2gb() -> torch.Tensor:
    # Pages that are never touched take no memory.
    return torch.empty(2**31 + 16, dtype=torch.uint8).view(torch.float32)


CALLS: dict[str, tuple[Any, ...]] = {
    "aligned": (_tensor(), _tensor(), None, 16, 32, 2.0),
    "other value, same variant": (_tensor(), _tensor(), None, 48, 16, 3.0),
    "unaligned input": (_tensor(offset=1), _tensor(), None, 16, 32, 2.0),
    "unaligned output": (_tensor(), _tensor(offset=1), None, 16, 32, 2.0),
    "bf16 input": (_tensor(torch.bfloat16), _tensor(), None, 16, 32, 2.0),
    "tensor for None": (_tensor(), _tensor(), _tensor(), 16, 32, 2.0),
    "rows 1": (_tensor(), _tensor(), None, 1, 32, 2.0),
    "rows True": (_tensor(), _tensor(), None, True, 32, 2.0),
    "rows 0": (_tensor(), _tensor(), None, 0, 32, 2.0),
    "rows 8": (_tensor(), _tensor(), None, 8, 32, 2.0),
    "rows 7": (_tensor(), _tensor(), None, 7, 32, 2.0),
    "rows -16": (_tensor(), _tensor(), None, -16, 32, 2.0),
    "stride 7": (_tensor(), _tensor(), None, 16, 7, 2.0),
    "largest int32": (_tensor(), _tensor(), None, 16, 2**31 - 1, 2.0),
    "int64": (_tensor(), _tensor(), None, 16, 2**31, 2.0),
    "int64, unaligned": (_tensor(), _tensor(), None, 16, 2**31 + 1, 2.0),
    "uint64": (_tensor(), _tensor(), None, 16, 2**63, 2.0),
    "beyond 2 GiB": (_beyond_2gb(), _tensor(), None, 16, 32, 2.0),
    "int factor": (_tensor(), _tensor(), None, 16, 32, 2),
    "bool factor": (_tensor(), _tensor(), None, 16, 32, True),
}


NAMES = ("x_ptr", "y_ptr", "mask_ptr", "num_rows", "stride_x", "factor")


def _named(args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(NAMES, args, strict=True))


def test_every_call_runs_the_variant_triton_would_run(recorder: RecordingDriver) -> None:
    fn = JITFunction(scale_rows)
    launch = _launch(fn)
    for name, args in CALLS.items():
        for order in (NAMES, NAMES[::-1], NAMES):  # compiled, found by class, then by the numbers
            launch.launch((3, 2, 1), **{key: _named(args)[key] for key in order})
            source, launched = recorder.launches[-1]
            fn[(3, 2, 1)](*args, BLOCK=16, HAS_MASK=False, num_warps=1, num_stages=1, **OPTIONS)
            expected_source, expected = recorder.launches[-1]
            assert source is expected_source, name
            # Grid, stream, function and run-time arguments agree, tensors as addresses.
            addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in expected]
            for position, (got, want) in enumerate(zip(launched, addresses, strict=True)):
                if position not in RECORD:
                    assert got is want or got == want, (name, position)


def test_a_compiled_kernel_is_loaded_once_for_each_device(recorder: RecordingDriver) -> None:
    launch = _launch(JITFunction(scale_rows))
    for device in (0, 1, 0):
        recorder.device = device
        launch.launch((1, 1, 1), **_named(CALLS["aligned"]))
        assert recorder.launches[-1][1][3] == 1000 + device
    functions = [args[4] for _, args in recorder.launches]
    assert functions[0] is functions[2] is not functions[1]


TAKES = ("mask_ptr", "unknown_ptr", "x_ptr")


def test_a_prepared_launch_is_a_plain_one_of_other_addresses(recorder: RecordingDriver) -> None:
    """Whatever the order of the addresses, and of tensors that are gone."""
    launch = _launch(JITFunction(scale_rows))
    for name, args in CALLS.items():
        launch.launch((3, 2, 1), **_named(args))
        source, want = recorder.launches[-1]
        x, _, mask, *_ = args
        others = {"x_ptr": torch.empty_like(x), "mask_ptr": mask if mask is None else _tensor()}
        if "unaligned input" in name:
            others["x_ptr"] = _tensor(offset=1)
        prepared = launch.prepare(TAKES, (3, 2, 1), **{**_named(args), **others})
        count = len(recorder.launches)
        del others
        prepared((0 if mask is None else mask.data_ptr(), 7, x.data_ptr()))
        assert len(recorder.launches) == count + 1
        got_source, got = recorder.launches[-1]
        assert got_source is source and got == want, name


class Rows(NamedTuple):
    ptr: Any
    stride_n: Any
    num_rows: Any


class Scale(NamedTuple):
    mask_ptr: Any
    factor: Any


def scale_tuples(x: Rows, y_ptr, by: Scale, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr):
    i_row, o_n = tl.program_id(0), tl.arange(0, BLOCK)
    b_x = tl.load(x.ptr + i_row * x.stride_n + o_n, mask=i_row < x.num_rows)
    if HAS_MASK:
        b_x *= tl.load(by.mask_ptr + o_n)
    tl.store(y_ptr + i_row * x.stride_n + o_n, b_x * by.factor, mask=i_row < x.num_rows)


def _in_tuples(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments as `scale_tuples` takes them, and their names there."""
    x, y, mask, rows, stride, factor = args
    names = "x_ptr", "y_ptr", "mask_ptr", "num_rows", "stride_x_n", "factor"
    named = dict(zip(names, args, strict=True))
    return (Rows(x, stride, rows), y, Scale(mask, factor)), named


def test_arguments_in_tuples_have_names_and_variants_of_their_own(
    recorder: RecordingDriver,
) -> None:
    fn = JITFunction(scale_tuples)
    launch = _launch(fn)
    for name, args in CALLS.items():
        given, named = _in_tuples(args)
        fn[(3, 2, 1)](*given, BLOCK=16, HAS_MASK=False, num_warps=1, num_stages=1, **OPTIONS)
        want_source, want = recorder.launches[-1]
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in flat(want[9:])]
        for _ in range(2):
            launch.launch((3, 2, 1), **named)
        taken = "y_ptr", "mask_ptr"
        prepared = launch.prepare(taken, (3, 2, 1), **named)
        prepared(tuple([0 if named[n] is None else named[n].data_ptr() for n in taken]))
        for source, launched in recorder.launches[-3:]:
            assert source is want_source, name
            assert launched[:3] == (3, 2, 1) and list(flat(launched[9:])) == addresses, name
            assert [type(x) for x in launched[9:12]] == [tuple, int, tuple]


def test_constexprs_must_be_the_kernels_and_stand_last() -> None:
    with pytest.raises(ValueError, match=r"constexprs of scale_rows must be \['BLOCK', 'HAS_MASK'"):
        KernelLaunch(JITFunction(scale_rows), {"BLOCK": 16})

    def mixed(x_ptr, BLOCK: tl.constexpr, n):
        pass

    with pytest.raises(ValueError, match="constexprs of mixed must stand last"):
        KernelLaunch(JITFunction(mixed), {"BLOCK": 16})


def test_an_argument_that_triton_would_key_by_value_is_refused(recorder: RecordingDriver) -> None:
    with pytest.raises(TypeError, match="kernel argument must be a tensor, number or None"):
        args = (_tensor(), _tensor(), None, (1, 2), 32, 2.0)
        _launch(JITFunction(scale_rows)).launch((1, 1, 1), **_named(args))


def test_a_launch_hook_is_told_of_every_launch(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    constexprs, options = {"BLOCK": 16, "HAS_MASK": False}, {"num_warps": 1, "num_stages": 1}
    launch = KernelLaunch(JITFunction(scale_rows), constexprs, options)
    args = CALLS["aligned"]
    prepared = launch.prepare(("x_ptr",), (1, 1, 1), **_named(args))

    def records() -> list[Any]:
        launch.launch((1, 1, 1), **_named(args))
        prepared((args[0].data_ptr(),))
        return [[launched[i] for i in RECORD] for _, launched in recorder.launches[-2:]]

    assert records() == [[None, None, None]] * 2
    hooks = triton.knobs.runtime
    hook = lambda metadata: None  # noqa: E731
    hooks.launch_exit_hook.add(hook)
    try:
        for metadata, _, leave in records():
            assert metadata.get()["name"] == "scale_rows" and hook in leave.calls
    finally:
        hooks.launch_exit_hook.remove(hook)
    monkeypatch.setattr(hooks, "launch_enter_hook", hook)  # a function, as older profilers set
    assert all(enter is hook for _, enter, _ in records())


def test_interpreter_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    launch = _launch(triton.jit(scale_rows), HAS_MASK=True)
    x = torch.randn(3, 16)
    mask = torch.arange(16.0)
    y = torch.full_like(x, torch.nan)
    args = _named((x, y, mask, 3, 16, 2.0))
    launch.launch((0, 1, 1), **args)
    assert y.isnan().all()
    launch.launch((3, 1, 1), **args)
    torch.testing.assert_close(y, x * mask * 2.0)
    prepared = launch.prepare(("y_ptr", "x_ptr"), (3, 1, 1), **args)
    x, y = torch.randn(3, 16), torch.full_like(x, torch.nan)
    prepared((y.data_ptr(), x.data_ptr()))
    torch.testing.assert_close(y, x * mask * 2.0)
    launch = _launch(triton.jit(scale_tuples), HAS_MASK=True)
    _, named = _in_tuples((x, y, mask, 3, 16, 3.0))
    launch.launch((3, 1, 1), **named)
    torch.testing.assert_close(y, x * mask * 3.0)
    other = torch.ones(16)
    launch.prepare(("mask_ptr",), (3, 1, 1), **named)((other.data_ptr(),))
    torch.testing.assert_close(y, x * 3.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu_every_variant_gives_the_right_answer() -> None:
    launch = _launch(JITFunction(scale_rows))
    storage = torch.randn(8 * 48, device="cuda")
    for offset, num_rows, stride in ((0, 3, 16), (1, 3, 16), (0, 1, 16), (0, 3, 17), (0, 16, 16)):
        x = storage.as_strided((num_rows, 16), (stride, 1), offset)
        y = torch.empty_like(storage).as_strided((num_rows, 16), (stride, 1), offset)
        launch.launch((num_rows, 1, 1), **_named((x, y, None, num_rows, stride, 2.0)))
        torch.testing.assert_close(y, x * 2.0)


def test_a_wrong_name_is_refused(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = _named(CALLS["aligned"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for launch in (_launch(JITFunction(scale_rows)), _launch(triton.jit(scale_rows))):
        with pytest.raises(TypeError, match="stride_y"):
            launch.launch((1, 1, 1), **named, stride_y=1)
        with pytest.raises(TypeError, match="factor"):
            launch.launch((1, 1, 1), **{key: x for key, x in named.items() if key != "factor"})
    assert recorder.launches == []


def copy_block(x_desc, x_source, y_ptr, IS_TENSOR: tl.constexpr):
    b_x = x_desc.load([0])
    if IS_TENSOR:
        b_x += tl.load(x_source + tl.arange(0, 16))
    else:
        b_x += x_source.load([16])
    tl.store(y_ptr + tl.arange(0, 16), b_x)


def test_tensor_descriptors_by_name(recorder: RecordingDriver) -> None:
    """Their variants are kept apart by dtype and block, not by tensor and shape."""

    def described(length: int, block: int, dtype: torch.dtype) -> TensorDescriptor:
        return TensorDescriptor(torch.zeros(length, dtype=dtype), [length], [1], [block])

    whole = described(64, 16, torch.float32)
    sources = []
    for x, other in (
        (whole, whole),
        (described(64, 16, torch.bfloat16), whole),
        (whole, _tensor()),
        (whole, _tensor(offset=1)),
    ):
        is_tensor = isinstance(other, torch.Tensor)
        fn = JITFunction(copy_block)
        launch = KernelLaunch(fn, {"IS_TENSOR": is_tensor}, {"num_warps": 1})
        for y in (_tensor(), _tensor(), _tensor(offset=1)):
            fn[(1, 1, 1)](x, other, y, IS_TENSOR=is_tensor, num_warps=1, **OPTIONS)
            source, _ = recorder.launches[-1]
            launch.launch((1, 1, 1), x_desc=x, x_source=other, y_ptr=y)
            assert recorder.launches[-1][0] is source
    launch = KernelLaunch(JITFunction(copy_block), {"IS_TENSOR": False}, {"num_warps": 1})
    for x in (whole, described(128, 16, torch.float32), described(64, 16, torch.bfloat16), whole):
        launch.launch((1, 1, 1), x_desc=x, x_source=whole, y_ptr=_tensor())
        sources.append(recorder.launches[-1][0])
    assert sources[0] is sources[1] is sources[3] is not sources[2]


def test_products_and_sums_are_fused_whatever_the_default(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply_add(x_ptr, y_ptr, factor, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        y = tl.load(y_ptr + at)
        tl.store(y_ptr + at, tl.load(x_ptr + at) * factor + y)

    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    fn, x = JITFunction(multiply_add), torch.zeros(32)
    fused = KernelLaunch(fn, {"BLOCK": 32}, {"num_warps": 1})
    fused.launch((1, 1, 1), x_ptr=x, y_ptr=x.clone(), factor=2.0)
    (compiled,) = fused._compiled.values()
    apart = fn.warmup(x, x.clone(), 2.0, BLOCK=32, num_warps=1, grid=(1,))
    code, word = ("ptx", "fma.rn.f32") if "ptx" in compiled.asm else ("amdgcn", "v_fma")
    assert word in compiled.asm[code] and word not in apart.asm[code]


def test_strides_come_from_the_axes(recorder: RecordingDriver) -> None:
    constexprs, options = {"BLOCK": 16, "HAS_MASK": False}, {"num_warps": 1, "num_stages": 1}

    def copy_rows(x_ptr, y_ptr, stride_x_t, stride_x_h, stride_y_t, BLOCK: tl.constexpr):
        pass

    kernel = KernelLaunch(
        JITFunction(copy_rows), {"BLOCK": 16}, options, axes={"x": "thd", "y": "t."}
    )
    x, y = torch.zeros(4, 8, 16)[:, ::2], torch.zeros(4, 48)
    kernel.launch((1, 1, 1), x_ptr=x, y_ptr=y)
    assert recorder.launches[-1][1][-6:-1] == (x.data_ptr(), y.data_ptr(), 128, 32, 48)
    kernel.launch((1, 1, 1), x_ptr=x, y_ptr=None)
    assert recorder.launches[-1][1][-6:-1] == (x.data_ptr(), None, 128, 32, None)
    with pytest.raises(TypeError, match="stride_x_t"):
        kernel.launch((1, 1, 1), x_ptr=x, y_ptr=y, stride_x_t=1)
    with pytest.raises(ValueError, match=r"no such tensor \['z'\]"):
        KernelLaunch(JITFunction(scale_rows), constexprs, options, axes={"z": "t"})


def test_the_stride_of_a_single_row_compiles_nothing(recorder: RecordingDriver) -> None:
    """One row may lie in memory of any width. Several rows have the variant of their stride."""

    def copy_rows(x_ptr, y_ptr, stride_x_n, stride_y_n, BLOCK: tl.constexpr):
        pass

    options = {"num_warps": 1, "num_stages": 1}
    kernel = KernelLaunch(JITFunction(copy_rows), {"BLOCK": 16}, options, axes={"x": "n", "y": "n"})
    memory = torch.zeros(4 * 7 * 16)

    def launch(rows: int, x: int, y: int = 32) -> Any:
        """The variant for rows so far apart, by the two ways to a launch."""
        tensors = [memory.as_strided((rows, 4), (stride, 1)) for stride in (x, y)]
        named = dict(zip(("x_ptr", "y_ptr"), tensors, strict=True))
        kernel.launch((rows, 1, 1), **named)
        source, arguments = recorder.launches[-1]
        assert arguments[-3:-1] == (x, y)
        kernel.prepare(("x_ptr",), (rows, 1, 1), **named)((memory.data_ptr(),))
        assert recorder.launches[-1] == (source, arguments)
        return source

    aligned = launch(2, 16)
    for single in ((1, 7), (1, 1), (1, 16), (1, 7, 9)):
        assert launch(*single) is aligned
    odd = launch(2, 7)
    assert odd is not aligned and launch(2, 7) is odd and launch(2, 16) is aligned
    assert launch(1, 7) is odd and launch(1, 9, 5) in (aligned, odd)
    assert launch(2, 7, 9) not in (aligned, odd)
    beyond = memory.as_strided((1, 4), (2**31, 1))
    kernel.launch((1, 1, 1), x_ptr=beyond, y_ptr=memory.as_strided((2, 4), (32, 1)))
    assert recorder.launches[-1][0] not in (aligned, odd)  # whose parameters have 32 bits
