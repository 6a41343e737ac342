"""The kit finds out every wrong backend, and nothing about a correct one."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchbay import plugin
from torchbay.testing import BackendSuite

HERE = Path(__file__).parent

SUITES = """
    from broken_backends import KINDS
    from torchbay.testing import BackendSuite

    def suite(kind):
        name = getattr(kind, "asked_for_as", kind.name)
        fields = {"backend_name": name, "make_backend": staticmethod(kind)}
        return type(f"Test{kind.__name__}", (BackendSuite,), fields)

    globals().update({f"Test{kind.__name__}": suite(kind) for kind in KINDS})
"""

ONLY_WHAT_IS_BROKEN = """
    def pytest_collection_modifyitems(items):
        items[:] = [item for item in items if item.originalname == item.cls.make_backend.breaks]
"""

# The other correct backends differ from it in what they claim, not in what they compute.
ALL_OPERATORS_ONCE = """
    def pytest_collection_modifyitems(items):
        items[:] = [item for item in items if wanted(item)]

    def wanted(item):
        return item.cls.__name__ == "TestCorrect" or item.originalname not in SAME

    SAME = ("test_operator", "test_model")
"""


def run_pytest(folder, *arguments):
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    options = ["-p", "torchbay.testing.pytest_plugin", "--torchbay-report", report]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    child = subprocess.run(
        [*command, *options, folder],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode in (0, 1), child.stdout + child.stderr
    return json.loads(report.read_text())["records"], child.stdout


def write(path, text):
    path.write_text(textwrap.dedent(text))


def outcomes(records):
    return [
        (result["suite"].removeprefix("Test"), result["test"], result["case"], result["outcome"])
        for record in records
        for result in record["results"]
    ]


def kit_tests():
    return {name for name in dir(BackendSuite) if name.startswith("test_")}


@pytest.fixture(scope="session")
def wrong():
    path = HERE / "broken_backends.py"
    spec = importlib.util.spec_from_file_location("broken_backends", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


@pytest.fixture(scope="session")
def found_out(tmp_path_factory):
    """(backend, test) for every test that a wrong backend failed."""
    folder = tmp_path_factory.mktemp("wrong")
    write(folder / "test_wrong.py", SUITES.replace("KINDS", "WRONG"))
    write(folder / "conftest.py", ONLY_WHAT_IS_BROKEN)
    records, _ = run_pytest(folder)
    return {(suite, test) for suite, test, _, outcome in outcomes(records) if outcome == "wrong"}


@pytest.fixture(scope="session")
def correct(tmp_path_factory):
    folder = tmp_path_factory.mktemp("correct")
    write(folder / "test_correct.py", SUITES.replace("KINDS", "CORRECT"))
    write(folder / "conftest.py", ALL_OPERATORS_ONCE)
    records, output = run_pytest(folder)
    return outcomes(records), output


def test_every_test_fails_on_a_wrong_backend(found_out):
    assert {test for _, test in found_out} == kit_tests()


def test_every_wrong_backend_fails_the_test_it_breaks(found_out, wrong):
    assert found_out == {(kind.__name__, kind.breaks) for kind in wrong}


def test_nothing_is_wrong_with_a_correct_backend(correct):
    found, output = correct
    assert [result for result in found if result[-1] == "wrong"] == [], output


def test_every_test_passes_on_a_correct_backend(correct):
    passed = {test for _, test, _, outcome in correct[0] if outcome == "passed"}
    # The one correct delegate names a backend that is not installed.
    assert kit_tests() - passed == {"test_names_an_installed_maker_of_artifacts"}


def test_unclaimed_dtypes_are_refused_not_skipped(correct):
    dtypes = {
        case: outcome
        for suite, test, case, outcome in correct[0]
        if suite == "Modest" and test == "test_dtypes"
    }
    assert {case for case, outcome in dtypes.items() if outcome == "passed"} == {
        "float32",
        "int64",
        "int64 beyond floats",
        "bool",
    }
    assert set(dtypes.values()) == {"passed", "refused"}


def quotations():
    """(test, member, quoted sentence) for every promise that a docstring of the kit names."""
    for name in sorted(kit_tests()):
        text = " ".join(inspect.getdoc(getattr(BackendSuite, name)).split())
        for member, sentence in re.findall(r'`([A-Za-z_.]+)`: "([^"]+)"', text):
            yield name, member, sentence


def promise(member):
    """Everything that torchbay.plugin says about a member, on one line."""
    owner, _, name = member.partition(".")
    kind = getattr(plugin, owner)
    described = vars(kind).get(name)
    own = (
        inspect.getdoc(described) if callable(described) or isinstance(described, property) else ""
    )
    entry = re.search(
        rf"^    {name}: (.*?)(?=^    \w+: |\Z)", inspect.getdoc(kind), re.MULTILINE | re.DOTALL
    )
    return " ".join(f"{own} {entry[1] if entry else ''}".split())


def members():
    """Every method and property of the protocols, and every field of the capabilities."""
    for owner in vars(plugin).values():
        if inspect.isclass(owner) and getattr(owner, "_is_protocol", False):
            yield from (
                f"{owner.__name__}.{name}" for name in vars(owner) if is_member(owner, name)
            )
    yield from (f"Capabilities.{field.name}" for field in plugin.Capabilities.__attrs_attrs__)


def is_member(owner, name):
    # Hooks are called by the core, which has tests of its own for them.
    return not name.startswith("_") and owner is not plugin.Hooks


def test_every_test_quotes_the_contract():
    assert {test for test, *_ in quotations()} == kit_tests()


@pytest.mark.parametrize(("test", "member", "sentence"), list(quotations()))
def test_a_quotation_is_in_the_contract(test, member, sentence):
    assert sentence in promise(member)


def test_every_member_of_the_contract_is_tested():
    assert set(members()) - {member for _, member, _ in quotations()} == set()
