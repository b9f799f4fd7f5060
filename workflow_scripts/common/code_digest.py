"""A digest of a script and of all project code it runs, blind to comments and docstrings.

Snakemake notices changed scripts by the file's time alone and imported modules not at all; this digest
stands in the params of the cheap rules instead. It is taken from the source text, not from a printed
syntax tree, whose text differs between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from functools import lru_cache
from pathlib import Path

from workflow_scripts.common.digests import canonical_json

PACKAGE = "workflow_scripts"

Position = tuple[int, int]
"""Line, counted from 1, and character in it, counted from 0."""


def code_digest(script: Path, root: Path) -> str:
    """Return the digest of a script and, transitively, of the project modules it imports.

    Parameters
    ----------
    script
        A Python file.
    root
        Folder that holds the project's package.

    Returns
    -------
    str
        16 hexadecimal digits.
    """
    # By path within the project, not by place on the disk: a clone has the same digest.
    code = {
        path.relative_to(root).as_posix(): bare_source(path.read_text(encoding="utf-8"))
        for path in project_modules(script, root)
    }
    return hashlib.sha256(canonical_json(code).encode()).hexdigest()[:16]


def project_modules(script: Path, root: Path) -> set[Path]:
    """Return a script and the files of the project that it imports, directly or not."""
    pending, seen = [script], {script}
    while pending:
        source = pending.pop().read_text(encoding="utf-8")
        for name in _imported_names(source):
            for module in _files_of(name, root) - seen:
                seen.add(module)
                pending.append(module)
    return seen


@lru_cache(maxsize=512)
def bare_source(source: str) -> str:
    """Return code without comments, docstrings, blank lines and trailing space.

    What stands inside other strings is kept as it is.
    """
    # As tokenize and ast count lines: splitlines() would also end them at form feeds and the like.
    lines = io.StringIO(source).readlines()
    spans = _docstrings(ast.parse(source), lines)
    in_string: set[int] = set()  # numbers of lines that end inside a string
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            spans.append((token.start, token.end))
        elif kind == "STRING":
            in_string.update(range(token.start[0], token.end[0]))
        elif kind.endswith("STRING_START"):  # f-strings have their own tokens from Python 3.12 on
            opened.append(token.start[0])
        elif kind.endswith("STRING_END"):
            in_string.update(range(opened.pop(), token.end[0]))
    for (first, low), (last, high) in sorted(spans, reverse=True):
        in_string.difference_update(range(first, last))
        kept = lines[first - 1][:low] + lines[last - 1][high:]
        lines[first - 1 : last] = [kept, *[""] * (last - first)]
    return "\n".join(
        line.removesuffix("\n") if number in in_string else line.rstrip()
        for number, line in enumerate(lines, 1)
        if number in in_string or line.strip()
    )


def _docstrings(tree: ast.Module, lines: list[str]) -> list[tuple[Position, Position]]:
    """Return the spans of bare strings: docstrings of modules, classes, functions, attributes."""

    def position(line: int, byte: int) -> Position:
        # ast counts UTF-8 bytes, tokenize characters.
        return line, len(lines[line - 1].encode()[:byte].decode())

    return [
        (
            position(node.lineno, node.col_offset),
            position(node.end_lineno or node.lineno, node.end_col_offset or 0),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


@lru_cache(maxsize=512)
def _imported_names(source: str) -> frozenset[str]:
    """Return the dotted names of the project that a file's import statements hold."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(name for name in names if name.split(".")[0] == PACKAGE)


def _files_of(name: str, root: Path) -> set[Path]:
    """Return the files that importing a dotted name runs: its packages' and its own, if a module."""
    parts = name.split(".")
    files: set[Path] = set()
    for depth in range(1, len(parts) + 1):
        base = root.joinpath(*parts[:depth])
        files.update(f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file())
    return files
