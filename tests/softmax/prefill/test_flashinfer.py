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
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from softmax_backend.testing.prefill_cases import assert_matches


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
            " page_size causal sm_scale q_data_type kv_data_type use_profiler metadata"
            " cum_seq_lens_q block_tables seq_lens max_q_len query_layout kv_cache_layout"
            " lse_mode output_dtype output_scale scale_mode skip_softmax enable_pdl use_sinks",
        ),
        (
            BatchMLAPagedAttentionWrapper,
            "run",
            "q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table"
            " return_lse_base_on_e o_scale query kv_cache ckv_scale ckv_scale_arr kpe_scale sinks"
            " skip_softmax_threshold_scale_factor bmm1_scale bmm2_scale",
        ),
        (
            VariableBlockSparseAttentionWrapper,
            "run",
            "q k v out lse return_lse enable_pdl",
        ),
    ],
)
def test_positions_of_arguments_are_flashinfers(wrapper: type, method: str, names: str) -> None:
    """FlashInfer 0.7.2's parameters in its order."""
    found = inspect.signature(getattr(wrapper, method)).parameters
    assert list(found)[1:] == names.split()
