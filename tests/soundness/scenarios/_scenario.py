"""What a scenario is: a program, calls of it, and changes of the world between the calls.

A scenario is written as a function that makes a fresh program. Its name finishes the sentence
"it ...", and its steps stand in the decorator, in the order in which they happen:

    @scenario(calls(vector), change(lambda net: net.eval()), calls(vector))
    def follows_the_training_flag():
        return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

The function returns the program, or a `Program` where the changes, or the comparison after each
call, are about something that cannot be found from the program itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

__all__ = ["SCENARIOS", "Call", "Change", "Program", "Scenario", "calls", "change", "scenario"]

RIGHT, RECOMPILED, EAGERLY, REFUSED = "right", "recompiled", "served eagerly", "refused"
WRONG, CRASH = "wrong", "crash"
VERDICTS = (RIGHT, RECOMPILED, EAGERLY, REFUSED, WRONG, CRASH)

TIMES = 6
"""Calls of one kind: the first of them is observed, or the first two where it writes state."""


@attrs.frozen
class Program:
    """A callable, and the world that it reads and changes.

    Attributes:
        function: What is compiled.
        world: What changes are applied to, and what is compared after each call: modules,
            containers, namespaces and functions are walked.
    """

    function: Callable[..., Any]
    world: Any


@attrs.frozen
class Call:
    """One call.

    Attributes:
        make: Makes the arguments anew, from the world.
        under: The context in which it happens.
        through: What is called in place of the program itself.
    """

    make: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    under: Callable[[], AbstractContextManager[Any]]
    through: Callable[[Callable[..., Any]], Callable[..., Any]]


@attrs.frozen
class Change:
    """A change of the world between two calls."""

    apply: Callable[[Any], Any]


@attrs.frozen(eq=False)
class Scenario:
    """A fresh program and what happens to it.

    Attributes:
        name: Finishes the sentence "it ...".
        family: The part of the promise it belongs to.
        make: Makes a fresh program.
        steps: Calls and changes, in order.
        verdicts: Those that keep the promise.
        at_most: The most specializations it may take.
        says: Patterns that the reasons of its recompiles contain.
        settings: What `torchbay.compile` is given.
        near: How far values may lie apart; not at all, unless float rounding is documented.
    """

    name: str
    family: str
    make: Callable[[], Any]
    steps: tuple[Call | Change, ...]
    verdicts: frozenset[str]
    at_most: int
    says: tuple[str, ...]
    settings: Mapping[str, Any]
    near: float = 0.0

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"

    def fresh(self) -> Program:
        """Make the program anew, weights included."""
        torch.manual_seed(0)
        made = self.make()
        return made if isinstance(made, Program) else Program(made, made)


SCENARIOS: list[Scenario] = []


def scenario(
    *steps: Any,
    eagerly: bool = False,
    refused: bool = False,
    at_most: int = 8,
    says: tuple[str, ...] = (),
    near: float = 0.0,
    **settings: Any,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a function that makes a program into the catalogue.

    Args:
        steps: What `calls` and `change` return.
        eagerly: The documentation lists this as a call that no graph serves.
        refused: An error of torchbay before anything runs is right.
        at_most: The most specializations.
        says: Patterns that the reasons of recompiles contain.
        near: How far floating-point values may lie apart, where only the order of additions, or a
            rounding that the documentation names, sets them apart.
        settings: For `torchbay.compile`.
    """
    verdicts = {REFUSED} if refused else {RIGHT, RECOMPILED, *([EAGERLY] if eagerly else [])}

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        name = make.__name__.replace("_", " ")
        family = make.__module__.rpartition(".")[2].replace("_", " ")
        flat = tuple(one for step in steps for one in (step if isinstance(step, list) else [step]))
        SCENARIOS.append(
            Scenario(name, family, make, flat, frozenset(verdicts), at_most, says, settings, near)
        )
        return make

    return enter


def calls(
    *parts: Any,
    times: int = TIMES,
    together: Callable[..., tuple[Any, ...]] | None = None,
    under: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    through: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda program: program,
    **keywords: Any,
) -> list[Call]:
    """Return calls of one kind.

    Args:
        parts: Arguments. A function among them makes the argument, from the number of the call.
        times: How many.
        together: Makes all positional arguments from the world, in place of ``parts``.
        under: The context of each call.
        through: Wraps the program before it is called.
        keywords: Keyword arguments, as ``parts``.
    """

    def call(number: int) -> Call:
        def make(world: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args = tuple(_made(part, number) for part in parts) if not together else together(world)
            return args, {name: _made(value, number) for name, value in keywords.items()}

        return Call(make, under, through)

    return [call(number) for number in range(times)]


def _made(part: Any, number: int) -> Any:
    return part(number) if getattr(part, "makes_argument", False) else part


def given(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """Mark a function that makes an argument from the number of the call."""
    make.makes_argument = True  # type: ignore[attr-defined]
    return make


def normal(*shape: int, **options: Any) -> Callable[[int], Any]:
    """Return what makes a tensor of other random values for each call."""
    return given(lambda _: torch.randn(*shape, **options))


def growing(*shape: int, by: tuple[int, ...]) -> Callable[[int], Any]:
    """Return what makes a tensor that grows by so much from call to call."""
    return given(lambda n: torch.randn([a + b * n for a, b in zip(shape, by, strict=True)]))


def constant(*values: Any, **options: Any) -> Callable[[int], Any]:
    """Return what makes a tensor of these values."""
    return given(lambda _: torch.tensor(*values, **options))


def each(*values: Any) -> Callable[[int], Any]:
    """Return what takes one value after the other, from call to call; tensors are copied."""

    def make(number: int) -> Any:
        value = values[number % len(values)]
        return value.clone() if isinstance(value, torch.Tensor) else value

    return given(make)


def change(apply: Callable[[Any], Any]) -> Change:
    """Return a change of the world."""
    return Change(apply)


@contextlib.contextmanager
def restored(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Any:
    """Put a setting of the process to another value for a while."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)
