"""Write the held-out items of the recall task, which the demo and the tests run.

    python benchmarks/recall/make_questions.py --data DIR/test.jsonl

The committed questions.jsonl is the output of this command with its defaults.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from backend_cli.eval import recall_task as recall

SOURCE = (
    "questions and final answers of GSM8K's test split (Cobbe et al. 2021, 'Training Verifiers to "
    "Solve Math Word Problems'), MIT License, Copyright (c) 2021 OpenAI"
)


MIN_CONTEXT_QUESTIONS = 3
MIN_TOKENS, MAX_TOKENS = 500, 2000  # of a prompt


def make_questions(
    questions: Sequence[recall.Question], count: int, seed: int
) -> recall.QuestionSet:
    """Draw ``count`` items whose prompts have `MIN_TOKENS` to `MAX_TOKENS` tokens.

    The same arguments give the same items. Target lengths are uniform; a context has at least
    `MIN_CONTEXT_QUESTIONS` questions with different answers, and each of its positions is asked
    with the same probability. The pool keeps only the questions that some item uses. Raises
    ValueError where the questions at hand cannot fill such a prompt.
    """
    rng = random.Random(seed)
    sizes = [len(question.record().encode()) for question in questions]
    drawn: list[list[int]] = []
    for _ in range(1000 * count):
        if len(drawn) == count:
            break
        target = rng.randint(MIN_TOKENS, MAX_TOKENS)
        context = [rng.randrange(len(questions))]
        used = sizes[context[0]] + len(questions[context[0]].ask().encode())
        answers = {questions[context[0]].answer}
        for _ in range(64):
            index = rng.randrange(len(questions))
            if used + sizes[index] <= target and questions[index].answer not in answers:
                context.append(index)
                used += sizes[index]
                answers.add(questions[index].answer)
        if len(context) >= MIN_CONTEXT_QUESTIONS and used >= MIN_TOKENS:
            drawn.append(context)
    if len(drawn) < count:
        raise ValueError(
            f"expected questions that fill {count} prompts of {MIN_TOKENS} to {MAX_TOKENS} tokens, "
            f"got {len(questions)} questions that fill {len(drawn)}"
        )
    kept = sorted({index for context in drawn for index in context})
    place = {index: position for position, index in enumerate(kept)}
    items = []
    for context in drawn:
        asked, rest = context[0], context[1:]
        rest.insert(rng.randint(0, len(rest)), asked)
        items.append(recall.Item(tuple(place[index] for index in rest), place[asked]))
    return recall.QuestionSet(tuple(questions[index] for index in kept), tuple(items))


def write_questions(path: str | Path, questions: recall.QuestionSet, source: str) -> None:
    """Write a question set: a header with ``source``, the pool, then the items as indices."""
    lines: list[object] = [
        {
            "format": recall.FORMAT,
            "source": source,
            "pool": len(questions.pool),
            "items": len(questions.items),
        }
    ]
    lines += [{"question": q.text, "answer": q.answer} for q in questions.pool]
    lines += [{"context": item.context, "asked": item.asked} for item in questions.items]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    Path(path).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("questions.jsonl"))
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    questions = make_questions(recall.read_gsm8k(args.data), args.items, args.seed)
    write_questions(args.out, questions, SOURCE)


if __name__ == "__main__":
    main()
