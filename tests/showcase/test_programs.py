"""Programs that torch.compile refuses, served whole."""

from __future__ import annotations

import functools

import pytest
import side_by_side
from programs import PROGRAMS

ours, theirs = map(functools.cache, (side_by_side.ours, side_by_side.theirs))

programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)


@programs
def test_is_right_on_every_set_of_inputs(program):
    assert ours(program).wrong is None


@programs
def test_is_served_from_one_graph_for_each_way_through(program):
    found = ours(program)
    assert found.reasons == ()
    assert 1 <= found.graphs <= program.paths
    assert found.calls["eager"] <= program.paths + program.rehearsals
    assert found.calls["graph"] == 10 - found.calls["eager"]


@programs
def test_is_refused_or_served_wrong_by_torch_compile(program):
    assert theirs(program).refusal or theirs(program).wrong


def test_stands_in_a_table_beside_torch_compile(capsys):
    rows = [side_by_side.cells(p, ours(p), theirs(p)) for p in PROGRAMS]
    with capsys.disabled():
        print()
        print("\n".join(" | ".join(row) for row in [side_by_side.COLUMNS, *rows]))
    assert len({row[0] for row in rows}) == 11
