"""A compiled program does what the program does: the catalogue in `scenarios`, played both ways.

    python -m pytest tests/soundness -m "not slow"           # through the eager backend
    python -m pytest tests/soundness -k "tensors and view"   # by family and name
    python -m pytest tests/soundness -k inductor             # a sample through inductor_triton
    python -m pytest tests/soundness -k beside               # the counts, beside torch.compile

After every call a scenario compares, with eager on a fresh copy: the result (structure, types, strides,
values bit for bit), exceptions, arguments, the state of modules, closures and globals, which
tensors are one and which share memory, generators, and what is left behind in the process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from scenarios import SCENARIOS, Outcome, Scenario, compare, judged, play_compiled, play_eagerly
from scenarios._scenario import CRASH, VERDICTS, WRONG

import torchbay

BY_NAME = {str(scenario): scenario for scenario in SCENARIOS}
TOLERANCE = {"eager": 0.0, "inductor_triton": 1e-4}

# One or two graphs each, over every family. Not random numbers: its stream is Inductor's own.
SAMPLE = [
    "capture hazards: moves the statistics of a batch norm once per call",
    "changed in python: builds a mask on the first call",
    "changed in python: carries a hidden state from call to call",
    "control flow: selects by a mask",
    "control flow: takes a branch both ways",
    "dynamic shapes: serves a growing batch",
    "guards: compiles once for identical calls",
    "read from python: follows a number on a module",
    "read from python: reads a parameter that is replaced",
    "robustness: has an autocast block inside",
    "robustness: runs convolutions and pools",
    "robustness: serves eight threads on the first call",
    "tensors: changes an input through a view",
    "tensors: copies one input into another",
    "tensors: returns outputs that share memory",
    "tensors: returns views of the input",
    "training autograd: checkpoints a part",
    "training autograd: uses the gradient that a function defines",
    "training gradients: gives gradients to parameters and an input",
    "training gradients: moves the statistics of a batch norm once per call",
    "training gradients: returns results that are views of each other",
    "training gradients: trains on a growing batch",
    "training steps: accumulates into the gradients that are there",
    "training steps: descends along autograd grad",
]


@functools.cache
def outcome_of(scenario: Scenario, backend: str) -> Outcome:
    played = play_compiled(
        scenario, lambda program: torchbay.compile(program, backend=backend, **scenario.settings)
    )
    outcome = compare(play_eagerly(scenario), played, max(TOLERANCE[backend], scenario.near))
    return judged(outcome, played.compiled, scenario)


def check(scenario: Scenario, backend: str) -> None:
    outcome = outcome_of(scenario, backend)
    assert outcome.problems == ()
    assert outcome.verdict in scenario.verdicts, outcome.reasons or outcome.recompiles
    assert outcome.complaints == ()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_keeps_its_promise(scenario):
    check(scenario, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_keeps_its_promise_through_inductor(name):
    check(BY_NAME[name], "inductor_triton")


def test_names_each_scenario_once():
    assert len(BY_NAME) == len(SCENARIOS) >= 130


@pytest.fixture(scope="module")
def ours() -> dict[str, Outcome]:
    return {name: outcome_of(scenario, "eager") for name, scenario in BY_NAME.items()}


@pytest.mark.slow
def test_prints_the_table_beside_torch_compile(ours, capsys):
    theirs = under_torch_compile()
    with capsys.disabled():
        print(f"\n\n{table(ours, theirs)}\n")
    assert theirs.keys() == ours.keys()


def test_is_never_wrong_and_never_crashes(ours):
    assert [name for name, one in ours.items() if one.verdict in (WRONG, CRASH)] == []


def test_serves_four_of_five_calls_after_the_first_from_a_graph(ours):
    assert share(ours) >= 0.8


def share(outcomes: dict[str, Outcome]) -> float:
    """Return which part of the calls that were served, after the first of each program, hit a graph."""
    graph = sum(one.graph for one in outcomes.values())
    after_the_first = sum(max(0, one.graph + one.eager - 1) for one in outcomes.values())
    return graph / after_the_first


def under_torch_compile() -> dict[str, Outcome]:
    """Play the catalogue in a child process; a scenario that ends the process is a crash."""
    found: dict[str, Outcome] = {}
    names = [*BY_NAME]
    while len(found) < len(names):
        found |= _play_in_child(len(found))
        if len(found) < len(names):
            found[names[len(found)]] = Outcome(CRASH, ("the process ended",))
    return found


def _play_in_child(first: int) -> dict[str, Outcome]:
    command = [sys.executable, "-m", "scenarios.under_torch_compile", str(first)]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        command,
        cwd=here,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith('["')]
    return {name: Outcome(**outcome) for name, outcome in lines}


def table(ours: dict[str, Outcome], theirs: dict[str, Outcome]) -> str:
    counts = [Counter(one.verdict for one in side.values()) for side in (ours, theirs)]
    rows = [(verdict, *(count[verdict] for count in counts)) for verdict in VERDICTS]
    lines = [f"{len(ours)} scenarios      torchbay  torch.compile"]
    lines += [f"{verdict:16}{mine:12}{other:15}" for verdict, mine, other in rows]
    lines += [f"calls after the first that were served from a graph: {share(ours):.1%}"]
    wrong = [name for name, one in theirs.items() if one.verdict in (WRONG, CRASH)]
    lines += ["", "For torch.compile, recompiled means several graphs, served eagerly none."]
    lines += ["Wrong or crashed there:", *(f"  {name}" for name in wrong)]
    return "\n".join(lines)
