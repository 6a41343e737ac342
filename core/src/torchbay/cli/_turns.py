"""Runs one encoder through several backends in one process, taking turns with plain PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import torchbay
from torchbay.cli._measurement import Closeness, Measurement, Spread, problems
from torchbay.cli._progress import Announce
from torchbay.errors import UnknownBackend

EAGER = "PyTorch eager"
WARM_UP = 3


def measure(
    encoder: nn.Module,
    batch: Sequence[Tensor],
    backends: Mapping[str, Any],
    *,
    calls: int,
    announce: Announce,
) -> list[Measurement]:
    """Return plain PyTorch's row, then one for each of ``backends``.

    Everything runs under no_grad and on one thread.
    """
    with torch.no_grad(), _one_thread():
        eager = _Contender(name=EAGER, encode=encoder)
        # PyTorch's own first call must not count as a backend's compile time.
        encoder(*batch)
        contenders = [_Contender(name=name, encode=encoder) for name in backends]
        for contender in contenders:
            contender.attempt(contender.prepare, backends[contender.name])
        for contender in contenders:
            contender.attempt(contender.first_call, batch, announce)
        announce(f"Timing {calls} calls of each, taking turns")
        _take_turns(eager, contenders, batch, calls)
        return [_row_of_eager(eager), *(contender.row(eager) for contender in contenders)]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@attrs.define(kw_only=True)
class _Contender:
    """One way to run the encoder, and what was seen of it so far."""

    name: str
    encode: Callable[..., Tensor]
    compile_seconds: float | None = None
    seconds: list[float] = attrs.field(factory=list)
    embeddings: Tensor = attrs.field(factory=lambda: torch.empty(0))
    measurement: Measurement | None = None
    error: str | None = None

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Take one step, unless an earlier one failed; a failure is kept for the row."""
        if self.error is not None:
            return
        try:
            step(*args)
        except UnknownBackend:
            raise
        except Exception as failure:  # noqa: BLE001  the other rows still come
            self.error = f"{type(failure).__name__}: {failure}"

    def prepare(self, backend: Any) -> None:
        self.encode = torchbay.compile(self.encode, backend=backend, name="demo")

    def first_call(self, batch: Sequence[Tensor], announce: Announce) -> None:
        announce(f"Compiling with {self.name}")
        self.compile_seconds = self._timed_call(batch)

    def repeat(self, batch: Sequence[Tensor]) -> None:
        self.seconds.append(self._timed_call(batch))

    def _timed_call(self, batch: Sequence[Tensor]) -> float:
        started = time.perf_counter()
        self.embeddings = self.encode(*batch)
        return time.perf_counter() - started

    def steady_ms(self) -> Spread:
        return Spread.of(self.seconds[WARM_UP:])

    def _ratio_to(self, other: _Contender) -> float:
        # Within one turn both met the same load of the machine.
        turns = list(zip(self.seconds, other.seconds, strict=True))[WARM_UP:]
        return statistics.median(ours / theirs for ours, theirs in turns)

    def row(self, eager: _Contender) -> Measurement:
        self.attempt(self._compare, eager)
        return self.measurement or Measurement(
            backend=self.name,
            compile_seconds=self.compile_seconds,
            problems=(str(self.error),),
        )

    def _compare(self, eager: _Contender) -> None:
        closeness = Closeness.between(self.embeddings, eager.embeddings)
        calls = dict(torchbay.explain(self.encode).calls)
        self.measurement = Measurement(
            backend=self.name,
            compile_seconds=self.compile_seconds,
            steady_ms=self.steady_ms(),
            ratio_to_eager=self._ratio_to(eager),
            closeness=closeness,
            calls=calls,
            problems=tuple(problems(closeness, calls, repeated=len(self.seconds))),
        )


def _take_turns(
    eager: _Contender, contenders: Sequence[_Contender], batch: Sequence[Tensor], calls: int
) -> None:
    for _ in range(WARM_UP + calls):
        eager.repeat(batch)
        for contender in contenders:
            contender.attempt(contender.repeat, batch)


def _row_of_eager(eager: _Contender) -> Measurement:
    return Measurement(
        backend=EAGER,
        steady_ms=eager.steady_ms(),
        ratio_to_eager=1.0,
        closeness=Closeness.between(eager.embeddings, eager.embeddings),
    )
