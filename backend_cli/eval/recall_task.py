"""The recall task: real questions with their answers stand in the context, one is asked again.

A prompt is text in one fixed format. Every question of the context is a record, and the last
record stops where its answer begins::

    Q: Natalia sold clips to 48 of her friends in April, and then ... in April and May?
    A: 72
    Q: Weng earns $12 an hour for babysitting. Yesterday, ... How much did she earn?
    A: 10
    Q: Natalia sold clips to 48 of her friends in April, and then ... in April and May?
    A:␣

(``␣`` is the one space before the answer.) The model answers ``72`` and ends the line. Nothing
has to be computed: the answer stands in the context, up to 2,000 tokens back, and a model whose
recurrent state is read wrongly cannot find it.

Tokens are bytes: id ``b`` is the byte ``b`` of the UTF-8 text, for ``b`` in 0..255, and three ids
follow, `PAD`, `BOS` and `EOS`. `VOCAB_SIZE` rounds the table up to a multiple of 8; the ids from
259 on are unused. None of the special ids occurs in a prompt. These ids are the checkpoint's: they
never change.

Only the standard library is used here, so that the task runs against an HTTP endpoint from an
environment without torch. The questions are GSM8K's (Cobbe et al. 2021, MIT licence).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend_core.bounded import RESULT_BYTES, parse_json, read_text

PAD, BOS, EOS = 256, 257, 258
SPECIAL_TOKENS = {"<|pad|>": PAD, "<|bos|>": BOS, "<|eos|>": EOS}
VOCAB_SIZE = 264

TERMINATOR = "\n"
"""The character (one byte, one token) that ends an answer."""

MAX_ANSWER_TOKENS = 12
"""Generation may stop here: the longest GSM8K answer has 9 digits, and the terminator follows."""

FORMAT = "kda-dsv4 recall 1"


@dataclass(frozen=True)
class Question:
    """One GSM8K question: its text on one line, and its final answer as digits."""

    text: str
    answer: str

    def record(self) -> str:
        """The question with its answer, as it stands in a context."""
        return f"Q: {self.text}\nA: {self.answer}{TERMINATOR}"

    def ask(self) -> str:
        """The question up to where its answer begins, as it ends a prompt."""
        return f"Q: {self.text}\nA: "


@dataclass(frozen=True)
class Item:
    """One prompt: indices of the context's questions in the pool, and which of them is asked."""

    context: tuple[int, ...]
    asked: int


@dataclass(frozen=True)
class QuestionSet:
    """Items over a pool of questions."""

    pool: tuple[Question, ...]
    items: tuple[Item, ...]

    def prompt(self, item: Item) -> str:
        """The text that the model continues."""
        context = "".join(self.pool[index].record() for index in item.context)
        return context + self.pool[item.asked].ask()

    def answer(self, item: Item) -> str:
        """The only right continuation, without its terminator."""
        return self.pool[item.asked].answer

    def head(self, count: int) -> "QuestionSet":
        """The first ``count`` items over the same pool."""
        return QuestionSet(self.pool, self.items[:count])


@dataclass(frozen=True)
class Score:
    """How many answers were right, and which."""

    right: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """Share of right answers; 0 where there are none at all."""
        return sum(self.right) / len(self.right) if self.right else 0.0


def encode(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(ids: Iterable[int]) -> str:
    """Text of token ids; special ids are dropped, bytes that are not UTF-8 become U+FFFD."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def read_gsm8k(path: str | Path) -> list[Question]:
    """Read a GSM8K file: JSON lines with ``question`` and ``answer``, the number after ``####``.

    White space in a question is collapsed, so that a line is a question, and commas leave the
    number. Raises ValueError, with file and line, where a line is not such a record.
    """
    questions = []
    content = read_text(Path(path), RESULT_BYTES)
    for number, line in enumerate(_lines(content), start=1):
        try:
            record = parse_json(line)
            text, solution = _text(record["question"]), _text(record["answer"])
            answer = solution.split("####")[1].strip().replace(",", "")
            questions.append(Question(" ".join(text.split()), str(int(answer))))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a GSM8K record with 'question' and 'answer' "
                f"ending in '#### NUMBER', got {line[:80]!r}"
            ) from error
    return questions


def _text(value: object) -> str:
    """A text that can be sent; JSON also has halves of surrogate pairs.

    Raises:
        TypeError: it is no text.
        ValueError: UTF-8 does not have it.
    """
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of a text")
    value.encode()
    return value


def _lines(text: str) -> list[str]:
    """Split on "\\n" only: the texts may contain U+2028."""
    return text.removesuffix("\n").split("\n") if text else []


def read_questions(path: str | Path) -> QuestionSet:
    """Read a question set that ``benchmarks/recall/make_questions.py`` wrote. Raises ValueError
    where the file is not of that form."""
    content = read_text(Path(path), RESULT_BYTES)
    try:
        header, *rest = map(parse_json, _lines(content))
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        size = header["pool"]
        pool = tuple(Question(_text(x["question"]), _text(x["answer"])) for x in rest[:size])
        items = tuple(Item(tuple(line["context"]), line["asked"]) for line in rest[size:])
        if len(pool) != size or len(items) != header["items"]:
            raise ValueError(f"{len(pool)} questions and {len(items)} items")
        if any(not 0 <= index < size for item in items for index in (*item.context, item.asked)):
            raise ValueError("an index outside the pool")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected a file of format {FORMAT!r}, got {error}") from error
    return QuestionSet(pool, items)


def extract_answer(completion: str) -> str:
    """The answer in a completion: its text up to the first terminator."""
    return completion.split(TERMINATOR, 1)[0].strip()


def score(questions: QuestionSet, completions: Sequence[str]) -> Score:
    """Exact match of each completion's answer. Raises ValueError where the counts differ."""
    if len(completions) != len(questions.items):
        raise ValueError(
            f"completions must number {len(questions.items)}, one per item, got {len(completions)}"
        )
    return Score(
        tuple(
            extract_answer(completion) == questions.answer(item)
            for item, completion in zip(questions.items, completions, strict=True)
        )
    )
