from __future__ import annotations

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest

from backend_cli.eval.record import FORMAT, accuracy, mcnemar, published_for, verdict, wilson
from tests.cli.program import assert_one_sentence, run


def record(
    rights: str, task: str = "gsm8k", rule: str = "flexible", first: int = 0
) -> dict[str, Any]:
    """A record whose questions were answered rightly where ``rights`` has a 1."""
    return {
        "format": FORMAT,
        "task": task,
        "model": "m",
        "accuracy": {rule: accuracy([right == "1" for right in rights])},
        "questions": [
            {
                "id": str(first + n),
                "question": f"question {n}",
                "expected": "7",
                "answer": "7" if right == "1" else f"a long answer, {n} {right}",
                "right": {rule: right == "1"},
            }
            for n, right in enumerate(rights)
        ],
    }


def damaged(name: str, value: Any) -> dict[str, Any]:
    """A record whose only question has another value."""
    found = record("1")
    found["questions"][0][name] = value
    return found


def compare(tmp_path: Path, first: Any, second: Any, *more: str) -> tuple[int, str, str]:
    for name, content in (("a", first), ("b", second)):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    return run("eval", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *more)


def test_a_worse_run_is_seen_with_its_questions(tmp_path: Path) -> None:
    code, out, _ = compare(tmp_path, record("1" * 20), record("0" * 8 + "1" * 12), "--show", "3")
    assert code == 1
    assert "the runs differ beyond chance (exact McNemar, p = 0.00781)" in out
    assert "flexible: A 1.0000, B 0.6000 over 20 questions; only A right 8, only B right 0" in out
    assert "question 2" in out and "question 3" not in out and "and 5 more changed" in out
    assert "wrong: a long answer, 2 0" in " ".join(out.split())


def test_a_better_run_is_no_failure(tmp_path: Path) -> None:
    code, out, _ = compare(tmp_path, record("0" * 8), record("1" * 8))
    assert code == 0 and "differ beyond chance" in out


def test_chance(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    code, out, _ = compare(tmp_path, record("1100110"), record("1010101"), "--json", str(file))
    assert code == 0 and "do not differ beyond chance" in out
    report = json.loads(file.read_text())
    assert (report["only_a"], report["only_b"]) == (2, 2) and report["p_value"] == 1.0
    assert len(report["changed"]) == 4


def test_a_question_that_the_data_hold_twice(tmp_path: Path) -> None:
    """Both of its answers count."""
    first, second = record("1100"), record("0110")
    for found in (first, second):
        found["questions"][1]["id"] = found["questions"][0]["id"]
    code, out, _ = compare(tmp_path, first, second)
    assert code == 0 and "over 4 questions; only A right 1, only B right 1" in out
    second["questions"].pop(1)
    code, _, err = compare(tmp_path, first, second)
    assert code == 2 and "got 4 and 3 with 3 in common" in err


def test_other_settings_are_named(tmp_path: Path) -> None:
    first, second = ({**record("10"), "settings": {"max_tokens": n, "x": 1}} for n in (16, 256))
    code, out, _ = compare(tmp_path, first, second)
    assert code == 0 and "the runs had other settings: max_tokens 16 in A and 256 in B\n" in out
    assert "x 1" not in out


def test_records_in_another_order_are_the_same(tmp_path: Path) -> None:
    turned = record("1100")
    turned["questions"].reverse()
    code, out, _ = compare(tmp_path, record("1100"), turned)
    assert code == 0 and "only A right 0, only B right 0, same text 4" in out


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("", record("1"), "a.json must be JSON"),
        ("[1]", record("1"), f"a.json must be of format '{FORMAT}', got 'list'"),
        ({"format": "kda-dsv4 eval 0"}, record("1"), "got 'kda-dsv4 eval 0'"),
        ({"rows": []}, record("1"), f"a.json must be of format '{FORMAT}', got None"),
        ({"format": FORMAT, "task": "gsm8k"}, record("1"), "a.json is damaged: 'questions'"),
        (record("1"), damaged("answer", None), "b.json is damaged: question 1 must have the texts"),
        (record("1"), damaged("question", 7), "b.json is damaged: question 1 must have the texts"),
        (record("1"), damaged("right", {}), "b.json is damaged: question 1 must have the texts"),
        (record("1"), record("1") | {"accuracy": 5}, "b.json is damaged: 'accuracy' is missing"),
        (record("1"), record("1") | {"questions": None}, "'questions' is missing or wrong"),
        (record("1", task="recall"), record("1"), "must be of one task, got recall and gsm8k"),
        (record("1"), record("1", rule="strict"), "--rule must be one of none, got any"),
        (record("11"), record("11", first=1), "got 2 and 2 with 1 in common"),
    ],
)
def test_bad_records(tmp_path: Path, first: Any, second: Any, message: str) -> None:
    code, out, err = compare(tmp_path, first, second)
    assert (code, out) == (2, "") and message in err
    assert_one_sentence(err)


