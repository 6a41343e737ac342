"""Limits: how many specializations and builds there are, and what happens beyond."""

from __future__ import annotations

import pytest
import torch

import torchbay
from torchbay import errors


def scale(x, k):
    return x * k


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def test_runs_calls_past_the_limit_eagerly_with_one_warning(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=False, recompile_limit=2)
    with pytest.warns(errors.TorchbayWarning) as caught:
        for k in (1, 2, 3, 4, 3):
            assert compiled(torch.ones(1), k).item() == k
    (warning,) = caught
    assert "recompile_limit=2" in str(warning.message)
    assert "k: compiled for 2, seen 3" in str(warning.message)
    assert warning.filename == __file__
    assert compiled(torch.ones(1), 1).item() == 1
    assert served(compiled) == {"graph": 1, "eager": 5}
    assert len(torchbay.explain(compiled).specializations) == 2


def test_allows_eight_by_default(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=False)
    for k in range(8):
        compiled(torch.ones(1), k)
    with pytest.warns(errors.TorchbayWarning, match="recompile_limit=8"):
        compiled(torch.ones(1), 8)


@pytest.mark.parametrize("setting", [{"fullgraph": True}, {"fail_on_recompile_limit": True}])
def test_raises_past_the_limit_where_that_was_asked_for(setting, recording):
    runs = []

    def call(x, k):
        runs.append(k) if not torch.compiler.is_compiling() else None
        return x * k

    compiled = torchbay.compile(
        call, backend=recording, dynamic=False, recompile_limit=1, **setting
    )
    compiled(torch.ones(1), 1)
    for _ in range(2):
        with pytest.raises(errors.RecompileLimit, match="k: compiled for 1, seen 2") as caught:
            compiled(torch.ones(1), 2)
        assert __file__ in caught.value.account
        assert "recompile_limit" in caught.value.remedy
    assert compiled(torch.ones(1), 1).item() == 1
    assert served(compiled)["graph"] == 1
    assert runs == []


def test_does_not_count_eager_routes_against_specializations_wrongly(recording):
    def call(x, k):
        return torch.from_numpy(x.numpy() * k) if k > 2 else x * k

    compiled = torchbay.compile(call, backend=recording, dynamic=False, recompile_limit=4)
    with pytest.warns(errors.TorchbayWarning):
        for k in (1, 2, 3, 4):
            assert compiled(torch.ones(1), k).item() == k
    assert compiled(torch.ones(1), 1).item() == 1
    assert len(torchbay.explain(compiled).specializations) == 2


def test_tries_the_one_used_last_first(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=False)
    for k in (1, 2, 3, 1, 1):
        compiled(torch.ones(1), k)
    assert [report.calls for report in torchbay.explain(compiled).specializations] == [2, 0, 0]


def test_stops_building_after_256_failures(crashing):
    compiled = torchbay.compile(lambda x: x + 1, backend=crashing)
    for _ in range(256):
        with pytest.raises(errors.BackendFailed):
            compiled(torch.ones(1))
    with pytest.warns(errors.TorchbayWarning, match="256 graphs were built"):
        assert compiled(torch.ones(1)).item() == 2
    assert len(crashing.requests) == 256


def test_stops_building_for_objects_that_come_and_go(recording):
    class Thing:
        pass

    compiled = torchbay.compile(lambda x, thing: x + 1, backend=recording)
    for _ in range(256):
        compiled(torch.ones(1), Thing())
    with pytest.warns(errors.TorchbayWarning, match="256 graphs were built"):
        compiled(torch.ones(1), Thing())
    assert len(recording.requests) == 256


def test_gives_each_compiled_object_a_budget(recording):
    first = torchbay.compile(scale, backend=recording, recompile_limit=1)
    second = torchbay.compile(scale, backend=recording, recompile_limit=1)
    first(torch.ones(1), 1)
    second(torch.ones(1), 2)
    assert first(torch.ones(1), 1).item() == 1
    assert second(torch.ones(1), 2).item() == 2
    assert served(first) == served(second) == {"graph": 1, "eager": 1}


def test_says_nothing_when_nothing_is_wrong(recording):
    compiled = torchbay.compile(
        scale, backend=recording, dynamic=False, fullgraph=True, recompile_limit=1
    )
    for _ in range(4):
        compiled(torch.ones(1), 1)
    assert served(compiled) == {"graph": 3, "eager": 1}


def test_frees_the_budget_on_reset(recording):
    compiled = torchbay.compile(scale, backend=recording, dynamic=False, recompile_limit=1)
    compiled(torch.ones(1), 1)
    torchbay.reset()
    compiled(torch.ones(1), 2)
    assert compiled(torch.ones(1), 2).item() == 2
    assert served(compiled) == {"graph": 1, "eager": 1}
