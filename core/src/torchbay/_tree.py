"""The tree of one set of guards, and the Python functions that run it.

A fork computes a stage, reads its gate and goes on where the outcome leads; a leaf computes the
rest, writes what the call changes, and makes the result. Nothing with an effect happens before a
leaf, so that a call that leads nowhere can be captured as if nothing had run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from torchbay._backward import Backward, attach, spent
from torchbay._build import Built
from torchbay._guards import GuardFunction, compile_source
from torchbay._lower import INPUTS, LAST, ROOTS, Lowered, Part, Place, Source, Stage
from torchbay._misses import note_miss
from torchbay._reason import CannotServe
from torchbay._torch_compat import OpOverload, inference_execution, plain_execution
from torchbay._torch_symbols import symbols_of
from torchbay._trace import Trace

__all__ = ["MISS", "Build", "Fork", "Leaf", "Node", "Path", "grow"]

MISS = object()
"""What a specialization returns when data leads where nothing is compiled."""

_INDENT = "    "


def _unfinished(*_: Any) -> Any:
    """Stand in for what runs a node until it is emitted."""
    return MISS


class _Computing:
    """What a fork and a leaf have in common: a part of the graph that each may compute."""

    __slots__ = ()
    built: Built | None

    @property
    def refuses(self) -> Callable[[Sequence[Any]], str | None] | None:
        """The executable's own guard, if it has one."""
        return self.built.refuses if self.built is not None else None

    @property
    def operators(self) -> int:
        """How many operators it runs."""
        nodes = self.built.part.graph.graph.nodes if self.built is not None else ()
        return sum(isinstance(node.target, OpOverload) for node in nodes)


