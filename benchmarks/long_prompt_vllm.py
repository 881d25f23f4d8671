"""A prompt of 262,144 tokens through Kimi Delta Attention in a real vLLM engine, against float64.

    python -m benchmarks.long_prompt_vllm pair CONFIG_DIR vllm033_long_prompt.json
    python -m benchmarks.long_prompt_vllm run side.json --config CONFIG_DIR

The first four layers of CONFIG_DIR's model (three of KDA, one of MLA), dense, with random weights;
the heads of a KDA layer forget at rates from hardly at all to at once, as those of released
checkpoints. vLLM runs in its default mode, once in steps of 8,192 tokens and once with the whole
prompt in one step, where offsets into states and tokens pass 2^31.

With the flag, what the prefill of the first KDA layer reads and writes is followed: of some heads
the recurrence is carried in float64 from the first token to the last, on the tokens that the
kernels read, and compared with the outputs and the state of every step. Upstream is asked for the
next tokens alone. The exit status is not 0 where something is not finite, or further off than
``ALLOWED``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import time
from typing import Any

from backend_core.testing.records import write_record
from benchmarks import serve_vllm
from benchmarks.engines import decode_vllm, serve_work
from benchmarks.engines.serve_work import SideFile, prompt_of, say

TOKENS, NEW_TOKENS, LAYERS = 262_144, 8, 4
BUDGETS = {"steps of 8,192 tokens": 8192, "one step": TOKENS}
HEADS = (0, 10, 21, 31)  # that are followed
SLOWEST, FASTEST = 1e-3, 201.0  # exp(A_log); the second is the largest of Kimi-Linear-48B
ALLOWED = {"output": 1e-2, "state": 1e-2}  # relative L2: bf16 outputs, fp16 products
PIECE = 4096  # tokens that the reference takes at a time


def main() -> int:
    parser, two, one = serve_work.commands(__doc__)
    two.add_argument("--limit", type=float, default=400.0, help="seconds")
    one.add_argument("--mode", choices=BUDGETS, default="steps of 8,192 tokens")
    return serve_work.started(parser, pair, run)


def pair(args: argparse.Namespace) -> int:
    sides: dict[str, list[str]] = {"flag": ["--attention-backend", args.flag], "upstream": []}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    failed: list[str] = []
    until = time.time() + args.limit - serve_work.GRACE_S

    def engine(side: str, mode: str) -> None:
        label = f"{side}_{BUDGETS[mode]}"
        options = ["--config", str(args.config), "--mode", mode, *sides[side]]
        module = "benchmarks.long_prompt_vllm"
        data = serve_work.run_side(module, label, options, args.out, until)
        if data is not None:
            found[side, mode] = data
        if data is None or data["failed"]:
            failed.append(label)

    serve_work.beside(functools.partial(engine, s, m) for s in sides for m in BUDGETS)
    head: dict[str, Any] = next((data["head"] for data in found.values()), {})
    rows = [row for data in found.values() for row in data["rows"]]
    result = {**head, "script": "benchmarks/long_prompt_vllm.py", "mode": "default"}
    result |= {"tokens": TOKENS, "heads": HEADS, "allowed": ALLOWED, "rows": rows}
    write_record(args.out, result)
    wrong = [row for row in rows if not row["well"]]
    for row in rows if len(rows) < 24 else [*wrong, *rows[:: len(rows) // 12]]:
        print(json.dumps(row))
    print(f"{len(rows)} rows, {len(wrong)} not well; failed: {', '.join(failed) or 'none'}")
    return len(wrong) + len(failed) + (len(found) != len(sides) * len(BUDGETS))


def run(args: argparse.Namespace) -> int:
    llm = serve_vllm.drawn_engine(
        args.attention_backend,
        serve_vllm.model_directory(args.config, LAYERS, dense=True),
        set_rates,
        trust_remote_code=True,
        max_model_len=TOKENS + 64,
        max_num_batched_tokens=BUDGETS[args.mode],
        max_num_seqs=16,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=6 * 2**30,
        gpu_memory_utilization=0.2,  # only what must be free at the start, beside the others
    )
    head = serve_vllm.head_of(llm)
    side = SideFile(args.out, args.until, head)
    say(f"{args.mode}: {head['engine']}")
    serve_vllm.expect_layers(head["layers"], bool(args.attention_backend), 3)
    side.part("prompt", 30, lambda: ask(llm, side, args))
    return bool(side.data["failed"] or not all(row["well"] for row in side.data["rows"]))


def set_rates(model: Any) -> None:
    """Rates of forgetting from `SLOWEST` to `FASTEST`, head by head."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            x = parameter.data
            rates = torch.linspace(math.log(SLOWEST), math.log(FASTEST), x.numel())
            x.copy_(rates.view(x.shape))


