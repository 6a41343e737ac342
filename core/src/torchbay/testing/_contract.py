"""What every backend promises, whatever it claims."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import torchbay
from torchbay.errors import InvalidArgument
from torchbay.plugin import (
    API_VERSION,
    OLDEST_API_VERSION,
    ArtifactDelegate,
    Capabilities,
    GuardedExecutable,
    PartialBackend,
    PersistentBackend,
    ResettableBackend,
    UnsupportedGraph,
)
from torchbay.testing import tolerance
from torchbay.testing._outcome import never_refused
from torchbay.testing._subject import Recorder, Subject
from torchbay.testing._torch_compat import unknown_operator
from torchbay.testing._watched import WatchedBuild, watched

__all__ = ["ContractTests"]


def step(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute three results of different sizes."""
    hidden = torch.relu(x @ weight + bias)
    return hidden, hidden.sum(-1), x * 2


def step_inputs(subject: Subject, seed: int = 0) -> list[torch.Tensor]:
    """Return inputs for `step`."""
    draw = [(4, 5), (5,), (3, 4)]
    return [subject.randn(*sizes, seed=seed * 3 + i) for i, sizes in enumerate(draw)]


def assert_right(actual: Any, *inputs: torch.Tensor, function: Any = step) -> None:
    """Hold results to those of PyTorch."""
    eager = list(function(*inputs))
    truth = list(function(*map(tolerance.precise, inputs)))
    if wrong := tolerance.complaint(list(actual), eager, truth):
        pytest.fail(wrong)


