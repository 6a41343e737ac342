"""Plays a scenario twice, eagerly and compiled, and says how the two differ."""

from __future__ import annotations

import ast
import contextlib
import io
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

import torchbay
from scenarios._facts import Facts, Ledger, differences, facts_of_process
from scenarios._scenario import (
    CRASH,
    EAGERLY,
    RECOMPILED,
    REFUSED,
    RIGHT,
    WRONG,
    Call,
    Program,
    Scenario,
)
from torchbay.errors import InvalidArgument, TorchbayError

__all__ = ["Outcome", "Played", "compare", "judged", "play_compiled", "play_eagerly"]


@attrs.frozen
class Moment:
    """What was seen of one call.

    Attributes:
        before: Arguments and world just before it.
        after: Arguments, world, result and process just after it.
        raised: The exception, if it raised one.
    """

    before: Facts
    after: Facts
    raised: Exception | None


@attrs.frozen
class Played:
    """What was seen of every call of a scenario, and the compiled object if there is one."""

    moments: tuple[Moment, ...]
    compiled: Any = None
    refusal: Exception | None = None


@attrs.frozen
class Outcome:
    """The verdict on a scenario.

    Attributes:
        verdict: One of the six words.
        problems: What is wrong, in order; empty unless the verdict is wrong or crash.
        complaints: What else was promised and not kept: reasons, guards, number of specializations.
        specializations: How many there were in the end.
        graph: How many calls were served from a graph.
        eager: How many ran eagerly.
        reasons: Why calls ran eagerly, or were refused.
        recompiles: Why there was more than one specialization.
    """

    verdict: str
    problems: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()
    specializations: int = 0
    graph: int = 0
    eager: int = 0
    reasons: tuple[str, ...] = ()
    recompiles: tuple[str, ...] = ()


def play_eagerly(scenario: Scenario) -> Played:
    """Play a scenario with the program as it is."""
    return play(scenario, lambda function: function)


def play_compiled(scenario: Scenario, compile: Callable[[Any], Any]) -> Played:  # noqa: A002
    """Play a scenario with the program compiled; refusing to compile it is an answer too."""
    try:
        return play(scenario, compile)
    except InvalidArgument as refusal:
        return Played((), None, refusal)


def play(scenario: Scenario, compile: Callable[[Any], Any]) -> Played:  # noqa: A002
    """Play a scenario with a program made anew."""
    program = scenario.fresh()
    compiled = compile(program.function)
    ledger, moments = Ledger(), []
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - programs use the global one
    for number, step in enumerate(scenario.steps):
        if isinstance(step, Call):
            moments.append(_moment(step, program, compiled, ledger, number))
        else:
            step.apply(program.world)
    return Played(tuple(moments), compiled)


def _moment(step: Call, program: Program, compiled: Any, ledger: Ledger, seed: int) -> Moment:
    with torch.random.fork_rng(devices=[]), _quiet():
        # torch.manual_seed also formats a stack trace for each kind of device that is not there.
        torch.default_generator.manual_seed(seed)
        args, kwargs = step.make(program.world)
    outside = {"args": args, "kwargs": kwargs, "world": program.world}
    before = _facts(ledger, outside)
    result = raised = None
    with contextlib.redirect_stdout(io.StringIO()) as printed, _quiet(), step.under():
        try:
            result = step.through(compiled)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - compared with what eager raises
            raised = error
        left = facts_of_process()
    after = _facts(ledger, {**outside, "result": result})
    seen = {"printed": printed.getvalue(), "raised": _text(raised)}
    return Moment(before, {**after, **left, **seen}, raised)


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _facts(ledger: Ledger, values: dict[str, Any]) -> Facts:
    return {
        name: fact
        for key, value in values.items()
        for name, fact in ledger.facts(key, value).items()
    }


def _text(error: Exception | None) -> str:
    return f"{type(error).__qualname__}: {error}" if error is not None else "nothing"


def compare(
    eager: Played,
    compiled: Played,
    tolerance: float = 0.0,
    refusal: type[Exception] = TorchbayError,
) -> Outcome:
    """Return the verdict on a scenario that was played both ways.

    Args:
        eager: What plain PyTorch did.
        compiled: What the compiler did.
        tolerance: How far floating-point values may lie apart; by default, not at all.
        refusal: The compiler's own errors. Raised before anything ran, they are no crash.
    """
    if compiled.refusal is not None:
        return Outcome(REFUSED, reasons=(str(compiled.refusal),))
    problems, refusals, crashes = [], [], []
    for number, (one, other) in enumerate(zip(eager.moments, compiled.moments, strict=True)):
        if isinstance(other.raised, refusal) and one.raised is None:
            refusals.append(str(other.raised))
            problems += _ran_before(number, other)
        elif other.raised is not None and one.raised is None:
            crashes.append(f"call {number} raised {_text(other.raised)}")
        else:
            found = differences(one.after, other.after, tolerance)
            problems += [f"call {number}: {text}" for text in found]
    if crashes:
        return Outcome(CRASH, (*crashes, *problems))
    if problems:
        return Outcome(WRONG, tuple(problems))
    return Outcome(REFUSED, reasons=tuple(refusals)) if refusals else Outcome(RIGHT)


def _ran_before(number: int, moment: Moment) -> list[str]:
    after = {name: moment.after[name] for name in moment.before if name in moment.after}
    found = differences(moment.before, after, 0.0)
    return [f"call {number} was refused, but: {text}" for text in found]


def judged(outcome: Outcome, compiled: Any, scenario: Scenario) -> Outcome:
    """Add how the calls were served, and what the explanation says of it."""
    if compiled is None:
        return outcome
    explanation = torchbay.explain(compiled)
    graph, eager = explanation.calls["graph"], explanation.calls["eager"]
    count = len(explanation.specializations)
    verdict = outcome.verdict
    if verdict == RIGHT and eager - 1 > graph:
        verdict = EAGERLY
    elif verdict == RIGHT and count > 1:
        verdict = RECOMPILED
    return attrs.evolve(
        outcome,
        verdict=verdict,
        complaints=tuple(_complaints(explanation, scenario)),
        specializations=count,
        graph=graph,
        eager=eager,
        reasons=(*outcome.reasons, *(report.reason for report in explanation.eager)),
        recompiles=tuple("; ".join(reasons) for reasons in explanation.recompiles),
    )


def _complaints(explanation: Any, scenario: Scenario) -> list[str]:
    """Return what is wrong with what the explanation says, whatever the values were."""
    count = len(explanation.specializations)
    said = "\n".join("; ".join(reasons) for reasons in explanation.recompiles)
    texts = [f"no recompile says {t!r}: {said}" for t in scenario.says if not re.search(t, said)]
    if not all(any(reasons) for reasons in explanation.recompiles):
        texts.append("a recompile has no reason")
    if not all(map(_is_one_function, explanation.guards)):
        texts.append("guards are not one function")
    if count > scenario.at_most:
        texts.append(f"{count} specializations: {said}")
    return texts


def _is_one_function(source: str) -> bool:
    return [type(node) for node in ast.parse(source).body] == [ast.FunctionDef]
