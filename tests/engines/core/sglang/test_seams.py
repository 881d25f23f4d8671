"""The lists of what is relied on, in sglang's wheel."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from backend_core.engines.seams import Seam
from tests.engines import releases

VERSION = version("sglang")
NEWEST = pytest.mark.skipif(VERSION != "0.5.23", reason="about the newest release")
V4 = "sglang.srt.layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend"
NOT_SERVED = {
    "0.5.22": {"compressors of DeepSeek-V4.1", "attention of DeepSeek-V4"},
    "0.5.23": set(),
}


def test_what_is_relied_on_is_there() -> None:
    assert releases.differing("sglang") == NOT_SERVED[VERSION]
    assert releases.found("sglang") == releases.recorded("sglang", VERSION)


def test_holding_imports_nothing() -> None:
    assert releases.imported_by_holding("sglang") == set()


@NEWEST
def test_a_package_for_the_release_before_serves_what_it_can_of_this_one() -> None:
    """KDA and dense MLA; not what has a new parameter, nor what is imported from elsewhere."""
    then = (
        Seam(f"{V4}._low_ratio_compress_fused", takes="layer x req pos draft_len extend_offsets"),
        Seam(f"{V4}._forward_prefill_sparse", imports="sgl_kernel.flash_mla:flash_mla_sparse_fwd"),
    )
    changed, differs = releases.of_the_release_before("sglang", "0.5.22", then)
    assert differs == {
        "compressors of DeepSeek-V4.1": [
            f"{V4}._low_ratio_compress_fused must take draft_len, extend_offsets, layer, pos, req,"
            " x, got draft_len, extend_offsets, layer, pos, projected, req, x"
        ],
        "attention of DeepSeek-V4": [
            f"{V4}._forward_prefill_sparse must import flash_mla_sparse_fwd from"
            " sgl_kernel.flash_mla, got sgl_kernel,"
            " sglang.kernels.ops.attention.flash_mla_interface"
        ],
    }
    assert changed == {
        "KDA layers": ["KDAAttnBackend.forward_decode", "TritonKDAKernel.extend"],
        "records of drafts of KDA layers": [
            "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
            "commit_mamba_states_after_verify",
            "KVCacheConfigurator._handle_max_mamba_cache",
        ],
    }


@NEWEST
def test_a_release_that_does_not_exist_yet_is_served(tmp_path: Path) -> None:
    code, out = releases.seams_of_wheel("sglang", "0.5.24", tmp_path)
    (title,) = out.splitlines()
    assert code == 0 and title.startswith("sglang 0.5.24, not tested: ")
    assert title.endswith(" hold, 0 changed, 0 differ")
