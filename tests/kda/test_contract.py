"""Every refusal: the message says what was expected and what came, and nothing was written."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backend_core.testing.numerics import poisoned
from kda_backend import chunk_kda, fused_recurrent_kda
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape
from kda_backend.step_plan import StepPlan, build_step_plan
from kda_backend.testing.cases import make_case
from tests.kda import calls
from tests.kda.calls import Arguments
from tests.kda.cases import ON_GPU, Backend

Change = Callable[[Arguments], Arguments]
META = torch.device("meta")
T, N, H, HV, K, V = 5, 2, 2, 4, 32, 16


def arguments(device: torch.device) -> Arguments:
    """A call that uses everything, with poisoned memory wherever it writes."""
    case = make_case(0, (3, 2), heads=H, value_heads=HV, key_dim=K, value_dim=V).to(device)
    return {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "g": case.g,
        "beta": case.beta,
        **case.options(),
        "cu_seqlens": case.cu_seqlens,
        "state_pool": poisoned(3, HV, V, K, dtype=torch.float32, device=device),
        "state_indices": torch.tensor([2, 0], dtype=torch.int32, device=device),
        "has_initial_state": torch.tensor([False, False], device=device),
        "snapshot_chunks": torch.tensor([[1], [1]], dtype=torch.int32, device=device),
        "snapshots": poisoned(N, 1, HV, V, K, dtype=torch.float32, device=device),
        "out": poisoned(1, T, HV, V, dtype=torch.bfloat16, device=device),
    }


OPERATORS = [calls.prefill, calls.recurrent]
WRITTEN = ("state_pool", "snapshots", "out")
PREFILL_ONLY = ("snapshot_chunks", "snapshots", "snapshot_indices")


def snapshot_pool(device: torch.device) -> Arguments:
    """The same call with snapshots in slots of a pool."""
    return arguments(device) | {
        "snapshots": poisoned(4, HV, V, K, dtype=torch.float32, device=device),
        "snapshot_indices": torch.tensor([[3], [-1]], dtype=torch.int32, device=device),
    }


def functional(device: torch.device) -> Arguments:
    """The same call with a state in and a new one out."""
    kwargs = arguments(device)
    for name in ("state_pool", "state_indices", "has_initial_state"):
        del kwargs[name]
    state = torch.zeros(N, HV, K, V, device=device)
    return kwargs | {"initial_state": state, "output_final_state": True}


def of_fla(device: torch.device) -> Arguments:
    """The same call with FLA's arguments alone."""
    kwargs = functional(device)
    return {name: x for name, x in kwargs.items() if name not in (*PREFILL_ONLY, "out")}


def swap(**changes: Change | Any) -> Change:
    """Replace arguments: by a value, or by what a function makes of the present one."""

    def change(kwargs: Arguments) -> Arguments:
        new = {
            name: value(kwargs.get(name)) if callable(value) else value
            for name, value in changes.items()
        }
        return kwargs | new

    return change


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to(META)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dimension of twice as many."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half()


