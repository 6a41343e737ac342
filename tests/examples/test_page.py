"""The author's guide shows the template, whole and as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-a-backend.md"
TEMPLATE = ROOT / "examples" / "torchbay-example"
FILE = re.compile(
    r"^\*\*`([^`]+)`\*\*\n\n(?:<!-- not run -->\n)?```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
SHOWN = dict(FILE.findall(PAGE.read_text()))


def test_shows_every_file_of_the_template():
    found = {path for path in TEMPLATE.rglob("*") if path.suffix in {".py", ".toml"}}
    assert set(SHOWN) == {str(path.relative_to(TEMPLATE)) for path in found}


@pytest.mark.parametrize("name", SHOWN)
def test_shows_a_file_as_it_is(name):
    assert SHOWN[name] == (TEMPLATE / name).read_text()


def test_names_every_member_of_a_backend():
    page = PAGE.read_text()
    members = {"name", "capabilities", "options", "fingerprint", "compile", "supports", "save"}
    members |= {"load", "check", "reset", "refuses", "run"}
    assert [member for member in sorted(members) if f"`{member}" not in page] == []
