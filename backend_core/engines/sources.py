"""Definitions in an engine's source, read without importing it: of an environment or of a wheel.

A definition is cut out of its file by its indentation, and only that is parsed, which takes a
fraction of the time of parsing the file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import re
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

Read: TypeAlias = Callable[[str], str | None]
"""Gives the text of a file by its place below the folder of packages: ``"vllm/envs.py"``."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITION = r"(?:(?:(?:async )?def|class) (\w+)|(\w+)[ ]*[:=](?!=))"
_IN_MODULE = re.compile(rf"^{_DEFINITION}", re.MULTILINE)
_IN_CLASS = re.compile(rf"^    {_DEFINITION}", re.MULTILINE)
_NO_CODE = re.compile(r'"""(?s:.*?)"""|#[^\n]*')
_BRACKET = re.compile(r"[()]")
_COLON = re.compile(r":[ ]*(?:#[^\n]*)?(?:\.\.\.[ ]*)?$", re.MULTILINE)
_STATEMENTS = (("def ", "("), ("class ", ""), ("  ", ":"), ("  ", " ="), ("  ", "="))
_FROM = re.compile(
    r"^[ ]*(?:from[ ]+([.\w]+)[ ]+import[ ]+(\([^)]*\)|[^\n(]+)|import[ ]+([^\n]+))", re.MULTILINE
)


def installed(package: str) -> Read:
    """The files of a package of this environment, which is not imported."""
    loaded = sys.modules.get(package)
    spec = importlib.util.find_spec(package) if loaded is None else loaded.__spec__
    folders = [] if spec is None else spec.submodule_search_locations or []
    roots = [Path(folder).parent for folder in folders]

    def read(file: str) -> str | None:
        found = next((root / file for root in roots if (root / file).is_file()), None)
        return None if found is None else found.read_text(encoding="utf-8")

    return read


def of_wheel(file: Path) -> Read:
    """The files of a wheel.

    Raises:
        OSError, zipfile.BadZipFile: it cannot be read.
    """
    archive = zipfile.ZipFile(file)
    members = set(archive.namelist())

    def read(file: str) -> str | None:
        if file not in members:
            return None
        with archive.open(file) as member:  # lines end with \n, as those of `installed`
            return io.TextIOWrapper(member, encoding="utf-8").read()

    return read


class Definition(NamedTuple):
    """The meaning of a name in a module.

    Attributes:
        module, name: where it is defined, which others may import it from; the name is dotted for
            a member of a class.
        text: its source, of a class or function all of it; nothing where it is a module, or another
            package's.
    """

    module: str
    name: str
    text: str


