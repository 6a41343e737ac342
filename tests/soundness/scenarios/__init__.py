"""The catalogue: what a compiled program may rely on, one scenario each.

A family is a module; each scenario in it is a function whose name finishes the sentence "it ...".
Calls run under ``torch.no_grad()`` unless the scenario says otherwise.
"""

from scenarios import (
    capture_hazards,
    changed_in_python,
    control_flow,
    dynamic_shapes,
    guards,
    random_numbers,
    read_from_python,
    robustness,
    tensors,
    training_autograd,
    training_gradients,
    training_steps,
)
from scenarios._play import Outcome, Played, compare, judged, play_compiled, play_eagerly
from scenarios._scenario import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "Outcome",
    "Played",
    "Scenario",
    "capture_hazards",
    "changed_in_python",
    "compare",
    "control_flow",
    "dynamic_shapes",
    "guards",
    "judged",
    "play_compiled",
    "play_eagerly",
    "random_numbers",
    "read_from_python",
    "robustness",
    "tensors",
    "training_autograd",
    "training_gradients",
    "training_steps",
]
