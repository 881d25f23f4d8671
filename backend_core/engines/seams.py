"""Seams: names of an engine that adapters rely on, held against its source before weights load.

An adapter lists its `Seam`s in `Part`s, one for what is served or left to the engine as a whole.
Where a part does not hold, the engine's code serves it, and one sentence says what was expected and
what was found. Where only the body of a function that ours replace or follow is another than in the
releases of the contract tests, the part is served and one line says so; in strict mode it is not.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend_core.engines import ENGINES
from backend_core.engines.log import PREFIX
from backend_core.engines.sources import Function, Sources, digest, installed
from backend_core.family import PACKAGES
from backend_core.strict import strict_mode, warn_once

BODIES = Path(__file__).with_name("bodies.toml")
"""By engine, function and release a hash of the body; written by ``tests/engines/bodies.py``."""


@dataclass(frozen=True)
class Seam:
    """One name of an engine's, and what is relied on of it.

    In the lists of names a ``?`` after a name says that it may be missing, and ``...`` that ours
    pass on whatever else there is.

    Attributes:
        place: ``"module:name"``, the name dotted for a member of a class; a module alone is one
            that must be there.
        takes: the parameters of a function that ours stand in for.
        given: the arguments that ours give to a function of the engine's, or the fields to a
            dataclass.
        has: fields, attributes and methods of a class.
        calls: ``"callee: names"``, the keywords of every call that a function or the methods of a
            class make of a function that ours stand in for; ``"callee[name]: names"`` of those
            calls alone that have one keyword.
        imports: ``"module:name"``, imported in the function.
        body: ours replace the function or do as it does.
    """

    place: str
    takes: str | None = None
    given: str | None = None
    has: str = ""
    calls: str = ""
    imports: str = ""
    body: bool = False


@dataclass(frozen=True)
class Part:
    """A group of seams that is served or declined as a whole.

    Attributes:
        engine: ``"vllm"`` or ``"sglang"``; name: in a sentence: ``"KDA layers of Kimi-K3"``.
    """

    engine: str
    name: str
    seams: tuple[Seam, ...]

    @classmethod
    def of(cls, name: str, seams: tuple[Seam, ...]) -> Part:
        """The part that these seams, which lie in one engine, make up."""
        return cls(seams[0].place.partition(".")[0], name, seams)


def each(where: str, names: str, **relied: Any) -> tuple[Seam, ...]:
    """Seams of which the same is relied on.

    Args:
        where: a module, or a class as ``"module:Class"``; names: of its members.
        relied: the other attributes of each `Seam`.
    """
    dot = "." if ":" in where else ":"
    return tuple(Seam(f"{where}{dot}{name}", **relied) for name in names.split())


@dataclass(frozen=True)
class Finding:
    """A seam as it is in one release.

    Attributes:
        differs: a sentence of what was expected and what is there; ``None`` where it holds.
        changed: whether only its body is unknown.
    """

    seam: Seam
    differs: str | None = None
    changed: bool = False


def refusal(part: Part) -> str | None:
    """Why a part is not served in the installed release; asked as a model is loaded under a flag.

    Logs one line where the release is not as the contract tests know it.
    """
    reason, note = _verdict(part)
    if reason is None and note is not None:
        if strict_mode() and "changed" in note:
            return note
        warn_once(f"{PREFIX}: {note}")
    return reason


def difference(part: Part) -> str | None:
    """Why a part cannot be served in the installed release, whatever the flag and strict mode."""
    return _verdict(part)[0]


@functools.cache
def _verdict(part: Part) -> tuple[str | None, str | None]:
    """Why it cannot be served, and what is to be said where it is."""
    engine = ENGINES[part.engine]
    version = engine.installed() or "of an unknown release"
    findings = hold(part, _installed(part.engine))
    different = [finding.differs for finding in findings if finding.differs is not None]
    if different:
        more = f" (and {len(different) - 1} more: kda-dsv4 seams)" if different[1:] else ""
        return f"{part.engine} {version} does not fit the {part.name}: {different[0]}{more}", None
    changed = [finding.seam.place.partition(":")[2] for finding in findings if finding.changed]
    if not changed and engine.is_tested(version):
        return None, None
    bodies = f"{len(changed)} bod{'ies' if changed[1:] else 'y'} changed: {', '.join(changed)}"
    found = bodies if changed else "what is relied on holds"
    return None, f"{part.engine} {version} is not tested with this release; {part.name}: {found}"


def parts_held(engine: str) -> dict[str, bool]:
    """By part of an engine's adapters, whether the installed release can be served."""
    return {part.name: difference(part) is None for part in parts_of(engine)}


def in_words(engine: str) -> str:
    """Whether the installed release of an engine is tested, and what does not hold, in one line."""
    tested = ENGINES[engine].tested
    version = ENGINES[engine].installed()
    if version is None:
        return f"{engine}: not installed (tested: {', '.join(tested)})"
    verdict = (
        "tested" if ENGINES[engine].is_tested(version) else f"not tested ({', '.join(tested)} are)"
    )
    held = parts_held(engine)
    left = [name for name, holds in held.items() if not holds]
    if not held:
        return f"{engine} {version}: {verdict}"
    found = f"left to {engine}'s own code: {', '.join(left)}" if left else "what is relied on holds"
    return f"{engine} {version}: {verdict}; {found}"