def fp64(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def cut(x: torch.Tensor) -> torch.Tensor:
    """Without the last of the last dimension."""
    return x[..., :-1]


def flat(x: torch.Tensor) -> torch.Tensor:
    return x[0]


def two_rows(kwargs: Arguments) -> Arguments:
    rows = {name: torch.cat([kwargs[name]] * 2) for name in ("q", "k", "v", "g", "beta", "out")}
    return kwargs | rows


def wide_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of a batch that do not follow one another."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]


def i32(*values: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.tensor(values, dtype=torch.int32, device=x.device)


Refusal = tuple[str, Change, str]
"""(what, change, message); "{device}" stands for the device of the call."""


def of_shape(name: str, what: str, change: Any, wanted: str, got: str) -> Refusal:
    message = f"{name} must have shape {wanted}, got {got}"
    return f"{name} {what}", swap(**{name: change}), message


def of_dtype(name: str, change: Any, wanted: str, got: str) -> Refusal:
    message = f"{name} must have dtype {wanted}, got {got}"
    return f"{name} dtype", swap(**{name: change}), message


def of_device(*names: str) -> list[Refusal]:
    message = "{} must be on {{device}}, got meta"
    return [(f"{x} device", swap(**{x: on_meta}), message.format(x)) for x in names]


def with_gaps(*names: str) -> list[Refusal]:
    message = "{} must have stride 1 in dimension 0, got 2"
    return [(f"{x} strides", swap(**{x: doubled}), message.format(x)) for x in names]


TOKENS: list[Refusal] = [
    of_shape("q", "rank", flat, "[B, T, H, K]", f"[{T}, {H}, {K}]"),
    of_shape("v", "rank", flat, f"[1, {T}, HV, V]", f"[{T}, {HV}, {V}]"),
    of_shape("k", "shape", cut, f"[1, {T}, {H}, {K}]", f"[1, {T}, {H}, {K - 1}]"),
    of_shape("k", "rank", flat, f"[1, {T}, {H}, {K}]", f"[{T}, {H}, {K}]"),
    of_shape("v", "tokens", lambda x: x[:, 1:], f"[1, {T}, {HV}, {V}]", f"[1, {T - 1}, {HV}, {V}]"),
    of_shape("g", "shape", cut, f"[1, {T}, {HV}, {K}]", f"[1, {T}, {HV}, {K - 1}]"),
    of_shape(
        "g",
        "of the key heads",
        lambda x: x[:, :, :H],
        f"[1, {T}, {HV}, {K}]",
        f"[1, {T}, {H}, {K}]",
    ),
    of_shape("beta", "shape", cut, f"[1, {T}, {HV}]", f"[1, {T}, {HV - 1}]"),
    of_dtype("q", fp64, "bfloat16 or float16 or float32", "float64"),
    of_dtype("k", half, "bfloat16", "float16"),
    of_dtype("v", half, "bfloat16", "float16"),
    of_dtype("g", fp64, "bfloat16 or float16 or float32", "float64"),
    of_dtype("beta", fp64, "bfloat16 or float16 or float32", "float64"),
    (
        "value heads",
        swap(v=lambda x: x[:, :, :3], g=lambda x: x[:, :, :3], beta=lambda x: x[..., :3]),
        f"v must have a multiple of q's {H} heads (grouped values), got 3",
    ),
    (
        "no heads",
        swap(q=lambda x: x[:, :, :0], k=lambda x: x[:, :, :0]),
        f"v must have a multiple of q's 0 heads (grouped values), got {HV}",
    ),
    (
        "no value heads",
        swap(v=lambda x: x[:, :, :0], g=lambda x: x[:, :, :0], beta=lambda x: x[..., :0]),
        f"v must have a multiple of q's {H} heads (grouped values), got 0",
    ),
    (
        "K over 256",
        swap(**dict.fromkeys(("q", "k", "g"), lambda x: x.repeat(1, 1, 1, 9)[..., :257])),
        f"head dimensions must be 1 to 256, got K = 257 and V = {V}",
    ),
    (
        "V over 256",
        swap(v=lambda x: x.repeat(1, 1, 1, 17)[..., :257]),
        f"head dimensions must be 1 to 256, got K = {K} and V = 257",
    ),
    (
        "no channels",
        swap(**dict.fromkeys(("q", "k", "g"), lambda x: x[..., :0])),
        f"head dimensions must be 1 to 256, got K = 0 and V = {V}",
    ),
    (
        "no value channels",
        swap(v=lambda x: x[..., :0]),
        f"head dimensions must be 1 to 256, got K = {K} and V = 0",
    ),
    *(
        (
            f"gradient of {name}",
            swap(**{name: lambda x: x.clone().requires_grad_()}),
            "kda_backend has no backward pass: call it under torch.no_grad()",
        )
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    ),
    (
        "A_log missing",
        swap(A_log=None),
        "A_log must be given for the gate without lower_bound, got None",
    ),
    ("A_log size", swap(A_log=cut), f"A_log must have {HV} elements, got [{HV - 1}]"),
    (
        "dt_bias size",
        swap(dt_bias=cut),
        f"dt_bias must have {HV * K} elements, got [{HV}, {K - 1}]",
    ),
    of_dtype("A_log", fp64, "bfloat16 or float16 or float32", "float64"),
    of_dtype("dt_bias", fp64, "bfloat16 or float16 or float32", "float64"),
    ("A_log strides", swap(A_log=doubled), "A_log must be contiguous, got strides [2]"),
    (
        "dt_bias strides",
        swap(dt_bias=doubled),
        f"dt_bias must be contiguous, got strides [{2 * K}, 2]",
    ),
    *(
        (
            f"lower_bound {bound}",
            swap(lower_bound=bound),
            f"lower_bound must be in [-5, 0), got {bound}",
        )
        for bound in (0.0, -5.001, 1.0, float("nan"))
    ),
    of_shape("out", "shape", cut, f"[1, {T}, {HV}, {V}]", f"[1, {T}, {HV}, {V - 1}]"),
    of_dtype("out", half, "bfloat16", "float16"),
    ("out channels", swap(out=doubled), "out must have stride 1 in dimension 3, got 2"),
    of_shape("cu_seqlens", "rank", lambda x: x[None], "[N + 1]", f"[1, {N + 1}]"),
    of_shape("cu_seqlens", "empty", lambda x: x[:0], "[N + 1]", "[0]"),
    of_dtype("cu_seqlens", lambda x: x.short(), "int32 or int64", "int16"),
    ("cu_seqlens of a batch", two_rows, "q must have batch size 1 with cu_seqlens, got 2"),
    *of_device("k", "v", "g", "beta", "A_log", "dt_bias", "out", "cu_seqlens"),
    *with_gaps("cu_seqlens"),
]
POOL: list[Refusal] = [
    of_shape("state_pool", "rank", flat, f"[slots, {HV}, {V}, {K}]", f"[{HV}, {V}, {K}]"),
    (
        "pool transposed",
        swap(state_pool=lambda x: x.mT.contiguous()),
        f"state_pool must have shape [slots, {HV}, {V}, {K}], got [3, {HV}, {K}, {V}]",
    ),
    of_dtype("state_pool", fp64, "float32 or bfloat16 or float16", "float64"),
    (
        "pool channels",
        swap(state_pool=doubled),
        "state_pool must have stride 1 in dimension 3, got 2",
    ),
    (
        "pool rows",
        swap(state_pool=lambda x: torch.cat([x, x], 3)[..., :K]),
        f"state_pool must have stride {K} in dimension 2, got {2 * K}",
    ),
    (
        "pool heads",
        swap(state_pool=lambda x: torch.cat([x, x], 2)[:, :, :V]),
        f"state_pool must have stride {V * K} in dimension 1, got {2 * V * K}",
    ),
    (
        "pool slots that overlap",
        swap(state_pool=lambda x: x.as_strided(x.shape, (V * K, V * K, K, 1))),
        f"state_pool must have states at least {HV * V * K} elements apart,"
        f" got a stride of {V * K}",
    ),
    of_shape("state_indices", "size", cut, f"[{N}]", f"[{N - 1}]"),
    of_dtype("state_indices", lambda x: x.long(), "int32", "int64"),
    of_shape("has_initial_state", "size", cut, f"[{N}]", f"[{N - 1}]"),
    of_dtype("has_initial_state", lambda x: x.int(), "bool", "int32"),
    *of_device("state_pool", "state_indices", "has_initial_state"),
    *with_gaps("state_indices", "has_initial_state"),
]
FUNCTIONAL: list[Refusal] = [
    of_shape("initial_state", "shape", cut, f"[{N}, {HV}, {K}, {V}]", f"[{N}, {HV}, {K}, {V - 1}]"),
    (
        "state layout",
        swap(state_v_first=True),
        f"initial_state must have shape [{N}, {HV}, {V}, {K}], got [{N}, {HV}, {K}, {V}]",
    ),
    of_shape(
        "initial_state", "count", lambda x: x[:1], f"[{N}, {HV}, {K}, {V}]", f"[1, {HV}, {K}, {V}]"
    ),
    of_dtype("initial_state", lambda x: x.bfloat16(), "float32", "bfloat16"),
    (
        "gradient of the state",
        swap(initial_state=lambda x: x.clone().requires_grad_()),
        "kda_backend has no backward pass: call it under torch.no_grad()",
    ),
    *of_device("initial_state"),
]
FLA: list[Refusal] = [
    ("scale of a list", swap(scale=[0.5]), "scale must be a number, got [0.5]"),
    ("lower bound in words", swap(lower_bound="low"), "lower_bound must be a number, got 'low'"),
    (
        "context parallelism",
        swap(cp_context=object()),
        "cp_context must be None (context parallelism is for training)",
    ),
    ("chunk size", swap(chunk_size=16), "`chunk_size` must be either 32 or 64 for KDA, got 16."),
    (
        "chunk size with states",
        swap(chunk_size=32, return_intermediate_states=True),
        "`chunk_size` must be 64 with return_intermediate_states=True, got 32",
    ),
    (
        "safe gate",
        swap(safe_gate=True),
        "lower_bound must be given with safe_gate=True, got None",
    ),
    (
        "padded sequences",
        swap(use_graph=True, max_num_seqs=7),
        f"cu_seqlens must have 8 entries, got {N + 1}",
    ),
    (
        "negative eigenvalues of a given beta",
        swap(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True),
        "allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True",
    ),
]
SNAPSHOTS: list[Refusal] = [
    of_shape("snapshot_chunks", "rank", flat, f"[{N}, S]", "[1]"),
    of_dtype("snapshot_chunks", lambda x: x.long(), "int32", "int64"),
    (
        "snapshot_chunks strides",
        swap(snapshot_chunks=lambda x: torch.cat([x, x], 1)[:, :1]),
        "snapshot_chunks must be contiguous, got strides [2, 1]",
    ),
    of_shape(
        "snapshots", "shape", cut, f"[{N}, 1, {HV}, {V}, {K}]", f"[{N}, 1, {HV}, {V}, {K - 1}]"
    ),
    of_dtype("snapshots", lambda x: x.bfloat16(), "float32", "bfloat16"),
    (
        "snapshots strides",
        swap(snapshots=lambda x: x.mT.contiguous().mT),
        f"snapshots must be contiguous, got strides [{HV * V * K}, {HV * V * K}, {V * K}, 1, {V}]",
    ),
    *of_device("snapshot_chunks", "snapshots"),
]
SNAPSHOT_POOL: list[Refusal] = [
    of_shape("snapshot_indices", "shape", flat, f"[{N}, 1]", "[1]"),
    of_dtype("snapshot_indices", lambda x: x.long(), "int32", "int64"),
    (
        "snapshot_indices strides",
        swap(snapshot_indices=lambda x: torch.cat([x, x], 1)[:, :1]),
        "snapshot_indices must be contiguous, got strides [2, 1]",
    ),
    of_shape(
        "snapshots",
        "in order for a pool",
        lambda x: x[:2, None],
        f"[slots, {HV}, {V}, {K}]",
        f"[{N}, 1, {HV}, {V}, {K}]",
    ),
    of_dtype("snapshots", lambda x: x.bfloat16(), "float32", "bfloat16"),
    (
        "snapshot pool of transposed states",
        swap(snapshots=lambda x: x.mT.contiguous().mT),
        f"snapshots must have stride 1 in dimension 3, got {V}",
    ),
    (
        "snapshot slots over one another",
        swap(snapshots=lambda x: x.as_strided(x.shape, (V * K, *x.stride()[1:]))),
        f"snapshots must have states at least {HV * V * K} elements apart, got a stride of {V * K}",
    ),
    *of_device("snapshot_indices", "snapshots"),
]
# values that are read where that costs no synchronisation: in host memory
VALUES: list[Refusal] = [
    ("offsets that start late", swap(cu_seqlens=i32(1, 3, T)), "cu_seqlens must start at 0, got 1"),
    (
        "offsets that end early",
        swap(cu_seqlens=i32(0, 3, T - 1)),
        f"cu_seqlens must end at {T} tokens, got {T - 1}",
    ),
    (
        "offsets that end late",
        swap(cu_seqlens=i32(0, 3, T + 1)),
        f"cu_seqlens must end at {T} tokens, got {T + 1}",
    ),
    (
        "offsets that decrease",
        swap(
            cu_seqlens=i32(0, 4, 3, T),
            **dict.fromkeys(
                ("state_indices", "has_initial_state", "snapshot_chunks", "snapshots"), None
            ),
            state_pool=None,
        ),
        "cu_seqlens must not decrease, got 4 then 3 at entry 1",
    ),
]
SLOTS: list[Refusal] = [
    (
        "a slot past the pool",
        swap(state_indices=i32(3, 0)),
        "state_indices must be -1 or a slot below 3, got values from 0 to 3",
    ),
    (
        "a slot below -1",
        swap(state_indices=i32(-2, 0)),
        "state_indices must be -1 or a slot below 3, got values from -2 to 0",
    ),
]


def rows(
    *tables: tuple[Callable[[torch.device], Arguments], list[Refusal]],
) -> list[Any]:
    return [
        pytest.param(base, change, message, id=what.replace(" ", "_"))
        for base, table in tables
        for what, change, message in table
    ]


def of_operator(operator: Callable[..., object], kwargs: Arguments) -> Arguments:
    """The arguments that an operator has."""
    known = operator is not calls.recurrent
    return {name: x for name, x in kwargs.items() if known or name not in PREFILL_ONLY}


@functools.cache
def call_once(
    operator: Callable[..., object], base: Callable[[torch.device], Arguments], device: torch.device
) -> None:
    """Make the unchanged call, once in a process."""
    operator(**of_operator(operator, base(device)))


def assert_refused(
    operator: Callable[..., object],
    base: Callable[[torch.device], Arguments],
    change: Change,
    message: str,
    device: torch.device,
) -> None:
    call_once(operator, base, device)  # what is checked once is checked by now
    kwargs = base(device)
    changed = of_operator(operator, change(kwargs))
    expected = message.format(device=kwargs["q"].device)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        operator(**changed)
    for name in WRITTEN:
        for source in (kwargs, changed):
            x = source.get(name)
            if x is not None and x.device != META:
                assert x.isnan().all(), f"{name} was written before the refusal"


@pytest.mark.parametrize(
    ("base", "change", "message"),
    rows(
        (arguments, TOKENS),
        (arguments, POOL),
        (functional, FUNCTIONAL),
        (arguments, SNAPSHOTS),
        (snapshot_pool, SNAPSHOT_POOL),
    ),
)
def test_prefill_refuses(device: torch.device, base: Any, change: Change, message: str) -> None:
    assert_refused(calls.prefill, base, change, message, device)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    rows((arguments, TOKENS), (arguments, POOL), (functional, FUNCTIONAL)),
)
def test_decode_refuses(device: torch.device, base: Any, change: Change, message: str) -> None:
    assert_refused(calls.recurrent, base, change, message, device)


@pytest.mark.parametrize(("base", "change", "message"), rows((of_fla, FLA)))
def test_fla_s_function_refuses(
    device: torch.device, base: Any, change: Change, message: str
) -> None:
    assert_refused(chunk_kda, base, change, message, device)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("base", "change", "message"), rows((arguments, VALUES), (arguments, SLOTS))
)
def test_values_in_host_memory_are_checked(
    operator: Callable[..., object], base: Any, change: Change, message: str
) -> None:
    assert_refused(operator, base, change, message, torch.device("cpu"))


