"""The FlashInfer wrappers as its own tests use them (tests/attention/test_block_sparse.py)."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from softmax_backend import reference_block_sparse as reference
from softmax_backend.flashinfer import (
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from softmax_backend.testing.prefill_cases import assert_matches, causal_seen


def random(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).half().to(device)


@pytest.mark.parametrize(("R", "C"), [(1, 1), (4, 16), (16, 4), (64, 64)])
@pytest.mark.parametrize("has_mask", [False, True])
def test_block_sparse(R: int, C: int, has_mask: bool, seed: int, device: torch.device) -> None:
    m, n, heads, kv_heads = 100, 128, 4, 2
    generator = torch.Generator().manual_seed(seed)
    mb, nb = -(-m // R), n // C
    chosen = torch.rand(mb, nb, generator=generator) < 0.25
    indptr = torch.cat([torch.zeros(1), chosen.sum(1).cumsum(0)]).int().to(device)
    indices = chosen.nonzero()[:, 1].int().to(device)
    mask = torch.rand(len(indices), R, C, generator=generator) < 0.5
    elements = torch.zeros(mb, R, nb, C, dtype=torch.bool)
    at = chosen.nonzero()
    elements[at[:, 0], :, at[:, 1]] = mask if has_mask else torch.ones_like(mask)
    seen = elements.view(mb * R, n)[:m]
    q, k, v = (
        random((m, heads, 64), seed, device),
        *(random((n, kv_heads, 64), seed + i, device) for i in (1, 2)),
    )
    wrapper = BlockSparseAttentionWrapper(torch.empty(1, device=device))
    wrapper.plan(
        indptr, indices, m, n, R, C, heads, kv_heads, 64, mask=mask.to(device) if has_mask else None
    )
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want = reference.attention(*(x.cpu().transpose(0, 1) for x in (q, k, v)), seen, 0.125)
    assert_matches((out.transpose(0, 1), lse.t() * math.log(2)), want)
    if has_mask:  # each block row's [queries, blocks, C], as FlashInfer lays them out
        parts = mask.split(chosen.sum(1).tolist())
        segments = [x.transpose(0, 1)[: m - i * R].flatten() for i, x in enumerate(parts)]
        packed = [np.packbits(x.numpy(), bitorder="little") for x in segments]
        bits = torch.from_numpy(np.concatenate(packed)).to(device)
        other = BlockSparseAttentionWrapper(torch.empty(1, device=device))
        other.plan(indptr, indices, m, n, R, C, heads, kv_heads, 64, packed_mask=bits)
        assert torch.equal(other.run(q, k, v), out)  # type: ignore[arg-type]
        if len(bits):  # of a few large blocks it may be that none is chosen
            with pytest.raises(ValueError, match=r"packed_mask must be uint8 \[\d+\]"):
                other.plan(indptr, indices, m, n, R, C, heads, kv_heads, 64, packed_mask=bits[1:])
    given, given_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    wrapper.run(q, k, v, out=given, lse=given_lse, return_lse=True)
    assert torch.equal(given, out) and torch.equal(given_lse, lse)


def test_variable_blocks(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([[10, 30, 24], [1, 62, 1]])
    cols = torch.tensor([[50, 7, 3, 36], [1, 1, 90, 4]])
    block_map = torch.rand(2, 3, 4, generator=generator) < 0.6
    seen = torch.stack(
        [block_map[h].repeat_interleave(rows[h], 0).repeat_interleave(cols[h], 1) for h in range(2)]
    ).repeat_interleave(2, 0)
    q = random((4, 64, 64), seed, device)
    k, v = (random((2, 96, 64), seed + i, device) for i in (1, 2))
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(1, device=device))
    wrapper.plan(*(x.to(device) for x in (block_map, rows, cols)), 4, 2, 64, logits_soft_cap=3.0)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    cap = lambda s: 3.0 * torch.tanh(s / 3.0)  # noqa: E731
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, 0.125, cap)
    assert_matches((out, lse * math.log(2)), want)


def test_what_is_not_served_is_refused(device: torch.device) -> None:
    wrapper = BlockSparseAttentionWrapper(torch.empty(1, device=device))
    lists = torch.tensor([0, 1], device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="plan must be called before run"):
        wrapper.run(*(random((4, 1, 64), 0, device) for _ in range(3)))
    for wrong, message in (
        ({"causal": True}, "causal must be False here, got True"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be 'NONE' here"),
        ({"q_data_type": "float32"}, "data type must be float16 or bfloat16"),
        (
            {"block_mask": torch.ones(1, 1, 1), "packed_mask": torch.zeros(2, dtype=torch.uint8)},
            "mask and packed_mask must be None with block_mask",
        ),
        (
            {"packed_mask": torch.zeros(2, dtype=torch.uint8), "indptr": torch.tensor([1, 0])},
            r"indptr must have shape \[2\], begin at 0 and not fall, got \[1, 0\]",
        ),
        ({"q2k_num": torch.ones(1, 1)}, "q2k_num must be None here, got tensor"),
        ({"mask": torch.ones(2, 4, 4)}, r"mask must have shape \[1, 4, 4\], got \[2, 4, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            given = {"indptr": lists[0], "indices": lists[1], **wrong}
            sizes = {"M": 4, "N": 4, "R": 4, "C": 4, "num_qo_heads": 1, "num_kv_heads": 1}
            wrapper.plan(**given, **sizes, head_dim=64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrapper", "method", "names"),
    [
        (
            BatchPrefillWithPagedKVCacheWrapper,
            "__init__",
            "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf"
            " paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf"
            " backend jit_args jit_kwargs variant_owns_mask",
        ),
        (
            BatchPrefillWithPagedKVCacheWrapper,
            "plan",
            "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads"
            " num_kv_heads head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal"
            " pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap"
            " rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking"
            " prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr"
            " seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv"
            " fixed_split_size disable_split_kv uniform_q_len",  # the last since 0.7.2.post1
        ),
        *(
            (
                BatchPrefillWithPagedKVCacheWrapper,
                name,
                "q paged_kv_cache causal pos_encoding_mode use_fp16_qk_reduction k_scale v_scale"
                " window_left logits_soft_cap sm_scale rope_scale rope_theta",
            )
            for name in ("forward", "forward_return_lse")
        ),
        (
            BatchPrefillWithPagedKVCacheWrapper,
            "run",  # whose further positions are of variants
            "q paged_kv_cache q_scale k_scale v_scale out lse return_lse lse_base lse_layout"
            " enable_pdl window_left sinks kv_cache_sf skip_softmax_threshold_scale_factor"
            " use_fp16_softmax uses_spcompress",
        ),
        (
            BlockSparseAttentionWrapper,
            "plan",
            "indptr indices M N R C num_qo_heads num_kv_heads head_dim mask packed_mask causal"
            " pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale"
            " rope_theta q_data_type kv_data_type o_data_type non_blocking block_mask"
            " kv_block_lens q2k_indices q2k_num kv_splits use_clc q_scale k_scale v_scale",
        ),
        (
            BatchMLAPagedAttentionWrapper,
            "plan",
            "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe"
            " page_size causal sm_scale q_data_type kv_data_type use_profiler query_layout"
            " kv_cache_layout lse_mode output_dtype output_scale scale_mode skip_softmax enable_pdl"
            " use_sinks",
        ),
        (
            BlockSparseAttentionWrapper,
            "forward",
            "q k v scale_q scale_k scale_v pos_encoding_mode use_fp16_qk_reduction"
            " logits_soft_cap sm_scale rope_scale rope_theta",
        ),
        (
            VariableBlockSparseAttentionWrapper,
            "run",
            "q k v out lse return_lse enable_pdl",
        ),
        (
            VariableBlockSparseAttentionWrapper,
            "forward",
            "q k v pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale"
            " rope_theta",
        ),
    ],
)
def test_positions_of_arguments_are_flashinfers(wrapper: type, method: str, names: str) -> None:
    """FlashInfer 0.7.2's parameters in its order."""
    found = inspect.signature(getattr(wrapper, method)).parameters
    assert list(found)[1:] == names.split()


