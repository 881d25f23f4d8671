"""sglang's n-gram drafts as the chains for which its linear-attention layers take them.

With ``--speculative-ngram-max-bfs-breadth 1`` sglang verifies drafts as chains: each token
continues from the state that the one before it has left. Its corpus bounds the children of each
match alone, and hangs the matches of every suffix on the same root, so that it returns trees.
Softmax attention sees the tree by its mask; a recurrent state has then read the siblings of a
token, which may be accepted after one of them was rejected. Here one path of each tree is kept, on
the host.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from sglang.srt.runtime_context import get_spec

from backend_core.engines import seams
from backend_core.engines.in_place import in_place_of, is_ours
from backend_core.engines.sglang_flag import say
from kda_backend.engines.sglang_seams import SGLANG_NGRAM


def keep_one_path() -> None:
    """Have the corpora of this process return chains, where sglang has resolved its options to
    n-gram drafts that are verified as chains; a second call changes nothing."""
    spec = get_spec()  # the arguments of a ModelRunner are those before they were resolved
    if spec.speculative_algorithm != "NGRAM" or spec.speculative_eagle_topk != 1:
        return
    if (reason := seams.refusal(SGLANG_NGRAM)) is not None:
        say(f"n-gram drafts stay trees: {reason}")
        return
    corpus = importlib.import_module("sglang.srt.speculative.cpp_ngram.ngram_corpus").NgramCorpus
    upstream = corpus.batch_get
    if is_ours(upstream):
        return

    @in_place_of(corpus, "batch_get")
    def batch_get(self: Any, *args: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = upstream(self, *args, **options)
        return chains(tokens, mask, self.draft_token_num)

    say("n-gram drafts: the longest path of each tree is verified, as a chain")


def chains(tokens: np.ndarray, mask: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The longest path of each of B trees of ``number`` nodes, the first of equals.

    Args:
        tokens: ``[B * number]``, the root first and parents before their children.
        mask: ``[B * number * number]``, not 0 where a row's node is the column's or descends from
            it.

    Returns:
        Both as they came: the path, then zeros that continue it, and the mask of a chain.
    """
    nodes, sees = tokens.reshape(-1, number), mask.reshape(-1, number, number) != 0
    batch = np.arange(len(nodes))
    on_path = sees[batch, sees.sum(2).argmax(1)]
    path_first = np.argsort(~on_path, axis=1, kind="stable")
    found = np.take_along_axis(nodes, path_first, 1)
    found[np.arange(number) >= on_path.sum(1)[:, None]] = 0
    chain = np.tril(np.ones((number, number), mask.dtype))
    return found.reshape(tokens.shape), np.tile(chain, (len(nodes), 1, 1)).reshape(mask.shape)