@functools.cache
def _installed(engine: str) -> Sources:
    return Sources(installed(engine))


def parts_of(engine: str) -> Iterator[Part]:
    """The parts of all adapters of an engine, which ``<package>.engines.seam_list`` list."""
    for package in ("backend_core", *PACKAGES):
        name = f"{package}.engines.seam_list"
        if importlib.util.find_spec(f"{package}.engines") is None:
            continue
        if importlib.util.find_spec(name) is not None:
            for part in importlib.import_module(name).SEAMS:
                if part.engine == engine:
                    yield part


def hold(
    part: Part, sources: Sources, known: Mapping[str, Mapping[str, str]] | None = None
) -> list[Finding]:
    """Each seam of a part as it is in a release.

    Args:
        known: by place and release the hashes of bodies; by default those of the contract tests.
    """
    bodies = _bodies().get(part.engine, {}) if known is None else known
    return [_held(seam, sources, bodies.get(seam.place, {})) for seam in part.seams]


@functools.cache
def _bodies() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads(BODIES.read_text(encoding="utf-8"))


def _held(seam: Seam, sources: Sources, known: Mapping[str, str]) -> Finding:
    try:
        return _hold(seam, sources, known)
    except Exception as error:  # would end the engine, where its own code can serve
        what = f"{type(error).__name__}: {error}"
        return Finding(seam, f"the source of {seam.place} cannot be read: {what}")


def _hold(seam: Seam, sources: Sources, known: Mapping[str, str]) -> Finding:
    module, _, name = seam.place.partition(":")
    if sources.text(module) is None:
        return Finding(seam, f"module {module} must be there, and is not")
    if not name:
        return Finding(seam)
    if sources.find(module, name) is None:
        return Finding(seam, f"{module} must have {name}, and has not")
    missing = [one for one in seam.has.split() if not sources.has(module, name, one)]
    if missing:
        return Finding(seam, f"{seam.place} must have {_words(missing)}, and has not")
    if replace(seam, has="") == Seam(seam.place):
        return Finding(seam)
    if (fields := sources.fields(module, name)) is not None:
        return Finding(seam, _differing(seam, set(fields), {x for x in fields if not fields[x]}))
    node = sources.function(module, name, bool(seam.imports or seam.body))
    if node is None:
        return Finding(seam, f"{seam.place} must be a function, and is not")
    differs = _parameters(seam, node) or _calls(seam, sources) or _imports(seam, node)
    changed = seam.body and differs is None and digest(node) not in known.values()
    return Finding(seam, differs, changed)


def _names(listed: str) -> tuple[set[str], set[str], bool]:
    """Names that must be there, those that may, and whether any other may."""
    names = set(listed.split())
    optional = {name[:-1] for name in names if name.endswith("?")}
    needed = {name for name in names if name[-1] not in "?."}
    return needed, needed | optional, "..." in names


def _parameters(seam: Seam, node: Function) -> str | None:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = {x.arg for x in positional[: len(positional) - len(arguments.defaults)]}
    required |= {
        x.arg
        for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    got = {x.arg for x in (*positional, *arguments.kwonlyargs)} - {"self", "cls"}
    required -= {"self", "cls"}
    return _differing(seam, got, required, rest=arguments.kwarg is not None)


def _differing(seam: Seam, got: set[str], required: set[str], rest: bool = False) -> str | None:
    """How the parameters of a function differ, or the fields of a dataclass.

    Args:
        required: of ``got``, those without a default; rest: whether it takes any others.
    """
    if seam.takes is not None:
        needed, known, others = _names(seam.takes)
        if not needed <= got or not (got <= known or others) or (rest and not others):
            found = _words(got) + (", **" if rest else "")
            return f"{seam.place} must take {_words(known)}, got {found}"
    if seam.given is not None:
        needed, known, _ = _names(seam.given)
        if not (needed <= got or rest) or not required <= known:
            return f"{seam.place} must take {_words(needed)}, got {_words(got)}"
    return None


def _calls(seam: Seam, sources: Sources) -> str | None:
    if not seam.calls:
        return None
    callee, _, listed = seam.calls.partition(":")
    callee, _, naming = callee.rstrip("]").partition("[")
    needed, known, others = _names(listed)
    module, _, name = seam.place.partition(":")
    calls = sources.calls(module, name, callee)
    if naming:
        calls = [x for x in calls if naming in {given.arg for given in x.keywords}]
    if not calls:
        return f"{seam.place} must call {callee}, and does not"
    for call in calls:
        got = {given.arg or "**" for given in call.keywords}
        if call.args:
            got.add("*")
        if not needed <= got or not (got <= known or others):
            return f"{seam.place} must call {callee} with {_words(known)}, got {_words(got)}"
    return None


def _imports(seam: Seam, node: ast.AST) -> str | None:
    if not seam.imports:
        return None
    module, _, name = seam.imports.partition(":")
    found = {
        x.module
        for x in ast.walk(node)
        if isinstance(x, ast.ImportFrom) and name in {alias.name for alias in x.names}
    }
    if module in found:
        return None
    got = _words({str(x) for x in found}) if found else "no import"
    return f"{seam.place} must import {name} from {module}, got {got}"


def _words(names: object) -> str:
    return ", ".join(sorted(names)) or "nothing"  # type: ignore[call-overload]