class Sources:
    """The modules of one engine."""

    def __init__(self, read: Read) -> None:
        self._read = functools.cache(read)
        self.find = functools.cache(self._find)
        self.function = functools.cache(self._function)
        self._code = functools.cache(lambda kind: _NO_CODE.sub("", kind.text))

    def text(self, module: str) -> str | None:
        """A module's source, ``None`` where there is no such module."""
        file = module.replace(".", "/")
        found = self._read(f"{file}.py")
        return self._read(f"{file}/__init__.py") if found is None else found

    def _find(self, module: str, name: str) -> Definition | None:
        """Find ``name``, dotted for a member of a class, in a module; ``None`` if it is not there.

        A name that the module imports is looked up where it comes from, and a member in the bases
        of its class.
        """
        if (text := self.text(module)) is None:
            return None
        first, _, member = name.partition(".")
        found = None
        if first not in _defined(text, 0):
            found = self._imported(module, text, first)
        if found is None and (cut := _cut(text, first)) is not None:
            found = Definition(module, first, cut)
        if found is None or not member:
            return found
        if (cut := _cut(found.text, member, 4)) is not None:
            return Definition(found.module, f"{found.name}.{member}", cut)
        inherited = (self.find(base.module, f"{base.name}.{member}") for base in self.bases(found))
        return next(filter(None, inherited), None)

    def bases(self, kind: Definition) -> Iterator[Definition]:
        """The classes that a class names as its bases, but for those of other packages."""
        header = re.match(r"class\s+\w+\s*\(([^)]*)\)", kind.text)
        for name in re.findall(r"[\w.]+(?=\s*(?:,|$|\[))", header[1]) if header else ():
            base = self.find(kind.module, name)
            if base is not None and base.text.startswith("class "):
                yield base

    def _imported(self, module: str, text: str, name: str) -> Definition | None:
        for match in _FROM.finditer(text):
            if name not in match[0]:
                continue
            for part in re.sub(r"#.*|[()]", "", match[2] or match[3]).split(","):
                theirs, *_, ours = part.split() * 2 or ("", "")
                if ours == name and _is_of_scope(text, match.start(), 0):
                    if match[1] is None:
                        return Definition(theirs, "", "")
                    return self._origin(self._absolute(module, match[1]), theirs)
        return None

    def _origin(self, origin: str, name: str) -> Definition | None:
        """Find the result of ``from origin import name``."""
        if not name or self.text(f"{origin}.{name}") is not None:
            return Definition(f"{origin}.{name}".rstrip("."), "", "")
        if self.text(origin) is None:  # another package's
            return Definition(origin, name, "")
        return self.find(origin, name)

    def _absolute(self, module: str, origin: str) -> str:
        name = origin.lstrip(".")
        if not (dots := len(origin) - len(name)):
            return origin
        is_package = self._read(f"{module.replace('.', '/')}/__init__.py") is not None
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - dots + is_package], *filter(None, [name])])

    def has(self, module: str, name: str, member: str) -> bool:
        """Whether a class or one of its bases has a field, method or attribute."""
        kind = self.find(module, name)
        if kind is None:
            return False
        bases = self.bases(kind)
        if member in _defined(kind.text, 4):
            return True
        if re.search(rf"\bself\.{re.escape(member)}\b", self._code(kind)):
            return True
        return any(self.has(base.module, base.name, member) for base in bases)

    def fields(self, module: str, name: str) -> dict[str, bool] | None:
        """The fields of a dataclass and its bases, and whether each has a default; ``None`` where
        it is no class."""
        kind = self.find(module, name)
        if kind is None or not kind.text.startswith("class "):
            return None
        (node,) = ast.parse(kind.text).body
        found: dict[str, bool] = {}
        for base in self.bases(kind):
            found |= self.fields(base.module, base.name) or {}
        for x in getattr(node, "body", []):
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name):
                found[x.target.id] = x.value is not None
        return found

    def calls(self, module: str, name: str, callee: str) -> list[ast.Call]:
        """The calls of a function, by its last name, in a function."""
        found, calls = self.find(module, name), []
        text = "" if found is None else found.text
        for match in re.finditer(rf"(?<!def )\b{re.escape(callee)}\(", text):
            try:  # each by itself, which is quicker than the whole function
                source = text[match.start() : _end_of_call(text, match.end())]
                calls.append(ast.parse(source, mode="eval").body)
            except SyntaxError:  # a bracket in a string or comment
                nodes = ast.walk(self.function(module, name) or ast.Pass())
                return [x for x in nodes if isinstance(x, ast.Call) and _called(x) == callee]
        return [call for call in calls if isinstance(call, ast.Call)]

    def _function(self, module: str, name: str, whole: bool = True) -> Function | None:
        """A function; ``None`` where there is none, or it is another package's.

        Args:
            whole: without it the body is left out, which need not be parsed then.
        """
        found = self.find(module, name)
        if found is None or not found.text or found.text.startswith("class "):
            return None
        for text in [found.text] if whole else _headers(found.text):
            try:
                (node,) = ast.parse(f"if 1:\n{text}" if text.startswith(" ") else text).body
            except SyntaxError:
                continue
            node = node.body[0] if isinstance(node, ast.If) else node
            return node if isinstance(node, Function) else None
        # a line of a string, without indentation, ended the cut
        body: Iterable[ast.stmt] = ast.parse(self.text(found.module) or "").body
        node = ast.Pass()
        for part in found.name.split("."):
            scope = (x for x in _statements(body) if getattr(x, "name", None) == part)
            node = next(scope, ast.Pass())
            body = getattr(node, "body", ())
        return node if isinstance(node, Function) else None


