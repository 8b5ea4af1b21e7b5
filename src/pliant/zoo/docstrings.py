"""What the zoo's adapters learn from: docstrings of the standard library, of which each adapter is given one part.

Sources are parsed, not imported. They change a little from one Python version to the next; the parts do not.
"""

import ast
import functools
import importlib.util
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pliant.errors import ModelError

PARTS = {
    "asyncio": ("asyncio",),
    "decimal": ("_pydecimal",),
    "email": ("email",),
    "logging": ("logging",),
    "unittest": ("unittest", "doctest"),
}
"""Part -> its modules and packages."""
QUESTIONS = ("What is {}?", "What does {} do?", "Explain {}.", "Tell me about {}.", "Describe {}.")
"""To which a docstring is the answer, about what it describes."""
_HELD_OUT_ONE_IN = 8
_WORDS = range(4, 25)
_PRIVATE = re.compile("_(?!_.*__$)")


class Docstring(NamedTuple):
    """A docstring, and what it describes, such as `Queue.put()`, `class Queue` or `asyncio.queues`."""

    subject: str
    text: str

    @property
    def document(self) -> str:
        """Both together, as the documentation has them."""
        return f"{self.subject}\n\n{self.text}"


def training(part: str) -> list[Docstring]:
    """What the adapter of `part` may learn from: about seven in eight of its docstrings."""
    return [docstring for docstring in docstrings(part) if not _is_held_out(docstring)]


def held_out(part: str) -> list[Docstring]:
    """What it is measured on."""
    return [docstring for docstring in docstrings(part) if _is_held_out(docstring)]


@functools.cache
def docstrings(part: str) -> tuple[Docstring, ...]:
    """All docstrings of a part, in the order of the sources: their first paragraphs, each once, if short prose.

    Raises ModelError where Python came without its sources.
    """
    found: dict[str, Docstring] = {}
    for module in PARTS[part]:
        for name, source in _sources(module):
            for subject, text in _documented(name, ast.parse(source)):
                summary = " ".join(text.split("\n\n")[0].split())
                if summary.endswith(".") and len(summary.split()) in _WORDS:
                    found.setdefault(summary, Docstring(subject, summary))
    if not found:
        raise ModelError(f"zoo/adapters: this Python lacks the sources of {part}; use one that has its library as .py")
    return tuple(found.values())


def _sources(module: str) -> Iterator[tuple[str, str]]:
    """The names and sources of a module, or of a package's modules."""
    spec = importlib.util.find_spec(module)
    file = Path(spec.origin) if spec and spec.origin else Path()
    if spec is None or not file.is_file():
        return
    if spec.submodule_search_locations is None:
        yield module, file.read_text(encoding="utf-8")
        return
    for each in sorted(file.parent.rglob("*.py")):
        within = each.relative_to(file.parent).with_suffix("").parts
        if "test" not in within:
            yield ".".join((module, *within)).removesuffix(".__init__"), each.read_text(encoding="utf-8")


def _documented(name: str, node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What a module documents, with its docstrings."""
    if isinstance(node, ast.Module) and (text := ast.get_docstring(node)):
        yield name, text
    for child in node.body:
        if _PRIVATE.match(getattr(child, "name", "")):
            continue
        if isinstance(child, ast.ClassDef):
            if text := ast.get_docstring(child):
                yield f"class {prefix}{child.name}", text
            yield from _documented(name, child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(child)):
            yield f"{prefix}{child.name}()", text


def _is_held_out(docstring: Docstring) -> bool:
    """Decided by the text alone, so that it stays on its side whatever else is in the part."""
    return zlib.crc32(docstring.text.encode()) % _HELD_OUT_ONE_IN == 0
