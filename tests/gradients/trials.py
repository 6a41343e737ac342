"""Calls with a backward pass after each, played eagerly and compiled, judged and counted."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import torch
from passes import PASSES, Pass
from scenarios import Outcome, Played, Scenario, compare, judged, play_compiled, play_eagerly
from scenarios._scenario import CRASH, EAGERLY, REFUSED, RIGHT, WRONG, Call, Change
from torch.utils._pytree import tree_map_only

import torchbay

__all__ = [
    "BROKEN",
    "Arguments",
    "Trial",
    "Wrap",
    "copied",
    "play",
    "share_from_graphs",
    "spread",
    "table",
    "unchanged",
    "with_passes",
]

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

EXACT, ROUNDED, RAISED = "from a graph, bit for bit", "from a graph, rounded", "raised as eager"
VERDICTS = (EXACT, ROUNDED, EAGERLY, RAISED, REFUSED, WRONG, CRASH)
BROKEN = (REFUSED, WRONG, CRASH)

TOLERANCE = 1e-5
"""Where several gradients reach one tensor, a joint graph may add them in another order. A tangent
with gaps is laid out densely first, and kernels for dense memory round otherwise."""


@attrs.frozen
class Trial:
    """What came out of one program.

    Attributes:
        name: What was tried.
        verdict: One of `VERDICTS`.
        why: Why it was not served from a graph, or what is wrong.
    """

    name: str
    verdict: str
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        # Numbers of tensors are off wherever one is missing before them.
        telling = sorted(self.why, key=lambda text: ".identity" in text or ".storage" in text)
        return f"{self.name}: {self.verdict}: {'; '.join(telling[:3])}"


def copied(arguments: T, number: int = 0) -> T:
    """Return arguments for a call of their own, in the same layout; odd calls get other values."""
    copies: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copy(tensor, factor=0.875 if number % 2 else 1.0)
        return copies[id(tensor)]

    made: T = tree_map_only(torch.Tensor, copy_of, arguments)
    return made


def _copy(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    made = copy.deepcopy(tensor.detach())
    if factor != 1.0 and (made.is_floating_point() or made.is_complex()):
        count = made.untyped_storage().nbytes() // made.element_size()
        made.as_strided([count], [1], 0).mul_(factor)
    return made.requires_grad_(tensor.requires_grad)


def unchanged(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program as it is."""
    return program


def with_passes(
    make: Callable[[Any, int], Arguments],
    through: Wrap = unchanged,
    passes: Sequence[Pass] = PASSES,
) -> list[Call]:
    """Return a call for each pass, with arguments made from the world and the call's number."""
    return [_call(make, through, one, number) for number, one in enumerate(passes)]


def _call(make: Callable[[Any, int], Arguments], through: Wrap, one: Pass, number: int) -> Call:
    def and_back(program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.default_generator.manual_seed(number)
            result = through(program)(*args, **kwargs)
            one.run(result, (args, kwargs), number)
            return result

        return call

    return Call(lambda world: make(world, number), contextlib.nullcontext, and_back)


def play(
    name: str,
    make: Callable[[], Any],
    steps: Sequence[Call | Change],
    compile: Callable[[Any], Any] = lambda program: torchbay.compile(program, backend="eager"),  # noqa: A002
) -> Trial:
    """Try a program: play it both ways, and compare whatever can be seen after each call."""
    kept: list[Any] = []

    def made() -> Any:
        # What serves calls about an object goes with the object, and so do its counts.
        kept.append(make())
        return kept[-1]

    at_most = len(steps)
    scenario = Scenario(name, "gradients", made, tuple(steps), frozenset(), at_most, (), {})
    with ThreadPoolExecutor(max_workers=1) as thread:
        # PyTorch notes the stack with each operator it traces, and pytest's is deep.
        return thread.submit(_played, scenario, compile).result()


def _played(scenario: Scenario, compile: Callable[[Any], Any]) -> Trial:  # noqa: A002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, compiled = play_eagerly(scenario), play_compiled(scenario, compile)
    outcome = compare(eager, compiled)
    if outcome.verdict == RIGHT:
        outcome = judged(outcome, compiled.compiled, scenario)
    return _trial(scenario.name, eager, compiled, outcome)


def _trial(name: str, eager: Played, compiled: Played, outcome: Outcome) -> Trial:
    if outcome.verdict == WRONG and compare(eager, compiled, TOLERANCE).verdict == RIGHT:
        return Trial(name, ROUNDED, outcome.problems)
    if outcome.verdict in BROKEN:
        return Trial(name, outcome.verdict, outcome.problems or outcome.reasons)
    raised = [moment.after["raised"] for moment in eager.moments if moment.raised is not None]
    if raised:
        return Trial(name, RAISED, tuple(raised))
    is_eager = outcome.verdict == EAGERLY or not outcome.graph
    return Trial(name, EAGERLY if is_eager else EXACT, outcome.reasons)


def spread(items: Iterable[T], count: int) -> list[T]:
    """Return at most so many of the items, the first and others evenly after it."""
    found = list(items)
    if len(found) <= count:
        return found
    return [found[number * len(found) // count] for number in range(count)]


def share_from_graphs(trials: Sequence[Trial]) -> float:
    """Return which part of what was served was served from a graph."""
    verdicts = Counter(trial.verdict for trial in trials)
    from_graphs = verdicts[EXACT] + verdicts[ROUNDED]
    return from_graphs / max(1, from_graphs + verdicts[EAGERLY])


def table(title: str, trials: Sequence[Trial]) -> str:
    """Return the counts, why calls ran eagerly, and what is broken, readable."""
    verdicts = Counter(trial.verdict for trial in trials)
    reasons = Counter(_kind(trial) for trial in trials if trial.verdict == EAGERLY)
    lines = [f"{title}: {len(trials)} programs, {share_from_graphs(trials):.1%} from graphs"]
    lines += [f"{verdicts[verdict]:6} {verdict}" for verdict in VERDICTS]
    lines += [f"{count:12} eagerly: {reason}" for reason, count in reasons.most_common()]
    return "\n".join([*lines, *(str(trial) for trial in trials if trial.verdict in BROKEN)])


def _kind(trial: Trial) -> str:
    """Return why a program ran eagerly, without what is particular to it."""
    reason = trial.why[0] if trial.why else "no reason given"
    general = re.sub(r" at /\S+:\d+.*|'[^']*'|\"[^\"]*\"|\d+", "…", reason.partition("\n")[0])
    return general[:100]
