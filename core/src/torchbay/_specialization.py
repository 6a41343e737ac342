"""What serves the calls of one set of guards: a tree whose inner nodes are branches on data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import attrs

from torchbay._call import Call
from torchbay._guards import GuardFunction
from torchbay._misses import take_miss
from torchbay._observe import generator_states, restore_generators
from torchbay._reason import Reason
from torchbay._tree import MISS, Fork, Grown, Leaf, Node

__all__ = ["EagerRoute", "Specialization"]


def _watch(self: Any, call: Call, discard: weakref.WeakMethod[Callable[[Any], None]]) -> None:
    """Have this entry dropped as soon as an object it is about is gone.

    The guards keep the attributes of such objects, hence its weights, alive until then.
    """
    entry = weakref.ref(self)

    def gone(_: object) -> None:
        drop, dead = discard(), entry()
        if drop is not None and dead is not None:
            drop(dead)

    self.watched = tuple(
        weakref.ref(item.value, gone) for item in call.objects if hasattr(item.value, "__weakref__")
    )


@attrs.define(eq=False, kw_only=True)
class Specialization:
    """One set of guards, and the graphs compiled under them.

    Attributes:
        guards: What must hold for a call to be served here.
        match: The guards as one function.
        root: What runs when they hold: the only leaf, or the first fork.
        run: The same as a function of the graph's inputs and the call's arguments.
        leaves: The ways through the tree, in the order they were compiled.
        calls: How many calls it served.
        watched: Weak references to the objects it is about.
    """

    guards: GuardFunction
    match: Callable[..., Any]
    root: Node
    run: Callable[..., Any]
    leaves: list[Leaf]
    calls: int = 0
    watched: tuple[Any, ...] = ()

    watch = _watch

    @classmethod
    def of(cls, grown: Grown) -> Specialization:
        """Put a tree with one leaf behind its guards."""
        guards, root = grown.guards, grown.root
        made = cls(guards=guards, match=guards.match, root=root, run=root.run, leaves=[])
        made.add(grown.leaf)
        return made

    def add(self, leaf: Leaf) -> None:
        """Take up a leaf that was added to the tree."""
        if leaf not in self.leaves:
            self.leaves.append(leaf)
        self.run = _replayable(self.root) if _draws(self.root) else self.root.run

    @property
    def may_refuse(self) -> bool:
        """Whether a call may be refused although the guards hold and the gates agree."""
        return any(node.refuses is not None for node in self.root.nodes())

    def covers(self, record: int) -> bool:
        """Whether there is a leaf captured from a call with this record."""
        return not self.may_refuse and any(leaf.record == record for leaf in self.leaves)

    def why_missed(self) -> str:
        """Return why the call this thread tried here last was not served though its guards hold."""
        if (reason := take_miss(self.root.nodes())) is not None:
            return reason
        if not isinstance(self.root, Fork):
            return "its executable may refuse the inputs"
        gates = ", ".join(self.leaves[-1].gates)
        return f"a branch on data may go another way than {gates}"


def _draws(root: Node) -> bool:
    return any(isinstance(node, Fork) and node.is_random for node in root.nodes())


def _replayable(root: Node) -> Callable[..., Any]:
    """Return a run that leaves the random generators alone if it turns out to be a miss."""

    def run(inputs: Any, args: Any, kwargs: Any) -> Any:
        before = generator_states()
        result = root.run(inputs, args, kwargs)
        if result is MISS:
            restore_generators(before)
        return result

    return run


@attrs.define(eq=False, kw_only=True)
class EagerRoute:
    """Calls that cannot be served from a graph, recognized so that nobody tries again."""

    guards: GuardFunction
    match: Callable[..., Any]
    run: Callable[..., Any]
    reason: Reason
    calls: int = 0
    watched: tuple[Any, ...] = ()

    watch = _watch

    def why_missed(self) -> str:
        """Return why such calls run eagerly."""
        return str(self.reason)
