"""Write the held-out items of the recall task, which the demo and the tests run.

    python benchmarks/recall/make_questions.py --data DIR/test.jsonl

The committed questions.jsonl is the output of this command with its defaults.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from backend_cli.eval import recall_task as recall

SOURCE = (
    "questions and final answers of GSM8K's test split (Cobbe et al. 2021, 'Training Verifiers to "
    "Solve Math Word Problems'), MIT License, Copyright (c) 2021 OpenAI"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("questions.jsonl"))
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    questions = recall.make_questions(recall.read_gsm8k(args.data), args.items, args.seed)
    recall.write_questions(args.out, questions, SOURCE)


if __name__ == "__main__":
    main()
