"""Each claim of a backend: right where it is made, refused or adapted where it is not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch.nn import functional

import torchbay
from torchbay.errors import NotServed, TorchbayError
from torchbay.plugin import CompileRequest, Executable, StridedExecutable
from torchbay.testing import tolerance
from torchbay.testing._contract import assert_right, step, step_inputs
from torchbay.testing._groups import quietly
from torchbay.testing._subject import Subject
from torchbay.testing._torch_compat import dynamic_request, static_request
from torchbay.testing._watched import generator_states

__all__ = ["ClaimTests"]

aten = torch.ops.aten
COMPOSITES = {
    aten.scaled_dot_product_attention.default,
    aten.layer_norm.default,
    aten.group_norm.default,
}


def composites(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call each operator that can be handed over whole."""
    heads = x.unsqueeze(1)
    attention = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    normal = functional.layer_norm(x, (8,), weight, weight)
    return attention, normal, functional.group_norm(x.transpose(1, 2), 2, weight, weight)


def sized(x: torch.Tensor, size: Any) -> tuple[torch.Tensor, ...]:
    """Use a size in every way that code can go wrong with it."""
    total = (x * x).sum()
    return x.relu() + 1, x.reshape(size * 4), torch.cat([x, x]) * size, total / size


def noise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draw in several ways."""
    return torch.rand_like(x), functional.dropout(x, 0.5), torch.randn_like(x)


def branch(
    goes_left: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Choose by a tensor; one way uses another tensor from around it."""
    return (torch.cond(goes_left, lambda x: (x * weight).sin(), lambda x: x.cos(), (x,)),)


