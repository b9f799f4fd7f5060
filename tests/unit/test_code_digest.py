"""The digest that stands for a script's code: what it sees and what it is blind to."""

from __future__ import annotations

from pathlib import Path

import pytest

from workflow_scripts.common.code_digest import bare_source, code_digest, project_modules

SCRIPT = '''"""Make something."""
from workflow_scripts.common import names
from workflow_scripts.stage.parts import double


def main(value):
    """Return a line.

    Of text.
    """
    # twice
    text = "a # b"
    return f"{text}: {double(value)} {names.ONE}"
'''

FILES = {
    "workflow_scripts/__init__.py": "",
    "workflow_scripts/common/__init__.py": "",
    "workflow_scripts/common/names.py": "ONE = 1\n",
    "workflow_scripts/common/deep.py": "def twice(x):\n    return 2 * x\n",
    "workflow_scripts/stage/__init__.py": '"""A stage."""\n',
    "workflow_scripts/stage/make.py": SCRIPT,
    "workflow_scripts/stage/parts.py": (
        "def double(x):\n    import workflow_scripts.common.deep as d\n\n    return d.twice(x)\n"
    ),
    "workflow_scripts/stage/unrelated.py": "TWO = 2\n",
}

MAKE = "workflow_scripts/stage/make.py"


def digest(root: Path, **edits: str) -> str:
    """Write the project with some files replaced; return the script's digest."""
    for name, text in (FILES | edits).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return code_digest(root / MAKE, root)


def edited(root: Path, name: str, old: str, new: str) -> bool:
    """Return whether an edit of a file changes the script's digest."""
    before = digest(root)
    assert old in FILES[name]
    (root / name).write_text(FILES[name].replace(old, new, 1), encoding="utf-8")
    return code_digest(root / MAKE, root) != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# twice", "# two times"),
        ("    # twice\n", ""),
        ('"a # b"', '"a # b"  # why'),
        ("Make something", "Make anything"),
        ("Return a line.\n\n    Of text.\n    ", "Return text."),
        ("\n\ndef", "\n\n\n\n\ndef"),
        ("(value):\n", "(value):   \n"),
    ],
)
def test_an_edit_that_runs_no_other_code_keeps_the_digest(
    tmp_path: Path, old: str, new: str
) -> None:
    assert not edited(tmp_path, MAKE, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{names.ONE}", "{-names.ONE}"),
        ("def main(value)", "def main(value=1)"),
        ('"a # b"', '"a # c"'),
        ('"a # b"', '"a "'),
        ("    return f", "    text += text\n    return f"),
    ],
)
def test_an_edit_of_the_code_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert edited(tmp_path, MAKE, old, new)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("workflow_scripts/common/names.py", "1", "2"),
        ("workflow_scripts/common/deep.py", "2 * x", "x + x"),
        ("workflow_scripts/stage/__init__.py", '"""A stage."""', "import os"),
    ],
)
def test_an_edit_of_an_imported_module_changes_the_digest(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    assert edited(tmp_path, name, old, new)


def test_an_edit_of_a_module_not_imported_keeps_the_digest(tmp_path: Path) -> None:
    assert not edited(tmp_path, "workflow_scripts/stage/unrelated.py", "2", "3")


def test_modules_are_found_through_packages_functions_and_imports_of_names(tmp_path: Path) -> None:
    digest(tmp_path)
    found = project_modules(tmp_path / MAKE, tmp_path)
    expected = set(FILES) - {"workflow_scripts/stage/unrelated.py"}
    assert {path.relative_to(tmp_path).as_posix() for path in found} == expected


def test_modules_that_import_each_other_have_a_digest(tmp_path: Path) -> None:
    digest(
        tmp_path,
        **{"workflow_scripts/common/names.py": "import workflow_scripts.stage.make\nONE = 1\n"},
    )
    assert len(project_modules(tmp_path / MAKE, tmp_path)) == len(FILES) - 1


def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    assert digest(tmp_path / "a") == digest(tmp_path / "b c")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('x = """a\n\nb  \n# c\n"""  # d\n', 'x = """a\n\nb  \n# c\n"""'),
        ('x = f"""a\n\n{1}  \n# c"""\n\n\ny = 2\n', 'x = f"""a\n\n{1}  \n# c"""\ny = 2'),
        ('x = (\n    "a"\n\n    # why\n    "b"\n)\n', 'x = (\n    "a"\n    "b"\n)'),
        ('é = "日本"  # 語\n', 'é = "日本"'),
        ('"""日本"""; x = 1\n', "; x = 1"),
        ('x = "\x0c#"  # form feed\ny = 1 # z\n', 'x = "\x0c#"\ny = 1'),
        ('x: int = 1\n"""What x\n\nis."""\ny = 2\n', "x: int = 1\ny = 2"),
        ('def f():\n    r"""Doc # no comment."""\n    return 1', "def f():\n    return 1"),
    ],
    ids=[
        "string of several lines",
        "f-string of several lines",
        "joined strings",
        "characters of several bytes",
        "statement after a docstring",
        "form feed",
        "docstring of an attribute",
        "raw docstring",
    ],
)
def test_bare_source_keeps_code_and_strings_only(source: str, expected: str) -> None:
    assert bare_source(source) == expected
