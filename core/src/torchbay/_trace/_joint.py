"""Gradients of what a call returns: the second half of a joint graph."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._observe import Observation, OpRecorder, Snapshot, StrictRecorder, profiled
from torchbay._reason import CannotServe
from torchbay._torch_autograd import (
    edge_of,
    groups_of,
    is_about_spent_graph,
    is_plain_view,
    is_spent,
    roots_behind,
    runs_python,
    without_autocast,
)
from torchbay._torch_compat import storage_id, writes_of
from torchbay._trace._inputs import Inputs
from torchbay._trace._modes import OpTracer

__all__ = ["Differentiation", "Joint", "is_sure_of_roots", "with_tangents"]


@attrs.frozen(eq=False)
class Joint:
    """What the graph of a call has besides when its result needs gradients.

    After results and gates it returns its *roots*, the tensors that autograd differentiates, then
    the gradients. It takes a *tangent* for each root, the gradient of a loss by it, after the
    inputs and numbers.

    Attributes:
        roots: The fakes of the roots.
        tangents: What stands for the tangents.
        root_of: The root that each result is, or is a view of; none for results that need no
            gradient and for views of inputs.
        written: The inputs whose new value is a root.
        wanted: The inputs that get the gradients, in order.
        reached: The roots that each of those is computed from: without a tangent of any of them,
            autograd gives none.
        groups: The roots that go together: a backward of one lets go of what the others need.
        profile: What user code the backward ran.
    """

    roots: tuple[torch.Tensor, ...]
    tangents: tuple[torch.Tensor, ...]
    root_of: Mapping[int, int]
    written: Mapping[int, int]
    wanted: tuple[int, ...]
    reached: tuple[frozenset[int], ...]
    groups: tuple[frozenset[int], ...]
    profile: StrictRecorder


class Differentiation:
    """Adds gradients to a trace.

    Attributes:
        joint: What it adds, once it is known; None if there is nothing to differentiate.
        differentiable: The results that need gradients, views of inputs among them.
        spent: Those of them whose gradients a backward inside the call has used up.
    """

    def __init__(self, observation: Observation, inputs: Inputs, *, asks_each: bool) -> None:
        """Look at the inputs before the call runs.

        Args:
            observation: The observed call.
            inputs: The inputs of its graph.
            asks_each: Whether to differentiate each root alone as well, to see which gradients
                there are then.
        """
        self._asks_each = asks_each
        self.joint: Joint | None = None
        self.differentiable: frozenset[int] = frozenset()
        self.spent: frozenset[int] = frozenset()
        self._observation = observation
        self._paths, self._fakes = inputs.paths, inputs.fakes
        self._edges = {i: edge_of(f) for i, f in enumerate(inputs.fakes) if f.requires_grad}

    def outputs(self, made: Sequence[Any], tracer: OpTracer) -> list[Any]:
        """Return what the joint graph returns after results and gates: roots, tangents, gradients.

        Args:
            made: The tensors and numbers of the result.
            tracer: The mode that is active while the call is traced.

        Raises:
            CannotServe: A result shares memory in a way that its gradient does not follow, or the
                backward does what no graph can do.
        """
        tensors = {i: m for i, m in enumerate(made) if isinstance(m, torch.Tensor)}
        needing = {i: tensor for i, tensor in tensors.items() if tensor.requires_grad}
        self.differentiable = frozenset(needing)
        roots = _Roots(needing, self._fakes, self._paths)
        written_roots = {i: roots.add(self._fakes[i]) for i in self._written()}
        if not roots.found:
            return []
        groups = groups_of(roots.found, [*self._edges.values()])
        tangents = [tracer.tangent_of(root) for root in roots.found]
        profile = StrictRecorder(OpRecorder(), self._observation.reach)
        try:
            gradients, reached = self._gradients(roots.found, tangents, tracer, profile)
        except RuntimeError as error:
            if not (is_about_spent_graph(error) and all(map(is_spent, roots.found))):
                raise
            self.spent = frozenset(roots.of)
            return []
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not given:
            raise CannotServe("its result needs gradients that lead to none of its inputs")
        positions = [*self._edges]
        self.joint = Joint(
            tuple(roots.found),
            tuple(tangents),
            roots.of,
            written_roots,
            tuple(positions[i] for i in given),
            tuple(reached[i] for i in given),
            groups,
            profile,
        )
        return [*roots.found, *tangents, *(g for g in gradients if g is not None)]

    def _written(self) -> list[int]:
        """Return the inputs that the call gave another history."""
        now = {i: edge_of(self._fakes[i]).node for i in self._edges}
        return [i for i, edge in self._edges.items() if now[i] is not edge.node]

    def _gradients(
        self,
        roots: Sequence[torch.Tensor],
        tangents: Sequence[torch.Tensor],
        tracer: OpTracer,
        profile: StrictRecorder,
    ) -> tuple[Sequence[torch.Tensor | None], Sequence[frozenset[int]]]:
        """Return the gradient of each input that needs one, and the roots it is computed from."""
        if not self._edges:
            raise CannotServe("its result needs gradients, and none of its inputs does")
        before, edges = Snapshot.of(self._observation.reach), [*self._edges.values()]
        with tracer.backward(), without_autocast(), profiled(profile):
            reached: Sequence[frozenset[int]] = roots_behind(roots, edges)
            # A single root gives what all of them give.
            if len(roots) > 1 and (self._asks_each or runs_python(roots, edges)):
                reached = _seen_alone(roots, tangents, edges)
            gradients = torch.autograd.grad(roots, edges, tangents, allow_unused=True)
        profile.check()
        for change in (c for effect in before.effects() for c in effect.changes):
            raise CannotServe(f"its backward changes Python state: {change.path}")
        return gradients, reached


def _seen_alone(
    roots: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], edges: Sequence[Any]
) -> Sequence[frozenset[int]]:
    """Return, for each input, the roots that alone give it a gradient."""
    alone = [
        torch.autograd.grad([root], edges, [tangent], retain_graph=True, allow_unused=True)
        for root, tangent in zip(roots, tangents, strict=True)
    ]
    return [
        frozenset(r for r, found in enumerate(alone) if found[i] is not None)
        for i in range(len(edges))
    ]


class _Roots:
    """Which tensors to differentiate, so that every result with a gradient is one or a view of one.

    Attributes:
        found: The roots.
        of: The root of each result that has one.
    """

    def __init__(
        self, needing: Mapping[int, torch.Tensor], fakes: Sequence[Any], paths: Sequence[str]
    ) -> None:
        self.found: list[torch.Tensor] = []
        self.of: dict[int, int] = {}
        self._inputs = collections.defaultdict(list)
        for position, fake in enumerate(fakes):
            self._inputs[storage_id(fake)].append((fake, paths[position]))
        groups: dict[int, list[int]] = collections.defaultdict(list)
        for position, value in needing.items():
            groups[storage_id(value)].append(position)
        for storage, positions in groups.items():
            members = [needing[position] for position in positions]
            if storage in self._inputs:
                self._refuse_others(members, storage)
                continue
            root = self.add(_common_base(members))
            self.of |= dict.fromkeys(positions, root)

    def add(self, root: torch.Tensor) -> int:
        """Add a root; return its position."""
        self.found.append(root)
        return len(self.found) - 1

    def _refuse_others(self, members: Sequence[torch.Tensor], storage: int) -> None:
        """Refuse what lies in an input's memory and is no view of it: views are made anew."""
        for member in members:
            inputs = self._inputs[storage]
            if len(inputs) > 1 or not is_plain_view(member, inputs[0][0]):
                raise CannotServe(
                    f"its result shares memory with {inputs[0][1]} and has a gradient of its own"
                )


