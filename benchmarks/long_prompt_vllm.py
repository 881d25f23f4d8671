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
import json
import math
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import serve_vllm
from benchmarks.engines import serve_work
from benchmarks.engines.serve_work import SideFile, prompt_of, say

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TOKENS, NEW_TOKENS, LAYERS = 262_144, 8, 4
BUDGETS = {"steps of 8,192 tokens": 8192, "one step": TOKENS}
HEADS = (0, 10, 21, 31)  # that are followed
SLOWEST, FASTEST = 1e-3, 201.0  # exp(A_log); the second is the largest of Kimi-Linear-48B
ALLOWED = {"output": 1e-2, "state": 1e-2}  # relative L2: bf16 outputs, fp16 products
PIECE = 4096  # tokens that the reference takes at a time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    two = commands.add_parser("pair", help="both sides, each in both modes, beside each other")
    two.add_argument("config", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--flag", default="KDA", help="of --attention-backend (CUSTOM before 0.32)")
    two.add_argument("--limit", type=float, default=400.0, help="seconds")
    one = commands.add_parser("run", help="one engine")
    one.add_argument("out", type=Path)
    one.add_argument("--config", type=Path, required=True)
    one.add_argument("--attention-backend")
    one.add_argument("--mode", choices=BUDGETS, default="steps of 8,192 tokens")
    one.add_argument("--until", type=float, default=math.inf, help="no part starts later; time()")
    args = parser.parse_args()
    if not (args.config / "config.json").is_file():
        parser.error(f"{args.config} must hold config.json")
    return pair(args) if args.command == "pair" else run(args)


def pair(args: argparse.Namespace) -> int:
    sides: dict[str, list[str]] = {"flag": ["--attention-backend", args.flag], "upstream": []}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    failed: list[str] = []
    until = time.time() + args.limit

    def engine(side: str, mode: str) -> None:
        label = f"{side}_{BUDGETS[mode]}"
        file = args.out.with_name(f"{args.out.stem}_{label}.json")
        file.unlink(missing_ok=True)
        command = [sys.executable, "-u", "-m", "benchmarks.long_prompt_vllm", "run", str(file)]
        command += ["--config", str(args.config), "--mode", mode, "--until", str(until)]
        code = serve_work.child([*command, *sides[side]], label, args.out, until)
        if file.exists():
            found[side, mode] = json.loads(file.read_text())
        if code or not file.exists() or found[side, mode]["failed"]:
            failed.append(label)

    threads = [threading.Thread(target=engine, args=(s, m)) for s in sides for m in BUDGETS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head: dict[str, Any] = next((data["head"] for data in found.values()), {})
    rows = [row for data in found.values() for row in data["rows"]]
    result = {**head, "script": "benchmarks/long_prompt_vllm.py", "mode": "default"}
    result |= {"tokens": TOKENS, "heads": HEADS, "allowed": ALLOWED, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if not row["well"]]
    for row in rows if len(rows) < 24 else [*wrong, *rows[:: len(rows) // 12]]:
        print(json.dumps(row))
    print(f"{len(rows)} rows, {len(wrong)} not well; failed: {', '.join(failed) or 'none'}")
    return len(wrong) + len(failed) + (len(found) != len(sides) * len(BUDGETS))


def run(args: argparse.Namespace) -> int:
    llm = load(args)
    head = {"head": serve_vllm.versions(), "engine": serve_vllm.engine_of(llm)}
    head["layers"] = llm.apply_model(serve_vllm.layer_classes)[0]
    side = SideFile(args.out, args.until, head)
    say(f"{args.mode}: {head['layers']}, {head['engine']}")
    ours = sum(n for kind, n in head["layers"].items() if kind.startswith("kda_backend"))
    if ours != (3 if args.attention_backend else 0):
        raise SystemExit(f"expected the KDA layers of one side, got {head['layers']}")
    side.part("prompt", 30, lambda: ask(llm, side, args))
    return bool(side.data["failed"] or not all(row["well"] for row in side.data["rows"]))


def load(args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm import LLM
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("drawn_with_rates")
    class DrawnModelLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            serve_vllm.draw_weights(model)
            set_rates(model)

    options = {"attention_backend": args.attention_backend} if args.attention_backend else {}
    return LLM(
        model=serve_vllm.model_directory(args.config, LAYERS, dense=True),
        load_format="drawn_with_rates",
        skip_tokenizer_init=True,
        trust_remote_code=True,
        max_model_len=TOKENS + 64,
        max_num_batched_tokens=BUDGETS[args.mode],
        max_num_seqs=16,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=6 * 2**30,
        gpu_memory_utilization=0.2,  # only what must be free at the start, beside the others
        seed=0,
        **options,
    )


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
    from vllm import SamplingParams

    follower = Follower() if args.attention_backend else None
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False
    )
    prompt = {"prompt_token_ids": prompt_of(random.Random(3), TOKENS)}
    name = "flag" if args.attention_backend else "upstream"
    answer = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
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