class ContractTests:
    """One test for each sentence that binds every backend."""

    family = "contract"

    @pytest.fixture(scope="class")
    def build(self, subject: Subject) -> WatchedBuild:
        """Return one build of `step`, with what the world was like before and after it."""
        inputs = step_inputs(subject)
        request = attrs.evolve(subject.request(step, *inputs), state_count=2)
        return watched(subject, request, inputs)

    def test_has_the_name_it_is_asked_for_by(self, subject: Subject) -> None:
        """Calls itself what users type.

        `Backend.name`: "The entry point's name, as users type it."
        """
        assert subject.backend.name == subject.expected_name

    def test_speaks_this_version_of_the_contract(self, subject: Subject) -> None:
        """States the version it was written for.

        `Backend.api_version`: "The plugin API this was written for: a literal"
        """
        version = subject.backend.api_version
        assert type(version) is int
        assert OLDEST_API_VERSION <= version <= API_VERSION

    def test_states_its_claims(self, subject: Subject) -> None:
        """Claims the same thing whenever it is asked.

        `Backend.capabilities`: "What this backend claims"
        """
        assert isinstance(subject.backend.capabilities, Capabilities)
        assert subject.backend.capabilities == subject.backend.capabilities

    def test_has_options_that_can_be_left_out(self, subject: Subject) -> None:
        """Takes no options to mean its defaults.

        `Backend.options`: "The class of this backend's options, `NoOptions` if it has none."
        """
        assert isinstance(subject.backend.options, type)
        assert isinstance(subject.backend.options(), subject.backend.options)

    def test_refuses_options_it_does_not_have(self, subject: Subject) -> None:
        """Lets no misspelt option pass.

        `Backend.options`: "May raise: TypeError or ValueError."
        """
        options = {"torchbay_testing_no_such_option": 1}
        with pytest.raises(InvalidArgument):
            subject.compile(step, options=options)

    def test_names_the_components_of_its_fingerprint(self, subject: Subject) -> None:
        """Describes itself by names and texts.

        `Backend.fingerprint`: "Return named components that change whenever the code compiled"
        """
        components = subject.backend.fingerprint()
        assert isinstance(components, Mapping)
        assert all(isinstance(part, str) for pair in components.items() for part in pair)

    def test_has_a_fingerprint_without_paths(self, subject: Subject) -> None:
        """Has the same fingerprint wherever it is installed.

        `Backend.fingerprint`: "Must not: contain a path of this machine"
        """
        text = json.dumps(dict(subject.backend.fingerprint()))
        assert [path for path in paths_of_this_machine() if path in text] == []

    def test_has_one_fingerprint_in_all_processes(self, subject: Subject) -> None:
        """Has the same fingerprint when asked again, and in another process.

        `Backend.fingerprint`: "or anything that differs between two processes"
        """
        components = dict(subject.backend.fingerprint())
        assert dict(subject.backend.fingerprint()) == components
        if subject.is_installed:
            assert _fingerprint_elsewhere(subject.expected_name) == components

    @never_refused
    def test_compiles_a_small_graph(self, build: WatchedBuild) -> None:
        """Compiles a matrix product, a sum and a relu; declining everything is no backend.

        `Backend.compile`: "Compile ``request.graph``."
        """
        assert callable(getattr(build.executable, "run", None))

    def test_leaves_the_request_alone(self, build: WatchedBuild) -> None:
        """Leaves graph, metadata and example inputs as they were.

        `Backend.compile`: "Must not: change the request"
        """
        assert build.after.request == build.before.request

    def test_moves_no_generator_when_building(self, build: WatchedBuild) -> None:
        """Draws no random number from PyTorch while it compiles.

        `Backend.compile`: "move a random generator"
        """
        assert build.after.generators == build.before.generators

    def test_leaves_ambient_state_alone(self, build: WatchedBuild) -> None:
        """Leaves PyTorch's settings as they were.

        `Backend.compile`: "leave ambient state (grad mode, default dtype, thread count) other than"
        """
        assert build.after.settings == build.before.settings

    def test_leaves_tensors_alone(self, subject: Subject) -> None:
        """Leaves a tensor that the graph holds as it was.

        `Backend.compile`: "touch a user's tensor"
        """
        table = subject.randn(4)
        compiled = subject.compile(lambda x: x * table + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x))
        before = table.clone()
        x = subject.randn(4, seed=1)
        compiled.warmup(x)
        assert table.equal(before)
        truth = x.double() * before.double() + torch.arange(1, 5).to(x).double()
        assert compiled(x).double().allclose(truth, atol=1e-4)

    def test_runs_or_declines_an_unknown_operator(self, subject: Subject) -> None:
        """Runs an operator it has never heard of, or declines the graph; nothing else.

        `Backend.compile`: "May raise: `UnsupportedGraph` to decline. Anything else is a failure"
        """
        triple, x = unknown_operator(), subject.randn(3)
        request = subject.request(lambda x: (triple(x) + 1,), x)
        [result] = subject.build(request).run([x.clone()])
        assert result.allclose(x * 3 + 1, atol=1e-4)

    def test_returns_outputs_in_order(self, subject: Subject, build: WatchedBuild) -> None:
        """Computes what the graph says, for other values than those it was built from.

        `Executable.run`: "Returns the graph's outputs in order."
        """
        for seed in (1, 2):
            inputs = step_inputs(subject, seed)
            assert_right(build.executable.run(list(inputs)), *inputs)

    def test_follows_replaced_state(self, subject: Subject, build: WatchedBuild) -> None:
        """Reads weights anew on every call, be they changed in place or replaced.

        `CompileRequest.state_count`: "keeps its storage from call to call far more often than not,
        but may be replaced."
        """
        inputs = step_inputs(subject, 3)
        build.executable.run(list(inputs))
        inputs[0].mul_(2)
        assert_right(build.executable.run(list(inputs)), *inputs)
        inputs[0], inputs[1] = inputs[0] - 1, inputs[1] + 1
        assert_right(build.executable.run(list(inputs)), *inputs)

    def test_changes_no_input(self, subject: Subject, build: WatchedBuild) -> None:
        """Leaves inputs as they were when the graph writes none.

        `Executable.run`: "Must not: change inputs other than the request's ``mutated``"
        """
        inputs = step_inputs(subject, 4)
        before = [tensor.clone() for tensor in inputs]
        build.executable.run(list(inputs))
        assert all(map(torch.equal, inputs, before))

    def test_draws_nothing_when_nothing_is_random(
        self, subject: Subject, build: WatchedBuild
    ) -> None:
        """Moves no generator when the graph has no random operator.

        `Executable.run`: "draw from a generator it has no random operator for"
        """
        before = build.generators()
        build.executable.run(step_inputs(subject))
        assert build.generators() == before

    def test_keeps_nothing_alive(self, subject: Subject, build: WatchedBuild) -> None:
        """Lets go of inputs and outputs as soon as it has returned.

        `Executable.run`: "keep an input or an output alive once it has returned."
        """
        inputs = step_inputs(subject, 5)
        outputs = list(build.executable.run(list(inputs)))
        held = [weakref.ref(tensor) for tensor in (*inputs, *outputs)]
        del inputs, outputs
        gc.collect()
        assert [reference() for reference in held] == [None] * len(held)

    def test_returns_memory_of_its_own(self, subject: Subject, build: WatchedBuild) -> None:
        """Returns results that the next call does not overwrite.

        `Executable.run`: "No output shares memory with an output of another call."
        """
        inputs = step_inputs(subject, 6)
        outputs = list(build.executable.run(list(inputs)))
        build.executable.run(step_inputs(subject, 7))
        assert_right(outputs, *inputs)

    def test_returns_the_strides_of_the_graph(self, subject: Subject) -> None:
        """Returns results laid out as PyTorch lays them out.

        `Executable.run`: "Each has the sizes, strides, dtype and device of its node's"
        """
        x = subject.randn(3, 4)

        def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.t() + 1, (x * 2).t(), x.exp()

        request = subject.request(views, x)
        outputs = subject.build(request).run([x.clone()])
        seen = [(output.size(), output.stride()) for output in outputs]
        assert seen == [(output.size(), output.stride()) for output in views(x)]

    def test_raises_what_operators_raise(self, subject: Subject) -> None:
        """Raises for an index out of bounds instead of reading past the end.

        `Executable.run`: "May raise: what the operators themselves raise on the values"
        """
        if subject.device.type != "cpu":
            pytest.skip("an accelerator reports it later, or not at all")
        x, index = subject.randn(4, 2), torch.tensor([0, 3])
        request = subject.request(lambda x, index: (x[index] + 1,), x, index)
        executable = subject.build(request)
        executable.run([x, index])
        with pytest.raises((IndexError, RuntimeError)):
            executable.run([x, torch.tensor([0, 1000])])

    def test_takes_what_its_guards_let_through(self, subject: Subject, build: WatchedBuild) -> None:
        """Takes, by its own guard, the inputs it was compiled for, and leaves them alone.

        `GuardedExecutable.refuses`: "Return why these inputs cannot be run, or None to run them."
        `GuardedExecutable.refuses`: "Must not: keep, change or wait for the inputs."
        """
        if not isinstance(build.executable, GuardedExecutable):
            pytest.skip("it has no guard of its own")
        inputs = step_inputs(subject, 8)
        before = [tensor.clone() for tensor in inputs]
        given = list(inputs)
        assert build.executable.refuses(given) is None
        assert len(given) == len(inputs)
        assert all(map(torch.equal, inputs, before))

    def test_can_be_reset(self, subject: Subject) -> None:
        """Compiles as before after it has forgotten what it kept.

        `ResettableBackend.reset`: "Forget it."
        """
        if not isinstance(subject.backend, ResettableBackend):
            pytest.skip("it has no reset")
        inputs = step_inputs(subject)
        request = subject.request(step, *inputs)
        subject.build(request)
        subject.backend.reset()
        assert_right(subject.build(request).run(list(inputs)), *inputs)

    def test_compiles_what_it_supports(self, subject: Subject) -> None:
        """Compiles a graph when it supports each of its nodes.

        `PartialBackend.supports`: "Whether this node may be in a graph for `compile`."
        `PartialBackend.supports`: "Must not: change the node or its graph."
        """
        if not isinstance(subject.backend, PartialBackend):
            pytest.skip("it takes whole graphs only")
        inputs = step_inputs(subject)
        request = subject.request(step, *inputs)
        before = request.graph.code
        nodes = [node for node in request.graph.graph.nodes if node.op == "call_function"]
        answers = [subject.backend.supports(node) for node in nodes]
        assert request.graph.code == before
        assert set(map(type, answers)) == {bool}
        if not all(answers):
            raise UnsupportedGraph("it does not support every node of a small graph")
        try:
            executable = subject.build(request)
        except UnsupportedGraph as refusal:
            pytest.fail(f"it supports every node and declines the graph: {refusal}")
        assert_right(executable.run(list(inputs)), *inputs)

    def test_leaves_the_rest_to_a_fallback(self, subject: Subject) -> None:
        """Computes the regions it is given right when another backend computes those between.

        `PartialBackend.supports`: "compiles those whose nodes are all supported with this backend
        and the rest with the caller's fallback."
        """
        if not isinstance(subject.backend, PartialBackend):
            pytest.skip("it takes whole graphs only")
        triple = unknown_operator()

        def mixed(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden, total, doubled = step(*inputs)
            return triple(hidden).relu() + 1, total * 2, triple(doubled) - doubled

        inputs = step_inputs(subject)
        fallback = Recorder(Capabilities(devices=subject.claims.devices, mutation=True))
        compiled = subject.compile(mixed, fallback=fallback)
        compiled.warmup(*inputs)
        assert_right(compiled(*inputs), *inputs, function=mixed)

    def test_names_an_installed_maker_of_artifacts(self, subject: Subject) -> None:
        """Names a backend that can save executables.

        `ArtifactDelegate.artifact_backend`: "The name of that backend; it is reached through the
        registry, never imported."
        """
        if not isinstance(subject.backend, ArtifactDelegate):
            pytest.skip("no other backend makes its artifacts")
        name = subject.backend.artifact_backend
        installed = {listing.name for listing in torchbay.backends()}
        if name not in installed:
            raise UnsupportedGraph(f"it leaves artifacts to {name!r}, which is not installed")
        from torchbay._registry import load

        assert isinstance(load(name), PersistentBackend)


def paths_of_this_machine() -> set[str]:
    """Return folders that no portable text names."""
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix)}
    return {str(folder) for folder in folders if len(folder.parts) > 1}


def _fingerprint_elsewhere(name: str) -> dict[str, str]:
    program = (
        "import json, sys; from torchbay._registry import load; "
        "print(json.dumps(dict(load(sys.argv[1]).fingerprint())))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, name]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    components: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return components