def _common_base(members: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what results in one piece of memory are views of."""
    first, *others = members
    if not others:
        return first
    base = first._base if first._is_view() else first  # noqa: SLF001 - documented names
    if base is None or not all(m is base or is_plain_view(m, base) for m in members):
        raise CannotServe("two of its results share memory and have gradients of their own")
    return base


def is_sure_of_roots(module: GraphModule, joint: Joint, inputs: int) -> bool:
    """Whether data flows as autograd's functions lead, from tangents to gradients.

    Where it does not, a function gives zeros, or no gradient at all, for want of a tangent.

    Args:
        module: The joint graph.
        joint: What it is about.
        inputs: How many inputs it has before the tangents.
    """
    by_node: dict[Node, frozenset[int]] = {}
    by_memory: dict[int, frozenset[int]] = collections.defaultdict(frozenset)
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        by_node[node] = frozenset({position - inputs} if position >= inputs else ())
    for node in module.graph.nodes:
        found = by_node.get(node, frozenset())
        for used in node.all_input_nodes:
            found |= by_node[used] | by_memory[_memory(used)]
        by_node[node] = found
        for position, name in writes_of(node.target):
            target = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            if isinstance(target, Node):
                by_memory[_memory(target)] |= found
    returned: Sequence[Any] = module.graph.output_node().args[0]  # type: ignore[assignment]
    gradients = returned[len(returned) - len(joint.wanted) :]
    flowing = tuple(by_node[node] | by_memory[_memory(node)] for node in gradients)
    return len(joint.roots) == 1 or flowing == joint.reached


def _memory(node: Node) -> int:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, torch.Tensor) else 0


def with_tangents(module: GraphModule, joint: Joint, first: int) -> GraphModule:
    """Return a joint graph that takes its tangents, which it returned as traced.

    Args:
        module: The graph as traced.
        joint: What it returns.
        first: The position of the tangents among its outputs.
    """
    graph, end = module.graph, first + len(joint.tangents)
    returned: list[Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    graph.output_node().args = ((*returned[:first], *returned[end:]),)
    first_operator = next(node for node in graph.nodes if node.op != "placeholder")
    for number, node in enumerate(returned[first:end]):
        with graph.inserting_before(first_operator):
            tangent = graph.placeholder(f"tangents_{number}")
        tangent.meta = dict(node.meta)
        node.replace_all_uses_with(tangent)
        graph.erase_node(node)
    module.recompile()
    return module
