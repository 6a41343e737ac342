"""Random small programs, compiled, do what they do as they are.

Results, changed inputs, identity, shared memory, Python state and the random generator are compared
after every call, those of earlier calls included. A failure prints the smallest program found.
"""

from __future__ import annotations

import os

from drawing import programs
from hypothesis import HealthCheck, given, note, settings
from worlds import Copying, Tally, check

_COUNT = int(os.environ.get("TORCHBAY_TEST_PROGRAMS", "300"))


def run_programs(backend, count) -> Tally:
    tally = Tally()

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(program):
        note(str(program))
        check(program, backend, tally)

    run()
    return tally


def test_runs_programs_as_eager_does(capsys):
    tally = run_programs("eager", _COUNT)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.programs >= _COUNT
    assert tally.share >= 0.8, tally.reasons


def test_runs_programs_as_eager_does_through_a_backend_that_returns_copies(capsys):
    tally = run_programs(Copying(), _COUNT // 5)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.from_graphs > 0
