"""Where the drop-ins of SageAttention and SpargeAttn part from the originals, and where not.

Neither original has forward tests; these are of its README's calls and of what its source does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from backend_core.launch.triton import KernelLaunch
from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from block_sparse_backend import selection
from block_sparse_backend.dense8 import triton as dense8
from block_sparse_backend.drop_ins import sageattention, spargeattn
from block_sparse_backend.plan import intervals
from block_sparse_backend.sage import (
    PACKED_MODE,
    packed_attention,
    quantised_attention,
)
from block_sparse_backend.selection import default_blocks_int8
from block_sparse_backend.testing.cases import causal_seen, inputs
from tests.block_sparse.compiler import compiler

ERROR = 6e-2


def test_sageattn_in_the_place_of_torchs_attention(seed: int, device: torch.device) -> None:
    q, k, v = inputs((4, 70, 64), (2, 70, 64), seed=seed, device=device)
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.2}
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    got = sageattention.sageattn(query=q, key=k, value=v, enable_gqa=True, **options)
    assert isinstance(got, torch.Tensor)
    assert relative_error(got, want) < ERROR
    smoothed = sageattention.sageattn(q, k, v, smooth_k=False, enable_gqa=True, **options)
    assert isinstance(smoothed, torch.Tensor) and torch.equal(smoothed, got)
    unscaled = sageattention.sageattn(q, k, v, is_causal=True)
    assert isinstance(unscaled, torch.Tensor) and relative_error(unscaled, want) > ERROR


def test_what_sageattn_would_ignore_is_refused(device: torch.device) -> None:
    q, k, v = inputs((2, 64, 64), (2, 64, 64), seed=0, device=device)
    for options, message in (
        ({"attn_mask": causal_seen(64, 64)}, "attn_mask must be None"),
        ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"sm_scale": 0.1, "scale": 0.2}, "only one of sm_scale and scale may be given"),
    ):
        with pytest.raises(ValueError, match=message):
            sageattention.sageattn(q, k, v, **options)  # type: ignore[arg-type]
    for given in ({"q": q, "query": q, "k": k, "v": v}, {"k": k, "v": v}):
        with pytest.raises(ValueError, match="exactly one of q and query must be given"):
            sageattention.sageattn(**given)


@pytest.mark.parametrize("d", [64, 40])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_compiled_code_is_one_graph(layout: str, d: int, seed: int, device: torch.device) -> None:
    """And what it is told of the operator's outputs is so."""
    q, k, v = inputs((4, 70, d), (2, 90, d), seed=seed, device=device)
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def model(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = sageattention.sageattn(q + 1, k, v, layout, True, return_lse=True)
        return out.mT.contiguous() * 2, lse + 1

    for dynamic in (False, True):
        compiled = torch.compile(model, backend=compiler(device), fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(compiled(q), model(q), rtol=0, atol=0)
    if d == 64:
        heads_first = sageattention.heads_first(layout, q, k, v)
        arguments = (*heads_first, True, 0.2, False)
        torch.library.opcheck(torch.ops.block_sparse_backend.sageattn, arguments)


@pytest.mark.parametrize("name", ["spas_sage2_attn_meansim_cuda", "block_sparse_sage2_attn_cuda"])
def test_sparge_parts_compiled_code_once(name: str, seed: int, device: torch.device) -> None:
    """What calls it is compiled before and after it, and nothing within."""
    q, k, v = inputs((2, 128, 64), (2, 128, 64), seed=seed, device=device)
    options = {"mask_id": torch.ones(1, 2, 1, 2, device=device)} if "block" in name else {}
    call = getattr(spargeattn, name)

    def model(q: torch.Tensor) -> torch.Tensor:
        return 2 * call(q + 1, k, v, **options)  # type: ignore[no-any-return]

    graphs = CompileCounter()
    torch.testing.assert_close(torch.compile(model, backend=graphs)(q), model(q), rtol=0, atol=0)
    assert graphs.frame_count <= 3


@pytest.mark.parametrize(
    ("name", "names", "error"),
    [
        (
            "qk_int8_pv_fp8_cuda",
            "qk_quant_gran sm_scale pv_accum_dtype smooth_k smooth_v return_lse",
            ERROR,
        ),
        (
            "qk_int8_pv_fp16_cuda",
            "qk_quant_gran sm_scale pv_accum_dtype smooth_k smooth_v return_lse",
            1.5e-2,
        ),
        ("qk_int8_pv_fp16_triton", "attn_mask sm_scale smooth_k return_lse", 1.5e-2),
    ],
)
def test_kernels_by_name(
    name: str, names: str, error: float, seed: int, device: torch.device
) -> None:
    """SageAttention 2.2's parameters in its order, called as diffusers and ComfyUI's nodes do."""
    call = getattr(sageattention, "sageattn_" + name)
    parameters = inspect.signature(call).parameters.values()
    found = " ".join(x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD)
    backend = " quantization_backend" if "triton" in name else ""
    assert found == f"q k v tensor_layout{backend} is_causal {names}"
    q, k, v = inputs((4, 70, 64), (2, 70, 64), seed=seed, device=device)
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True, scale=0.2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = call(
        q=q, k=k, v=v, tensor_layout="NHD", is_causal=True, sm_scale=0.2, return_lse=True
    )
    assert relative_error(out.transpose(1, 2), want) < error and lse.shape == (1, 4, 70)
    options: dict[str, Any] = {"is_causal": True, "tensor_layout": "NHD", "sm_scale": 0.2}
    if "triton" not in name:
        options["pv_accum_dtype"] = "fp32"
    assert torch.equal(call(q, k, v, attn_mask=None, **options), out)
    with pytest.raises(ValueError, match="attn_mask must be None"):
        call(q, k, v, attn_mask=causal_seen(70, 70), **options)
    with pytest.raises(ValueError, match="dropout_p must be 0"):
        call(q, k, v, dropout_p=0.5, **options)


def test_a_scale_by_its_position(device: torch.device) -> None:
    """It was taken for ``smooth_k``; where it stood before there was a mask it is refused."""
    call = sageattention.sageattn_qk_int8_pv_fp16_triton
    q, k, v = inputs((2, 70, 64), (2, 70, 64), seed=0, device=device)
    got = call(q, k, v, "HND", "triton", True, None, 0.3)
    assert torch.equal(got, call(q, k, v, is_causal=True, sm_scale=0.3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attn_mask must be None, got 0\.3; pass sm_scale"):
        call(q, k, v, "HND", "triton", True, 0.3)  # type: ignore[arg-type]


def test_sequences_of_a_packed_batch(seed: int, device: torch.device) -> None:
    q, k, v = inputs((4, 70, 64), (2, 90, 64), seed=seed, device=device)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends_q, ends_k = [0, 20, 20, 60, 70], [0, 50, 60, 60, 90]  # one without queries, one of keys
    offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends_q, ends_k))
    out = sageattention.sageattn_varlen(*packed, *offsets, 40, 50, False, 0.2).transpose(0, 1)
    for i in (0, 3):
        at, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        own = q[:, :, at], k[:, :, keys], v[:, :, keys]
        want = scaled_dot_product_attention(*own, enable_gqa=True, scale=0.2)
        assert relative_error(out[:, at], want[0]) < ERROR
    assert (out[:, 20:60] == 0).all()


def test_lengths_and_offsets_of_a_packed_batch(device: torch.device) -> None:
    """Counts may be tensors, as ``cu_seqlens.diff().max()`` is; nothing is read out of bounds."""
    x = torch.randn(90, 2, 64, device=device).half()
    offsets = torch.tensor([0, 30, 90], device=device)
    run = functools.partial(sageattention.sageattn_varlen, x, x, x)
    most = offsets.diff().max()
    assert torch.equal(run(offsets, offsets, most, most), run(offsets, offsets, 60, 60))
    for wrong in (60.0, -1, None):
        with pytest.raises(ValueError, match="max_seqlen_k must be a whole number of at least 0"):
            run(offsets, offsets, 60, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be a torch.Tensor, got list"):
        run(offsets, [0, 30, 90], 60, 60)  # type: ignore[arg-type]
    for values, message in (([0, 30, 91], "end at 90 tokens at most"), ([0, 60, 30], "decrease")):
        with pytest.raises(ValueError, match=message):
            intervals.ragged(*[torch.tensor(values)] * 2, 60, 60, 2, tokens=(90, 90), path="torch")


def test_numbers_and_flags_that_are_tensors(seed: int, device: torch.device) -> None:
    """Their values count, which no cache of calls may look at."""
    q, k, v = inputs((2, 96, 64), (2, 96, 64), seed=seed, device=device)
    for call in (
        sageattention.sageattn,
        functools.partial(spargeattn.spas_sage2_attn_meansim_topk_cuda, topk=1.0),
    ):
        for causal in (False, True, False):
            for scale in (0.1, 0.5):
                tensors = {"is_causal": torch.tensor(causal), "scale": torch.tensor(scale)}
                want = call(q, k, v, is_causal=causal, scale=float(torch.tensor(scale)))
                assert torch.equal(call(q, k, v, **tensors), want)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            call(q, k, v, scale=torch.tensor(math.nan))  # type: ignore[arg-type]
        compiled = torch.compile(lambda *x, call=call: call(*x[:3], scale=x[3]), backend="eager")
        want = call(q, k, v, scale=0.5)
        torch.testing.assert_close(compiled(q, k, v, torch.tensor(0.5)), want, rtol=0, atol=1e-3)


def test_what_is_no_tensor_is_named(device: torch.device) -> None:
    q = inputs((2, 64, 64), (2, 64, 64), seed=0, device=device)[0]
    calls: list[Any] = [
        lambda: sageattention.sageattn(q.tolist(), q, q),
        lambda: sageattention.sageattn_varlen(q[0], q[0], (q[0],), q, q, 64, 64),
        lambda: spargeattn.spas_sage2_attn_meansim_cuda(q, q.tolist(), q),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must be a torch.Tensor, got (list|tuple)"):
            call()
    with pytest.raises(ValueError, match="mask_id must have one of the shapes"):
        spargeattn.block_sparse_sage2_attn_cuda(q, q, q, [[1]])  # type: ignore[arg-type]
    text: Any = "float16"
    with pytest.raises(ValueError, match=r"output_dtype must be a .*, got 'float16'"):
        spargeattn.spas_sage2_attn_meansim_topk_cuda(q, q, q, output_dtype=text)
    with pytest.raises(ValueError, match="the same in q, k and v, got 96, 96 and 64"):
        sageattention.sageattn(*[q.new_zeros(1, 2, 64, 96)] * 2, q)
    with pytest.raises(ValueError, match="head size must be at most 128 and not 0, got 0"):
        sageattention.sageattn(*[q[..., :0]] * 3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_one_launch(
    seed: int, device: torch.device, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what each sequence is alone, whatever lies between and behind them."""
    q, k, v = inputs((4, 300, 64), (2, 400, 64), seed=seed, device=device)
    ends_q, ends_k = [0, 140, 140, 210, 290], [0, 150, 190, 190, 390]
    q[:, :, 290:], k[:, :, 390:], v[:, :, 390:] = math.nan, math.nan, math.nan
    offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends_q, ends_k))
    launches = []
    made = dense8.attention_kernel

    def counted(*of: Any) -> Any:
        kernel = made(*of)

        def launch(*call: Any, **named: Any) -> None:
            launches.append(call)
            kernel.launch(*call, **named)

        return SimpleNamespace(launch=launch)

    with monkeypatch.context() as patched:
        patched.setattr(dense8, "attention_kernel", counted)
        # a kernel that another test has bound would not be counted
        patched.setattr(selection, "_chosen", selection._chosen.__wrapped__)
        out = packed_attention(
            q, k, v, *offsets, (140, 200), is_causal=is_causal, scale=0.2, path="triton"
        )
    assert len(launches) == 1
    for i in range(4):
        at, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        if i not in (0, 3):
            assert not out[:, :, at].any()
            continue
        make = intervals.causal if is_causal else intervals.dense
        block_m, block_n = default_blocks_int8(device)
        sizes = at.stop - at.start, keys.stop - keys.start
        plan = make(*sizes, 4, block_m=block_m, block_n=block_n, device=device)
        own = q[:, :, at], k[:, :, keys], v[:, :, keys]
        want, _ = quantised_attention(*own, plan, scale=0.2, mode=PACKED_MODE, path="triton")
        assert relative_error(out[:, :, at], want) < 1e-3
    assert not out[:, :, 290:].any()


class Operators(TorchDispatchMode):
    """Names of torch's operators that calls run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(call))
        return call(*args, **(kwargs or {}))


@pytest.mark.interpreter
def test_a_call_like_one_before_allocates_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no plan in torch, whose operators take longer than the rest of a call."""
    q, k, v = inputs((2, 134, 64), (2, 134, 64), seed=0, device=torch.device("cpu"))
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 64, 134], dtype=torch.int32)
    kept = torch.ones(1, 2, 3, 2, dtype=torch.bool)
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *given: None)
    monkeypatch.setattr(
        selection, "detect_target", lambda device: Target("nvidia", "sm90", 132, "H200")
    )
    views = {"aten.transpose.int", "aten.slice.Tensor", "aten.unsqueeze.default", "aten.view.dtype"}
    views |= {"aten.select.int", "aten.alias.default", "aten.detach.default"}
    made = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}
    made |= {"aten.zeros_like.default", "aten.arange.default"}
    for call in (
        lambda: sageattention.sageattn(q, k, v, is_causal=True),
        lambda: sageattention.sageattn_varlen(*tokens, offsets, offsets, 70, 70),
        lambda: spargeattn.spas_sage2_attn_meansim_topk_cuda(q, k, v),
        lambda: spargeattn.block_sparse_sage2_attn_cuda(q, k, v, kept),
    ):
        call()
        with Operators() as seen:
            call()
        assert seen.names <= views | made


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that calls allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes += out.untyped_storage().nbytes()
        return out


def test_a_packed_batch_takes_memory_by_its_tokens(device: torch.device) -> None:
    """However long the longest sequence is."""

    def allocated(lengths: list[int]) -> int:
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        x = torch.randn(1, 2, sum(lengths), 64, device=device).half()
        with Allocations() as seen:
            packed_attention(x, x, x, offsets, offsets, (max(lengths),) * 2, path="triton")
        return seen.bytes

    assert allocated([450, *[4] * 15]) < 1.5 * allocated([32] * 16)


def test_a_packed_batch_of_skewed_sequences(seed: int, device: torch.device) -> None:
    lengths = [1, 300, 2, 0, 130, 1]
    q, k, v = inputs((2, 434, 64), (1, 434, 64), seed=seed, device=device)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    for is_causal in (False, True):
        options: dict[str, Any] = {"is_causal": is_causal, "path": "triton"}
        out = packed_attention(q, k, v, offsets, offsets, (300, 300), **options)
        for first, last in itertools.pairwise(ends):
            if first < last:
                own = [x[:, :, first:last].float() for x in (q, k, v)]
                want = scaled_dot_product_attention(*own, enable_gqa=True, is_causal=is_causal)
                assert relative_error(out[:, :, first:last].cpu(), want.cpu()) < 1.5e-2


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        (
            "spas_sage2_attn_meansim_cuda",
            {"simthreshd1": 0.6, "cdfthreshd": 0.98, "pvthreshd": 50, "attention_sink": False},
        ),
        (
            "spas_sage2_attn_meansim_topk_cuda",
            {"simthreshd1": -0.1, "cdfthreshd": None, "topk": 0.5, "pvthreshd": 50},
        ),
        ("spas_sage_attn_meansim_cuda", {"simthreshd1": 0.6, "cdfthreshd": 0.98}),
        ("spas_sage_attn_meansim_topk_cuda", {"simthreshd1": -0.1, "topk": 0.5}),
        ("block_sparse_sage2_attn_cuda", {"mask_id": None, "pvthreshd": 50}),
    ],
)
def test_sparge_s_defaults_are_the_originals(name: str, defaults: dict[str, object]) -> None:
    found = inspect.signature(getattr(spargeattn, name)).parameters
    assert {key: found[key].default for key in defaults} == defaults
    first = ["q", "k", "v", "mask_id" if "block" in name else "attn_mask", "dropout_p"]
    assert list(found)[:5] == first


@pytest.mark.parametrize("topk", [0.01, 0.3, 0.5, 0.51, 1.0])
def test_a_share_of_blocks_is_rounded_up(topk: float, seed: int, device: torch.device) -> None:
    q, k, v = inputs((1, 64, 64), (1, 512, 64), seed=seed, device=device)
    result = spargeattn.spas_sage2_attn_meansim_topk_cuda(
        q, k, v, topk=topk, simthreshd1=-0.1, return_sparsity=True
    )
    blocks = 512 // default_blocks_int8(device)[1]
    assert result[1] == pytest.approx(1.0 - math.ceil(topk * blocks) / blocks)


def test_values_in_16_bits(seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 300, 64), (2, 300, 64), seed=seed, device=device)
    want = scaled_dot_product_attention(q, k, v)
    for call, options in (
        (spargeattn.spas_sage_attn_meansim_cuda, {"cdfthreshd": 1.0}),
        (spargeattn.spas_sage_attn_meansim_topk_cuda, {"topk": 1.0}),
    ):
        got = call(q, k, v, **options)
        assert isinstance(got, torch.Tensor) and relative_error(got, want) < 1.5e-2


def test_thresholds_of_each_head(seed: int, device: torch.device) -> None:
    """A list, a tensor and one number are the same where all heads have that number; and a head's
    output is that of its own."""
    q, k, v = inputs((2, 300, 64), (2, 300, 64), seed=seed, device=device)
    sum_of, share_of = (
        spargeattn.spas_sage2_attn_meansim_cuda,
        spargeattn.spas_sage2_attn_meansim_topk_cuda,
    )
    for call, name, low, high in ((sum_of, "cdfthreshd", 0.2, 1.0), (share_of, "topk", 0.2, 1.0)):
        options = {"simthreshd1": -0.1, "is_causal": True}
        few, all_of = (call(q, k, v, **{name: x}, **options) for x in (low, high))  # type: ignore[arg-type]
        assert isinstance(few, torch.Tensor) and isinstance(all_of, torch.Tensor)
        assert not torch.equal(few[:, 0], all_of[:, 0])
        for each in ([low, high], (low, high), torch.tensor([low, high]).to(device)):
            got = call(q, k, v, **{name: each}, **options, pvthreshd=[50, 50])  # type: ignore[arg-type]
            assert isinstance(got, torch.Tensor)
            assert torch.equal(got[:, 0], few[:, 0]) and torch.equal(got[:, 1], all_of[:, 1])
        scalar = call(q, k, v, **{name: torch.tensor(low)}, **options)  # type: ignore[arg-type]
        assert isinstance(scalar, torch.Tensor) and torch.equal(scalar, few)
    whole, own = (
        sum_of(q, k, v, simthreshd1=x, cdfthreshd=0.1) for x in (1.0, torch.tensor([1.0, -0.1]))
    )
    assert isinstance(whole, torch.Tensor) and isinstance(own, torch.Tensor)
    assert torch.equal(own[:, 0], whole[:, 0]) and not torch.equal(own[:, 1], whole[:, 1])
    dense = scaled_dot_product_attention(q, k, v)
    assert relative_error(own[:, 0], dense[:, 0]) < ERROR < relative_error(own[:, 1], dense[:, 1])


def test_thresholds_that_are_refused(device: torch.device) -> None:
    q, k, v = inputs((2, 128, 64), (2, 128, 64), seed=0, device=device)
    for name, given, message in (
        ("topk", torch.tensor([0.5, 0.9, 0.9]), r"topk must have shape \[2\], got \[3\]"),
        ("topk", [0.5], r"topk must have shape \[2\], got \[1\]"),
        ("simthreshd1", torch.zeros(1, 2), r"simthreshd1 must have shape \[2\], got \[1, 2\]"),
        ("simthreshd1", "0.5", "simthreshd1 must be a number, or a list or tensor .* got str"),
        ("topk", [0.5, 1.5], "cdf and topk must be above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            spargeattn.spas_sage2_attn_meansim_topk_cuda(q, k, v, **{name: given})  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cdfthreshd must be None where topk chooses"):
        spargeattn.spas_sage2_attn_meansim_topk_cuda(q, k, v, cdfthreshd=0.9)  # type: ignore[arg-type]
