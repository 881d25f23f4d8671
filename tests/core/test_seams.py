"""What adapters rely on in an engine: each kind of change is found, with its sentence, in small
packages that are made for it."""

from __future__ import annotations

import logging
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from backend_core import strict
from backend_core.engines import ENGINES, Engine, seams
from backend_core.engines.seams import BODIES, Part, Seam, hold, parts_of
from backend_core.engines.sources import Sources, digest, installed
from tests.cli.program import assert_one_sentence, run

LAYER = '''"""A layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Base as _Base
from engine.kernels import (
    attend,  # of the GPU
)

if TYPE_CHECKING:
    OPTION: bool = False
else:
    from engine import options as chosen


@dataclass
class Metadata:
    """Of a step.

    bounds: of the requests
    """

    lengths: int
    slots: int
    kept: bool = True


class Layer(_Base):
    scale = 1.0

    def __init__(self, config, prefix="", **options):
        self.heads, self.prefix = config.heads, prefix

    def forward(
        self, q, k, *, out=None
    ):
        """Text that
ends where no line is indented."""
        from engine.kernels import prefill

        attend(q=q, k=k)
        return prefill(q)  # of no length
'''
FILES = {
    "__init__.py": "",
    "layer.py": LAYER,
    "base.py": "class Base:\n    def plan(self, step):\n        self.planned = step\n",
    "kernels.py": "def attend(q, k, window=None): ...\ndef prefill(q): ...\n",
    "options.py": "",
}
M = "engine.layer"
PART = Part(
    "engine",
    "layers of a model",
    (
        Seam("engine.options"),
        Seam(f"{M}:OPTION"),
        Seam(f"{M}:chosen"),
        Seam(f"{M}:Metadata", given="lengths slots"),
        Seam(f"{M}:Metadata", has="lengths kept"),
        Seam(f"{M}:Layer", has="scale heads prefix planned plan forward"),
        Seam(f"{M}:Layer.__init__", takes="config prefix ..."),
        Seam(
            f"{M}:Layer.forward",
            takes="q k out?",
            calls="attend: q k window?",
            imports="engine.kernels:prefill",
            body=True,
        ),
        Seam(f"{M}:Layer.plan", takes="step"),
        Seam(f"{M}:attend", given="q k"),
    ),
)


@pytest.fixture
def release(tmp_path: Path) -> Callable[..., Sources]:
    """A release, with a text of one of its files in the place of another."""

    def made(file: str = "", old: str = "", new: str = "") -> Sources:
        texts = dict(FILES)
        if file:
            assert old in texts[file]
            texts[file] = texts[file].replace(old, new)
        return Sources(lambda name: texts.get(name.removeprefix("engine/")))

    return made


def bodies(sources: Sources) -> dict[str, dict[str, str]]:
    place = f"{M}:Layer.forward"
    function = sources.function(*place.split(":"))
    assert function is not None
    return {place: {"1.0": digest(function)}}


def found(sources: Sources, known: Sources) -> list[str]:
    """What is not as it was in ``known``."""
    findings = hold(PART, sources, bodies(known))
    return [str(x.differs or f"changed {x.seam.place}") for x in findings if x.differs or x.changed]


