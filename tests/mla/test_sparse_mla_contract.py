"""Sparse MLA: bad input is one sentence and nothing is written; tables; the splits' plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.drop_ins.flash_mla import flash_mla_with_kvcache
from mla_backend.plan.sparse_splits import sparse_splits
from mla_backend.sparse_mla import select_sparse_mla, sparse_mla
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.testing.cases import forced
from mla_backend.testing.sparse_mla_cases import (
    SCALE,
    SparseCase,
    make_case,
)

LISTS: list[tuple[int, int, list[int] | None]] = [(64, 40, [40, 7]), (2, 30, [30, 0])]


def arguments(case: SparseCase) -> dict[str, Any]:
    return {
        "q": case.q,
        "rows": case.rows,
        "extra": case.extra,
        "selection": forced(case.spec, "torch"),
        "scale": SCALE,
        "out": torch.full(case.q.shape, 7.0, dtype=torch.bfloat16),
        "lse": torch.full(case.q.shape[:3], 7.0),
    }


def shifted(cache: torch.Tensor, stride: int) -> torch.Tensor:
    memory = torch.zeros(cache.shape[0] * stride + 16, dtype=torch.uint8)
    return memory.as_strided(cache.shape, (stride, 584, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"q": x.q.half()}, "q must have dtype bfloat16, got float16"),
        (lambda x: {"q": x.q[..., :448]},
         "q must have shape [requests, query tokens, 8, 512], got [2, 1, 8, 448]"),
        (lambda x: {"extra": None}, "extra must be given for extra_page_size 2"),
        (lambda x: {"scale": -1.0}, "scale must be positive and finite, got -1.0"),
        (lambda x: {"sinks": torch.zeros(4)}, "sinks must have shape [8], got [4]"),
        (lambda x: {"splits": 161}, "splits must be 1 to 160, got 161"),
        (lambda x: {"out": torch.zeros(2, 1, 8, 512)}, "out must have dtype bfloat16, got float32"),
        (lambda x: {"rows": NamedRows(x.rows.cache[:, :32], x.rows.indices)},
         "rows.cache must have shape [pages, 64, 584]"),
        (lambda x: {"rows": NamedRows(x.rows.cache.short(), x.rows.indices)},
         "rows.cache must have dtype uint8 or int8 or float8_e4m3fn, got int16"),
        (lambda x: {"rows": NamedRows(shifted(x.rows.cache, 64 * 584 + 8), x.rows.indices)},
         "rows.cache must have pages that start at multiples of 16 bytes"),
        (lambda x: {"rows": NamedRows(x.rows.cache, x.rows.indices.long())},
         "rows.indices must have dtype int32, got int64"),
        (lambda x: {"rows": NamedRows(x.rows.cache, x.rows.indices[:1])},
         "rows.indices must have shape [2, 1, topk], got [1, 1, 40]"),
        (lambda x: {"extra": NamedRows(x.extra.cache, x.extra.indices, torch.zeros(3).int())},
         "extra.lengths must have shape [2], got [3]"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change: Any, message: str) -> None:
    case = make_case(8, LISTS, requests=2)
    call = {**arguments(case), **change(case)}
    with pytest.raises(ValueError, match=re.escape(message)):
        sparse_mla(**call)
    assert (arguments(case)["out"] == 7).all() and (call["lse"] == 7).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": None}, "indices must be given"),
        ({"block_table": torch.zeros(1)}, "block_table must be None with indices"),
        ({"head_dim_v": 576}, "head_dim_v must be 512, got 576"),
        ({"causal": True}, "causal must be False and is_fp8_kvcache True with indices"),
        ({"extra_k_cache": torch.zeros(1)},
         "extra_k_cache and extra_indices_in_kvcache must be given together"),
        ({"extra_topk_length": torch.zeros(1)}, "extra_topk_length must be None without"),
        ({"k_cache": torch.zeros(2, 64, 1, 656).byte()},
         "k_cache must have shape [blocks, page size, 1, 584], got [2, 64, 1, 656]"),
        ({"indices": torch.zeros(2, 1, 4).long()}, "indices must have dtype int32, got int64"),
        ({"topk_length": torch.zeros(2).long()}, "topk_length must have dtype int32, got int64"),
        ({"attn_sink": torch.zeros(9)}, "attn_sink must have shape [8], got [9]"),
        ({"softmax_scale": 0}, "softmax_scale must be positive and finite, got 0.0"),
        ({"softmax_scale": [0.1]}, "softmax_scale must be a number, got [0.1]"),
        ({"extra_k_cache": torch.zeros(2, 2, 1, 584).byte(),
          "extra_indices_in_kvcache": torch.zeros(2, 1, 4, dtype=torch.int32),
          "extra_topk_length": torch.zeros(3, dtype=torch.int32)},
         "extra_topk_length must have shape [2], got [3]"),
    ],
)  # fmt: skip
def test_the_drop_in_refuses(changes: dict[str, Any], message: str) -> None:
    case = make_case(8, LISTS[:1], requests=2)
    call = {
        "q": case.q, "k_cache": case.rows.cache.unsqueeze(2), "block_table": None,
        "cache_seqlens": None, "head_dim_v": 512, "is_fp8_kvcache": True,
        "indices": case.rows.indices,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        flash_mla_with_kvcache(**{**call, **changes})


@pytest.mark.parametrize("changes", [{"num_heads": 0}, {"num_heads": 129}, {"page_size": 0},
                                     {"cache_format": "fp8"}, {"extra_page_size": -1},
                                     {"cache_format": "bf16_rows", "page_size": 64}])  # fmt: skip
def test_a_layer_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SparseMlaSpec(**{"num_heads": 8, **changes})


@pytest.mark.parametrize("name", ["H200", "B200", "MI300X", "MI355X", "cpu"])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16_rows"])
def test_every_table_serves_both_formats(name: str, cache_format: Any) -> None:
    chosen = select_sparse_mla(KNOWN_TARGETS[name], SparseMlaSpec(16, cache_format))
    path = chosen.row(64 * 16)
    assert cache_format + "_cache" in path.features
    if name == "H200":
        assert path.name == "gluon_sm90"


@pytest.mark.parametrize("tiles", [1, 3, 64, 132, 500])
@pytest.mark.parametrize("blocks", [1, 10, 18, 400])
def test_the_number_of_splits_is_one_that_can_be_merged(tiles: int, blocks: int) -> None:
    splits = sparse_splits(tiles, blocks, 132)
    assert 1 <= splits <= min(blocks, 160)
    if tiles == 500 and blocks <= 18:
        assert splits == 1
    if tiles == 1 and blocks >= 10:
        assert splits > 4  # a single token is spread over the GPU
