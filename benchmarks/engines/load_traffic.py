"""Mixed traffic for a server of the recall checkpoint, with every answer judged.

Each client draws its next request when the last one is done, so that ``concurrency`` requests are
under way at any time. The number of clients follows `CYCLE`, the same every minute, so that minutes
can be compared. A request is one of `KINDS`:

- recall: a question over 500 to 2,000 tokens. Half of them share one cache salt and hit prefixes.
- long: the same, generating up to 200 tokens, which makes a small cache run out: preemption. It
  begins with the answer; the line's end, which would end the text, is held back until then.
- short: a piece of text of 1 to 499 tokens. Right is what the idle server answered before the
  load, alone and twice the same, and only as far as each token's margin was over `SURE_NATS`: this
  far no rounding can change it.
- aborted: a long request whose client leaves after some tokens, or before the first.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

import aiohttp

from backend_cli.eval import recall_task as recall
from benchmarks.engines.vllm_server import completion

# of each minute: seconds, clients
CYCLE = ((6, 1), (10, 16), (14, 64), (30, 256))
KINDS = {"recall": 0.5, "long": 0.2, "short": 0.15, "aborted": 0.15}
LONG_TOKENS = (60, 200)
SURE_NATS = 1.0
SHORT_PROMPTS, SHORT_TOKENS = 64, 8
REQUEST_S = 120.0  # an answer that takes longer is an error


@dataclass(frozen=True)
class Request:
    """A request, and the beginning that its text must have; ``None``: not judged."""

    kind: str
    body: dict[str, Any]
    right: str | None
    leave_after: float | None = None  # tokens; below 0: seconds before the first one


@dataclass
class Done:
    """A finished request. Times in seconds of the load's clock."""

    kind: str
    concurrency: int
    start: float
    end: float
    prompt_tokens: int
    ok: bool
    why: str = ""


@dataclass
class Short:
    """A short prompt and what an idle server continues it with, as far as it is sure."""

    prompt: list[int]
    right: str


@dataclass
class Traffic:
    """Draws requests; the same seed gives the same sequence."""

    questions: recall.QuestionSet
    shorts: list[Short]
    seed: int = 0
    rng: random.Random = field(init=False)
    drawn: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def next(self) -> Request:
        """The next request."""
        self.drawn += 1
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        salt = "shared" if self.rng.random() < 0.5 else f"own {self.drawn}"
        if kind == "short" and self.shorts:
            short = self.rng.choice(self.shorts)
            return Request(
                kind, completion(short.prompt, salt, SHORT_TOKENS, stream=True), short.right
            )
        item = self.rng.choice(self.questions.items)
        prompt = recall.encode(self.questions.prompt(item))
        right = self.questions.answer(item)
        if kind in ("recall", "short"):
            body = completion(prompt, salt, stop=[recall.TERMINATOR], stream=True)
            return Request("recall", body, right)
        length = self.rng.randint(*LONG_TOKENS)
        # not ignore_eos: sglang admits such requests only where all their tokens have room
        body = completion(prompt, salt, length, min_tokens=length, stream=True)
        if kind == "long":
            return Request(kind, body, right)
        early = self.rng.random() < 0.3
        leave = -0.001 - self.rng.random() * 0.2 if early else float(self.rng.randint(1, 40))
        return Request(kind, body, None, leave)


def clients_at(second: float) -> int:
    """The concurrency that `CYCLE` has at a second of the load."""
    within = second % sum(length for length, _ in CYCLE)
    for length, clients in CYCLE:
        if within < length:
            return clients
        within -= length
    return CYCLE[-1][1]


async def ask(
    session: aiohttp.ClientSession, url: str, request: Request, concurrency: int, zero: float
) -> Done:
    """Send one request, read its stream, judge it."""
    start = time.monotonic() - zero
    done = Done(request.kind, concurrency, start, start, len(request.body["prompt"]), False)
    text, tokens = "", 0
    try:
        wait = REQUEST_S if request.leave_after is None or request.leave_after > 0 else None
        limit = aiohttp.ClientTimeout(total=wait or -float(request.leave_after or 0))
        async with session.post(
            f"{url}/v1/completions", json=request.body, timeout=limit
        ) as answer:
            if answer.status != 200:
                done.why = f"status {answer.status}: {(await answer.text())[:300]}"
                return done
            async for piece in pieces(answer):
                text += piece
                tokens += 1
                if request.leave_after is not None and tokens >= request.leave_after > 0:
                    break  # leaving the block closes the connection
        done.ok = request.right is None or judge(text, request)
        if not done.ok:
            done.why = f"expected {request.right!r}, got {text[:60]!r}"
    except TimeoutError:
        done.ok = request.leave_after is not None and request.leave_after < 0
        done.why = "" if done.ok else f"no answer in {REQUEST_S:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        done.why = f"{type(error).__name__}: {error}"[:300]
    finally:
        done.end = time.monotonic() - zero
    return done


