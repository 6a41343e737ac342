"""Options of one compiled object."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs.validators import ge, in_

__all__ = ["OpenVinoOptions"]


@attrs.frozen(kw_only=True)
class OpenVinoOptions:
    """How OpenVINO runs a graph.

    Attributes:
        inference_precision: ``f32`` gives PyTorch's results; ``bf16`` and ``f16`` are faster on
            processors that have them, and round accordingly.
        num_streams: How many streams OpenVINO splits its threads into.
        threads: How many threads one call uses; 0 for as many as PyTorch uses.
    """

    inference_precision: str = attrs.field(default="f32", validator=in_(("f32", "bf16", "f16")))
    num_streams: int = attrs.field(default=1, validator=ge(1))
    threads: int = attrs.field(default=0, validator=ge(0))

    def properties(self) -> dict[str, Any]:
        """Return the same as OpenVINO's own properties."""
        return {
            "INFERENCE_PRECISION_HINT": self.inference_precision,
            "NUM_STREAMS": self.num_streams,
            "INFERENCE_NUM_THREADS": self.threads or torch.get_num_threads(),
        }
