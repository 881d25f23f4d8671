"""Train the recall checkpoints: 5M-parameter Kimi-Linear models that the demo and the tests run.

    python benchmarks/recall/train.py --data DIR --out DIR                # on a GPU, with FLA
    python benchmarks/recall/train.py --data DIR --out DIR --device cpu \
        --start-from benchmarks/recall/checkpoint --steps 80 --batch-tokens 8192 --lr 2e-4 \
        --workers 0 --minutes 60 --items 64

The second, which made ``checkpoint_bounded``, gives the first one's weights Kimi-K3's gates
(`bounded_gate`) and trains on, an hour on a core.

DIR holds GSM8K's train.jsonl and test.jsonl. The task is
`backend_cli.eval.recall_task`; the model is transformers' own KimiLinearForCausalLM. On a GPU the
gradients run through `fla.ops.kda`, on a CPU through the chunked form below.

Three things make the recurrent state do the work, so that the checkpoint tests KDA kernels:
answers in training are random numbers, so none can be learned by heart; questions are recombined
from sentences and renumbered, for the same reason; and the one softmax (MLA) layer is switched off
in most training sequences, so that the model cannot lean on it.
"""

import argparse
import json
import math
import platform
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from backend_cli.eval import recall_task as recall
from backend_core.testing.records import write_record
from benchmarks.recall import bounded_gate
from benchmarks.recall.canary import with_transposed_state
from benchmarks.recall.make_questions import make_questions

CHECKPOINT = Path(__file__).with_name("checkpoint")
CONFIG = json.loads((CHECKPOINT / "config.json").read_text())  # of the model that is trained

OTHER, REPEATED, ANSWER = 0, 1, 2  # classes of a target byte
CLASS_WEIGHTS = (0.15, 0.5, 1.0)
MLA_DROP = 0.75
# share of the run it starts at, tokens in a sequence, share of short questions
CURRICULUM = ((0.0, 512, 0.9), (0.12, 512, 0.5), (0.3, 1024, 0.3), (0.55, 2048, 0.15))


# ---------------------------------------------------------------------------------------- data


class Corpus:
    """Training sequences over the sentences and answers of GSM8K's training questions."""

    def __init__(self, questions: list[recall.Question]) -> None:
        split = [re.split(r"(?<=[.?!]) ", q.text) for q in questions]
        self.questions = [[s.encode() for s in sentences] for sentences in split]
        self.answers = [q.answer.encode() for q in questions]

    def sentences(self, rng: random.Random) -> list[bytes]:
        """The sentences of one question, or of several questions with the end of another."""
        if rng.random() < 0.5:
            return list(rng.choice(self.questions))
        body = [rng.choice(rng.choice(self.questions)) for _ in range(rng.randint(1, 4))]
        return [*body, rng.choice(self.questions)[-1]]

    def question(self, rng: random.Random, short: float, context: list[list[bytes]]) -> list[bytes]:
        """A new question: a few words with probability ``short``; else sentences, renumbered,
        and sometimes with the same end or the same beginning as one in the context."""
        sentences = self.sentences(rng)
        if rng.random() < short:
            words = b" ".join(sentences).split(b" ")
            start = rng.randrange(max(1, len(words) - 4))
            return [b" ".join(words[start : start + rng.randint(3, 12)])]
        if context and rng.random() < 0.2:
            other = rng.choice(context)
            if rng.random() < 0.7:
                sentences[-1] = other[-1]
            else:
                sentences[0] = other[0]
        if rng.random() < 0.5:
            digits = bytes(rng.choices(b"0123456789", k=10))
            table = bytes.maketrans(b"0123456789", digits)
            sentences = [s.translate(table) for s in sentences]
        return sentences

    def answer(self, rng: random.Random) -> bytes:
        """A number: some question's answer, or random digits."""
        if rng.random() < 0.5:
            return rng.choice(self.answers)
        size = rng.choices((1, 2, 3, 4, 5), weights=(15, 35, 25, 15, 10))[0]
        return str(rng.randrange(10 ** (size - 1), 10**size)).encode()

    def sequence(self, rng: random.Random, length: int, short: float) -> tuple[bytes, bytes]:
        """``length`` + 1 bytes, and the class of each: new questions first, then those again."""
        text, classes = bytearray(), bytearray()
        context: list[list[bytes]] = []
        answers: list[bytes] = []
        new = rng.uniform(0.2, 0.85) * length
        while len(text) < new or not context:
            context.append(self.question(rng, short, context))
            answers.append(self.answer(rng))
            text += b"Q: " + b" ".join(context[-1]) + b"\nA: " + answers[-1] + b"\n"
        classes += bytes((OTHER,)) * len(text)
        order: list[int] = []
        while len(text) <= length:
            if not order:
                order = list(range(len(context)))
                rng.shuffle(order)
            i = order.pop()
            ask, answer = b"Q: " + b" ".join(context[i]) + b"\nA: ", answers[i] + b"\n"
            text += ask + answer
            classes += bytes((REPEATED,)) * len(ask) + bytes((ANSWER,)) * len(answer)
        return bytes(text[: length + 1]), bytes(classes[: length + 1])


