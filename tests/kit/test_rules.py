"""How the pytest plugin judges, counts and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SUITES = """
    import pytest
    from broken_backends import Correct, DeclinesEverything
    from torchbay.errors import UnsupportedGraph
    from torchbay.testing import BackendSuite


    class TestRules(BackendSuite):
        backend_name = "correct"
        make_backend = staticmethod(Correct)
        known_failures = {
            "test_own_failure": "https://example.org/1",
            "test_own_success": "https://example.org/2",
            "test_own_case[b]": "https://example.org/3",
        }

        def test_own_failure(self, subject):
            assert subject.backend.api_version == 7

        def test_own_success(self, subject):
            pass

        def test_own_refusal(self, subject):
            raise UnsupportedGraph("no kernel for <this>")

        def test_own_mistake(self, subject):
            assert subject.backend.name == "<wrong>"

        @pytest.mark.parametrize("letter", ["a", "b"])
        def test_own_case(self, letter):
            assert letter == "a"

        def test_own_gap(self):
            pytest.skip("nothing to see")


    class TestStale(BackendSuite):
        backend_name = "correct"
        make_backend = staticmethod(Correct)
        known_failures = {"test_own_nothing": "https://example.org/4"}

        def test_own_success(self, subject):
            pass


    class TestDeclining(BackendSuite):
        backend_name = "correct"
        make_backend = staticmethod(DeclinesEverything)


    def test_own_and_no_part_of_the_kit():
        raise UnsupportedGraph("an ordinary failure")
"""

NAMES = "test_own or test_compiles_a_small_graph or test_changes_no_input"


def run_pytest(folder, *options):
    (folder / "test_suites.py").write_text(textwrap.dedent(SUITES))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NAMES]
    child = subprocess.run(
        [*command, *options, folder],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return child.returncode, child.stdout


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    report, page = folder / "report.json", folder / "page.html"
    options = ["-p", "torchbay.testing.pytest_plugin"]
    code, output = run_pytest(
        folder, *options, "--torchbay-report", report, "--torchbay-html", page
    )
    assert code == 1
    return output, json.loads(report.read_text())["records"], page.read_text()


@pytest.fixture(scope="module")
def results(judged):
    return {
        (result["suite"].removeprefix("Test"), result["test"], result["case"]): result
        for record in judged[1]
        for result in record["results"]
    }


@pytest.mark.parametrize(
    ("suite", "test", "case", "outcome"),
    [
        ("Rules", "test_own_failure", "", "known failure"),
        ("Rules", "test_own_success", "", "wrong"),
        ("Rules", "test_own_refusal", "", "refused"),
        ("Rules", "test_own_mistake", "", "wrong"),
        ("Rules", "test_own_case", "a", "passed"),
        ("Rules", "test_own_case", "b", "known failure"),
        ("Rules", "test_own_gap", "", "not offered"),
        ("Rules", "test_changes_no_input", "", "passed"),
        ("Stale", "test_own_success", "", "wrong"),
        ("Declining", "test_compiles_a_small_graph", "", "wrong"),
        ("Declining", "test_changes_no_input", "", "refused"),
    ],
)
def test_judges(results, suite, test, case, outcome):
    assert results[suite, test, case]["outcome"] == outcome


def test_leaves_other_tests_alone(judged, results):
    assert "FAILED test_suites.py::test_own_and_no_part_of_the_kit" in judged[0]
    assert "test_own_and_no_part_of_the_kit" not in {test for _, test, _ in results}


def test_says_why(results):
    assert results["Rules", "test_own_refusal", ""]["detail"] == "no kernel for <this>"
    assert "assert 1 == 7" in results["Rules", "test_own_failure", ""]["detail"]
    assert "remove it" in results["Rules", "test_own_success", ""]["detail"]
    assert "test_own_nothing" in results["Stale", "test_own_success", ""]["detail"]
    assert "cannot decline" in results["Declining", "test_compiles_a_small_graph", ""]["detail"]


def test_links_known_failures(results):
    assert results["Rules", "test_own_case", "b"]["link"] == "https://example.org/3"


def test_prints_one_line_for_each_suite(judged):
    assert (
        "torchbay: correct, plugin API 1: "
        "3 passed, 1 refused cleanly, 2 known failures, 2 wrong" in judged[0].splitlines()
    )


def test_counts_what_it_lists(judged):
    for record in judged[1]:
        found = [result["outcome"] for result in record["results"]]
        assert record["counts"] == {name: found.count(name) for name in record["counts"]}


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [(tag, name) for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else(judged):
    tags = Tags()
    tags.feed(judged[2])
    assert tags.open == []
    assert set(tags.links) == {("a", "href")}


def test_the_page_shows_every_outcome_and_escapes_what_it_quotes(judged):
    for shown in ("pass", "refused cleanly", "known failure", "wrong", "not offered"):
        assert f" {shown}</th>" in judged[2]
    assert "no kernel for &lt;this&gt;" in judged[2]
    assert "<this>" not in judged[2]


def test_says_what_is_missing_without_the_plugin(tmp_path):
    code, output = run_pytest(tmp_path)
    assert code == 1
    assert 'add pytest_plugins = "torchbay.testing.pytest_plugin"' in output


def test_shows_the_values_of_a_failing_assert(tmp_path):
    (tmp_path / "test_one.py").write_text(
        textwrap.dedent("""
            from broken_backends import OtherName
            from torchbay.testing import BackendSuite

            class TestOther(BackendSuite):
                backend_name = "correct"
                make_backend = staticmethod(OtherName)
        """)
    )
    _, output = run_pytest(tmp_path, "-p", "torchbay.testing.pytest_plugin", "-k", "has_the_name")
    assert "assert 'another' == 'correct'" in output
