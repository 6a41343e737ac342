"""A correct backend, and for every promise one that breaks it.

Each wrong backend names, in ``breaks``, the test of the kit that must find it out.
"""

from __future__ import annotations

import json
import operator
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from torchbay.plugin import Capabilities, CompileRequest, NoOptions, UnsupportedGraph, Verdict

aten = torch.ops.aten

EVERYTHING = Capabilities(
    decompositions=dict,
    keep=frozenset({aten.layer_norm.default}),
    dynamic_shapes=True,
    training=True,
    mutation=True,
    control_flow=True,
    external_weights=True,
    eager_random=True,
    thread_safe=True,
)


class Plain:
    """Calls the operators of a graph."""

    def __init__(self, graph: GraphModule, state_count: int = 0):
        self.graph = graph
        self.state_count = state_count

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        values = list(inputs)
        inputs.clear()
        return self.graph(*values)


class Runner(Plain):
    """Has a guard of its own, which lets everything through."""

    def refuses(self, inputs: Sequence[Any]) -> str | None:
        return None


class Modest:
    """Keeps every promise, claims little and saves nothing."""

    name = "modest"
    api_version = 1
    options: type[Any] = NoOptions
    capabilities = Capabilities(dtypes=frozenset({torch.float32, torch.int64, torch.bool}))
    Made = Plain

    def fingerprint(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def compile(self, request: CompileRequest) -> Plain:
        return self.Made(deepcopy(request.graph), request.state_count)


class Correct(Modest):
    """Keeps every promise, claims every capability and has every ability."""

    name = "correct"
    capabilities = EVERYTHING
    Made = Runner

    def reset(self) -> None:
        pass

    def save(self, executable: Runner) -> Mapping[str, bytes]:
        return {"graph": json.dumps(to_plain(executable.graph)).encode()}

    def check(self, payload: Mapping[str, bytes]) -> Verdict:
        try:
            json.loads(payload["graph"])
        except (KeyError, ValueError) as error:
            return Verdict("refused", repr(error))
        return Verdict("usable")

    def load(self, payload: Mapping[str, bytes], request: CompileRequest) -> Runner:
        return Runner(from_plain(json.loads(payload["graph"])))


class CorrectInParts(Correct):
    """Says node by node what it takes, and leaves artifacts to a backend that is not here."""

    name = "partial"
    artifact_backend = "not_installed"

    def supports(self, node: Node) -> bool:
        return getattr(node.target, "namespace", "") == "aten"


def to_plain(graph: GraphModule) -> list[Any]:
    return [[n.op, n.name, str(n.target), plain_argument(n.args)] for n in graph.graph.nodes]


def plain_argument(value: Any) -> Any:
    if isinstance(value, Node):
        return {"node": value.name}
    return [plain_argument(v) for v in value] if isinstance(value, (tuple, list)) else value


def from_plain(nodes: list[Any]) -> GraphModule:
    graph, made = Graph(), {}

    def argument(value: Any) -> Any:
        if isinstance(value, dict):
            return made[value["node"]]
        return tuple(map(argument, value)) if isinstance(value, list) else value

    for kind, name, target, args in nodes:
        found = operator.attrgetter(target)(torch.ops) if kind == "call_function" else target
        made[name] = graph.create_node(kind, found, argument(args), name=name)
    return GraphModule(torch.nn.Module(), graph)


class Altered(Runner):
    """Runs a graph operator by operator, and some of them wrongly."""

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        alter = self.alter

        class Wrong(Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                return alter(target, args, super().call_function(target, args, kwargs))

        return Wrong(self.graph).run(*inputs)

    def alter(self, target: Any, args: Any, result: Any) -> Any:
        raise NotImplementedError


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


# What a backend says about itself.


class OtherName(Correct):
    breaks = "test_has_the_name_it_is_asked_for_by"
    name = "another"
    asked_for_as = "correct"


class FutureVersion(Correct):
    breaks = "test_speaks_this_version_of_the_contract"
    api_version = 99


class WaveringClaims(Correct):
    breaks = "test_states_its_claims"
    asked = 0

    @property
    def capabilities(self) -> Capabilities:
        self.asked += 1
        return Capabilities(training=self.asked % 2 == 0)


@attrs.frozen
class LevelOptions:
    level: int


class NeededOptions(Correct):
    breaks = "test_has_options_that_can_be_left_out"

    options = LevelOptions


class AnyOptions(Correct):
    breaks = "test_refuses_options_it_does_not_have"

    options = dict


class NumberInFingerprint(Correct):
    breaks = "test_names_the_components_of_its_fingerprint"

    def fingerprint(self) -> Any:
        return {"torch": 2}


class PathInFingerprint(Correct):
    breaks = "test_has_a_fingerprint_without_paths"

    def fingerprint(self) -> Mapping[str, str]:
        return {"compiler": f"{Path.cwd()}/bin/cc"}


class TimeInFingerprint(Correct):
    breaks = "test_has_one_fingerprint_in_all_processes"

    def fingerprint(self) -> Mapping[str, str]:
        return {"built": str(time.perf_counter_ns())}


class WrongDevice(Correct):
    breaks = "test_claims_the_device_it_is_tested_on"
    capabilities = Capabilities(devices=frozenset({"cuda"}))


class DtypesByName(Correct):
    breaks = "test_claims_dtypes"
    capabilities = Capabilities(dtypes=frozenset({"float32"}))


class DecompositionsInAList(Correct):
    breaks = "test_asks_for_decompositions_it_can_have"
    capabilities = Capabilities(decompositions=lambda: [aten.relu.default])


class KeepsAnything(Correct):
    breaks = "test_keeps_composites_it_knows"
    capabilities = Capabilities(keep=frozenset({aten.add.Tensor}))


# What it does when it compiles.


class DeclinesEverything(Correct):
    breaks = "test_compiles_a_small_graph"

    def compile(self, request: CompileRequest) -> Runner:
        raise UnsupportedGraph("not today")


class MarksNodes(Correct):
    breaks = "test_leaves_the_request_alone"

    def compile(self, request: CompileRequest) -> Runner:
        for node in request.graph.graph.nodes:
            node.meta["seen"] = True
        return super().compile(request)


class DrawsToTune(Correct):
    breaks = "test_moves_no_generator_when_building"

    def compile(self, request: CompileRequest) -> Runner:
        torch.randn(8)
        return super().compile(request)


class SetsDefaults(Correct):
    breaks = "test_leaves_ambient_state_alone"

    def compile(self, request: CompileRequest) -> Runner:
        torch.set_default_dtype(torch.float64)
        return super().compile(request)


class OverwritesLiterals(Correct):
    breaks = "test_leaves_tensors_alone"

    def compile(self, request: CompileRequest) -> Runner:
        for tensor in request.graph.buffers():
            tensor.zero_()
        return super().compile(request)


class KnowsOnlyAten(Correct):
    breaks = "test_runs_or_declines_an_unknown_operator"

    def compile(self, request: CompileRequest) -> Runner:
        for node in request.graph.graph.nodes:
            if node.op == "call_function":
                {"aten": True}[node.target.namespace]
        return super().compile(request)


class ForgetsItself(Correct):
    breaks = "test_can_be_reset"
    is_usable = True

    def reset(self) -> None:
        self.is_usable = False

    def compile(self, request: CompileRequest) -> Runner:
        if not self.is_usable:
            raise RuntimeError("no toolchain")
        return super().compile(request)


class SupportsInName(CorrectInParts):
    breaks = "test_compiles_what_it_supports"

    def compile(self, request: CompileRequest) -> Runner:
        raise UnsupportedGraph("no kernel")


class LosesItsPlace(CorrectInParts):
    breaks = "test_leaves_the_rest_to_a_fallback"

    class Made(Runner):
        def run(self, inputs):
            return [output + 1 for output in super().run(inputs)]


class NamesNoMaker(CorrectInParts):
    breaks = "test_names_an_installed_maker_of_artifacts"
    artifact_backend = "eager"


class CachesByName(Correct):
    breaks = "test_compiles_again"

    def __init__(self):
        self.made = {}

    def compile(self, request: CompileRequest) -> Runner:
        return self.made.setdefault(request.name, super().compile(request))


class MainThreadOnly(Correct):
    breaks = "test_compiles_for_several_threads"

    def compile(self, request: CompileRequest) -> Runner:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not in this thread")
        return super().compile(request)


# What its executables do.


class Reverses(Correct):
    breaks = "test_returns_outputs_in_order"

    class Made(Runner):
        def run(self, inputs):
            return tuple(reversed(super().run(inputs)))


class BakesState(Correct):
    breaks = "test_follows_replaced_state"

    class Made(Runner):
        state = None

        def run(self, inputs):
            if self.state is None:
                self.state = [tensor.clone() for tensor in inputs[: self.state_count]]
            return super().run([*self.state, *inputs[self.state_count :]])


class BakesWeights(BakesState):
    breaks = "test_borrows_weights"


class UsesInputsAsScratch(Correct):
    breaks = "test_changes_no_input"

    class Made(Runner):
        def run(self, inputs):
            scratch = inputs[-1]
            outputs = super().run(inputs)
            scratch.zero_()
            return outputs


class DrawsOnEveryCall(Correct):
    breaks = "test_draws_nothing_when_nothing_is_random"

    class Made(Runner):
        def run(self, inputs):
            torch.randn(1)
            return super().run(inputs)


class KeepsItsOutputs(Correct):
    breaks = "test_keeps_nothing_alive"

    class Made(Runner):
        def run(self, inputs):
            self.outputs = super().run(inputs)
            return self.outputs


class KeepsItsInputs(Correct):
    breaks = "test_lets_go_of_what_it_compiled"
    kept: list[Any] = []  # noqa: RUF012 - shared on purpose

    class Made(Runner):
        def run(self, inputs):
            KeepsItsInputs.kept.append(list(inputs))
            return super().run(inputs)


class ReusesItsBuffers(Correct):
    breaks = "test_returns_memory_of_its_own"

    class Made(Runner):
        buffers = None

        def run(self, inputs):
            outputs = super().run(inputs)
            self.buffers = self.buffers or [output.clone() for output in outputs]
            for buffer, output in zip(self.buffers, outputs, strict=True):
                buffer.copy_(output)
            return self.buffers


class ReturnsContiguous(Correct):
    breaks = "test_returns_the_strides_of_the_graph"

    class Made(Runner):
        def run(self, inputs):
            return [output.contiguous() for output in super().run(inputs)]


class AnswersAnyway(Correct):
    breaks = "test_raises_what_operators_raise"

    class Made(Runner):
        def run(self, inputs):
            try:
                return super().run(inputs)
            except IndexError:
                return (torch.zeros(2, 2),)


class RefusesEveryCall(Correct):
    breaks = "test_takes_what_its_guards_let_through"

    class Made(Runner):
        def refuses(self, inputs):
            return "not these"


class SharesScratchMemory(Correct):
    breaks = "test_runs_in_threads_it_claims_to_run_in"

    class Made(Runner):
        def run(self, inputs):
            self.inputs = list(inputs)
            time.sleep(0.001)
            return super().run(self.inputs)


class BakesSizes(Correct):
    breaks = "test_takes_symbolic_sizes"

    class Made(Runner):
        size = None

        def run(self, inputs):
            sizes = [value for value in inputs if isinstance(value, int)]
            self.size = self.size or sizes
            return super().run([*tensors(inputs), *self.size])


class HasNoGradients(Correct):
    breaks = "test_takes_both_halves_of_a_training_step"

    def compile(self, request: CompileRequest) -> Runner:
        made = super().compile(request)
        if request.side == "backward":
            made.run = lambda inputs: [torch.zeros_like(x) for x in made.graph(*inputs)]
        return made


class GoesLeft(Correct):
    breaks = "test_takes_branches_on_tensors"

    class Made(Runner):
        def run(self, inputs):
            return super().run([torch.ones_like(inputs[0]), *inputs[1:]])


class DrawsItsOwnNumbers(Correct):
    breaks = "test_draws_what_it_claims_to_draw"

    class Made(Runner):
        def run(self, inputs):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return super().run(inputs)


class NeverWrites(Correct):
    breaks = "test_writes_what_it_claims_to_write"

    def compile(self, request: CompileRequest) -> Runner:
        made = super().compile(request)
        for node in list(made.graph.graph.nodes):
            if node.target is aten.copy_.default:
                node.replace_all_uses_with(node.args[1])
                made.graph.graph.erase_node(node)
        made.graph.recompile()
        return made


class NeverWritesInPlace(NeverWrites):
    breaks = "test_in_place"


# What it computes.


class ComputesIntegersAsFloats(Correct):
    breaks = "test_dtypes"

    class Made(Altered):
        def alter(self, target, args, result):
            is_wide = isinstance(result, torch.Tensor) and result.dtype is torch.int64
            return result.float().long() if is_wide else result


class IgnoresStrides(Correct):
    breaks = "test_layouts"

    class Made(Runner):
        def run(self, inputs):
            dense = [torch.empty_strided(x.shape, x.stride()).is_contiguous() for x in inputs]
            pairs = zip(inputs, dense, strict=True)
            return super().run([x if is_dense else self.read(x) for x, is_dense in pairs])

        def read(self, tensor):
            flat = tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)
            return flat.repeat(tensor.numel())[: tensor.numel()].reshape(tensor.shape)


class DividesByTheNumberOfElements(Correct):
    breaks = "test_sizes"

    class Made(Altered):
        def alter(self, target, args, result):
            for tensor in tensors(args):
                1 / tensor.numel()
            return result


class WantsEqualShapes(Correct):
    breaks = "test_broadcasting"

    class Made(Altered):
        def alter(self, target, args, result):
            if target is aten.mul.Tensor and len({x.shape for x in tensors(args)}) > 1:
                return result.flip(0)
            return result


class KeepsTheFirstDtype(Correct):
    breaks = "test_promotion"

    class Made(Altered):
        def alter(self, target, args, result):
            return result.to(args[0].dtype) if target is aten.add.Tensor else result


class FastMath(Correct):
    breaks = "test_special_values"

    class Made(Altered):
        def alter(self, target, args, result):
            return result.nan_to_num() if target is aten.exp.default else result


class LosesScatteredValues(Correct):
    breaks = "test_views"

    class Made(Altered):
        def alter(self, target, args, result):
            return args[0] if target is aten.slice_scatter.default else result


class RoundsTanh(Correct):
    breaks = "test_operator"

    class Made(Altered):
        def alter(self, target, args, result):
            return result.half().float() if target is aten.tanh.default else result


class RoundsMatrixProducts(Correct):
    breaks = "test_model"

    class Made(Altered):
        def alter(self, target, args, result):
            return result.bfloat16().float() if target is aten.addmm.default else result


# What it saves.


class SavesText(Correct):
    breaks = "test_saves_bytes_by_name"

    def save(self, executable: Runner) -> Any:
        return {"graph": json.dumps(to_plain(executable.graph))}


class SavesWeights(Correct):
    breaks = "test_saves_no_weights"

    class Made(Runner):
        def run(self, inputs):
            self.weights = [tensor.numpy().tobytes() for tensor in inputs]
            return super().run(inputs)

    def save(self, executable: Any) -> Mapping[str, bytes]:
        return {**super().save(executable), "weights": b"".join(executable.weights)}


class SavesPaths(Correct):
    breaks = "test_saves_no_paths"

    def save(self, executable: Runner) -> Mapping[str, bytes]:
        return {**super().save(executable), "origin": str(Path.cwd()).encode()}


class DistrustsItself(Correct):
    breaks = "test_can_use_what_it_saved"

    def check(self, payload: Mapping[str, bytes]) -> Verdict:
        return Verdict("refused", "made on another machine")


class UsesAnything(Correct):
    breaks = "test_refuses_what_it_did_not_save"

    def check(self, payload: Mapping[str, bytes]) -> Verdict:
        return Verdict("usable")


class Unpickles(Correct):
    breaks = "test_executes_nothing_to_check"

    def check(self, payload: Mapping[str, bytes]) -> Verdict:
        for part in payload.values():
            pickle.loads(part)
        return Verdict("usable")


class LoadsSomethingElse(Correct):
    breaks = "test_loads_what_it_saved"

    def load(self, payload: Mapping[str, bytes], request: CompileRequest) -> Runner:
        return Reverses.Made(super().load(payload, request).graph)


class CompilesToLoad(Correct):
    breaks = "test_loads_without_compiling"

    def load(self, payload: Mapping[str, bytes], request: CompileRequest) -> Runner:
        return self.compile(request)


def subclasses(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


CORRECT = [Correct, Modest, CorrectInParts]
WRONG = [kind for kind in subclasses(Modest) if kind not in CORRECT]
