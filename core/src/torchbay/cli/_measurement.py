"""What the demo saw of one backend, and what of that is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor
from torch.nn.functional import cosine_similarity

LEAST_COSINE = 0.9999


@attrs.frozen(kw_only=True)
class Spread:
    """Milliseconds per call: the median, and the range that four calls in five fall into."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of ``seconds``, of which there is at least one."""
        ordered = sorted(1000 * second for second in seconds)
        last = len(ordered) - 1
        return cls(
            median=statistics.median(ordered),
            low=ordered[round(0.1 * last)],
            high=ordered[round(0.9 * last)],
        )


@attrs.frozen(kw_only=True)
class Closeness:
    """How far embeddings are from those of plain PyTorch; the last row is the query's."""

    largest_difference: float
    lowest_cosine: float
    nearest: int
    nearest_in_eager: int

    @classmethod
    def between(cls, actual: Tensor, expected: Tensor) -> Closeness:
        """Compare two outputs of one encoder, or raise ValueError when their shapes differ."""
        if actual.shape != expected.shape:
            message = f"output of shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
            raise ValueError(message)
        actual, expected = actual.double(), expected.double()
        return cls(
            largest_difference=float((actual - expected).abs().max()),
            lowest_cosine=float(cosine_similarity(actual, expected, dim=1).min()),
            nearest=_nearest_to_query(actual),
            nearest_in_eager=_nearest_to_query(expected),
        )


def _nearest_to_query(embeddings: Tensor) -> int:
    return int((embeddings[:-1] @ embeddings[-1]).argmax())


@attrs.frozen(kw_only=True)
class Measurement:
    """One row of the demo; fields are None where the backend did not get that far."""

    backend: str
    compile_seconds: float | None = None
    steady_ms: Spread | None = None
    ratio_to_eager: float | None = None
    closeness: Closeness | None = None
    calls: Mapping[str, int] | None = None
    problems: Sequence[str] = ()


def problems(closeness: Closeness, calls: Mapping[str, int], repeated: int) -> Iterator[str]:
    """Yield what is wrong with a backend that ``repeated`` calls should have reached."""
    # Not "below": a cosine of NaN is wrong too.
    if not closeness.lowest_cosine >= LEAST_COSINE:
        yield f"lowest cosine to eager is {closeness.lowest_cosine:.6f}, not {LEAST_COSINE} or more"
    if closeness.nearest != closeness.nearest_in_eager:
        yield "the sentence nearest to the query is not the one eager finds"
    if calls["graph"] < repeated:
        yield f"{calls['graph']} of {repeated} repeated calls were served from a graph"