def _called(call: ast.Call) -> str | None:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _end_of_call(text: str, at: int) -> int:
    """Where the bracket that is open at a place is closed."""
    depth = 1
    for match in _BRACKET.finditer(text, at):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _headers(text: str) -> Iterator[str]:
    """A function without its body, if it ends with the first colon that ends a line, the second
    one, ..."""
    for match in _COLON.finditer(text):
        yield f"{text[: match.start()]}: ..."


def _cut(text: str, name: str, indent: int = 0) -> str | None:
    """The statement that defines a name in a module, or in a class's body indented by 4."""
    at, level = _defined(text, indent).get(name), indent
    if at is None:
        if (conditional := _conditional(text, name, indent)) is None:
            return None
        at, level = conditional
    end = re.compile(rf"^[ ]{{0,{level}}}[A-Za-z_@\"']", re.MULTILINE)
    last = end.search(text, at + level + 1)
    while last and text.count('"""', at, last.start()) % 2:  # a line of a string
        last = end.search(text, last.end())
    found = text[at : last.start() if last else len(text)]
    is_method = indent and not found.lstrip().startswith("class ")
    return found if is_method or not level else textwrap.dedent(found)


@functools.cache
def _defined(text: str, indent: int) -> dict[str, int]:
    """Where the names of a scope are defined first, but for those under a condition."""
    found: dict[str, int] = {}
    last, quotes = 0, 0
    for match in (_IN_CLASS if indent else _IN_MODULE).finditer(text):
        quotes += text.count('"""', last, match.start())
        last = match.start()
        if quotes % 2 == 0:  # not a line of a docstring
            found.setdefault(match[1] or match[2], last)
    return found


def _conditional(text: str, name: str, indent: int) -> tuple[int, int] | None:
    """Where a name is defined under a condition, and by how much that is indented."""
    if not any(f"{before}{name}{end}" in text for before, end in _STATEMENTS):
        return None
    word = re.escape(name)
    statement = rf"^([ ]{{{indent},}})(?:(?:async )?def {word}\b|class {word}\b|{word} *[:=](?!=))"
    for match in re.finditer(statement, text, re.MULTILINE):
        if _is_of_scope(text, match.start(), indent):
            return match.start(), len(match[1])
    return None


def _is_of_scope(text: str, at: int, indent: int) -> bool:
    """Whether the statement that begins there is the scope's own, perhaps under a condition."""
    before = " " * indent
    if text[at + indent : at + indent + 1] not in (" ", ""):
        return True
    while at > 0:
        start = text.rfind("\n", 0, at - 1) + 1
        line = text[start : at - 1]
        at = start
        if line.startswith(before) and line[indent : indent + 1] not in ("", " ", "#", ")", "]"):
            return (
                re.match(r"(?:if|elif|else|try|except|finally|with)\b", line[indent:]) is not None
            )
    return False


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a scope, also under conditions."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                yield from _statements(getattr(statement, part, ()))


def digest(function: Function) -> str:
    """A hash of what a function does: of its parsed body without docstrings, annotations and
    formatting. It does not depend on Python's version."""
    lines: list[str] = []
    _spell(function.body, lines)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _spell(value: object, lines: list[str]) -> None:
    if isinstance(value, list):
        for one in value:
            _spell(one, lines)
        lines.append("end")
    elif not isinstance(value, ast.AST):
        lines.append(repr(value))
    elif not (isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant)):  # a docstring
        lines.append(type(value).__name__)
        for field in value._fields:
            inner = getattr(value, field, None)
            if field not in _LEFT_OUT and inner is not None and inner != []:
                lines.append(field)
                _spell(inner, lines)


_LEFT_OUT = {"ctx", "kind", "type_comment", "type_params", "annotation", "returns", "simple"}
