"""Observers are told what happens, and can break nothing."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

import torchbay
from torchbay import _registry
from torchbay.plugin import CompileReport, DeclineReport, RecompileReport

OBSERVER = """
    from torchbay.plugin import hookimpl

    told = []

    @hookimpl
    def torchbay_compiled(report):
        told.append(report)

    @hookimpl
    def torchbay_recompiled(report):
        told.append(report)

    @hookimpl
    def torchbay_declined(report):
        told.append(report)
"""
REPORT = CompileReport("f", "eager", 0.5, 3)


def observe(shelf, name, source=OBSERVER, **where):
    return shelf.publish(name, source, group="torchbay.observers", **where)


def told(module):
    return sys.modules[module].told


def test_is_told_of_compiles_and_recompiles(shelf, recording):
    module = observe(shelf, "watch")
    compiled = torchbay.compile(lambda x: x + 1, backend=recording, name="plus")
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    first, second, third = told(module)
    assert isinstance(first, CompileReport)
    assert (first.name, first.backend, first.nodes) == ("plus", "recording", 1)
    assert 0 < first.seconds < 60
    assert isinstance(second, RecompileReport)
    assert second.name == "plus"
    assert "2" in second.reasons[0]
    assert "3" in second.reasons[0]
    assert isinstance(third, CompileReport)


def test_is_told_of_declines(shelf, declining):
    module = observe(shelf, "watch")
    compiled = torchbay.compile(lambda x: x + 1, backend=declining, fallback="eager", name="plus")
    compiled(torch.ones(2))
    declined, compiled_report = told(module)
    assert isinstance(declined, DeclineReport)
    assert "no kernel for anything" in declined.reason
    assert compiled_report.backend == "eager"


def test_is_imported_with_the_first_report_and_not_before(shelf):
    module = observe(shelf, "watch")
    torchbay.backends()
    _registry.load("eager")
    assert module not in sys.modules
    _registry.notify("torchbay_compiled", REPORT)
    assert told(module) == [REPORT]


def test_is_looked_for_once(shelf, monkeypatch):
    _registry.notify("torchbay_compiled", REPORT)
    module = observe(shelf, "late")
    _registry.notify("torchbay_compiled", REPORT)
    assert module not in sys.modules


def test_is_no_backend(shelf):
    observe(shelf, "watch")
    assert "watch" not in {listing.name for listing in torchbay.backends()}


def test_may_be_the_plugin_of_a_backend_that_was_used(shelf):
    module = shelf.publish("mygpu", OBSERVER + shelf.source("mygpu").replace("\n", "\n    "))
    _registry.notify("torchbay_compiled", REPORT)
    assert module not in sys.modules
    _registry.load("mygpu")
    _registry.notify("torchbay_compiled", REPORT)
    assert told(module) == [REPORT]


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_is_told_once_though_its_module_stands_in_both_groups(shelf, is_loaded_first):
    source = OBSERVER + shelf.source("mygpu").replace("\n", "\n    ")
    module = shelf.publish("mygpu", source)
    observe(shelf, "watch", source, module=module)
    if is_loaded_first:
        _registry.load("mygpu")
    _registry.notify("torchbay_compiled", REPORT)
    assert told(module) == [REPORT]
    assert _registry.load("mygpu").name == "mygpu"
    _registry.notify("torchbay_compiled", REPORT)
    assert told(module) == [REPORT, REPORT]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import does_not_exist", "ModuleNotFoundError"),
        ("raise SystemExit(1)", "SystemExit"),
        (OBSERVER.replace("_compiled", "_compield"), "torchbay_compield"),
        (OBSERVER.replace("torchbay_compiled(report)", "torchbay_compiled(color)"), "color"),
    ],
)
def test_is_left_out_with_a_warning_if_it_cannot_be_used(shelf, caplog, source, complaint):
    observe(shelf, "bad", source)
    module = observe(shelf, "good")
    for _ in range(2):
        _registry.notify("torchbay_compiled", REPORT)
    assert told(module) == [REPORT, REPORT]
    [record] = caplog.records
    assert (record.name, record.levelno) == ("torchbay", logging.WARNING)
    assert "observer 'bad' from torchbay-bad 1.0" in record.getMessage()
    assert complaint in record.getMessage()
    assert _registry.load("eager").name == "eager"


def test_is_logged_when_it_raises_and_stops_no_other(shelf, caplog, recording):
    modules = [observe(shelf, name) for name in ("first", "last")]
    observe(shelf, "middle", OBSERVER.replace("told.append(report)", "1 / 0"))
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert [len(told(module)) for module in modules] == [1, 1]
    [record] = caplog.records
    assert "observer 'middle' from torchbay-middle 1.0" in record.getMessage()
    assert "torchbay_compiled raised ZeroDivisionError" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_lets_an_interrupt_through(shelf):
    observe(shelf, "watch", OBSERVER.replace("told.append(report)", "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        _registry.notify("torchbay_compiled", REPORT)


def test_may_compile_something_itself(shelf):
    source = OBSERVER.replace(
        "told.append(report)",
        "told.append(report); import torch, torchbay\n"
        "        if report.name != 'inner':\n"
        "            torchbay.compile(lambda x: x * 2, backend='eager', name='inner')(torch.ones(1))",
    )
    module = observe(shelf, "watch", source)
    torchbay.compile(lambda x: x + 1, backend="eager", name="outer")(torch.ones(2))
    assert [report.name for report in told(module)] == ["outer", "inner"]


def test_is_hidden_like_other_plugins(shelf, monkeypatch):
    module = observe(shelf, "watch")
    monkeypatch.setenv("TORCHBAY_SKIP_BACKENDS", "watch")
    _registry.notify("torchbay_compiled", REPORT)
    assert module not in sys.modules