@attrs.define(eq=False)
class Fork(_Computing):
    """A stage, and where each outcome of its gate leads.

    Attributes:
        key: Equal for stages that compute the same from the same.
        is_random: Whether the stage draws random numbers.
        reads: What its gate reads, readable.
        where: File and line that asked, where known.
        gives: Which of the stage's operators it hands on, by number; only ever added to.
        built: What computes it, or None if the gate needs nothing computed.
        branches: What follows, by outcome.
        run: A function of inputs, arguments and what earlier forks handed on.
        source: The same as Python source.
    """

    key: str
    is_random: bool
    reads: str
    where: str
    gives: list[int] = attrs.field(factory=list)
    built: Built | None = None
    branches: dict[Any, Node] = attrs.field(factory=dict)
    run: Callable[..., Any] = _unfinished
    source: str = ""

    def execute(self, inputs: list[Any]) -> Sequence[Any]:
        """Compute what the fork hands on."""
        assert self.built is not None
        return self.built.executable.run(inputs)

    def other_way(self, outcome: Any) -> str:
        """Return how an outcome differs from those that are compiled."""
        ways = _either([str(key) for key in list(self.branches)])
        where = f" at {self.where}" if self.where else ""
        condition = f"{self.reads} == {ways}{where}"
        return f"a branch on data went another way than {condition}: seen {outcome!r}"

    @property
    def parts(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The backends that compiled it."""
        return self.built.parts if self.built is not None else ()

    def nodes(self) -> Iterator[Node]:
        """Yield this node and all that follow."""
        yield self
        for branch in list(self.branches.values()):
            yield from branch.nodes()


@attrs.define(eq=False)
class Leaf(_Computing):
    """The end of one way through the tree.

    Attributes:
        built: What computes the rest of the graph, or None when there is none.
        run: A function of inputs, arguments and what the forks handed on.
        source: The same as Python source.
        gates: The branches that lead here, readable.
        record: The record of the call it was captured from.
        compile_seconds: From the end of that call to this leaf.
        forks: The forks that lead here.
        backward: What computes gradients, if the result needs any.
        calls: How many calls ended here, if any fork leads here.
    """

    built: Built | None
    gates: tuple[str, ...]
    record: int
    forks: tuple[Fork, ...]
    backward: Backward | None = None
    run: Callable[..., Any] = _unfinished
    source: str = ""
    compile_seconds: float = 0.0
    calls: int = 0

    @property
    def parts(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The backends that compiled the path, in order."""
        found = (node.parts for node in (*self.forks, self.built) if node is not None)
        return tuple(part for parts in found for part in parts)

    @property
    def graphs(self) -> tuple[torch.fx.GraphModule, ...]:
        """The graphs that run on the way here, in order."""
        built = (*(fork.built for fork in self.forks), self.built)
        return tuple(b.part.graph for b in built if b is not None)

    def nodes(self) -> Iterator[Node]:
        """Yield this node."""
        yield self


Node = Fork | Leaf


def _left(node: Node, reason: str) -> Any:
    """Note why a call leaves the tree at a node, and return `MISS`."""
    note_miss(node, reason)
    return MISS


def _either(texts: Sequence[str]) -> str:
    """Return outcomes as a list in words, the first few of many."""
    shown = [*texts[:_MOST_SHOWN], f"{len(texts) - _MOST_SHOWN} others"]
    *before, last = shown if len(texts) > _MOST_SHOWN else texts
    return f"{', '.join(before)} or {last}" if before else last


_MOST_SHOWN = 8


@attrs.frozen(eq=False)
class Path:
    """A captured call, lowered: what is to be one way through the tree.

    Attributes:
        trace: The trace.
        lowered: The same, lowered.
        guards: Returns what must hold for it; complete once everything is compiled, since a
            compiler may decide on sizes.
        record: What the observed call read of data, and the operators it issued.
        backward: What computes gradients, if the result needs any.
    """

    trace: Trace
    lowered: Lowered
    guards: Callable[[], GuardFunction]
    record: int
    backward: Backward | None = None


@attrs.frozen(eq=False)
class Grown:
    """A tree with a path in it, and the guards of that path."""

    root: Node
    leaf: Leaf
    guards: GuardFunction


class Build(Protocol):
    """Compiles a part, given which of the trace's inputs it writes and which outputs are private."""

    def __call__(
        self, part: Part, mutated: frozenset[int], private: frozenset[int] = ...
    ) -> Built: ...


def grow(tree: tuple[Node, GuardFunction] | None, path: Path, build: Build) -> Grown | None:
    """Add a path to a tree, or begin one.

    Only what the tree does not have yet is built. Returns None if the path does not fit the tree.

    Args:
        tree: The tree's root and the guards in front of it, or None.
        path: The path.
        build: Compiles a part.

    Raises:
        CannotServe: The path forks too often.
        UnsupportedGraph, BackendFailed: As the backend says.
    """
    stages = path.lowered.stages
    if len(stages) > _MOST_FORKS:
        where = stages[0].gate.where
        raise CannotServe(f"data decides more than {_MOST_FORKS} times where it goes", where=where)
    root = tree[0] if tree is not None else None
    if (found := _shared(root, stages)) is None:
        return None
    shared, following = found
    for fork, stage in zip(shared, stages, strict=False):
        _hand_on(fork, stage, build)
    if isinstance(following, Leaf) and tree is not None:
        # It is served already, unless an executable there refuses such calls.
        passed: list[Node] = [*shared, following]
        may_refuse = any(node.refuses is not None for node in passed)
        return None if may_refuse else Grown(tree[0], following, tree[1])
    forks, leaf = _built_nodes(path, shared, build)
    guards = path.guards()
    # Behind guards that are not its own, a path looks for its inputs itself.
    is_foreign = tree is not None and not guards.is_like(tree[1])
    nodes: list[Node] = [*forks, leaf]
    inner = guards.inside() if is_foreign else guards
    _emit(path, inner, nodes, len(shared), is_matching=is_foreign)
    for position in range(max(len(shared) - 1, 0), len(stages)):
        forks[position].branches[_key(stages[position].gate.value)] = nodes[position + 1]
    return Grown(root or nodes[0], leaf, guards)


def _shared(root: Node | None, stages: Sequence[Stage]) -> tuple[list[Fork], Node | None] | None:
    """Return the forks that a path has in common with a tree, and what follows them there."""
    forks: list[Fork] = []
    node = root
    for stage in stages:
        if node is None:
            return forks, None
        if not isinstance(node, Fork) or node.key != stage.key:
            return None
        forks.append(node)
        node = node.branches.get(_key(stage.gate.value))
    return None if isinstance(node, Fork) else (forks, node)


def _hand_on(fork: Fork, stage: Stage, build: Build) -> None:
    """Let a fork hand on what a path needs of it."""
    missing = sorted(stage.needed - set(fork.gives))
    part = stage.part([*fork.gives, *missing]) if missing or fork.run is _unfinished else None
    if part is not None:
        fork.built = build(part, frozenset())
        fork.gives += missing


def _built_nodes(path: Path, shared: list[Fork], build: Build) -> tuple[list[Fork], Leaf]:
    """Return the forks of a path and its leaf, what its tree does not have yet built."""
    stages, forks = path.lowered.stages, [*shared]
    for stage in stages[len(shared) :]:
        reads = stage.gate.reads_as(stage.text)
        forks.append(Fork(stage.key, stage.is_random, reads, stage.gate.where))
        _hand_on(forks[-1], stage, build)
    last = path.lowered.last
    training, built = path.lowered.training, None
    if last is not None:
        private = training.private if training is not None else frozenset()
        built = build(last, path.lowered.mutated, private)
    if path.backward is not None:
        path.backward.prepare(built.executable if built is not None else None)
    gates = tuple(stage.gate.described(stage.text) for stage in stages)
    return forks, Leaf(built, gates, path.record, tuple(forks), path.backward)


def _emit(
    path: Path, guards: GuardFunction, nodes: Sequence[Node], first: int, *, is_matching: bool
) -> None:
    """Emit the nodes of a path from the first new one on."""
    forks = [node for node in nodes if isinstance(node, Fork)]
    for position in range(first, len(nodes)):
        node, behind = nodes[position], forks[: position + 1]
        lines = _matching_lines(node) if is_matching and position == first else []
        if isinstance(node, Fork):
            _emit_fork(path, guards, behind, lines)
        else:
            _emit_leaf(path, guards, behind, node, lines)


def _key(outcome: Any) -> Any:
    """Return what tells outcomes apart: 0.0 from -0.0, and a NaN from no other."""
    return outcome if type(outcome) in _EXACT else repr(outcome)


_EXACT = (bool, int)
_MOST_FORKS = 64


_LISTS = {LAST: "raw", ROOTS: "roots"}


class _Route:
    """How the code of a node reaches inputs, what forks handed on, and its own outputs."""

    def __init__(self, path: Path, forks: Sequence[Fork], *, is_leaf: bool = False) -> None:
        self._forks = forks
        self._names = path.trace.names
        reached = {f"inputs[{i}]": fake for i, fake in enumerate(path.trace.fakes)}
        for stage, fork in zip(path.lowered.stages, forks, strict=False):
            for slot, index in enumerate(fork.gives):
                if index < len(stage.values) and isinstance(stage.values[index], torch.Tensor):
                    reached[f"step_{stage.level}[{slot}]"] = stage.values[index]
        if is_leaf:
            reached |= {f"raw[{i}]": fake for i, fake in enumerate(path.lowered.outputs)}
        self.symbols = symbols_of(reached)
        self.input_count = len(path.trace.fakes)

    def place(self, place: Place) -> str:
        """Return an expression for what stands in a place."""
        if place.level == INPUTS:
            return f"inputs[{place.index}]"
        if place.level in _LISTS:
            return f"{_LISTS[place.level]}[{place.index}]"
        slot = self._forks[place.level - 1].gives.index(place.index)
        return f"step_{place.level}[{slot}]"

    def name(self, value: Any) -> str:
        """Return the name of a function or an object."""
        return self._names.of(value, str(getattr(value, "__name__", "value")))

    def source(self, source: Source | Stage) -> str:
        """Return an expression for something.

        Raises:
            CannotServe: A size depends on data that nothing hands on.
        """
        try:
            return source.source(self)
        except KeyError as error:
            raise CannotServe(f"a view of size {error} cannot be made anew") from error


def _emit_fork(path: Path, guards: GuardFunction, forks: list[Fork], lines: list[str]) -> None:
    fork, level = forks[-1], len(forks)
    stage = path.lowered.stages[level - 1]
    route = _Route(path, forks)
    body = [*lines, *_part_lines(fork.built, route, f"step_{level} = ", "fork.execute")]
    outcome = route.source(stage)
    key = "outcome" if type(stage.gate.value) in _EXACT else "repr(outcome)"
    steps = [f"step_{i}" for i in range(1, level + 1)]
    body += [
        *([f"step_{level} = ()"] if fork.built is None else []),
        *_branch_lines(outcome, key),
        "if branch is None:",
        f"{_INDENT}return left(fork, fork.other_way(outcome))",
        f"return branch.run({', '.join(['inputs', 'args', 'kwargs', *steps])})",
    ]
    fork.source, fork.run = _emitted(path, guards, body, level, fork=fork, built=fork.built)


def _emit_leaf(
    path: Path, guards: GuardFunction, forks: list[Fork], leaf: Leaf, lines: list[str]
) -> None:
    trace, lowered = path.trace, path.lowered
    route = _Route(path, forks, is_leaf=True)
    results = [route.source(result) for result in lowered.results]
    results = [f"spent({r})" if i in trace.spent else r for i, r in enumerate(results)]
    following = [
        *(f"inputs[{i}].copy_({route.source(value)})" for i, value in lowered.written),
        *_autograd_lines(path, route),
        *_result_lines(results, is_differentiable=bool(trace.differentiable - trace.spent)),
        *trace.effects,
    ]
    is_keeping = any("inputs[" in line for line in (*following, trace.result))
    body = [*lines, *_part_lines(leaf.built, route, "raw = ", "execute", is_keeping=is_keeping)]
    body += following
    if forks:
        body.append("leaf.calls += 1")
    leaf.source, leaf.run = _emitted(
        path,
        guards,
        body,
        len(forks) + 1,
        built=leaf.built,
        result=trace.result,
        leaf=leaf,
        backward=leaf.backward,
    )


def _autograd_lines(path: Path, route: _Route) -> list[str]:
    """Return lines that tell autograd how gradients are computed."""
    training = path.lowered.training
    if training is None:
        return []
    lists = [
        f"[{', '.join(map(route.source, sources))}]"
        for sources in (training.roots, training.saved, training.numbers)
    ]
    wanted = "".join(f"inputs[{i}], " for i in training.wanted)
    given = ["backward", lists[0], lists[1], str(training.saved_roots), lists[2], f"({wanted})"]
    lines = [f"roots = attach({', '.join(given)})"]
    if training.written:
        lines.append("with torch.enable_grad():")
        lines += [f"{_INDENT}inputs[{i}].copy_(roots[{k}])" for i, k in training.written]
    return lines


def _result_lines(results: Sequence[str], *, is_differentiable: bool) -> list[str]:
    """Return lines that collect the tensors and numbers of the result."""
    if not results:
        return []
    if results == [f"raw[{i}]" for i in range(len(results))]:
        return ["out = raw"]
    if results == [f"roots[{i}]" for i in range(len(results))]:
        return ["out = roots"]
    line = f"out = [{', '.join(results)}]"
    return ["with torch.enable_grad():", _INDENT + line] if is_differentiable else [line]


def _branch_lines(outcome: str, key: str) -> list[str]:
    """Return lines that look up where to go; a division by zero is the program's to raise."""
    lines, following = [f"outcome = {outcome}"], f"branch = fork.branches.get({key})"
    if any(sign in outcome for sign in ("/", "%", "**")):
        noted = f"{_INDENT}return left(fork, 'a branch on data divides by zero')"
        lines = ["try:", _INDENT + lines[0], "except ArithmeticError:", noted]
    return [*lines, following]


def _matching_lines(node: Node) -> list[str]:
    name = "fork" if isinstance(node, Fork) else "leaf"
    return [
        "inputs = match(args, kwargs)",
        "if inputs is None:",
        f"{_INDENT}return left({name}, '; '.join(map(str, mismatches(args, kwargs))))",
    ]


def _part_lines(
    built: Built | None, route: _Route, target: str, execute: str, *, is_keeping: bool = True
) -> list[str]:
    """Return lines that run a part."""
    if built is None:
        return []
    takes = [route.place(place) for place in built.part.takes]
    given = f"[{', '.join(takes)}]"
    if takes == [f"inputs[{i}]" for i in range(route.input_count)] and execute == "execute":
        # The executable clears its list; what is needed afterwards must stand in another.
        given = "inputs[:]" if is_keeping else "inputs"
    lines = []
    if built.refuses is not None:
        node = "fork" if execute == "fork.execute" else "leaf"
        reason = f"{f'{built.parts[0][0]} refuses the inputs: '!r} + refusal"
        lines = [f"refusal = refuses({given})", "if refusal is not None:"]
        lines.append(f"{_INDENT}return left({node}, {reason})")
    return [*lines, f"{target}{execute}({given})"]


def _emitted(
    path: Path,
    guards: GuardFunction,
    body: list[str],
    level: int,
    *,
    built: Built | None,
    result: str = "",
    **more: Any,
) -> tuple[str, Callable[..., Any]]:
    """Emit a node's function; the first on a path sets what all run under."""
    steps = [f"step_{i}" for i in range(1, level)]
    context = _context(path.trace) if body and level == 1 else None
    if context is not None:
        body = [f"with {context}():", *(_INDENT + line for line in body)]
    lines = [f"def run({', '.join(['inputs', 'args', 'kwargs', *steps])}):"]
    lines += [_INDENT + line for line in body]
    lines += [f"{_INDENT}return {result}"] if result else []
    source = "\n".join([*lines, ""])
    variables: Mapping[str, Any] = {
        **path.trace.names.values,
        "left": _left,
        "mismatches": guards.mismatches,
        "attach": attach,
        "spent": spent,
        "execute": built.executable.run if built is not None else None,
        "inference_execution": inference_execution,
        "match": guards.match,
        "math": math,
        "torch": torch,
        "plain_execution": plain_execution,
        "refuses": built.refuses if built is not None else None,
        **more,
    }
    return source, compile_source(source, "run", variables)


def _context(trace: Trace) -> str | None:
    """Return the context a graph must run in, if the call's own will not do."""
    if trace.is_inference:
        return "inference_execution"
    has_autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return "plain_execution" if torch.is_grad_enabled() or has_autocast else None