def test_slots_of_snapshots_in_host_memory_are_checked() -> None:
    change = swap(snapshot_indices=lambda x: x + 1)
    message = "snapshot_indices must be negative or a slot below 4, got 4"
    assert_refused(calls.prefill, snapshot_pool, change, message, torch.device("cpu"))


@pytest.mark.parametrize(("base", "change", "message"), rows((arguments, VALUES)))
@pytest.mark.skipif(not ON_GPU, reason="the host's copy matters where the tensor is on a GPU")
def test_the_hosts_copy_of_the_offsets_is_checked(
    device: torch.device, base: Any, change: Change, message: str
) -> None:
    def change_copy(kwargs: Arguments) -> Arguments:
        changed = change(kwargs)
        return changed | {"cu_seqlens_cpu": changed["cu_seqlens"].cpu()}

    assert_refused(calls.prefill, base, change_copy, message, device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_output_batch_must_be_packed(
    operator: Callable[..., object], device: torch.device
) -> None:
    def base(device: torch.device) -> Arguments:
        return two_rows(functional(device)) | {"cu_seqlens": None}

    change = swap(out=wide_rows)
    message = f"out must have stride {T * HV * V} in dimension 0, got {2 * T * HV * V}"
    assert_refused(operator, base, change, message, device)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("base", [arguments, functional, snapshot_pool])
def test_the_unchanged_calls_are_accepted(
    operator: Callable[..., object], base: Callable[[torch.device], Arguments], device: torch.device
) -> None:
    """So that each refusal is of its own change."""
    kwargs = of_operator(operator, base(device))
    operator(**kwargs)
    assert not kwargs["out"].isnan().any()
    if "snapshots" in kwargs:
        written = kwargs["snapshots"][3:] if base is snapshot_pool else kwargs["snapshots"]
        assert not written.isnan().any()


def described(num_tokens: int, device: torch.device, *, chunk_table: bool = False) -> StepPlan:
    offsets = torch.tensor([0, 3, num_tokens], dtype=torch.int32)
    host = None if device == META else offsets
    return build_step_plan(
        offsets.to(device), num_tokens, cu_seqlens_cpu=host, chunk_table=chunk_table
    )


def test_a_step_plan_of_another_step_is_refused(device: torch.device) -> None:
    kernels = Backend("kernels", device)
    with_selection = {"cu_seqlens": None, "selection": kernels.selection(KdaShape(H, HV, K, V))}
    for step_plan, message in (
        (described(T - 1, device), f"step_plan is of {T - 1} tokens, q has {T}"),
        (described(T, META), "step_plan must be on {device}, got meta"),
        (described(T, device), "step_plan must have a chunk table for the kernels, got none"),
    ):
        change = swap(step_plan=step_plan, **with_selection)
        assert_refused(calls.prefill, arguments, change, message, device)


@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_unknown_arguments_raise(operator: Callable[..., object], device: torch.device) -> None:
    with pytest.raises(TypeError, match="state_layout"):
        operator(**of_fla(device), state_layout="vk")


@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_flas_deprecated_name_of_state_v_first_is_taken_with_a_warning(
    operator: Callable[..., object], device: torch.device
) -> None:
    kwargs = of_fla(device)
    kwargs["initial_state"] = torch.randn(N, HV, V, K, device=device)
    want = operator(**kwargs, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`") as warned:
        got = operator(**kwargs, transpose_state_layout=True)
    assert warned[0].filename == __file__
    assert isinstance(want, tuple) and isinstance(got, tuple)
    assert torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match="Cannot pass both `state_v_first` and the deprecated"):
        operator(**kwargs, state_v_first=True, transpose_state_layout=False)


def test_lower_bound_at_its_limit_is_accepted(device: torch.device) -> None:
    kwargs = of_fla(device) | {"lower_bound": -5.0, "safe_gate": True}
    assert not chunk_kda(**kwargs)[0].isnan().any()


def test_gate_arguments_are_ignored_without_the_gate(device: torch.device) -> None:
    """As in FLA: they belong to use_gate_in_kernel."""
    kwargs = of_fla(device) | {"use_gate_in_kernel": False, "g": -arguments(device)["g"].abs()}
    want, _ = chunk_kda(**kwargs)[:2]
    got, _ = chunk_kda(**(kwargs | {"lower_bound": 3.0, "A_log": None, "dt_bias": None}))[:2]
    assert torch.equal(got, want)


def test_training_and_graph_arguments_are_accepted(device: torch.device) -> None:
    kwargs = of_fla(device)
    want, accepted = chunk_kda(**kwargs)[0], {"disable_recompute": True, "use_graph": True}
    got = chunk_kda(**kwargs, **accepted, max_num_seqs=N, chunk_size=32)[0]
    assert torch.equal(got, want) and not want.isnan().any()


def test_scratch_memory_of_another_device_is_refused(device: torch.device) -> None:
    change = swap(scratch=Scratch(META))
    assert_refused(
        calls.prefill, arguments, change, "scratch must be on {device}, got meta", device
    )


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dim", [1, 2], ids=["tokens", "heads"])
def test_an_output_whose_rows_lie_over_one_another_is_refused(
    operator: Callable[..., object], dim: int, device: torch.device
) -> None:
    def one_for_all(out: torch.Tensor) -> torch.Tensor:
        return out.narrow(dim, 0, 1).expand(out.shape)

    strides = [T * HV * V, 0, V, 1] if dim == 1 else [T * HV * V, HV * V, 0, 1]
    message = f"out must have rows apart, got strides {strides}"
    assert_refused(operator, arguments, swap(out=one_for_all), message, device)