def forward_half(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute a layer, and what its gradient needs."""
    y = torch.tanh(x @ weight)
    return y, y * y


def backward_half(
    squared: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of that layer."""
    inner = given * (1 - squared)
    return x.t() @ inner, inner @ weight.t()


class ClaimTests:
    """One test for each field of `Capabilities`."""

    family = "claims"

    def test_claims_the_device_it_is_tested_on(self, subject: Subject) -> None:
        """Claims the device of this run, and none by another name than PyTorch's.

        `Capabilities.devices`: "Types of device it compiles for, as in ``torch.device(...).type``."
        """
        assert subject.device.type in subject.claims.devices
        assert all(torch.device(name).type == name for name in subject.claims.devices)

    def test_claims_dtypes(self, subject: Subject) -> None:
        """Names element types, and is given no others.

        `Capabilities.dtypes`: "Element types it takes, or None for all of them."
        """
        claimed = subject.claims.dtypes
        assert claimed is None or all(isinstance(kind, torch.dtype) for kind in claimed)
        unclaimed = {torch.float64, torch.int16, torch.complex64} - set(claimed or ())
        for kind in unclaimed if claimed is not None else ():
            x = torch.ones(3, dtype=kind, device=subject.device)
            with pytest.raises(TorchbayError):
                subject.compile(lambda x: x + x)(x)

    def test_asks_for_decompositions_it_can_have(self, subject: Subject) -> None:
        """Names operators to rewrite, each with the function that does it.

        `Capabilities.decompositions`: "returns the operators to rewrite into simpler ones first."
        """
        if subject.claims.decompositions is None:
            pytest.skip("it takes graphs as traced")
        table = subject.claims.decompositions()
        assert isinstance(table, Mapping)
        assert all(callable(part) for pair in table.items() for part in pair)

    def test_keeps_composites_it_knows(self, subject: Subject) -> None:
        """Asks for known composite operators only, and computes them whole or in parts.

        `Capabilities.keep`: "Composite operators to hand over whole, among"
        """
        assert set(subject.claims.keep) <= COMPOSITES
        x, weight = subject.randn(2, 6, 8), subject.randn(8, seed=1)
        compiled = subject.compile(composites)
        compiled.warmup(x, weight)
        assert_right(compiled(x, weight), x, weight, function=composites)

    def test_takes_symbolic_sizes(self, subject: Subject) -> None:
        """Computes with other sizes than it was built for; without the claim, it is built anew.

        `Capabilities.dynamic_shapes`: "Takes graphs with symbolic sizes"
        """
        tensors = [subject.randn(size, 4, seed=size) for size in (6, 3, 9)]
        if subject.claims.dynamic_shapes:
            run = _built_with_symbolic_size(subject, tensors[0]).run
        else:
            with pytest.raises(TorchbayError):
                subject.compile(torch.relu, dynamic=True)(tensors[0])
            compiled = subject.compile(lambda x: sized(x, x.shape[0]))
            run = lambda inputs: compiled(inputs[0])  # noqa: E731 - the other branch has a method
        with quietly():
            for x in tensors:
                size = x.shape[0]
                assert_right(run([x, size]), x, function=lambda x, size=size: sized(x, size))

    def test_takes_both_halves_of_a_training_step(self, subject: Subject) -> None:
        """Computes gradients; without the claim, the call is served eagerly, with a reason.

        `Capabilities.training`: "Takes the forward and the backward half of a training step."
        `StridedExecutable.output_strides`: "The strides of every output, in elements: those of the
        graph, but for `free_strides`."
        """
        weight, x = subject.randn(4, 5), subject.randn(3, 4, seed=1)
        if subject.claims.training:
            _assert_halves_are_right(subject, weight, x)
        calls = _assert_gradients_are_right(subject, weight, x)
        assert calls["graph"] == int(subject.claims.training)

    def test_writes_what_it_claims_to_write(self, subject: Subject) -> None:
        """Writes the inputs listed, by the claim; without it, the core does.

        `Capabilities.mutation`: "Takes graphs that end in ``aten.copy_`` onto an input listed in"
        `CompileRequest.mutated`: "Positions of inputs the graph writes, with ``aten.copy_`` as its
        last nodes."
        """

        def count(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum(0))
            return total * 2

        total, x = subject.randn(4), subject.randn(3, 4, seed=1)
        compiled = subject.compile(count)
        compiled.warmup(total, x)
        before = total.clone()
        result = compiled(total, x)
        expected = before.double() + x.double().sum(0)
        assert total.double().allclose(expected, atol=1e-4)
        assert result.double().allclose(expected * 2, atol=1e-4)

    def test_takes_branches_on_tensors(self, subject: Subject) -> None:
        """Takes both ways through ``torch.cond``; without the claim, the core keeps it away.

        `Capabilities.control_flow`: "Takes higher-order operators such as ``torch.cond``."
        """
        x, weight = subject.randn(3, 4), subject.randn(4, seed=1)
        ways = [torch.tensor(way, device=subject.device) for way in (True, False)]
        compiled: Any = subject.compile(branch)
        with quietly():
            if not subject.claims.control_flow:
                dtypes = subject.claims.dtypes
                takes_predicates = dtypes is None or torch.bool in dtypes
                with pytest.raises(NotServed, match="cond" if takes_predicates else "torch.bool"):
                    compiled(ways[0], x, weight)
                return
            compiled.warmup(ways[0], x, weight)
            for way, expected in zip(ways, ((x * weight).sin(), x.cos()), strict=True):
                [result] = compiled(way, x, weight)
                assert result.allclose(expected, atol=1e-4)
        assert torchbay.explain(compiled).calls["graph"] == 2

    def test_borrows_weights(self, subject: Subject) -> None:
        """Computes with a weight as it is now, not as it was at an earlier call.

        `Capabilities.external_weights`: "Can build code that borrows its weights from the caller."
        """
        layer = torch.nn.Linear(4, 3).to(subject.device)
        compiled, x = subject.compile(layer), subject.randn(2, 4)
        compiled.warmup(x)
        for _ in range(2):
            layer.weight.mul_(-2)
            weight, bias = layer.weight.double(), layer.bias.double()
            assert compiled(x).double().allclose(x.double() @ weight.t() + bias, atol=1e-4)
        assert torchbay.explain(compiled).calls["graph"] == 2

    def test_draws_what_it_claims_to_draw(self, subject: Subject) -> None:
        """Draws eager's numbers, by the claim; without it, numbers that are random all the same.

        `Capabilities.eager_random`: "Draws from PyTorch's generators exactly as eager execution"
        """
        x = torch.ones(64, 64, device=subject.device)
        compiled = subject.compile(noise)
        with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
            compiled.warmup(x)
            if subject.claims.eager_random:
                _assert_same_stream(subject, compiled, x)
            else:
                _assert_random(compiled(x), compiled(x))

    def test_runs_in_threads_it_claims_to_run_in(self, subject: Subject) -> None:
        """Runs in several threads at once, by the claim; without it, from one thread after another.

        `Capabilities.thread_safe`: "Executables may run in several threads at once."
        """
        request = subject.request(step, *step_inputs(subject))
        executable = subject.build(request)
        batches = [step_inputs(subject, seed) for seed in range(6)]
        if subject.claims.thread_safe:
            results = _in_threads(executable, batches)
        else:
            results = [_in_threads(executable, [batch])[0] for batch in batches]
        for result, inputs in zip(results, batches, strict=True):
            assert_right(result, *inputs)


def _request(
    make: Callable[..., CompileRequest], subject: Subject, function: Any, inputs: Any, **fields: Any
) -> CompileRequest:
    """Return a request as the core would make it, for what it does not make yet."""
    wanted = subject.claims.decompositions
    table = wanted() if wanted is not None else None
    options = subject.backend.options()
    return make(function, inputs, table, device=subject.device, options=options, **fields)


def _built_with_symbolic_size(subject: Subject, tensor: torch.Tensor) -> Executable:
    return subject.build(_request(dynamic_request, subject, sized, tensor))


def _assert_halves_are_right(subject: Subject, weight: torch.Tensor, x: torch.Tensor) -> None:
    given = subject.randn(3, 5, seed=2)
    inputs = (forward_half(weight, x)[1], weight, x, given)
    for function, tensors, side in (
        (forward_half, (weight, x), "forward"),
        (backward_half, inputs, "backward"),
    ):
        request = _request(static_request, subject, function, tensors, side=side)
        # What a forward half returns after its result is for its backward half alone.
        free = frozenset({1} if side == "forward" else ())
        executable = subject.build(attrs.evolve(request, free_strides=free))
        outputs = executable.run(list(tensors))
        assert_right(outputs, *tensors, function=function)
        if isinstance(executable, StridedExecutable):
            _assert_laid_out(outputs, executable.output_strides, request, free)


def _assert_laid_out(
    outputs: Any, strides: Any, request: CompileRequest, free: frozenset[int]
) -> None:
    """Compare strides with what was said of them, and with the graph's unless they are free."""
    assert [tuple(o.stride()) for o in outputs] == [tuple(s) for s in strides]
    nodes: Any = request.graph.graph.output_node().args[0]
    for position, node in enumerate(nodes):
        is_kept = tuple(strides[position]) == tuple(node.meta["val"].stride())
        assert is_kept or position in free


def _assert_gradients_are_right(
    subject: Subject, weight: torch.Tensor, x: torch.Tensor
) -> Mapping[str, int]:
    """Compare gradients with plain PyTorch's; return how the two calls were served."""
    compiled = subject.compile(lambda weight, x: torch.tanh(x @ weight).sum(), fullgraph=False)
    weight.requires_grad_()
    expected = torch.autograd.functional.jacobian(lambda w: torch.tanh(x @ w).sum(), weight)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            [gradient] = torch.autograd.grad(compiled(weight, x), [weight])
            assert gradient.allclose(expected, atol=1e-4)
    return torchbay.explain(compiled).calls


def _assert_same_stream(subject: Subject, compiled: Any, x: torch.Tensor) -> None:
    torch.manual_seed(5)
    expected, after = noise(x), generator_states(subject.device)
    torch.manual_seed(5)
    assert tolerance.complaint(compiled(x), expected, expected) == ""
    assert generator_states(subject.device) == after


def _assert_random(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        assert not one.equal(other)
    uniform, dropped, normal = first
    assert 0 <= uniform.min() < uniform.max() < 1
    assert 0.4 < (dropped == 0).double().mean() < 0.6
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert abs(normal.mean()) < 0.1
    assert 0.9 < normal.std() < 1.1


def _in_threads(executable: Executable, batches: list[list[torch.Tensor]]) -> list[Any]:
    """Run once for each batch, all at the same time, several times over."""
    start = threading.Barrier(len(batches))
    results: dict[int, Any] = {}

    def run(position: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(20):
                results[position] = executable.run(list(batches[position]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(len(batches)))
    return [results[i] for i in range(len(batches))]