class Batches(torch.utils.data.IterableDataset):
    """Batch i depends on the seed and on i alone, however many workers make the batches."""

    def __init__(
        self, corpus: Corpus, seed: int, steps: int, tokens: int, end: bool = False
    ) -> None:
        """``end``: all batches are as at the curriculum's end."""
        self.corpus, self.seed, self.steps, self.tokens = corpus, seed, steps, tokens
        self.end = end

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(first, self.steps, stride):
            progress = 1.0 if self.end else step / self.steps
            _, length, short = [c for c in CURRICULUM if c[0] <= progress][-1]
            rng = random.Random(self.seed * 1_000_003 + step)
            rows = [self.corpus.sequence(rng, length, short) for _ in range(self.tokens // length)]
            yield tuple(
                np.frombuffer(bytearray().join(column), np.uint8).reshape(len(rows), -1)
                for column in zip(*rows, strict=True)
            )


def check_disjoint(train: list[recall.Question], test: list[recall.Question]) -> None:
    """Raise ValueError where a test question is among the training questions."""
    shared = {q.text for q in train} & {q.text for q in test}
    if shared:
        raise ValueError(f"{len(shared)} test questions are among the training questions")


# --------------------------------------------------------------------------------------- model


def chunk_kda_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Differentiable KDA with a bounded gate in chunks of 16, for a CPU.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K] log decay, beta [B, T, H]; q and k are
    normalised here. A g is at least -5, so that a chunk decays by exp(-80) at most, whose inverse
    is an fp32 number, and scores are products of matrices.
    """
    C, T = 16, q.shape[1]
    q, k, v, g, beta = (
        functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, -T % C))
        .unflatten(1, (-1, C))
        .movedim(3, 1)
        for x in (q, k, v, g, beta)
    )  # [B, H, N, C, ...]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    G = g.cumsum(-2)
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    rows = torch.cat((q, k), -2) * torch.cat((G, G), -2).exp()
    scores, A = (rows @ (k * (-G).exp()).mT).masked_fill(~causal.repeat(2, 1), 0).split(C, -2)
    A = A.tril(-1) * beta[..., None]
    eye = torch.eye(C, device=q.device).expand_as(A)
    inverse = torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)
    u = inverse @ (v * beta[..., None])
    w = inverse @ (k * G.exp() * beta[..., None])
    q_decayed, k_restored = q * G.exp(), k * (G[..., -1:, :] - G).exp()
    S = (
        initial_state.float()
        if initial_state is not None
        else q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    )
    outputs = []
    for n in range(q.shape[2]):
        delta = u[:, :, n] - w[:, :, n] @ S
        outputs.append(q_decayed[:, :, n] @ S + scores[:, :, n] @ delta)
        S = S * G[:, :, n, -1].exp()[..., None] + k_restored[:, :, n].mT @ delta
    output = torch.stack(outputs, 2).movedim(1, 3).flatten(1, 2)[:, :T]
    return output, S


def causal_conv1d_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: None = None, activation: str = "silu", **_: object
) -> torch.Tensor:
    """Depthwise causal convolution of x [B, D, T] with weight [D, W]."""
    taps = weight.shape[1]
    x = functional.pad(x, (taps - 1, 0))
    size = x.shape[-1] - taps + 1
    return functional.silu(
        sum(x[..., i : i + size] * weight[:, i, None].to(x.dtype) for i in range(taps))
    )


def use_fla(variants: int) -> None:
    """Put FLA's differentiable kernels under transformers' functions.

    FLA's autotuner would try about 150 variants of 20 kernels, which takes longer to compile than
    the training takes; ``variants`` of each are kept.
    """
    import fla.modules.causal_conv1d as fla_conv
    import fla.ops.kda as fla_kda
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                while value is not None and not isinstance(value, Autotuner):
                    value = getattr(value, "fn", None)
                if value is not None:
                    value.configs = sorted(
                        value.configs,
                        key=lambda c: (abs(c.num_stages - 3), abs(c.num_warps - 4)),
                    )[:variants]

    def chunk_kda(q, k, v, g, beta, **kwargs):
        q, k, v, beta = (x.to(torch.bfloat16) for x in (q, k, v, beta))
        return fla_kda.chunk_kda(q, k, v, g, beta, **kwargs)

    def conv(x, weight, bias=None, activation="silu", **_):
        out, _ = fla_conv.causal_conv1d(x.transpose(1, 2), weight.to(x), activation=activation)
        return out.transpose(1, 2)

    modeling.chunk_kimi_delta_attention = chunk_kda
    modeling.causal_conv1d_fn = conv


def build_model(seed: int, start_from: Path | None = None) -> KimiLinearForCausalLM:
    """A fresh model, or a checkpoint's. Decays start slower than transformers' default: 20 to
    10,000 tokens."""
    torch.manual_seed(seed)
    if start_from is not None:
        return KimiLinearForCausalLM.from_pretrained(start_from, dtype=torch.float32)
    model = KimiLinearForCausalLM(KimiLinearConfig(**CONFIG)).float()
    for module in model.modules():
        if isinstance(module, modeling.KimiLinearForgetGate):
            nn.init.uniform_(module.A_log, 0.0, math.log(4.0))
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-4), math.log(3e-2)).exp()
            module.dt_bias.data = dt + torch.log(-torch.expm1(-dt))
        elif isinstance(module, nn.Conv1d):
            nn.init.uniform_(module.weight, -0.5, 0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
    return model


class MlaDrop:
    """Switches MLA outputs off for random sequences of a training batch, or for all."""

    def __init__(self, model: KimiLinearForCausalLM) -> None:
        self.share = 0.0
        for module in model.modules():
            if isinstance(module, modeling.KimiLinearAttention):
                module.register_forward_hook(self)

    def __call__(self, module: nn.Module, _: tuple, output: tuple) -> tuple:
        out = output[0]
        keep = torch.rand(out.shape[0], 1, 1, device=out.device) >= self.share
        return out * keep, *output[1:]


# ------------------------------------------------------------------------------------ training


def loss_of(logits: torch.Tensor, targets: torch.Tensor, classes: torch.Tensor) -> tuple:
    """Weighted loss, and the mean loss of each class of byte."""
    loss = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    one_hot = functional.one_hot(classes.flatten(), 3).float()
    means = (loss[:, None] * one_hot).sum(0) / one_hot.sum(0).clamp(min=1)
    return (means * means.new_tensor(CLASS_WEIGHTS)).sum(), means


@torch.no_grad()
def evaluate(model: KimiLinearForCausalLM, questions: recall.QuestionSet, batch: int) -> float:
    """Share of items that greedy decoding answers exactly.

    The right answer is fed in: greedy decoding gives exactly it where, at each of its bytes and at
    the terminator, the largest logit is the right one.
    """
    device = model.device
    right = 0
    items = sorted(questions.items, key=lambda item: len(questions.prompt(item)))
    for start in range(0, len(items), batch):
        rows = [
            (recall.encode(questions.prompt(i)), recall.encode(questions.answer(i) + "\n"))
            for i in items[start : start + batch]
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        width += -width % 256
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for row, (prompt, answer) in zip(ids, rows, strict=True):
            row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = model(ids.to(device), use_cache=False).logits.argmax(-1).cpu()
        for row, (prompt, answer) in zip(best, rows, strict=True):
            place = len(prompt) - 1
            right += row[place : place + len(answer)].tolist() == answer
    return right / len(items)


def train(
    args: argparse.Namespace,
    corpus: Corpus,
    model: KimiLinearForCausalLM,
    drop: MlaDrop,
) -> dict:
    """Run the schedule; returns the log, and the steps, tokens and seconds that it took."""
    device = torch.device(args.device)
    batches = torch.utils.data.DataLoader(
        Batches(
            *(corpus, args.seed, args.steps, args.batch_tokens),
            end=args.start_from is not None,
        ),
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=8 if args.workers else None,
    )
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    warmup = max(1, min(300, args.steps // 10))
    log: list[dict] = []
    model.train()
    start = time.monotonic()
    for step, (text, classes) in enumerate(batches):
        lr = (
            args.lr
            * min(1.0, (step + 1) / warmup)
            * (0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        text, classes = (
            torch.as_tensor(x).to(device, non_blocking=True).long() for x in (text, classes)
        )
        drop.share = MLA_DROP
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(text[:, :-1], use_cache=False).logits
        loss, means = loss_of(logits, text[:, 1:], classes[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.log_every == 0 or step == args.steps - 1:
            other, repeated, answer = means.tolist()
            entry = {
                "step": step,
                "seconds": round(time.monotonic() - start, 1),
                "length": text.shape[1] - 1,
                "lr": round(lr, 6),
                "loss_other": round(other, 4),
                "loss_repeated": round(repeated, 4),
                "loss_answer": round(answer, 4),
                "gradient_norm": round(norm.item(), 3),
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if time.monotonic() - start > args.minutes * 60:
            print(f"time limit at step {step}", flush=True)
            break
    return {
        "steps": step + 1,
        "tokens": (step + 1) * args.batch_tokens,
        "seconds": round(time.monotonic() - start, 1),
        "log": log,
    }


# ---------------------------------------------------------------------------------- checkpoint


def save(model: KimiLinearForCausalLM, out: Path, bounded: bool = False) -> None:
    """Weights in bf16 under the published names, configuration, the committed tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    weights = out / "model.safetensors"
    tensors = {  # transformers takes every MLP for a mixture when it writes the published names
        name.replace("block_sparse_moe", "mlp"): tensor
        for name, tensor in load_file(weights).items()
    }
    config = CONFIG
    if bounded:
        tensors = {bounded_gate.published_name(name): x for name, x in tensors.items()}
        config = bounded_gate.configuration(CONFIG)
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(CHECKPOINT / name, out / name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of train.jsonl, test.jsonl"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop training after this")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--items", type=int, default=1000, help="held-out items to measure")
    parser.add_argument(
        "--start-from",
        type=Path,
        help="a checkpoint, which gets bounded gates; all batches are then of the last lengths",
    )
    return parser.parse_args()


def measured(
    model: KimiLinearForCausalLM, drop: MlaDrop, questions: recall.QuestionSet, bounded: bool
) -> dict:
    """Accuracy on held-out and on the committed items, and that of planted faults."""
    committed = recall.read_questions(Path(__file__).with_name("questions.jsonl"))
    result: dict = {"items": len(questions.items)}
    drop.share = 0.0
    result["accuracy"] = evaluate(model, questions, 32)
    result["committed_items"] = len(committed.items)
    result["accuracy_committed"] = evaluate(model, committed, 32)
    print(json.dumps(result), flush=True)
    drop.share = 1.0
    result["accuracy_without_mla"] = evaluate(model, questions, 32)
    drop.share = 0.0
    plain = modeling.chunk_kimi_delta_attention
    modeling.chunk_kimi_delta_attention = with_transposed_state(plain)
    result["accuracy_state_transposed"] = evaluate(model, questions.head(256), 32)
    modeling.chunk_kimi_delta_attention = plain
    if bounded:
        gate = modeling.KimiLinearForgetGate.forward
        modeling.KimiLinearForgetGate.forward = bounded_gate.unbounded_forward
        result["accuracy_gate_unbounded"] = evaluate(model, questions.head(256), 32)
        modeling.KimiLinearForgetGate.forward = gate
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    args = arguments()
    bounded = args.start_from is not None
    train_questions, test_questions = (
        recall.read_gsm8k(args.data / name) for name in ("train.jsonl", "test.jsonl")
    )
    check_disjoint(train_questions, test_questions)
    torch.set_float32_matmul_precision("high")
    if args.device == "cuda":
        use_fla(variants=2)
    else:
        modeling.chunk_kimi_delta_attention = chunk_kda_torch
        modeling.causal_conv1d_fn = causal_conv1d_torch
    model = build_model(args.seed, args.start_from)
    if bounded:
        bounded_gate.bound_gates(model)
    model.to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    drop = MlaDrop(model)
    args.out.mkdir(parents=True, exist_ok=True)
    asked = {k: v for k, v in vars(args).items() if k not in ("data", "out")}
    asked |= {"gate": "bounded", "start_from": args.start_from.name} if bounded else {}
    training = train(args, Corpus(train_questions), model, drop)

    save(model, args.out / "checkpoint", bounded)
    model.float().eval()  # the weights that were saved, rounded to bf16
    questions = make_questions(test_questions, args.items, args.seed)
    result = measured(model, drop, questions, bounded)
    record = {
        "benchmark": "recall_training",
        "script": "benchmarks/recall/train.py",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "arguments": asked,
        "curriculum": CURRICULUM,
        "held_out": result,
        "training": training,
    }
    if args.device == "cuda":
        import fla
        import triton

        record["versions"] |= {"triton": triton.__version__, "fla": fla.__version__}
    write_record(args.out / "recall_training.json", record)


if __name__ == "__main__":
    main()