def paged_wrapper(device: torch.device, **options: object) -> BatchPrefillWithPagedKVCacheWrapper:
    """One sequence of 20 queries and 40 keys, two heads over one, pages of 16."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, device=device), "NHD")
    offsets, indptr = (torch.tensor([0, n], dtype=torch.int32) for n in (20, 3))
    pages, last = torch.arange(3, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    wrapper.plan(offsets, indptr, pages, last, 2, 1, 64, 16, causal=True, **options)  # type: ignore[arg-type]
    return wrapper


def test_scales_and_the_older_forward(seed: int, device: torch.device) -> None:
    """Scales of q and k multiply the logits and that of v the output; ``forward`` replaces scale
    and soft cap, and asks for the planned mask."""
    q, cache = random((20, 2, 64), seed, device), random((3, 2, 16, 1, 64), seed + 1, device)
    wrapper = paged_wrapper(device)
    scaled, lse = wrapper.run_return_lse(q, cache, q_scale=0.5, k_scale=3.0, v_scale=2.0)
    k, v = (x.cpu().reshape(-1, 1, 64)[:40].transpose(0, 1)[None] for x in cache.unbind(1))
    seen, q4 = causal_seen(20, 40), q.cpu().transpose(0, 1)[None]
    want, want_lse = reference.attention(q4, k, v, seen, 1.5 / 8.0)
    assert_matches(
        (scaled.transpose(0, 1)[None] / 2, lse.t()[None] * math.log(2)), (want, want_lse)
    )
    given, given_lse = torch.full_like(scaled, torch.nan), torch.full_like(lse, torch.nan)
    scales = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 2.0}
    assert wrapper.run(q, cache, **scales, out=given, lse=given_lse) is given
    assert torch.equal(given, scaled) and torch.equal(given_lse, lse)
    capped = wrapper.forward(q, cache, True, logits_soft_cap=2.0, sm_scale=0.3)
    want = reference.attention(q4, k, v, seen, 0.3, lambda s: 2.0 * torch.tanh(s / 2.0))[0]
    assert isinstance(capped, torch.Tensor)
    older = wrapper.forward_return_lse(q, cache, True, logits_soft_cap=2.0, sm_scale=0.3)
    assert torch.equal(older[0], capped) and torch.equal(
        older[1], wrapper.run_return_lse(q, cache)[1]
    )
    assert_close = torch.testing.assert_close
    assert_close(capped.cpu().double(), want[0].transpose(0, 1), atol=2e-3, rtol=2e-3)
    again = paged_wrapper(device, sm_scale=0.3, logits_soft_cap=2.0).run(q, cache, window_left=-1)
    assert isinstance(again, torch.Tensor) and torch.equal(again, capped)


def test_what_the_paged_wrapper_does_not_serve(device: torch.device) -> None:
    workspace = torch.empty(1, device=device)
    with pytest.raises(ValueError, match="use_cuda_graph needs qo_indptr_buf, got None"):
        BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", True)
    with pytest.raises(ValueError, match="jit_args must be None and variant_owns_mask False"):
        BatchPrefillWithPagedKVCacheWrapper(workspace, jit_args=["name"])
    wrapper = paged_wrapper(device)
    q = torch.zeros(20, 2, 64, dtype=torch.float16, device=device)
    cache = torch.zeros(3, 2, 16, 1, 64, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="causal must be True as planned, got False"):
        wrapper.forward(q, cache)
    with pytest.raises(ValueError, match="window_left must be -1 as planned, got 5"):
        wrapper.run(q, cache, window_left=5)
    with pytest.raises(ValueError, match="k_scale must be a float or None here, got Tensor"):
        wrapper.run(q, cache, k_scale=workspace)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="kv_cache_sf and skip_softmax_threshold_scale_factor must"
    ):
        wrapper.run(q, cache, kv_cache_sf=workspace)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix_len_ptr and the positions in items must be None"):
        paged_wrapper(device, prefix_len_ptr=workspace)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_prefill(layout: str, seed: int, device: torch.device) -> None:
    q_lens, kv_lens, page = [30, 1], [45, 20], 16
    indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(8, generator=generator)[:5].int()
    cache = random((8, 2, page, 1, 64), seed, device)
    q = random((31, 2, 64), seed + 1, device)
    sinks = torch.tensor([0.5, -1.0], device=device)
    given = cache if layout == "NHD" else cache.transpose(2, 3).contiguous()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, device=device), layout)
    last = torch.tensor([13, 4], dtype=torch.int32)
    offsets = torch.tensor([0, 30, 31], dtype=torch.int32)
    wrapper.plan(offsets, indptr, indices, last, 2, 1, 64, page, causal=True, window_left=20)
    out, lse = wrapper.run(q, given, return_lse=True, sinks=sinks)
    for i, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows = cache[indices[indptr[i] : indptr[i + 1]].long().to(device)].cpu()
        k, v = (x.reshape(-1, 1, 64)[:n].transpose(0, 1) for x in rows.unbind(1))
        at = slice(offsets[i], offsets[i + 1])
        own = q[at].cpu().transpose(0, 1)
        want, want_lse = reference.attention(own, k, v, causal_seen(m, n, 21), 0.125)
        share = torch.sigmoid(want_lse - sinks.cpu()[:, None].double())
        got = out[at].transpose(0, 1), lse[at].t() * math.log(2)
        assert_matches(got, (want * share[..., None], want_lse))
