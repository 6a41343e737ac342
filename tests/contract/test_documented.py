"""What users can set is written down, and versions agree."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = sorted([ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")])
VARIABLE = re.compile(r"\bTORCHBAY_[A-Z_]+\b")


def project(path):
    return tomllib.loads(path.read_text())["project"]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.parent.name)


def variables():
    sources = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    return {name for source in sources for name in VARIABLE.findall(source.read_text())}


def test_every_environment_variable_has_a_row_on_the_front_page():
    page = (ROOT / "README.md").read_text()
    assert {name for name in variables() if f"| `{name}" not in page} == set()


def test_all_distributions_share_one_version():
    assert {version(project(path)["name"]) for path in PROJECTS} == {version("torchbay")}


def test_the_changelog_speaks_of_this_version():
    assert f"## {version('torchbay')}" in (ROOT / "CHANGELOG.md").read_text()


@named(PROJECTS)
def test_a_distribution_declares_the_same_pythons_and_torches(path):
    declared = project(path)
    assert declared["requires-python"] == ">=3.11,<3.14"
    assert "torch>=2.11,<2.16" in declared["dependencies"]


@named([path for path in PROJECTS if path.parent.name != "core"])
def test_a_plugin_is_one_module_under_one_name(path):
    declared = project(path)
    folder = path.parent.name
    assert declared["entry-points"] == {"torchbay.backends": {folder: f"torchbay_{folder}"}}
    assert declared["name"] == f"torchbay-{folder.replace('_', '-')}"


@named(PROJECTS)
def test_a_distribution_carries_the_license(path):
    assert (path.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
