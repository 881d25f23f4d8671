"""Files that the program reads and writes: none is left half, and what a text has ends no line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_cli import files
from backend_cli.errors import BadInputError
from backend_cli.eval.recall_task import Question, read_gsm8k
from backend_cli.files import check_writable, write_text
from backend_core.testing import records

ROOT = Path(__file__).parents[2]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "record.json", "old")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "chmod", refuse)
    with pytest.raises(BadInputError, match=r"record\.json: No space left on device"):
        write_text(tmp_path / "record.json", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
    assert (tmp_path / "record.json").read_text() == "old"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As a device is, /dev/null for instance, which root had lost."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for write in (lambda: write_text(pipe, "[1]\n"), lambda: records.write_record(pipe, [1])):
        write()
        assert os.read(reader, 100) == b"[1]\n" and pipe.is_fifo()
    os.close(reader)


def test_a_record_that_is_not_written_to_its_end_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "rows.json"
    records.write_record(path, [1])
    whole = Path.write_text

    def half(file: Path, text: str, **options: Any) -> int:
        whole(file, text[:1], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        records.write_record(path, [2])
    assert path.read_text() == "[1]\n" and list(path.parent.iterdir()) == [path]


def test_a_folder_below_a_closed_one_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, whole = tmp_path / "closed", os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if Path(path).is_relative_to(closed / "home"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return whole(path, *args, **kwargs)

    closed.mkdir()
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "lstat", stat)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)
    with pytest.raises(BadInputError, match="it must be a file in a folder of yours"):
        check_writable(closed / "home" / "results" / "record.json")
    check_writable(tmp_path / "absent" / "record.json")


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "open"])
def test_lines_of_a_data_file(end: str, last: bool, tmp_path: Path) -> None:
    """JSON has U+2028, U+2029 and U+0085 as they are in its texts."""
    texts = ["What\u2028is it?", "And\u2029that?", "Or\u0085this?"]
    lines = [
        f'{{"question": "{text}", "answer": "so #### 1,00{n}"}}' for n, text in enumerate(texts)
    ]
    (tmp_path / "test.jsonl").write_text(
        end.join(lines) + (end if last else ""), encoding="utf-8", newline=""
    )
    assert read_gsm8k(tmp_path / "test.jsonl") == [
        Question("What is it?", "1000"),
        Question("And that?", "1001"),
        Question("Or this?", "1002"),
    ]


def test_a_terminal_that_lacks_a_character_gets_another() -> None:
    code = "import backend_cli.main as m; m.app = lambda **_: print('\\u2026 \\ud800'); m.main()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, b"? ?\n"), result.stderr.decode()


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("/dev/full", 1, "kda-dsv4: cannot write the output: No space left on device\n"),
        ("&-", 0, ""),
    ],
    ids=["full", "closed"],
)
def test_where_nothing_can_be_printed(output: str, code: int, said: str) -> None:
    command = f'"{sys.executable}" -m backend_cli.main info --json >{output}'
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (code, said)
