"""What runs when autograd asks a served call for gradients.

A backward is compiled for each set of roots that a loss depends on: what depends on none of them is
left out of the graph, and its gradient is None, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import GraphModule

from torchbay._build import Built, compiling
from torchbay._guards import compile_source
from torchbay._lower import INPUTS, LAST, BackwardPart, Given, Place, Training, present
from torchbay._source import Names
from torchbay._torch_autograd import keeps_graph
from torchbay._torch_compat import plain_execution
from torchbay._torch_symbols import symbols_of
from torchbay.errors import DoubleBackward
from torchbay.plugin import Executable, StridedExecutable

__all__ = ["Backward", "attach", "spent"]

Run = Callable[[list[Any], Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""From what was saved, a list that it empties, numbers, tangents and the forms of the roots to
gradients."""


@attrs.define(eq=False)
class Backward:
    """Compiles and runs the backward half of one specialization.

    Attributes:
        training: The half, and what its forward half gives it.
        build: Compiles a graph, some of whose inputs are state.
        name: What the caller calls the compiled object.
    """

    training: Training
    build: Callable[[GraphModule, Sequence[bool]], Built]
    name: str
    _built: dict[frozenset[int], Built] = attrs.field(factory=dict)
    _runs: dict[frozenset[int], Run] = attrs.field(factory=dict)
    _needed: dict[frozenset[int], frozenset[int]] = attrs.field(factory=dict)

    @property
    def compiled(self) -> tuple[Built, ...]:
        """What has been compiled so far, for each set of roots that a loss depended on."""
        return tuple(self._built.values())

    def prepare(self, forward: Executable | None) -> None:
        """Compile for the loss that is likely: a scalar, if any root is one, else every root.

        Args:
            forward: What runs the forward half, if it computes anything.
        """
        if isinstance(forward, StridedExecutable):
            self._lay_out(forward.output_strides)
        self._run_for(self.training.scalars or frozenset(range(len(self.training.roots))))

    def _lay_out(self, strides: Sequence[Sequence[Any]]) -> None:
        """Let the half take what the forward half made as that laid it out."""
        half, saved = self.training.backward, self.training.saved
        taking = half.graph.graph.find_nodes(op="placeholder")
        for node, given in zip(taking, half.given, strict=True):
            is_saved = given.kind == "saved" and given.index < len(saved)
            source = saved[given.index] if is_saved else None
            if isinstance(source, Place) and _is_private(source, self.training):
                value, layout = node.meta["val"], tuple(strides[source.index])
                node.meta["val"] = value.new_empty_strided(value.shape, layout)

    def __call__(
        self,
        saved: list[torch.Tensor],
        numbers: Sequence[Any],
        tangents: Sequence[torch.Tensor | None],
        forms: Sequence[Any],
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs that get one; ``saved`` is emptied."""
        run = self._run_for(frozenset(i for i, t in enumerate(tangents) if t is not None))
        with plain_execution():
            return run(saved, numbers, tangents, forms)

    def left(self, spent: frozenset[int]) -> frozenset[int]:
        """Return the roots that a backward of these leaves the others to be differentiated."""
        groups = (group for group in self.training.groups if group.isdisjoint(spent))
        return frozenset().union(*groups)

    def needed(self, roots: frozenset[int]) -> frozenset[int]:
        """Return which of what is saved the backward of these roots takes."""
        if roots not in self._needed:
            given = present(self.training.backward, roots).given
            self._needed[roots] = frozenset(g.index for g in given if g.kind == "saved")
        return self._needed[roots]

    def _run_for(self, wanted: frozenset[int]) -> Run:
        if (run := self._runs.get(wanted)) is None:
            with compiling:
                run = self._runs.get(wanted) or self._made(wanted)
                self._runs[wanted] = run
        return run

    def _made(self, wanted: frozenset[int]) -> Run:
        part = present(self.training.backward, wanted)
        built = None
        if any(node.op == "call_function" for node in part.graph.graph.nodes):
            inputs = len(part.graph.graph.find_nodes(op="placeholder"))
            states = [given.is_state for given in part.given[:inputs]]
            built = self._built[wanted] = self.build(part.graph, states)
        return _emitted(part, wanted, built)


def _is_private(place: Place, training: Training) -> bool:
    return place.level == LAST and place.index in training.private


class _Route:
    """How the code of a backward reaches its inputs and what its graph returns."""

    def __init__(self, part: BackwardPart, names: Names) -> None:
        placeholders = part.graph.graph.find_nodes(op="placeholder")
        pairs = enumerate(zip(placeholders, part.given, strict=False))
        # A view is made once the others are there.
        fakes = {f"inputs[{i}]": n.meta["val"] for i, (n, given) in pairs if given.view is None}
        self.symbols = symbols_of(fakes)
        self._names = names

    def place(self, place: Place) -> str:
        """Return an expression for what stands in a place."""
        return f"{'inputs' if place.level == INPUTS else 'raw'}[{place.index}]"

    def name(self, value: Any) -> str:
        """Return the name of a function."""
        return self._names.of(value, str(getattr(value, "__name__", "value")))


def _emitted(part: BackwardPart, wanted: frozenset[int], built: Built | None) -> Run:
    """Emit the function that runs a backward."""
    names = Names("saved", "numbers", "tangents", "forms", "inputs", "raw", "execute")
    route = _Route(part, names)
    count = len(part.graph.graph.find_nodes(op="placeholder"))
    rows = [f"        {_given(given, wanted, route)}," for given in part.given]
    views = [(i, given.view) for i, given in enumerate(part.given) if given.view is not None]
    gradients = ["None" if g is None else g.source(route) for g in part.gradients]
    is_keeping = any("inputs[" in gradient for gradient in gradients)
    given = f"inputs[:{count}]" if is_keeping else "inputs"
    lines = [
        "def run(saved, numbers, tangents, forms):",
        "    inputs = [",
        *rows,
        "    ]",
        # Nobody else holds what was saved: it goes with its last use in the graph.
        "    saved.clear()",
        "    del tangents",
        *(f"    inputs[{i}] = {view.source(_RouteTo(f'inputs[{i}]', route))}" for i, view in views),
        *([f"    raw = execute({given})"] if built is not None else []),
        f"    return ({', '.join(gradients)},)",
        "",
    ]
    variables: Mapping[str, Any] = {
        **names.values,
        "execute": built.executable.run if built is not None else None,
    }
    run: Run = compile_source("\n".join(lines), "run", variables)
    return run


def _given(given: Given, wanted: frozenset[int], route: _Route) -> str:
    """Return an expression for an input of a backward."""
    if given.kind == "number":
        return f"numbers[{given.index}]"
    if given.kind == "tangent":
        layout = route.name(given.layout)
        if given.index in wanted:
            return f"{route.name(laid_out)}(tangents[{given.index}], {layout})"
        return f"{route.name(zeros)}(forms[{given.index}], {layout})"
    return f"saved[{given.index}]"


class _RouteTo:
    """How code reaches the only place that a view has as its base."""

    def __init__(self, base: str, route: _Route) -> None:
        self.symbols = route.symbols
        self.name = route.name
        self._base = base

    def place(self, place: Place) -> str:
        """Return an expression for the base."""
        del place
        return self._base


def laid_out(tangent: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """Return a gradient as a graph takes it: dense, and with the strides that it was traced for."""
    if tangent.layout is not torch.strided:
        tangent = tangent.to_dense()
    return tangent.resolve_conj().resolve_neg().contiguous(memory_format=layout)


def zeros(form: tuple[Any, ...], layout: torch.memory_format) -> torch.Tensor:
    """Return the gradient of a loss that does not depend on a root."""
    sizes, dtype, device = form
    return torch.zeros(sizes, dtype=dtype, device=device).contiguous(memory_format=layout)


def attach(
    backward: Backward,
    roots: Sequence[torch.Tensor],
    saved: list[torch.Tensor],
    saved_roots: Sequence[int],
    numbers: Sequence[Any],
    wanted: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Tell autograd how the gradients of some tensors are computed.

    Args:
        backward: What computes them.
        roots: The tensors that the forward half made.
        saved: What else of it the backward needs.
        saved_roots: The roots that it needs.
        numbers: The numbers that it needs.
        wanted: The inputs that get gradients.

    Returns:
        The roots, as results of the inputs.
    """
    with torch.enable_grad():
        attached: tuple[torch.Tensor, ...] = _Served.apply(
            backward, roots, saved, saved_roots, numbers, *wanted
        )
    return attached[:-1]


class _Served(torch.autograd.Function):
    """A call that has been served, as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        roots: Sequence[torch.Tensor],
        saved: list[torch.Tensor],
        saved_roots: Sequence[int],
        numbers: Sequence[Any],
        *wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del wanted
        # What a backend returns may be a view of memory of its own; autograd would take care of it.
        plain = tuple(root.data for root in roots)
        # Leads back to this call, for gradients of gradients to meet it.
        link = torch.empty(0)
        ctx.save_for_backward(*saved, *(plain[i] for i in saved_roots), link)
        ctx.set_materialize_grads(False)
        ctx.served_by, ctx.numbers = backward, numbers
        ctx.forms = [(root.shape, root.dtype, root.device) for root in plain]
        ctx.left, ctx.kept = frozenset(range(len(plain))), []
        return (*plain, link)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        backward: Backward = ctx.served_by
        *saved, link = _taken(ctx, frozenset(i for i, t in enumerate(tangents) if t is not None))
        gradients = backward(saved, ctx.numbers, tangents[:-1], ctx.forms)
        if torch.is_grad_enabled():
            given = (link, *(t for t in tangents if t is not None))
            gradients = [
                None if g is None else _Once.apply(backward.name, g, *given) for g in gradients
            ]
        return (None, None, None, None, None, *gradients)


def _taken(ctx: Any, wanted: frozenset[int]) -> Sequence[torch.Tensor]:
    """Take what was saved; keep only what other roots need that eager would keep it for."""
    try:
        found: Sequence[torch.Tensor] = ctx.saved_tensors
    except RuntimeError:
        if not ctx.kept or not wanted <= ctx.left:
            raise
        found = ctx.kept
    if not keeps_graph():
        backward: Backward = ctx.served_by
        ctx.left &= backward.left(wanted)
        ctx.kept = []
        if ctx.left:
            needed = backward.needed(ctx.left)
            # Without their history, which leads back to here.
            ctx.kept = [t.data if i in needed else _NOTHING for i, t in enumerate(found)]
        ctx.maybe_clear_saved_tensors()
    return found


_NOTHING = torch.empty(0)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        del given
        ctx.name = name
        return gradient.data

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DoubleBackward(
            f"a gradient of a gradient is asked of {ctx.name}, which was served from a graph",
            remedy="Compute the first gradient inside the compiled function, "
            "or call the original for this",
        )


def spent(result: torch.Tensor) -> torch.Tensor:
    """Return a result whose gradients a backward inside the call has used up."""
    with torch.enable_grad():
        made: torch.Tensor = _Spent.apply(torch.empty(0, requires_grad=True), result)
    return made


class _Spent(torch.autograd.Function):
    """A result that has a history, and nothing to compute gradients from."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        del ctx, anchor
        return result.data

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        del ctx
        # As PyTorch says it.
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors "
            "after they have already been freed). The call has run backward() itself; specify "
            "retain_graph=True there if you need to backward through its result."
        )
