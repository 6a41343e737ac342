"""Judges the tests of a `BackendSuite`, counts them, and writes reports.

A test that ends because the backend declined counts as refused. One listed in ``known_failures``
must fail. Tests that belong to no suite are not touched.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from torchbay.errors import CaptureError, UnsupportedGraph
from torchbay.testing._outcome import Outcome, Result
from torchbay.testing._page import page
from torchbay.testing._record import Record, Tested, tested
from torchbay.testing._suite import BackendSuite

__all__: list[str] = []

_LETTERS = {"refused": "r", "known failure": "k", "not offered": "-"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("torchbay", "conformance of torchbay backends")
    group.addoption("--torchbay-report", metavar="FILE", help="write results as JSON")
    group.addoption("--torchbay-html", metavar="FILE", help="write results as one HTML page")
    group.addoption(
        "--torchbay-full",
        action="store_true",
        help="run all of PyTorch's operators, not the stated sample of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start a record for this session."""
    config.pluginmanager.register(_Recorder(), "torchbay-recorder")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn an outcome of pytest into one of the kit."""
    report = yield
    kind = item.cls if isinstance(item, pytest.Function) else None
    if kind is not None and issubclass(kind, BackendSuite) and report.when != "teardown":
        _judge(item, kind, call, report)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name the outcomes that pytest has no name for."""
    outcome = getattr(report, "torchbay", {}).get("outcome")
    if outcome not in _LETTERS:
        return None
    return outcome, _LETTERS[outcome], outcome.upper()


def _judge(item: Any, suite: Any, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Attach how a test of the kit ended, and have pytest see it the same way."""
    error = call.excinfo.value if call.excinfo is not None else None
    if report.when == "setup" and error is None:
        return
    outcome, detail = _outcome(item, error)
    link = suite.known_failures.get(item.name) or suite.known_failures.get(item.originalname)
    if link is not None:
        outcome, detail = _against_known(outcome, detail, link)
    if outcome == "wrong":
        report.outcome = "failed"
        if error is None or isinstance(error, (UnsupportedGraph, CaptureError)):
            report.longrepr = detail
    else:
        # A setup that passed would have the test called.
        report.outcome = "passed" if report.when == "call" else "skipped"
    result = Result(
        suite=suite.__qualname__,
        family=_family(suite, item.originalname),
        test=item.originalname,
        case=_case(item),
        outcome=outcome,
        detail=detail,
        link=link or "",
        seconds=call.duration,
    )
    described = attrs.asdict(tested(suite))
    report.torchbay = {**attrs.asdict(result), "tested": described}  # type: ignore[attr-defined]


def _outcome(item: Any, error: BaseException | None) -> tuple[Outcome, str]:
    if error is None:
        return "passed", ""
    detail = str(error).strip() or repr(error)
    if isinstance(error, pytest.skip.Exception):
        return "not offered", detail
    if isinstance(error, (UnsupportedGraph, CaptureError)):
        if getattr(item.function, "never_refused", False):
            return "wrong", f"a backend cannot decline this: {detail}"
        return "refused", detail
    return "wrong", detail


def _against_known(outcome: Outcome, detail: str, link: str) -> tuple[Outcome, str]:
    if outcome == "wrong":
        return "known failure", detail
    return "wrong", f"it is {outcome}, and known_failures says that it fails ({link}): remove it"


def _family(suite: type, test: str) -> str:
    owner = next(kind for kind in suite.__mro__ if test in vars(kind))
    return str(vars(owner).get("family", "own"))


def _case(item: Any) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""


class _Recorder:
    """Collects results, also those of other processes, and reports them at the end."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: Mapping[str, Any] | None = getattr(report, "torchbay", None)
        if found is None:
            return
        fields = dict(found)
        subject = Tested(**fields.pop("tested"))
        result = Result(**fields)
        record = self.records.setdefault(result.suite, Record(subject))
        record.results.append(result)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        for record in self.records.values():
            terminalreporter.write_line(record.summary())
        records = list(self.records.values())
        if path := config.getoption("torchbay_report"):
            document = {"records": [record.as_dict() for record in records]}
            Path(path).write_text(json.dumps(document, indent=1), encoding="utf-8")
        if path := config.getoption("torchbay_html"):
            Path(path).write_text(page(records), encoding="utf-8")
