"""The pieces of the drawn pictures in docs/img/, which take the colours of the reader's scheme."""

from __future__ import annotations

from html import escape

STYLE = """\
<style>
svg { color-scheme: light dark; --ink: #1f2328; --paper: #f6f8fa; --line: #afb8c1; --soft: #59636e;
  --a: #ddf4ff; --b: #dafbe1; --c: #fff8c5 }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --paper: #161b22; --line: #484f58;
  --soft: #9198a1; --a: #12304f; --b: #15361f; --c: #3d3311 } }
text { fill: var(--ink); font: 13px system-ui, Helvetica, Arial, "DejaVu Sans", sans-serif }
.mono { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.bold { font-weight: bold } .soft { fill: var(--soft); font-size: 12px }
.box { stroke: var(--line) } .paper { fill: var(--paper) } .a { fill: var(--a) }
.b { fill: var(--b) } .c { fill: var(--c) }
.arrow { stroke: var(--soft); stroke-width: 1.5; fill: none; marker-end: url(#head) }
.head { fill: var(--soft) }
</style>
"""


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole file. ``title`` is for who does not see it."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" xml:space="preserve">\n'
    return f"{head}<title>{escape(title)}</title>\n{STYLE}" + "\n".join([*parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{name}>{escape(words, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="box {kind}" {place} rx="6"/>'