FORWARD = f"{M}:Layer.forward"
FAULTS = [
    ("layer.py", "slots: int", "rows: int", f"{M}:Metadata must take lengths, slots, got"),
    ("layer.py", "kept: bool = True", "", f"{M}:Metadata must have kept, and has not"),
    (
        "layer.py",
        "slots: int",
        "slots: int\n    rows: int",
        "slots, got kept, lengths, rows, slots",
    ),
    ("layer.py", "self.heads", "self.groups", f"{M}:Layer must have heads, and has not"),
    ("layer.py", "import Base as _Base", "import Other as _Base", "Layer must have plan, planned"),
    ("layer.py", "OPTION", "CHOICE", f"{M} must have OPTION, and has not"),
    ("layer.py", "import options as", "import settings as", f"{M} must have chosen, and has not"),
    (
        "layer.py",
        "import prefill",
        "import decode",
        "must import prefill from engine.kernels, got no",
    ),
    ("layer.py", "from engine.kernels import p", "from theirs import p", "kernels, got theirs"),
    (
        "layer.py",
        "attend(q=q, k=k)",
        "attend(q=q, k=k, sinks=3)",
        "with k, q, window, got k, q, sinks",
    ),
    (
        "layer.py",
        "attend(q=q, k=k)",
        "attend(q, k=k)",
        "must call attend with k, q, window, got *, k",
    ),
    ("layer.py", "attend(q=q, k=k)", "compute(q, k)", f"{FORWARD} must call attend, and does not"),
    (
        "layer.py",
        "*, out=None",
        "turn, *, out=None",
        f"{FORWARD} must take k, out, q, got k, out, q, t",
    ),
    ("layer.py", "k, *, out=None", "k", ""),
    ("layer.py", "return prefill(q)", "return prefill(k)", f"changed {FORWARD}"),
    (
        "layer.py",
        'prefix=""',
        "name",
        f"{M}:Layer.__init__ must take config, prefix, got config, n",
    ),
    ("layer.py", ", **options", ", extra=1", ""),
    (
        "base.py",
        "plan(self, step)",
        "plan(self, steps)",
        f"{M}:Layer.plan must take step, got steps",
    ),
    (
        "kernels.py",
        "attend(q, k,",
        "attend(q, k, scale,",
        "attend must take k, q, got k, q, scale, w",
    ),
    (
        "kernels.py",
        "attend(q, k,",
        "attend(q, values,",
        "attend must take k, q, got q, values, window",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "sentence"), FAULTS)
def test_what_another_release_has_changed_is_found_and_named(
    release: Callable[..., Sources], file: str, old: str, new: str, sentence: str
) -> None:
    lines = found(release(file, old, new), release())
    assert any(sentence in line for line in lines) if sentence else lines == [], lines


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ends where no line is indented", "ends"),
        ("  # of no length", ""),
        ("attend(q=q, k=k)", "attend(\n            q=q, k=k,  # attend( of (all)\n        )"),
        ("self, q, k, *", "self, q: int, k, *"),
    ],
)
def test_a_body_is_what_it_computes(release: Callable[..., Sources], old: str, new: str) -> None:
    assert found(release("layer.py", old, new), release()) == []


def test_a_module_that_is_gone_is_named() -> None:
    (finding, *_) = hold(PART, Sources({}.get), {})
    assert finding.differs == "module engine.options must be there, and is not"


def test_source_that_cannot_be_read_is_named() -> None:
    def read(file: str) -> str:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "no text")

    findings = hold(PART, Sources(read), {})
    assert all("cannot be read: UnicodeDecodeError: " in str(x.differs) for x in findings)
    broken = Sources({"engine/layer.py": "class Layer:\n    def plan(self, step:\n"}.get)
    (finding,) = hold(Part("engine", "", (Seam(f"{M}:Layer.plan", takes="step"),)), broken, {})
    assert finding.differs is not None


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package ``engine`` of a version, whose contract tests ran with 1.0."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ENGINES, "engine", Engine("engine", ("1.0",)))
    monkeypatch.setattr(strict, "_reported", set())
    folder = tmp_path / "engine"
    folder.mkdir()

    def install(version: str, **files: str) -> None:
        seams._verdict.cache_clear()
        seams._installed.cache_clear()
        for name, text in FILES.items():
            (folder / name).write_text(files.get(name.removesuffix(".py"), text))
        monkeypatch.setattr(Engine, "installed", lambda engine: version)

    install("1.0")
    known = bodies(Sources(installed("engine")))
    monkeypatch.setattr(seams, "_bodies", lambda: {"engine": known})
    return install


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kda_dsv4"]


