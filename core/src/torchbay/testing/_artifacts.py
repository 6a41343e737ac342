"""Saved executables, for backends that can save."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from torchbay.plugin import CompileRequest, PersistentBackend, Verdict
from torchbay.testing._contract import assert_right, paths_of_this_machine, step, step_inputs
from torchbay.testing._subject import Subject

__all__ = ["ArtifactTests"]


@attrs.frozen(eq=False)
class Saved:
    """A request, and what the backend saved of its executable."""

    backend: PersistentBackend
    request: CompileRequest
    inputs: list[torch.Tensor]
    payload: Mapping[str, bytes]


class ArtifactTests:
    """One test for each promise of `PersistentBackend`."""

    family = "artifacts"

    @pytest.fixture(scope="class")
    def saved(self, subject: Subject) -> Saved:
        """Return a saved executable of `step`."""
        backend = subject.backend
        if not isinstance(backend, PersistentBackend):
            pytest.skip("it saves nothing")
        inputs = step_inputs(subject)
        request = attrs.evolve(subject.request(step, *inputs), state_count=2)
        executable = subject.build(request)
        executable.run(list(inputs))
        return Saved(backend, request, inputs, backend.save(executable))

    def test_saves_bytes_by_name(self, saved: Saved) -> None:
        """Returns what it saved as bytes.

        `PersistentBackend.save`: "Return everything that `load` needs, by name."
        """
        assert isinstance(saved.payload, Mapping)
        assert saved.payload
        assert all(
            type(name) is str and type(part) is bytes for name, part in saved.payload.items()
        )

    def test_saves_no_weights(self, saved: Saved) -> None:
        """Saves code, not the values it was called with.

        `PersistentBackend.save`: "Must not: contain weights"
        """
        weights = [tensor.cpu().numpy().tobytes() for tensor in saved.inputs[:2]]
        everything = b"".join(saved.payload.values())
        assert [weight for weight in weights if weight in everything] == []

    def test_saves_no_paths(self, saved: Saved) -> None:
        """Saves nothing that names a folder of this machine.

        `PersistentBackend.save`: "or a path of this machine."
        """
        everything = b"".join(saved.payload.values())
        assert [path for path in paths_of_this_machine() if path.encode() in everything] == []

    def test_can_use_what_it_saved(self, saved: Saved) -> None:
        """Finds that its own payload can be used where it was made.

        `PersistentBackend.check`: "Return whether a payload can be used on this machine."
        """
        assert saved.backend.check(saved.payload) == Verdict("usable")

    def test_refuses_what_it_did_not_save(self, saved: Saved) -> None:
        """Refuses, with a reason, a payload that is cut short or another's.

        `PersistentBackend.check`: "Return whether a payload can be used on this machine."
        """
        for payload in ({}, dict.fromkeys(saved.payload, b"no such thing")):
            verdict = saved.backend.check(payload)
            assert verdict.state == "refused"
            assert verdict.reason

    def test_executes_nothing_to_check(self, saved: Saved) -> None:
        """Runs no code that a payload brings.

        `PersistentBackend.check`: "Must not: execute anything the payload brings."
        """
        Trap.sprung = False
        trap = pickle.dumps(Trap())
        saved.backend.check(dict.fromkeys(saved.payload, trap))
        assert not Trap.sprung

    def test_loads_what_it_saved(self, saved: Saved) -> None:
        """Loads an executable that computes the same.

        `PersistentBackend.load`: "Return an executable equal to the one that was saved"
        """
        executable = saved.backend.load(dict(saved.payload), saved.request)
        inputs = [tensor * 2 for tensor in saved.inputs]
        assert_right(executable.run(list(inputs)), *inputs)

    def test_loads_without_compiling(self, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
        """Starts no compiler, and does not call its own.

        `PersistentBackend.load`: "Must not: compile, or start a compiler."
        """

        def refuse(*_args: Any, **_kwargs: Any) -> None:
            pytest.fail("loading started a compiler")

        monkeypatch.setattr(type(saved.backend), "compile", refuse)
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        saved.backend.load(dict(saved.payload), saved.request)


class Trap:
    """Tells when it is unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> None:
    Trap.sprung = True
