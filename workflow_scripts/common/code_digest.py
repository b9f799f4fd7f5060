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
    pending, seen = [script], {script}
    while pending:
        for module in _imported(pending.pop(), root):
            if module not in seen:
                seen.add(module)
                pending.append(module)
    # By path within the project, not by place on the disk: a clone has the same digest.
    code = {path.relative_to(root).as_posix(): bare_source(path) for path in seen}
    return hashlib.sha256(canonical_json(code).encode()).hexdigest()[:16]


@lru_cache(maxsize=512)
def bare_source(path: Path) -> str:
    """Return a file's code without comments, docstrings, blank lines and trailing space."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    # Offsets of ast count UTF-8 bytes, those of tokenize characters.
    spans = [(start, stop) for start, stop in _docstrings(ast.parse(source), lines)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            spans.append((token.start, token.end))
    for (first, low), (last, high) in sorted(spans, reverse=True):
        kept = lines[first - 1][:low] + lines[last - 1][high:]
        lines[first - 1 : last] = [kept, *[""] * (last - first)]
    stripped = (line.rstrip() for line in lines)
    return "\n".join(line for line in stripped if line)


Position = tuple[int, int]


def _docstrings(tree: ast.Module, lines: list[str]) -> list[tuple[Position, Position]]:
    """Return the spans of bare strings: docstrings of modules, classes, functions, attributes."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            end_line, end_byte = node.end_lineno or node.lineno, node.end_col_offset or 0
            start = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
            end = len(lines[end_line - 1].encode()[:end_byte].decode())
            found.append(((node.lineno, start), (end_line, end)))
    return found


@lru_cache(maxsize=512)
def _imported(path: Path, root: Path) -> tuple[Path, ...]:
    """Return the project files that a file's import statements name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    files: set[Path] = set()
    for name in names:
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        for depth in range(1, len(parts) + 1):
            base = root.joinpath(*parts[:depth])
            files.update(f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file())
    return tuple(sorted(files))
