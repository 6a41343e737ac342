"""One set of guards with its branches on data, as data and as a drawing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from torchbay._counted import counted
from torchbay._specialization_report import SpecializationReport
from torchbay._tree import Fork, Leaf, Node

__all__ = ["ForkReport", "TreeReport", "tree_report"]


@attrs.frozen
class ForkReport:
    """A branch on data.

    Attributes:
        reads: What decides, as Python source.
        where: File and line that asked, where known.
        operators: How many operators run to compute it, after those of earlier forks.
        backend: What compiled them; empty if there are none.
        branches: What follows, by outcome, in the order they were compiled.
    """

    reads: str
    where: str
    operators: int
    backend: str
    branches: tuple[tuple[str, ForkReport | SpecializationReport], ...]

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        maker = f" by {self.backend}" if self.backend else ""
        return f"{self.reads}{where}, {counted(self.operators, 'operator')}{maker}"


@attrs.frozen
class TreeReport:
    """The specializations of one set of guards.

    Attributes:
        guards: The function that decides whether a call is served here, as Python source.
        root: The first branch on data, or the only specialization.
        leaves: The specializations, in the order they were compiled.
        numbers: The position of each among all of the explanation.
        calls: How many calls they served.
    """

    guards: str
    root: ForkReport | SpecializationReport
    leaves: tuple[SpecializationReport, ...]
    numbers: tuple[int, ...]
    calls: int

    def __str__(self) -> str:
        return "\n".join(self._lines("", "", self.root))

    def _lines(
        self, head: str, indent: str, node: ForkReport | SpecializationReport
    ) -> Iterator[str]:
        """Draw a node and what follows it, below and to the right."""
        if isinstance(node, SpecializationReport):
            yield f"{head}{self._leaf(node)}"
            return
        yield f"{head}{node}"
        last = len(node.branches) - 1
        for position, (outcome, branch) in enumerate(node.branches):
            corner, below = ("└─ ", "   ") if position == last else ("├─ ", "│  ")
            yield from self._lines(f"{indent}{corner}{outcome}: ", indent + below, branch)

    def _leaf(self, leaf: SpecializationReport) -> str:
        number = next(
            n for n, other in zip(self.numbers, self.leaves, strict=True) if other is leaf
        )
        return (
            f"specialization {number}, served {counted(leaf.calls, 'call')}, "
            f"{counted(leaf.operators, 'operator')}, compiled in {leaf.compile_seconds:.2f} s"
        )


def tree_report(
    root: Node, leaves: Mapping[Leaf, SpecializationReport], guards: str, first: int, calls: int
) -> TreeReport:
    """Describe a tree.

    Args:
        root: Its root.
        leaves: What describes each leaf.
        guards: The guards in front of it, as Python source.
        first: The number of its first leaf.
        calls: How many calls it served.
    """
    numbers = tuple(range(first, first + len(leaves)))
    return TreeReport(guards, _node_report(root, leaves), tuple(leaves.values()), numbers, calls)


def _node_report(node: Node, leaves: Mapping[Leaf, SpecializationReport]) -> Any:
    if isinstance(node, Leaf):
        return leaves[node]
    branches = [
        (str(outcome), _node_report(branch, leaves))
        for outcome, branch in list(node.branches.items())
        if _is_known(branch, leaves)
    ]
    backend = ", ".join(dict.fromkeys(name for name, _ in node.parts))
    return ForkReport(node.reads, node.where, node.operators, backend, tuple(branches))


def _is_known(node: Node, leaves: Mapping[Leaf, SpecializationReport]) -> bool:
    """Whether a node was there when its leaves were listed: another thread may add more."""
    return any(isinstance(found, Fork) or found in leaves for found in node.nodes())
