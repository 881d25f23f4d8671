"""The flag in sglang, where ``dsv4`` is also a name of its own."""

from __future__ import annotations

import pickle

from sglang.srt.layers.attention import attention_registry

from dsv4_backend.engines.sglang_compressor import FusedStep
from tests.engines.dsv4.sglang.harness import STEP, Served, server_args
from tests.engines.kda.sglang.test_register import resolved


def test_sglangs_backend_of_that_name_is_its_own() -> None:
    built_by = attention_registry.ATTENTION_BACKENDS["dsv4"]
    assert built_by.__module__ == attention_registry.__name__


def test_the_flag_leaves_every_decision_to_sglang() -> None:
    upstream, ours = server_args(), server_args("--attention-backend", "dsv4")
    assert ours._kda_dsv4_requested == "dsv4"
    assert not hasattr(upstream, "_kda_dsv4_requested")  # though sglang resolves it to dsv4 too
    assert resolved(ours) == resolved(upstream)
    assert resolved(ours)["attention_backend"] == "dsv4"
    assert pickle.loads(pickle.dumps(ours))._kda_dsv4_requested == "dsv4"


def test_the_name_for_one_phase_is_sglangs_own() -> None:
    arguments = server_args("--decode-attention-backend", "dsv4")
    assert not hasattr(arguments, "_kda_dsv4_requested")


def test_without_the_flag_the_step_is_stock() -> None:
    assert STEP not in vars(Served("indexer_fp8", flag=None).backend)


def test_with_the_flag_the_step_is_ours() -> None:
    assert type(getattr(Served("indexer_fp8").backend, STEP)) is FusedStep


def test_the_log_says_once_which_path_serves_a_kind(log_lines: list[str]) -> None:
    from dsv4_backend.engines import sglang_compressor
    from tests.dsv4.cases import make_history

    sglang_compressor._choose.cache_clear()
    served = Served("fp8_ds_mla")
    history = make_history(served.layer.spec, 5, 0)
    for chunk in ((0, 0, 4), (0, 4, 5)):
        served.run([history], [chunk])
    lines = [line for line in log_lines if "DeepSeek-V4's compressors" in line]
    assert len(lines) == 1
    assert "512 channels and ratio 4 (fp8_ds_mla) on cpu" in lines[0]
