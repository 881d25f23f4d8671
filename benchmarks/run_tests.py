"""Run the operators' tests natively on this GPU and write how many passed.

    python benchmarks/run_tests.py --output benchmarks/results/tests_h200.json

The same tests that CI runs under Triton's interpreter: on a machine with a GPU their kernels are
compiled and run on it. More arguments go to pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from backend_core.family import families
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    args, more = parser.parse_known_args()
    folders = [f"tests/{name}" for name in families() if (ROOT / "tests" / name).is_dir()]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", *folders, *more]
        code = subprocess.run(command, cwd=ROOT).returncode
        if not report.is_file():
            sys.exit(f"pytest ended with {code} and wrote no report")
        suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    result = environment() | {
        "folders": folders,
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "failed": count["failures"] + count["errors"],
        "skipped": count["skipped"],
        "seconds": float(suite.attrib["time"]),
        "failures": failed,
    }
    write_record(args.output, result)
    print(f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    sys.exit(code)


if __name__ == "__main__":
    main()