@pytest.mark.parametrize(
    ("before", "behind"), [(["compare"], ["b.json"]), (["recall", "--data-path"], [])]
)
def test_files_that_hold_no_text_say_so_alone(
    before: list[str], behind: list[str], tmp_path: Path
) -> None:
    """And are not said to be JSON that is wrong."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe{}")
    for path, message in (
        (binary, f"{binary} must be UTF-8 text, got invalid start byte\n"),
        (Path("/dev/null"), "kda-dsv4: expected a regular file, got /dev/null\n"),
    ):
        code, out, err = run("eval", *before, str(path), *behind)
        assert (code, out) == (2, "") and err.endswith(message)
        assert_one_sentence(err)


def test_an_answer_steers_no_terminal(tmp_path: Path) -> None:
    hostile = damaged("answer", "\x1b[2J\x1b]0;title\x07 7")
    hostile["questions"][0]["right"]["flexible"] = False
    code, out, _ = compare(tmp_path, record("1"), hostile)
    assert code == 0 and "\x1b" not in out and "title" in out


def test_a_comparison_does_not_replace_a_record(tmp_path: Path) -> None:
    code, out, err = compare(
        tmp_path, record("1"), record("1"), "--json", str(tmp_path / "." / "b.json")
    )
    assert (code, out) == (2, "") and "--json must name a file of its own" in err
    assert_one_sentence(err)
    assert json.loads((tmp_path / "b.json").read_text()) == record("1")


def test_an_absent_record(tmp_path: Path) -> None:
    code, _, err = run("eval", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 2 and "cannot read result" in err
    assert_one_sentence(err)


def test_wilson_is_the_root_of_the_score_equation() -> None:
    for right, total in ((0, 10), (3, 10), (10, 10), (1174, 1319)):
        share = right / total
        for bound in wilson(right, total):
            if bound not in (0.0, 1.0):
                score = (share - bound) ** 2 / (bound * (1 - bound) / total)
                assert score == pytest.approx(1.959963984540054**2)
    assert wilson(0, 0) == (0.0, 1.0)


def test_mcnemar_is_a_sign_test() -> None:
    assert mcnemar(0, 0) == mcnemar(1, 1) == 1.0
    assert mcnemar(0, 5) == mcnemar(5, 0) == pytest.approx(2 / 32)
    tail = sum(comb(30, k) for k in range(9)) / 2**30
    assert mcnemar(22, 8) == pytest.approx(2 * tail)


@pytest.mark.parametrize(
    ("right", "ok", "said"),
    [
        (1174, True, "flexible agrees with the published 0.8901"),
        (1100, False, "flexible below the published 0.8901 beyond chance"),
        (1300, True, "flexible above the published 0.8901 beyond chance"),
    ],
)
def test_verdicts(right: int, ok: bool, said: str) -> None:
    rights = [n < right for n in range(1319)]
    found = {rule: accuracy(rights) for rule in ("flexible", "strict")}
    result = verdict("moonshotai/Kimi-Linear-48B-A3B-Instruct", found)
    assert result["ok"] is ok and said in result["text"]
    assert verdict("another", found)["ok"] is None


def test_a_floor_is_a_floor() -> None:
    rights = [n < 87 for n in range(100)]  # the interval holds 0.8901
    found = {rule: accuracy(rights) for rule in ("flexible", "strict")}
    result = verdict("Kimi-Linear-48B", found)
    assert result["ok"] is False and "under the floor 0.88" in result["text"]


def test_models_are_known_by_name_and_path() -> None:
    for name in ("/models/DeepSeek-V4-Pro", "deepseek-ai/DeepSeek-V4-Flash"):
        found = published_for(name)
        assert found is not None and found.values == {"flexible": 0.94}
    assert published_for("DeepSeek-V3") is None
