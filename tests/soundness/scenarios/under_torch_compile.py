"""Plays the catalogue under torch.compile with its eager backend, one JSON line per scenario.

python -m scenarios.under_torch_compile [NUMBER OF THE FIRST SCENARIO]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import attrs
import torch
from torch._dynamo import exc, utils

from scenarios import SCENARIOS, Outcome, Scenario, compare, play_compiled, play_eagerly
from scenarios._scenario import EAGERLY, RECOMPILED, RIGHT

__all__ = ["outcomes"]


def _outcome(scenario: Scenario) -> Outcome:
    torch._dynamo.reset()
    utils.counters.clear()
    dynamic = scenario.settings.get("dynamic")
    played = play_compiled(
        scenario, lambda program: torch.compile(program, backend="eager", dynamic=dynamic)
    )
    graphs = utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    outcome = compare(play_eagerly(scenario), played, refusal=exc.TorchDynamoException)
    verdict = outcome.verdict
    if verdict == RIGHT and graphs != 1:
        verdict = RECOMPILED if graphs else EAGERLY
    return attrs.evolve(outcome, verdict=verdict, specializations=graphs)


def outcomes(first: int) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each scenario from a number on."""
    for scenario in SCENARIOS[first:]:
        yield str(scenario), _outcome(scenario)


if __name__ == "__main__":
    for name, outcome in outcomes(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
        print(json.dumps([name, attrs.asdict(outcome)]), flush=True)
