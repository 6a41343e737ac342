"""A program run twice, side by side: as it is, and compiled. All that it left is compared."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch
from program import CallKind, Program, load

import torchbay
from torchbay.errors import TorchbayWarning
from torchbay.plugin import Capabilities, CompileRequest, NoOptions

__all__ = ["Copying", "Tally", "Wrong", "check"]


class Wrong(AssertionError):
    """The compiled program did something else."""


@attrs.frozen(eq=False)
class _CopyingRunner:
    graph: torch.fx.GraphModule

    def run(self, inputs: list[Any]) -> list[torch.Tensor]:
        values = list(inputs)
        inputs.clear()
        return [copy.deepcopy(value) for value in self.graph(*values)]


@attrs.frozen(eq=False)
class Copying:
    """Claims as little as a backend can, and returns nothing but copies, as foreign runtimes do."""

    name: str = "copying"
    api_version: int = 1
    capabilities: Capabilities = attrs.field(factory=lambda: Capabilities(eager_random=True))
    options: type[Any] = NoOptions

    def fingerprint(self) -> dict[str, str]:
        return {}

    def compile(self, request: CompileRequest) -> _CopyingRunner:
        return _CopyingRunner(request.graph)


@attrs.define
class Tally:
    """What was counted over all programs.

    Attributes:
        programs: How many were run.
        calls: How many calls after the first of each returned: what a graph can serve.
        raised: How many calls after the first of each raised, as eager's did.
        from_graphs: How many calls were served from a graph.
        specializations: How many graphs there are.
        eager: How many calls ran eagerly, by reason.
    """

    programs: int = 0
    calls: int = 0
    raised: int = 0
    from_graphs: int = 0
    specializations: int = 0
    eager: Counter[str] = attrs.field(factory=Counter)

    @property
    def reasons(self) -> str:
        """Say how many calls ran eagerly for which reasons."""
        return "\n".join(f"{count:5} {reason}" for reason, count in self.eager.most_common(20))

    @property
    def share(self) -> float:
        return self.from_graphs / max(self.calls, 1)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, 0 wrong; {self.raised} calls raised; "
            f"of {self.calls} others after the first of each, "
            f"{self.from_graphs} ({self.share:.1%}) from {self.specializations} graphs"
        )


@attrs.define
class _World:
    """One copy of a program with all it has seen."""

    module: ModuleType
    program: Any
    past: list[Any] = attrs.field(factory=list)
    numbers: Any = None

    def call(self, kind: CallKind, box: str, seed: int) -> None:
        arguments = _arguments(kind, box, seed, self.module.Record)
        torch.manual_seed(seed)
        try:
            result = self.program(*arguments)
        except Exception as error:  # noqa: BLE001 - programs raise whatever they like
            result = type(error)
        self.numbers = torch.get_rng_state()
        self.past += [arguments, result]

    @property
    def results(self) -> list[Any]:
        """Return what the calls returned, or the class of what they raised."""
        return self.past[1::2]

    def roots(self) -> dict[str, Any]:
        """Return all that the program can have changed, by where it stands."""
        kinds = (ModuleType, type)
        names = vars(self.module).items()
        state = {n: v for n, v in names if not n.startswith("__") and not isinstance(v, kinds)}
        whats = ("arguments", "result")
        past = {f"{whats[i % 2]} of call {i // 2}": part for i, part in enumerate(self.past)}
        return {**state, **past}


def check(program: Program, backend: Any, tally: Tally) -> None:
    """Run a program's calls both ways, and compare after each.

    Raises:
        Wrong: Something differs, or only one of them raised.
    """
    plain, mine = (load(program, name) for name in ("program_plain", "program_compiled"))
    compiled = torchbay.compile(mine.program, backend=backend)
    worlds = _World(plain, plain.program), _World(mine, compiled)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", TorchbayWarning)
            for number, (kind, seed) in enumerate(program.calls):
                for world in worlds:
                    world.call(program.kinds[kind], program.box, seed)
                _compare(*worlds, f"call {number}")
        _count(compiled, worlds[0].results[1:], tally)
    finally:
        for world in worlds:
            sys.modules.pop(world.module.__name__, None)


def _count(compiled: Any, later: Sequence[Any], tally: Tally) -> None:
    found = torchbay.explain(compiled)
    tally.programs += 1
    raised = sum(isinstance(result, type) for result in later)
    tally.raised += raised
    tally.calls += len(later) - raised
    tally.from_graphs += found.calls["graph"]
    tally.specializations += len(found.specializations)
    for report in found.eager:
        tally.eager[report.reason[:90]] += report.calls


def _arguments(kind: CallKind, box: str, seed: int, record: type) -> tuple[Any, ...]:
    numbers = torch.Generator().manual_seed(seed)
    x = _laid_out(kind, numbers)
    y = _beside(x, kind, numbers)
    first = x if kind.shares_box else _tensor(numbers, kind.rows, 3)
    held = _boxed(box, first, _tensor(numbers, kind.rows, 3), record)
    return x, y, kind.k, kind.flag, kind.scale, held


def _tensor(numbers: torch.Generator, *sizes: int) -> torch.Tensor:
    # Quarters, so that sums are exact in whatever order they are taken.
    return torch.randint(-8, 9, sizes, generator=numbers) / 4


def _laid_out(kind: CallKind, numbers: torch.Generator) -> torch.Tensor:
    if kind.sharing in ("overlap", "transposed", "rows"):
        size = 3 if kind.sharing == "transposed" else 2 * kind.rows
        return _tensor(numbers, size, 3)[: kind.rows]
    makers = {
        "contiguous": lambda: _tensor(numbers, kind.rows, 3),
        "transposed": lambda: _tensor(numbers, 3, kind.rows).t(),
        "strided": lambda: _tensor(numbers, kind.rows * 2, 3)[::2],
        "offset": lambda: _tensor(numbers, kind.rows + 1, 3)[1:],
        "expanded": lambda: _tensor(numbers, 1, 3).expand(kind.rows, 3),
    }
    return makers[kind.layout]()


def _beside(x: torch.Tensor, kind: CallKind, numbers: torch.Generator) -> torch.Tensor:
    base = x._base if x._base is not None else x
    makers = {
        "apart": lambda: _tensor(numbers, kind.rows, 3),
        "same": lambda: x,
        "alias": lambda: x[:],
        "overlap": lambda: base[1 : 1 + kind.rows],
        "rows": lambda: base[kind.rows :],
        "transposed": lambda: base.t()[: kind.rows],
    }
    return makers[kind.sharing]()


def _boxed(box: str, first: torch.Tensor, second: torch.Tensor, record: type) -> Any:
    makers = {
        "list": lambda: [first, second],
        "dict": lambda: {"p": first, 0: second},
        "tuple": lambda: (first, second),
        "record": lambda: record(first, second),
        "nested": lambda: {"pair": (first, second), "rest": [first]},
        "mixed": lambda: [(first, 3), record(second, "up")],
    }
    return makers[box]()


def _compare(plain: _World, mine: _World, when: str) -> None:
    pairs = _Pairs(when)
    pairs.walk(plain.roots(), mine.roots(), "")
    if not torch.equal(plain.numbers, mine.numbers):
        raise Wrong(f"{when}: the random generator is elsewhere")


@attrs.define
class _Pairs:
    """Matches the objects of one world with those of the other, one to one."""

    when: str
    objects: dict[int, int] = attrs.field(factory=dict)
    twins: dict[int, int] = attrs.field(factory=dict)
    storages: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    owners: dict[int, int] = attrs.field(factory=dict)

    def walk(self, plain: Any, mine: Any, path: str) -> None:
        if isinstance(plain, type) and plain.__qualname__ == mine.__qualname__:
            return None
        self._require(_kind(plain) == _kind(mine), path, "type", plain, mine)
        if isinstance(plain, torch.Tensor):
            return self._tensor(plain, mine, path)
        if isinstance(plain, (int, float, str, bytes, type(None))):
            is_same = plain == mine or (plain != plain and mine != mine)  # noqa: PLR0124 - NaN
            return self._require(is_same, path, "value", plain, mine)
        if not self._meet(plain, mine, path):
            return None
        first, second = dict(_parts(plain)), dict(_parts(mine))
        self._require([*first] == [*second], path, "parts", [*first], [*second])
        for label, part in first.items():
            self.walk(part, second[label], path + label)
        return None

    def _meet(self, plain: Any, mine: Any, path: str) -> bool:
        """Match two objects; return whether they are met for the first time."""
        if isinstance(plain, (tuple, MethodType)):
            # Python may share or copy these; nobody can change them.
            return True
        is_new = id(plain) not in self.objects
        known = self.objects.setdefault(id(plain), id(mine))
        back = self.twins.setdefault(id(mine), id(plain))
        self._require(known == id(mine) and back == id(plain), path, "identity", plain, mine)
        return is_new

    def _tensor(self, plain: torch.Tensor, mine: torch.Tensor, path: str) -> None:
        self._meet(plain, mine, path)
        for what, read in _FACTS.items():
            self._require(read(plain) == read(mine), path, what, read(plain), read(mine))
        is_same = torch.allclose(plain, mine, rtol=1e-5, atol=1e-5, equal_nan=True)
        self._require(is_same, path, "data", plain, mine)
        self._memory(plain, mine, path)

    def _memory(self, plain: torch.Tensor, mine: torch.Tensor, path: str) -> None:
        """Where one tensor lies relative to the others must be the same in both worlds."""
        if plain.numel() == 0:
            return
        storage, other = (t.untyped_storage()._cdata for t in (plain, mine))
        shift = mine.storage_offset() - plain.storage_offset()
        known = self.storages.setdefault(storage, (other, shift))
        owner = self.owners.setdefault(other, storage)
        self._require(known == (other, shift) and owner == storage, path, "memory", plain, mine)

    def _require(self, is_right: bool, path: str, what: str, plain: Any, mine: Any) -> None:
        if not is_right:
            raise Wrong(
                f"{self.when}: the {what} of {path} differs\n  eager: {plain!r}\n  compiled: {mine!r}"
            )


_FACTS = {
    "dtype": lambda t: t.dtype,
    "shape": lambda t: tuple(t.shape),
    "strides": lambda t: _strides(t),
    "gradient flag": lambda t: t.requires_grad,
    "class": lambda t: type(t),
    "inference": lambda t: t.is_inference(),
}


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that lead from one element to another."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1 and tensor.numel()]


def _kind(value: Any) -> str:
    return f"{type(value).__module__.replace('_plain', '_compiled')}.{type(value).__qualname__}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from (
            (f"[{key!r}]" if not isinstance(key, str) else f".{key}", part)
            for key, part in value.items()
        )
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell.cell_contents) for name, cell in cells)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.dtype):
        yield from ((f".{name}", part) for name, part in vars(value).items())
