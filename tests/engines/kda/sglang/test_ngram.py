"""n-gram drafts, which sglang verifies as chains and proposes as trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

from kda_backend.engines import sglang_ngram
from tests.engines.kda.sglang.harness import publish, server_args


def tree(parents: list[int]) -> np.ndarray:
    """The mask of nodes whose parents come before them; the root has none."""
    mask = np.eye(len(parents), dtype=np.uint8)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
    return mask


NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")
NAMES = ("speculative_algorithm", "speculative_eagle_topk")
# tokens and parents, and the chain that is left of them
TREES = [
    ([2, 10, 4, 10], [-1, 0, 0, 2], [2, 4, 10, 0]),  # a sibling of the path before it
    ([5, 6, 7, 8], [-1, 0, 1, 2], [5, 6, 7, 8]),
    ([5, 6, 0, 0], [-1, 0, 0, 0], [5, 6, 0, 0]),  # as sglang pads
    ([9, 0, 0, 0], [-1, 0, 0, 0], [9, 0, 0, 0]),
    ([1, 2, 3, 4], [-1, 0, 0, 1], [1, 2, 4, 0]),
]


class Corpus:
    """What `NgramCorpus` asks: it knows `TREES`, whatever the context."""

    def match_stateful(self, *_: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.array([tokens for tokens, _, _ in TREES], dtype=np.int64)
        return tokens.reshape(-1), np.stack([tree(parents) for _, parents, _ in TREES]).reshape(-1)


def drafts(
    monkeypatch: pytest.MonkeyPatch, *options: str, **said: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What a corpus of a server with these options returns; ``said`` has others of its group."""
    monkeypatch.setattr(NgramCorpus, "batch_get", NgramCorpus.batch_get)  # put back afterwards
    publish(server_args(*options), role="test")
    spec = SimpleNamespace(**{name: getattr(get_spec(), name) for name in NAMES} | said)
    monkeypatch.setattr(sglang_ngram, "get_spec", lambda: spec)
    for _ in range(2):
        sglang_ngram.keep_one_path()
    corpus = object.__new__(NgramCorpus)
    corpus._obj, corpus.draft_token_num = Corpus(), 4
    corpus._req_id_to_state_id, corpus._next_state_id = {}, 0
    requests = [str(n) for n in range(len(TREES))]
    return corpus.batch_get(requests, [[1]] * len(TREES), [1] * len(TREES))


def test_one_path_of_each_tree_is_left_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, mask = drafts(monkeypatch, *NGRAM)
    assert tokens.reshape(-1, 4).tolist() == [chain for _, _, chain in TREES]
    assert (mask.reshape(-1, 4, 4) == np.tril(np.ones((4, 4)))).all()
    given = Corpus().match_stateful()
    for ours, upstreams in zip((tokens, mask), given, strict=True):
        assert (ours.shape, ours.dtype) == (upstreams.shape, upstreams.dtype)


@pytest.mark.parametrize(
    "said", [{"speculative_algorithm": "EAGLE"}, {"speculative_eagle_topk": 2}]
)
def test_other_drafts_stay_as_they_are(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ours, upstreams in zip(
        drafts(monkeypatch, *NGRAM, **said), Corpus().match_stateful(), strict=True
    ):
        assert np.array_equal(ours, upstreams)