def judge(text: str, request: Request) -> bool:
    """Recall answers are matched as the task does, others by how they start."""
    assert request.right is not None
    if request.kind == "recall":
        return recall.extract_answer(text) == request.right
    return text.startswith(request.right)


async def pieces(answer: aiohttp.ClientResponse) -> Any:
    """The texts of a stream of completions. An ``error`` in it is a ValueError."""
    async for raw in answer.content:
        line = raw.decode().strip()
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        found = json.loads(line[6:])
        if "error" in found:
            raise ValueError(f"the stream ended with {found['error']}")
        if found["choices"]:  # the last one may hold counts alone
            yield found["choices"][0]["text"]


async def idle_answers(url: str, questions: recall.QuestionSet, seed: int) -> list[Short]:
    """Short prompts with what the idle server says twice, as far as it is sure."""
    rng = random.Random(seed)
    found = []
    async with aiohttp.ClientSession() as session:
        for number in range(SHORT_PROMPTS):
            length = 1 + 498 * number // (SHORT_PROMPTS - 1)
            text = recall.encode(questions.prompt(rng.choice(questions.items)))
            start = rng.randrange(max(1, len(text) - length))
            prompt = text[start : start + length]
            answers = [
                await sure_start(session, url, prompt, f"idle {seed} {number} {time}")
                for time in range(2)
            ]
            if answers[0] and answers[0] == answers[1]:
                found.append(Short(prompt, answers[0]))
    return found


async def sure_start(session: aiohttp.ClientSession, url: str, prompt: list[int], salt: str) -> str:
    """The greedy continuation up to its first token whose margin is at most `SURE_NATS`."""
    body = completion(prompt, salt, SHORT_TOKENS, logprobs=2, stream=False)
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the idle server answered {answer.status}: {await answer.text()}")
        choice = (await answer.json())["choices"][0]
    text = ""
    for token, best in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        values = sorted(best.values(), reverse=True)
        if len(values) < 2 or values[0] - values[1] <= SURE_NATS:
            break
        text += token
    return text if choice["text"].startswith(text) else ""


async def run(url: str, traffic: Traffic, seconds: float, zero: float) -> list[Done]:
    """Keep as many requests under way as `CYCLE` says, for so long; all of them end.

    ``zero``: time.monotonic() of the load's start.
    """
    finished: list[Done] = []
    waiting: set[asyncio.Task[Done]] = set()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        while (now := time.monotonic() - zero) < seconds or waiting:
            wanted = clients_at(now) if now < seconds else 0
            while len(waiting) < wanted:
                request = traffic.next()
                waiting.add(asyncio.create_task(ask(session, url, request, wanted, zero)))
            done, waiting = await asyncio.wait(
                waiting, timeout=0.05, return_when=asyncio.FIRST_COMPLETED
            )
            finished.extend(task.result() for task in done)
    return finished


def by_minute(finished: list[Done]) -> Iterator[dict[str, Any]]:
    """Median latency per minute and concurrency of the answers that were read to their end."""
    minutes = sorted({int(one.start // 60) for one in finished})
    for minute in minutes:
        for _, clients in CYCLE:
            rows = [
                one
                for one in finished
                if int(one.start // 60) == minute
                and one.concurrency == clients
                and one.kind == "recall"
                and one.ok
            ]
            if rows:
                yield {
                    "minute": minute,
                    "concurrency": clients,
                    "requests": len(rows),
                    "latency_ms": 1e3 * median_high(one.end - one.start for one in rows),
                }


def counts(finished: list[Done]) -> dict[str, dict[str, int]]:
    """Requests and wrong ones by kind."""
    found: dict[str, dict[str, int]] = {}
    for one in finished:
        row = found.setdefault(one.kind, {"requests": 0, "wrong": 0, "prompt_tokens": 0})
        row["requests"] += 1
        row["wrong"] += not one.ok
        row["prompt_tokens"] += one.prompt_tokens
    return found
