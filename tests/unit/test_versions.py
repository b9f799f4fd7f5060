"""Changed sources ask whether the numbers changed, so that no stale artifact is taken for a new one."""

from __future__ import annotations

import copy
import re

import pytest
from accept_sources import NEUTRAL, ROOT, SCRIPTS, Record, present, recorded, undecided

from workflow_scripts.common import versions


def test_every_change_of_a_source_that_decides_numbers_was_decided_on() -> None:
    assert not undecided(recorded(), present()), "\n".join(undecided(recorded(), present()))


def test_every_version_has_a_script_that_is_guarded() -> None:
    assert set(SCRIPTS) == {
        name for name in vars(versions) if re.fullmatch(r"[A-Z]+_VERSION", name)
    }
    for name, script in SCRIPTS.items():
        assert script in present()[name]["sources"]


def test_every_module_without_influence_exists() -> None:
    for module in NEUTRAL:
        assert (ROOT / "workflow_scripts" / module).is_file(), module


@pytest.fixture
def record() -> Record:
    return {
        "PROBES_VERSION": {"version": 1, "sources": {"probes/a.py": "0a", "common/b.py": "0b"}},
        "CAPTURE_VERSION": {"version": 3, "sources": {"common/b.py": "0b"}},
    }


def test_unchanged_sources_need_no_decision(record: Record) -> None:
    assert undecided(record, copy.deepcopy(record)) == []


def test_a_changed_source_names_the_version_and_the_command(record: Record) -> None:
    now = copy.deepcopy(record)
    now["PROBES_VERSION"]["sources"]["probes/a.py"] = "1a"
    (message,) = undecided(record, now)
    assert "PROBES_VERSION is still 1, but probes/a.py changed" in message
    assert "raise PROBES_VERSION in workflow_scripts/common/versions.py" in message
    assert message.endswith("python -m tests.unit.accept_sources")


def test_a_source_of_two_versions_asks_for_two_decisions(record: Record) -> None:
    now = copy.deepcopy(record)
    for entry in now.values():
        entry["sources"]["common/b.py"] = "1b"
    assert [message.split()[0] for message in undecided(record, now)] == [
        "PROBES_VERSION",
        "CAPTURE_VERSION",
    ]


@pytest.mark.parametrize("gone", [True, False])
def test_sources_that_come_or_go_need_a_decision(record: Record, gone: bool) -> None:
    fewer = copy.deepcopy(record)
    del fewer["PROBES_VERSION"]["sources"]["common/b.py"]
    (message,) = undecided(record, fewer) if gone else undecided(fewer, record)
    assert "common/b.py changed" in message


def test_a_raised_version_asks_for_its_record(record: Record) -> None:
    now = copy.deepcopy(record)
    now["CAPTURE_VERSION"]["version"] = 4
    now["CAPTURE_VERSION"]["sources"]["common/b.py"] = "1b"
    (message,) = undecided(record, now)
    assert message == ("CAPTURE_VERSION is 4, recorded 3: python -m tests.unit.accept_sources")