def test_a_tested_release_is_served_without_a_word(
    engine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    assert seams.refusal(PART) is None and seams.difference(PART) is None
    assert warnings(caplog) == [] and "engine" not in sys.modules


def test_a_release_that_was_not_tested_is_served_and_it_is_said_once(
    engine: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine("1.1")
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with caplog.at_level(logging.WARNING, logger="kda_dsv4"):
        assert [seams.refusal(PART) for _ in range(2)] == [None, None]
    assert warnings(caplog) == [
        "kda-dsv4-backend: engine 1.1 is not tested with this release; layers of a model: what is"
        " relied on holds"
    ]


def test_a_changed_body_is_served_and_declined_in_strict_mode(
    engine: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine("1.1", layer=LAYER.replace("return prefill(q)", "return prefill(k)"))
    line = "engine 1.1 is not tested with this release; layers of a model: 1 body changed:"
    assert seams.refusal(PART) is None and seams.difference(PART) is None
    assert warnings(caplog) == [f"kda-dsv4-backend: {line} Layer.forward"]
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    assert seams.refusal(PART) == f"{line} Layer.forward"


def test_what_does_not_hold_declines_its_part_alone(engine: Callable[..., None]) -> None:
    engine("1.1", layer=LAYER.replace("lengths: int", "sizes: int"))
    assert seams.refusal(PART) == (
        "engine 1.1 does not fit the layers of a model: engine.layer:Metadata must take lengths,"
        " slots, got kept, sizes, slots (and 1 more: kda-dsv4 seams)"
    )
    other = replace(PART, name="others", seams=PART.seams[-2:])
    assert seams.refusal(other) is None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_lists_are_well_formed(engine: str) -> None:
    parts = list(parts_of(engine))
    assert len({part.name for part in parts}) == len(parts) > 8
    known = seams._bodies()[engine]
    for part in parts:
        for seam in part.seams:
            module, colon, name = seam.place.partition(":")
            assert module.startswith(f"{engine}.") and bool(colon) == bool(name), seam
            assert not seam.body or set(known[seam.place]) <= set(ENGINES[engine].tested)
    listed = {seam.place for part in parts for seam in part.seams if seam.body}
    assert set(known) == listed and BODIES.suffix == ".toml"


def test_a_wheel_is_read_without_being_installed(tmp_path: Path) -> None:
    """One that lacks nearly everything: each part is named, with what it misses first."""
    wheel = tmp_path / "vllm-0.34.0-cp38-abi3-manylinux_2_31_x86_64.whl"
    registry = "class AttentionBackendEnum:\n    def register(cls, name, value): ...\n"
    registry += "if True:\n    pass\n\n    def register_backend(backend, class_path=None): ...\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/v1/attention/backends/registry.py", registry)
    code, out, _ = run("seams", "--wheel", str(wheel))
    assert code == 1
    with zipfile.ZipFile(of_windows := tmp_path / f"{wheel.stem}-win.whl", "w") as archive:
        archive.writestr("vllm/v1/attention/backends/registry.py", registry.replace("\n", "\r\n"))
    assert run("seams", "--wheel", str(of_windows)) == (code, out, "")
    title, *lines = out.splitlines()
    assert title.startswith("vllm 0.34.0, not tested: 2 hold, 0 changed, ")
    assert lines[0].split("  ")[1] == "flag" and lines[0].endswith("  served      2 hold")
    assert any("KDA layers of Ling-V3 " in line and "  not served  " in line for line in lines)
    assert "    differ  module vllm.platforms.cuda must be there, and is not" in lines
    assert not any(line.startswith("    hold") for line in lines)
    registered = "    hold    vllm.v1.attention.backends.registry:register_backend"
    assert registered in run("seams", "--wheel", str(wheel), "--verbose")[1].splitlines()
    code, out, _ = run("seams", "--wheel", str(wheel), "--failing")
    assert code == 1 and "  flag " not in out and "differ  module" in out


@pytest.mark.parametrize("name", ["torch-2.13.0-cp311-linux_x86_64.whl", "vllm-0.33.0-py3.whl"])
def test_a_wheel_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no archive")
    code, _, err = run("seams", "--wheel", str(tmp_path / name))
    assert code == 2
    assert_one_sentence(err)
    assert "--wheel" in err


def test_without_an_engine_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "installed", lambda engine: None)
    assert run("seams")[:2] == (0, "no engine is installed (vllm, sglang)\n")