def ask(llm: Any, side: SideFile, args: argparse.Namespace) -> None:
    """The prompt, and a few tokens after it."""
    follower = Follower() if args.attention_backend else None
    asked = serve_vllm.Asked(llm, decode_vllm.StepLog(llm))
    requests = asked.requests([prompt_of(random.Random(3), TOKENS)], [NEW_TOKENS], logprobs=1)
    name = "flag" if args.attention_backend else "upstream"
    answer = llm.generate(*requests, use_tqdm=False)[0].outputs[0]
    logprobs = [next(iter(step.values())).logprob for step in answer.logprobs]
    tokens = {"what": f"{name}, {args.mode}: next tokens", "tokens": list(answer.token_ids)}
    side.data["rows"].append({**tokens, "well": all(map(math.isfinite, logprobs))})
    if follower is not None:
        for row in follower.rows:
            well = row["finite"] and all(row[f"{k}_error"] <= v for k, v in ALLOWED.items())
            what = f"{name}, {args.mode}: first KDA layer"
            side.data["rows"].append({"what": what, **row, "well": well})
        if follower.end != TOKENS:
            raise ValueError(f"expected to follow {TOKENS} tokens, got {follower.end}")
    side.save()


class Follower:
    """Follows the first KDA layer's prefills of one sequence in float64.

    Attributes:
        rows: per step, where it ends and the errors, the worst of `HEADS`, as relative L2.
        end: tokens so far.
    """

    def __init__(self) -> None:
        from kda_backend import layer

        self.rows: list[dict[str, Any]] = []
        self.end = 0
        self._layer: int | None = None
        self._state: Any = None
        self._path_of = layer.path_of
        layer.path_of = self._followed

    def _followed(self, *call: Any) -> Any:
        run = self._path_of(*call)

        def prefill(call: Any) -> None:
            run(call)
            if self._layer is None:
                self._layer = call.gate.a_log.data_ptr()
            if call.gate.a_log.data_ptr() == self._layer:
                self._compare(call.tokens, call.gate, call.state, call.out)

        return prefill

    def _compare(self, tokens: Any, gate: Any, state: Any, out: Any) -> None:
        import torch

        count = tokens.q.shape[1]
        if state.indices.shape != (1,):
            raise ValueError(f"expected one sequence in a step, got {list(state.indices.shape)}")
        errors, sizes = torch.zeros(2, len(HEADS), dtype=torch.float64, device=out.device)
        for begin in range(0, count, PIECE):
            piece = slice(begin, min(count, begin + PIECE))
            want, self._state = reference_of(tokens, gate, piece, self._state)
            got = out[0, piece, list(HEADS)].double()
            errors += (got - want).square().sum((0, 2))
            sizes += want.square().sum((0, 2))
        self.end += count
        held = state.write[state.indices[0]][list(HEADS)].double()
        off = (held - self._state[0]).square().sum((1, 2))
        of_state = off / self._state[0].square().sum((1, 2))
        self.rows.append(
            {
                "end": self.end,
                "output_error": float((errors / sizes).sqrt().max()),
                "state_error": float(of_state.sqrt().max()),
                "finite": bool(out.isfinite().all() and held.isfinite().all()),
            }
        )


def reference_of(tokens: Any, gate: Any, piece: slice, state: Any) -> tuple[Any, Any]:
    """(outputs ``[T, heads, V]``, state ``[1, heads, V, K]``) in float64 of some tokens."""
    import torch

    from kda_backend import reference
    from kda_backend.spec import Beta, Gate

    if gate.kind != Gate.SOFTPLUS or tokens.beta_kind != Beta.SIGMOID or not tokens.l2norm:
        raise ValueError(f"expected the layers of Kimi-Linear, got {gate.kind}, {tokens.beta_kind}")
    heads = list(HEADS)
    q, k, v, g = (x[0, piece, heads].double() for x in tokens[:4])
    channels = gate.dt_bias.numel() // gate.a_log.numel()
    decay = reference.log_decay(
        g,
        gate.a_log.reshape(-1)[heads].double(),
        gate.dt_bias.reshape(-1, channels)[heads].double(),
        None,
    )
    if state is None:
        state = torch.zeros(1, len(heads), v.shape[2], q.shape[2], dtype=v.dtype, device=v.device)
    out, state, _ = reference.chunk_kda(
        reference.l2norm(q),
        reference.l2norm(k),
        v,
        decay,
        torch.sigmoid(tokens.beta[0, piece, heads].double()),
        scale=tokens.scale,
        state=state,
        cu_seqlens=[0, v.shape[0]],
    )
    return out, state


if __name__ == "__main__":
    raise SystemExit(main())
