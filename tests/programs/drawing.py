"""Strategies that draw programs, statement by statement, from what is in scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
from fragments import (
    BINARY,
    COMPUTED,
    DATA_CONDITIONS,
    PAIR_WRITES,
    RANDOM,
    RANDOM_WRITES,
    SIZE_CONDITIONS,
    VIEWS,
    WIDTH,
    WRITES,
    Term,
    applied,
    fixed,
    rows,
    valid_among,
)
from hypothesis import strategies as st
from program import FORMS, Block, Both, CallKind, Line, Program, Statement, place

__all__ = ["BOXES", "programs"]

Choice = TypeVar("Choice")

BOXES = {
    "list": ("box[0]", "box[1]"),
    "dict": ("box['p']", "box[0]"),
    "tuple": ("box[0]", "box[1]"),
    "record": ("box.left", "box.right"),
    "nested": ("box['pair'][0]", "box['pair'][1]"),
    "mixed": ("box[0][0]", "box[1].left"),
}
"""How a program reaches the two tensors in each kind of container it may be passed."""

_MOST_STATEMENTS = 9
_DEEPEST = 2


@attrs.define
class _Box:
    """A container the program made, and what is known to be in it."""

    source: str
    items: dict[str, Term]
    is_list: bool


@attrs.define
class _Scope:
    tensors: list[Term]
    boxes: list[_Box]


class _Author:
    """Writes one program."""

    def __init__(self, draw: Callable[[Any], Any], form: str, box: str) -> None:
        self._draw = draw
        self._form = form
        self._count = 0
        self._locals: list[Term] = [Term(name, rows(WIDTH)) for name in "xy"]
        self._boxes: list[_Box] = []
        self._box = box
        self._box_items = [Term(source, rows(WIDTH)) for source in BOXES[box]]
        self._has_effects = self._chance(6)
        self._state = [
            Term(place(form, "weight"), fixed(WIDTH)),
            Term(place(form, "total"), fixed()),
            Term(f"{place(form, 'cells')}[0]", fixed(1, WIDTH)),
            Term(f"{place(form, 'cells')}[1]", fixed(1)),
            Term(f"{place(form, 'slots')}['bias']", fixed(WIDTH)),
        ]

    def body(self) -> tuple[Statement, ...]:
        """Write all of it."""
        count = self._draw(st.sampled_from(range(1, _MOST_STATEMENTS + 1)))
        return (*self._statements(0, count), self._return())

    def _pick(self, options: Sequence[Choice]) -> Choice:
        return self._draw(st.sampled_from(options))

    def _chance(self, percent: int) -> bool:
        return self._draw(st.sampled_from(range(100))) >= 100 - percent

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    @property
    def _tensors(self) -> list[Term]:
        held = [term for box in self._boxes for term in box.items.values()]
        return [*self._locals, *self._box_items, *held, *self._state]

    def _tensor(self, *, to_write: bool = False) -> Term:
        terms = [term for term in self._tensors if term.is_dense or not to_write]
        recent = [term for term in self._locals if term.is_dense or not to_write][-3:]
        return self._pick(recent if recent and self._chance(60) else terms)

    def _viewed(self, *, to_write: bool = False) -> Term:
        """Return a tensor or, as often, a view of one."""
        term = self._tensor(to_write=to_write)
        while self._chance(35):
            views = [applied(view, term, is_view=True) for view in VIEWS]
            found = [v for v in views if v is not None and (v.is_dense or not to_write)]
            if not found:
                break
            term = self._pick(found)
        return term

    def _statements(self, depth: int, count: int) -> tuple[Statement, ...]:
        made = [self._statement(depth) for _ in range(count)]
        return tuple(statement for statement in made if statement is not None)

    def _statement(self, depth: int) -> Statement | None:
        flat = [
            *[self._compute] * 3,
            *[self._view] * 3,
            *[self._combine] * 4,
            *[self._write] * 6,
            *[self._write_pair] * 4,
            *[self._augment] * 2,
            *[self._gather] * 2,
            self._put,
            self._rebind,
            self._draw_numbers,
            self._mutate_random,
        ]
        nested = [*[self._branch] * 3, self._loop, self._loop_over, self._loop_on_data, self._try]
        effects = [
            self._remember,
            self._carry,
            self._change_python,
            self._change_argument,
        ]
        if self._has_effects and self._chance(30):
            return self._pick(effects)()
        if depth < _DEEPEST and self._chance(20):
            return self._pick(nested)(depth)
        return self._pick(flat)()

    def _assign(self, made: Term | None) -> Statement | None:
        if made is None:
            return None
        name = self._fresh()
        self._locals.append(Term(name, made.shape, made.is_dense))
        return Line(f"{name} = {made.source}")

    def _compute(self) -> Statement | None:
        term = self._viewed()
        return self._assign(self._one_of(COMPUTED, term))

    def _one_of(self, templates: Sequence[str], *terms: Term) -> Term | None:
        found = [made for t in templates if (made := applied(t, *terms)) is not None]
        return self._pick(found) if found else None

    def _view(self) -> Statement | None:
        term = self._tensor()
        made = [applied(view, term, is_view=True) for view in VIEWS]
        return self._assign(self._pick([view for view in made if view is not None] or [None]))

    def _combine(self) -> Statement | None:
        return self._assign(self._one_of(BINARY, self._viewed(), self._viewed()))

    def _draw_numbers(self) -> Statement | None:
        return self._assign(self._one_of(RANDOM, self._viewed()))

    def _write(self) -> Statement | None:
        return self._fill(WRITES, self._viewed(to_write=True))

    def _write_pair(self) -> Statement | None:
        return self._fill(PAIR_WRITES, self._viewed(to_write=True), self._viewed())

    def _mutate_random(self) -> Statement | None:
        return self._fill(RANDOM_WRITES, self._viewed(to_write=True))

    def _fill(self, templates: Sequence[str], *terms: Term) -> Statement | None:
        found = valid_among(templates, *terms)
        if not found:
            return None
        return Line(self._pick(found).format(*(term.source for term in terms)))

    def _augment(self) -> Statement | None:
        """Write through ``+=``, which also binds the name again."""
        term = self._pick([term for term in self._locals if term.is_dense])
        others = [f"{{0}} {sign}= {{1}}" for sign in "+-*"]
        return self._fill(others, term, self._viewed())

    def _rebind(self) -> Statement | None:
        """Give a variable another tensor of the same sizes."""
        term = self._pick([term for term in self._locals if term.is_dense])
        found = [
            made
            for template in (*COMPUTED, *VIEWS)
            if (made := applied(template, term, is_view=template in VIEWS)) is not None
            and made.shape == term.shape
            and made.is_dense
        ]
        return Line(f"{term.source} = {self._pick(found).source}") if found else None

    def _gather(self) -> Statement | None:
        """Make a container of tensors."""
        name, first, second = self._fresh(), self._viewed(), self._viewed()
        kind = self._pick(("list", "dict", "tuple", "record", "each"))
        if kind == "each":
            return self._comprehension(name, first, second)
        made, accesses = {
            "list": (f"[{first.source}, {second.source}]", ("[0]", "[1]")),
            "dict": (f"{{'p': {first.source}, 0: {second.source}}}", ("['p']", "[0]")),
            "tuple": (f"({first.source}, {second.source})", ("[0]", "[1]")),
            "record": (f"Record({first.source}, {second.source})", (".left", ".right")),
        }[kind]
        self._keep(name, dict(zip(accesses, (first, second), strict=True)), kind == "list")
        return Line(f"{name} = {made}")

    def _comprehension(self, name: str, first: Term, second: Term) -> Statement | None:
        template = self._pick(("{0} * 2", "{0}[:]", "{0}.flatten()", "{0}.sum()"))
        is_view = template in VIEWS
        made = [applied(template, term, is_view=is_view) for term in (first, second)]
        if None in made:
            return None
        self._keep(name, {f"[{i}]": term for i, term in enumerate(made)}, is_list=True)
        each = template.format("each")
        return Line(f"{name} = [{each} for each in ({first.source}, {second.source})]")

    def _keep(self, name: str, items: dict[str, Term], is_list: bool) -> None:
        held = {
            access: Term(f"{name}{access}", term.shape, term.is_dense)
            for access, term in items.items()
        }
        self._boxes.append(_Box(name, held, is_list))

    def _put(self) -> Statement | None:
        """Append to a list the program made."""
        lists = [box for box in self._boxes if box.is_list]
        if not lists:
            return None
        return Line(f"{self._pick(lists).source}.append({self._viewed().source})")

    @contextmanager
    def _inside(self):
        """What is assigned in a body is not known after it."""
        tensors, boxes = list(self._locals), list(self._boxes)
        yield
        self._locals, self._boxes = tensors, boxes

    def _body(self, depth: int) -> tuple[Statement, ...]:
        with self._inside():
            return self._statements(depth + 1, self._pick((1, 2, 3)))

    def _branch(self, depth: int) -> Statement | None:
        condition = self._condition()
        taken = Block(f"if {condition}:", self._body(depth))
        if self._chance(40):
            return Both(taken, Block("else:", self._body(depth)))
        if self._chance(15):
            with self._inside():
                return Block(taken.head, (*taken.body, self._return()))
        return taken

    def _condition(self) -> str:
        kind = self._pick(("data", "data", "size", "python", "identity"))
        if kind == "python":
            limit = place(self._form, "limit")
            return self._pick(("flag", "k > 1", "scale > 0.3", f"{limit} > 1", "k and flag"))
        if kind == "identity":
            boxes = [f"len({box.source}) > 2" for box in self._boxes if box.is_list]
            return self._pick(("x is y", f"{self._box_items[0].source} is x", *boxes))
        term = self._viewed()
        found = valid_among(DATA_CONDITIONS if kind == "data" else SIZE_CONDITIONS, term)
        return self._pick(found).format(term.source) if found else "flag"

    def _loop(self, depth: int) -> Statement:
        head = self._pick(("for _ in range(k):", "for _ in range(2):", "for _ in range(len(x)):"))
        return Block(head, self._body(depth))

    def _loop_over(self, depth: int) -> Statement:
        """Loop over the tensors of a container, or over the rows of one."""
        name = self._fresh()
        terms = [self._tensor() for _ in range(2)]
        if self._chance(50) and terms[0].shape[0]:
            row = applied("{0}[0]", terms[0], is_view=True)
            head, shape = f"for {name} in {terms[0].source}:", row and row.shape
        else:
            head = f"for {name} in ({terms[0].source}, {terms[1].source}):"
            shape = terms[0].shape if terms[0].shape == terms[1].shape else None
        with self._inside():
            if shape is not None and all(term.is_dense for term in terms):
                self._locals.append(Term(name, shape))
            return Block(head, self._statements(depth + 1, self._pick((1, 2, 3))))

    def _loop_on_data(self, depth: int) -> Statement:
        term, name = self._tensor(), self._fresh()
        body = (*self._body(depth), Line(f"{name} += 1"))
        head = f"while {name} < 3 and {term.source}.sum() < 4:"
        return Both(Line(f"{name} = 0"), Block(head, body))

    def _try(self, depth: int) -> Statement:
        line = self._pick(("x[9].add_(1)", "box.missing", "[][k]", "x.relu_()"))
        handler = Block("except (IndexError, AttributeError, RuntimeError):", self._body(depth))
        return Both(Block("try:", (Line(line),)), handler)

    def _remember(self) -> Statement:
        """Make something on the first call, and use it on every other."""
        memo, name = place(self._form, "memo"), self._fresh()
        made, use = self._pick(
            (
                ("torch.ones(3)", f"x * {memo}"),
                ("[0, torch.zeros(3)]", f"x + {memo}[1]"),
                ("(k, flag)", f"x + {memo}[0]"),
            )
        )
        self._locals.append(Term(name, rows(WIDTH)))
        block = Block(f"if {memo} is None:", (Line(f"{memo} = {made}"),))
        return Both(block, Line(f"{name} = {use}"))

    def _carry(self) -> Statement:
        """Keep a tensor for the next call, as a recurrent layer does."""
        memo, name = place(self._form, "memo"), self._fresh()
        use = Line(f"{name} = x if {memo} is None else x + {memo}.sum()")
        self._locals.append(Term(name, rows(WIDTH)))
        return Both(use, Line(f"{memo} = {self._viewed().source}"))

    def _change_python(self) -> Statement:
        limit, seen = place(self._form, "limit"), place(self._form, "seen")
        tensor, slots = self._viewed().source, place(self._form, "slots")
        lines = (
            f"{limit} += 1",
            f"{seen}.append(x.shape[0])",
            f"{slots}['last'] = {tensor}",
            f"{seen}.append({tensor})",
        )
        return Line(self._pick(lines))

    def _change_argument(self) -> Statement | None:
        tensor = self._viewed().source
        lines = {
            "list": (f"box.append({tensor})", f"box[1] = {tensor}", "box.reverse()"),
            "dict": (f"box['new'] = {tensor}", f"box[0] = {tensor}"),
            "record": (f"box.extra = {tensor}", f"box.left = {tensor}"),
            "nested": (f"box['rest'] = {tensor}",),
        }.get(self._box)
        if lines is None:
            return None
        # What the container holds is no longer known.
        self._box_items = [Term("x", rows(WIDTH))]
        return Line(self._pick(lines))

    def _return(self) -> Statement:
        parts = [self._part() for _ in range(self._pick((1, 2, 3, 4)))]
        return Line(f"return {self._around(parts)}")

    def _part(self) -> str:
        if self._chance(50):
            return self._pick(self._locals[-4:]).source
        if self._chance(70):
            return self._viewed().source
        values = ("x.shape[0]", "k", "scale", "box", "x.sum().item()", "y.shape", "flag", "None")
        return self._pick((*values, *(box.source for box in self._boxes)))

    def _around(self, parts: list[str]) -> str:
        if len(parts) == 1 and self._chance(60):
            return parts[0]
        every = ", ".join(parts)
        shapes = (
            f"({every},)",
            f"[{every}]",
            "{" + ", ".join(f"{i}: {part}" for i, part in enumerate(parts)) + "}",
            f"Record({parts[0]}, [{every}])",
            f"{{'all': ({every},), 'first': {parts[0]}}}",
        )
        return self._pick(shapes)


@st.composite
def programs(draw: Callable[[Any], Any]) -> Program:
    """Draw a program and its calls."""
    form, box = draw(st.sampled_from(FORMS)), draw(st.sampled_from(sorted(BOXES)))
    body = _Author(draw, form, box).body()
    kinds = draw(_kinds())
    seeds = draw(st.sampled_from(_SEEDS))
    count = draw(st.integers(4, 6))
    order = [0, 0, 0, *(draw(st.sampled_from(range(len(kinds)))) for _ in range(count - 3))]
    calls = tuple((kind, draw(st.sampled_from(seeds))) for kind in order)
    return Program(form, body, box, kinds, calls)


# Few, so that branches on data go the same way again.
_SEEDS = ((0, 1), (0, 1, 2))


@st.composite
def _kinds(draw: Callable[[Any], Any]) -> tuple[CallKind, ...]:
    """Draw what calls are like: mostly alike, and different in one way or two."""
    first = CallKind(4, sharing=draw(st.sampled_from(("apart",) * 40 + _SHARINGS)))
    others = draw(st.sampled_from((0, 0, 0, 1, 1, 2)))
    return (first, *(_varied(draw, first) for _ in range(others)))


_SHARINGS = ("same", "alias", "overlap", "transposed", "rows")
_LAYOUTS = ("transposed", "strided", "offset", "expanded")


def _varied(draw: Callable[[Any], Any], kind: CallKind) -> CallKind:
    change = draw(st.sampled_from(("rows", "sharing", "layout", "box", "k", "flag", "scale")))
    values: dict[str, tuple[str, Any]] = {
        "rows": ("rows", st.sampled_from((2, 1, 3))),
        "sharing": ("sharing", st.sampled_from(_SHARINGS)),
        "layout": ("layout", st.sampled_from(_LAYOUTS)),
        "box": ("shares_box", st.just(True)),
        "k": ("k", st.sampled_from((0, 2))),
        "flag": ("flag", st.just(False)),
        "scale": ("scale", st.sampled_from((0.25, 2))),
    }
    name, strategy = values[change]
    return attrs.evolve(kind, **{name: draw(strategy)})
