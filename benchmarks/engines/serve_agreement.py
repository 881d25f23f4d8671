"""Greedy tokens of two runs of one model: where they part, and how close the two best tokens were.

The same comparison is made between two ways to batch the prompts in one run, which differ only by
rounding. A difference between upstream and flag is explained if upstream's two best tokens are no
further apart than rounding moved them between those two batchings of upstream: it moved those with
another best token by at least their margin.
"""

from __future__ import annotations

import math
from statistics import median_high as median
from typing import Any

PROMPTS, APART, NEW_TOKENS = 64, 16, 16


def tokens_of(output: Any) -> dict[str, Any]:
    """Greedy tokens of one prompt, at each the two best tokens and their log-probabilities, and how
    many of the prompt came from the prefix cache."""
    completion = output.outputs[0]
    best = [
        sorted(((entry.logprob, token) for token, entry in at.items()), reverse=True)[:2]
        for at in completion.logprobs
    ]
    return {
        "tokens": list(completion.token_ids),
        "best": [[token for _, token in pair] for pair in best],
        "logprobs": [[round(logprob, 5) for logprob, _ in pair] for pair in best],
        "cached": output.num_cached_tokens or 0,
    }


def compared(
    upstream: dict[str, Any], flag: dict[str, Any], **variants: dict[str, Any]
) -> dict[str, Any]:
    """All sides' tokens, and each side's own two ways to batch.

    Args:
        upstream, flag: what a side's ``tokens`` part kept: lengths, together, apart, and resumed
            where prompts were.
        variants: of the flag's side, which is compared with each.

    Raises:
        ValueError: the sides were asked different prompts.
    """
    if any(upstream["lengths"] != other["lengths"] for other in (flag, *variants.values())):
        raise ValueError("expected two runs of the same prompts, got other lengths")
    first, again = (side["together"][: len(side["apart"])] for side in (upstream, flag))
    itself = agreement(first, upstream["apart"], None)
    noise = itself["limit_nats"]
    found = {"upstream together and apart": itself}
    found["flag together and apart"] = agreement(again, flag["apart"], noise)
    pairs = [("upstream and flag", upstream, flag)]
    pairs += [(f"flag and {name}", flag, variant) for name, variant in variants.items()]
    for name, a, b in pairs:
        for how in ("together", "apart", "resumed"):
            if how in a and how in b:
                found[f"{name}, {how}"] = agreement(a[how], b[how], noise)
    margins = [margin(row, i) for row in upstream["together"] for i in range(NEW_TOKENS)]
    return {
        "new_tokens": NEW_TOKENS,
        **found,
        "all margins of upstream, median": median(margins),
    }


def said(found: dict[str, Any]) -> list[str]:
    """A line per comparison of `compared`."""
    return [
        f"{name}: of {value['prompts']} prompts {value['same']} the same, first token"
        f" {value['first_token_same']}; {value['explained']} of {len(value['partings'])}"
        f" partings explained by rounding of {value['limit_nats']:.3f} nats"
        for name, value in found.items()
        if isinstance(value, dict)
    ]


def collapse(greedy: dict[str, Any]) -> dict[str, Any]:
    """Whether a run's tokens say anything: how many differ, and whether all are numbers."""
    rows = greedy["together"]
    resumed = {"cached": [row["cached"] for row in greedy.get("resumed", [])]}
    return {
        **(resumed if "resumed" in greedy else {}),
        "prompts": len(rows),
        "distinct_first_tokens": len({row["tokens"][0] for row in rows}),
        "distinct_tokens": len({token for row in rows for token in row["tokens"]}),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "not_finite": sum(
            not math.isfinite(x) for row in rows for at in row["logprobs"] for x in at
        ),
    }


def agreement(
    a: list[dict[str, Any]], b: list[dict[str, Any]], noise: float | None
) -> dict[str, Any]:
    """How many prompts have the same tokens, and why the others part.

    Up to where two runs part they have read the same tokens, so that the margin between the same
    two best tokens differs by rounding alone: ``rounding_nats``. A parting is explained where a's
    margin is at most ``noise``. Without it, both runs are one side's, which differ by nothing else,
    and the largest of their partings' margins counts too.
    """
    moved, partings = [], []
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        for i in range(NEW_TOKENS):
            if set(x["best"][i]) == set(y["best"][i]):
                same_order = x["best"][i] == y["best"][i]
                moved.append(abs(margin(x, i) - (1 if same_order else -1) * margin(y, i)))
            if x["tokens"][i] != y["tokens"][i]:
                partings.append({"prompt": number, "token": i, "margin_nats": margin(x, i)})
                break
    limit = noise
    if limit is None:
        limit = max([*moved, *(parting["margin_nats"] for parting in partings)], default=0.0)
    return {
        "prompts": len(a),
        "same": len(a) - len(partings),
        "first_token_same": sum(
            x["tokens"][0] == y["tokens"][0] for x, y in zip(a, b, strict=True)
        ),
        "rounding_nats": {
            "positions": len(moved),
            "median": median(moved) if moved else 0.0,
            "max": max(moved, default=0.0),
        },
        "limit_nats": limit,
        "explained": sum(parting["margin_nats"] <= limit for parting in partings),
        "partings": partings,
    }


def margin(row: dict[str, Any], i: int) -> float:
    """How far the second best token is behind the best, in nats."""
    first, second = row["logprobs"][i]
    return float(first - second)
