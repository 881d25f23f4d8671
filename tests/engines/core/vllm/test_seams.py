"""The lists of what is relied on, in vLLM's wheel."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.engines import releases

VERSION = version("vllm")
NEWEST = pytest.mark.skipif(VERSION != "0.33.0", reason="about the newest release")
NOT_SERVED = {
    # V4.1's requests without a ring wrote into one; a graph has no key of ours; there is no
    # AliceAI; records lay in the pages of the cache
    "0.32.0": {
        "compressors of DeepSeek-V4.1",
        "KDA layers inside of prefill graphs",
        "pages of KDA states of AliceAI",
        "records of drafts of Kimi-K3",
        "records of drafts beside states in float16",
        "records of drafts of other KDA layers",
    },
    "0.33.0": set(),
}


def test_what_is_relied_on_is_there() -> None:
    assert releases.differing("vllm") == NOT_SERVED[VERSION]
    assert releases.found("vllm") == releases.recorded("vllm", VERSION)


def test_holding_imports_nothing() -> None:
    assert releases.imported_by_holding("vllm") == set()


@NEWEST
def test_a_release_that_does_not_exist_yet_is_served(tmp_path: Path) -> None:
    code, out = releases.seams_of_wheel("vllm", "0.34.0", tmp_path)
    (title,) = out.splitlines()
    assert code == 0 and title.startswith("vllm 0.34.0, not tested: ")
    assert title.endswith(" hold, 0 changed, 0 differ")
