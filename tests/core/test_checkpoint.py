"""Checkpoints inside a compiled function: eager's gradients, and the memory that they are for."""

from __future__ import annotations

import collections
import functools
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointFunction,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import torchbay
from torchbay.plugin import Capabilities

WIDTH, BATCH, DEPTH = 16, 64, 3


def block(dropout):
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())


class Blocks(nn.Module):
    """Blocks in a row, each in a checkpoint."""

    def __init__(self, dropout=0.0, depth=DEPTH, **options):
        super().__init__()
        self.blocks = nn.ModuleList(block(dropout) for _ in range(depth))
        self.options = options

    def forward(self, x):
        for each in self.blocks:
            x = checkpoint(each, x, **self.options)
        return x


class Plain(Blocks):
    """The same without checkpoints."""

    def forward(self, x):
        for each in self.blocks:
            x = each(x)
        return x


class Residual(Blocks):
    """Blocks around which their inputs go as well."""

    def forward(self, x):
        for each in self.blocks:
            x = x + checkpoint(each, x, **self.options)
        return x


class Nested(Blocks):
    """Checkpoints in a checkpoint."""

    def forward(self, x):
        return checkpoint(super().forward, x, **self.options).sin()


class InTurn(Blocks):
    """Segments of a Sequential."""

    def forward(self, x):
        return checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, **self.options)


class UsedTwice(Blocks):
    """A checkpoint whose input is used twice, inside and outside, and returned as it is."""

    def inside(self, x):
        return x, self.blocks[0](x) * x + x

    def forward(self, x):
        x = x.sin()
        same, other = checkpoint(self.inside, x, **self.options)
        return same * other + x * x


class Keywords(Blocks):
    """Named arguments, called what the core calls its own, and a dict for a result."""

    def inside(self, *, original, context):
        return {"result": self.blocks[0](original) * context}

    def forward(self, x):
        return checkpoint(self.inside, original=x, context=x.sin(), **self.options)["result"]


class Branching(Blocks):
    """A branch on data, a tensor made in place and a constant, inside."""

    def inside(self, x):
        y = self.blocks[0](x)
        if x.sum() > -1e9:
            y = y.clone().mul_(torch.tensor([2.0]))
        return y.sin()

    def forward(self, x):
        return checkpoint(self.inside, x, **self.options)


class Switched(Blocks):
    """A checkpoint while gradients are off, and one whose input needs none."""

    def forward(self, x):
        with torch.no_grad():
            factor = checkpoint(self.blocks[0], x, **self.options)
        return self.blocks[2](checkpoint(self.blocks[1], x.detach(), **self.options)) * factor


CASES = {
    "plain": (Blocks, {}),
    "dropout": (Blocks, {"dropout": 0.3}),
    "residual": (Residual, {"dropout": 0.3}),
    "nested": (Nested, {"dropout": 0.3}),
    "sequential": (InTurn, {"dropout": 0.3}),
    "used twice": (UsedTwice, {}),
    "branch on data": (Branching, {}),
    "without gradients": (Switched, {}),
    "random state not preserved": (Blocks, {"preserve_rng_state": False}),
}
RUNS = [(name, reentrant) for name in CASES for reentrant in (False, True)]


def made(name, *, reentrant):
    kind, options = CASES[name]
    torch.manual_seed(0)
    return kind(use_reentrant=reentrant, **options)


def trained(function, model, x, calls=3):
    """Return losses, gradients and buffers of some calls, and what is drawn next."""
    torch.manual_seed(1)
    found = []
    for _ in range(calls):
        x = x.detach().clone().requires_grad_()
        model.zero_grad()
        loss = function(x)
        if loss.dim():
            loss = loss.square().sum()
        if loss.requires_grad:
            loss.backward()
        gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
        found += [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]
    return [*found, torch.rand(2)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


@pytest.fixture(autouse=True)
def gradients():
    with torch.enable_grad():
        yield


@pytest.fixture
def training(recording):
    """Keeps requests, and claims training."""
    recording.capabilities = Capabilities(training=True, eager_random=True, dynamic_shapes=True)
    return recording


def compiled_and_trained(model, x, **options):
    compiled = torchbay.compile(model, backend="eager", **options)
    trained(compiled, model, x)
    return compiled


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(("name", "reentrant"), RUNS)
def test_gives_the_gradients_of_eager(name, reentrant):
    model, x = made(name, reentrant=reentrant), torch.randn(BATCH, WIDTH)
    expected = trained(model, model, x)
    compiled = torchbay.compile(model, backend="eager")
    assert_equal(trained(compiled, model, x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}


@pytest.mark.parametrize("mode", ["default", "min_cut"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_serves_either_partitioner(mode, dropout):
    model, x = Residual(dropout, use_reentrant=False), torch.randn(BATCH, WIDTH)
    expected = trained(model, model, x)
    compiled = torchbay.compile(model, backend="eager", partitioner=mode)
    assert_equal(trained(compiled, model, x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_passes_named_arguments_on():
    model, x = Keywords(use_reentrant=False), torch.randn(BATCH, WIDTH)
    expected = trained(model, model, x)
    compiled = torchbay.compile(model, backend="eager")
    assert_equal(trained(compiled, model, x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(("name", "reentrant"), [run for run in RUNS if run[0] in list(CASES)[:5]])
def test_serves_steps_with_backward_inside(name, reentrant):
    model, x = made(name, reentrant=reentrant), torch.randn(BATCH, WIDTH)

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    expected = trained(step, model, x)
    compiled = torchbay.compile(step, backend="eager")
    assert_equal(trained(compiled, model, x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}


def saved_bytes(model, x, **options):
    report = torchbay.explain(compiled_and_trained(model, x, **options))
    return report.specializations[0].saved_bytes


@pytest.mark.parametrize("mode", ["default", "min_cut"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [Blocks, Residual])
def test_keeps_what_goes_from_checkpoint_to_checkpoint(kind, reentrant, mode):
    x, options = torch.randn(BATCH, WIDTH), {"partitioner": mode}
    found = saved_bytes(kind(use_reentrant=reentrant), x, **options)
    assert found == (DEPTH - 1) * x.nbytes
    assert 6 * found < saved_bytes(Plain(), x, **options)


def test_keeps_nothing_inside_of_nested_checkpoints():
    x = torch.randn(BATCH, WIDTH)
    assert saved_bytes(Nested(use_reentrant=False), x) == 0


def test_keeps_besides_what_was_drawn():
    x = torch.randn(BATCH, WIDTH)
    drawn = DEPTH * 4 * x.nbytes
    assert saved_bytes(Blocks(0.3, use_reentrant=False), x) == (DEPTH - 1) * x.nbytes + drawn


def most_alive(graph):
    """Return how many bytes of results are alive at once while a graph runs."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    ends = collections.Counter()
    alive = most = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and not is_view(node):
            alive += value.nbytes
            ends[max((order[user] for user in users(node)), default=order[node])] += value.nbytes
        most = max(most, alive)
        alive -= ends[order[node]]
    return most


def is_view(node):
    return getattr(node.target, "is_view", False)


def users(node):
    for user in node.users:
        yield user
        if is_view(user):
            yield from users(user)


@pytest.mark.parametrize("reentrant", [False, True])
def test_holds_one_checkpoint_at_a_time_in_its_backward(reentrant, training):
    x, most = torch.randn(BATCH, WIDTH), []
    for depth in (2, 4):
        model = Residual(depth=depth, use_reentrant=reentrant)
        trained(torchbay.compile(model, backend=training), model, x, calls=2)
        backward = [r for r in training.requests if r.side == "backward"][-1]
        most.append(most_alive(backward.graph.graph))
    gradients = sum(parameter.nbytes for parameter in model.parameters()) // 2
    assert most[1] - most[0] <= gradients < most[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_holds_one_checkpoint_at_a_time_in_a_step(reentrant, training):
    most = []
    for kind in (Residual, Plain):
        model = kind(use_reentrant=reentrant)

        def step(x, model=model):
            model(x).square().sum().backward()

        compiled = torchbay.compile(step, backend=training)
        for _ in range(2):
            model.zero_grad()
            compiled(torch.randn(BATCH, WIDTH, requires_grad=True))
        assert served(compiled)["graph"] == 1
        most.append(most_alive(training.requests[-1].graph.graph))
    assert most[0] < 0.75 * most[1]


class Normed(Blocks):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return checkpoint(self.norm, self.blocks[0](x), **self.options)


class Counting(Blocks):
    calls = 0

    def inside(self, x):
        self.calls += 1
        return self.blocks[0](x)

    def forward(self, x):
        return checkpoint(self.inside, x, **self.options)


class Selective(Blocks):
    def forward(self, x):
        context = functools.partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(self.blocks[0], x, context_fn=context, **self.options)


def keep_products(context, operator, *args, **kwargs):
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class PartlyDetached(Blocks):
    def inside(self, x):
        y = self.blocks[0](x)
        return y, y.detach().sin()

    def forward(self, x):
        first, second = checkpoint(self.inside, x, **self.options)
        return first * second


class InAList(PartlyDetached):
    def inside(self, x):
        return self.blocks[0](x), [x.sin()]

    def forward(self, x):
        first, (second,) = checkpoint(self.inside, x, **self.options)
        return first * second


REFUSED = {
    "statistics": (Normed, {}, "changes a tensor inside a checkpoint that was made outside"),
    "Python state": (Counting, {}, "a checkpoint changes Python state: self.calls"),
    "contexts": (Selective, {}, "a checkpoint with a context_fn"),
    "random state": (
        Blocks,
        {"dropout": 0.3, "preserve_rng_state": False},
        "whose generator it does not preserve",
    ),
    "gradient flags": (PartlyDetached, {"use_reentrant": True}, "what its gradients do not reach"),
    "a list": (InAList, {"use_reentrant": True}, "what its gradients do not reach"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_leaves_to_eager_what_a_second_run_does_otherwise(name):
    kind, options, reason = REFUSED[name]
    torch.manual_seed(0)
    model, x = kind(**{"use_reentrant": False, **options}), torch.randn(BATCH, WIDTH)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = trained(model, model, x)
    model.load_state_dict(state)
    compiled = torchbay.compile(model, backend="eager")
    with pytest.warns(torchbay.errors.TorchbayWarning, match=reason):
        found = trained(compiled, model, x)
    assert_equal(found, expected)
    assert served(compiled) == {"graph": 0, "eager": 3}


def test_raises_what_the_function_raises():
    def failing(x):
        raise KeyError("inside")

    compiled = torchbay.compile(
        lambda x: checkpoint(failing, x, use_reentrant=False), backend="eager"
    )
    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            compiled(torch.ones(2, requires_grad=True))


def recomputes(*, reentrant):
    """Return how often a checkpoint runs its function in forward and backward."""
    calls = []

    def counted(x):
        calls.append(1)
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    checkpoint(counted, x, use_reentrant=reentrant).sum().backward()
    return len(calls)


@pytest.mark.parametrize("reentrant", [False, True])
def test_leaves_checkpoints_of_other_threads_alone(reentrant):
    model, found = Blocks(use_reentrant=False), []

    class Elsewhere(torch.autograd.Function):
        """Runs a checkpoint in another thread, whenever it is run."""

        @staticmethod
        def forward(ctx, x):
            thread = threading.Thread(target=lambda: found.append(recomputes(reentrant=reentrant)))
            thread.start()
            thread.join()
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    compiled = torchbay.compile(lambda x: model(Elsewhere.apply(x)).sum(), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchbay.errors.TorchbayWarning)
        compiled(torch.randn(BATCH, WIDTH))
    assert len(found) > 1
    assert set(found) == {2}


@pytest.mark.parametrize("kind", [Blocks, Selective])
def test_puts_checkpoints_back(kind):
    model, x = kind(use_reentrant=False), torch.randn(BATCH, WIDTH)
    before = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchbay.errors.TorchbayWarning)
        compiled_and_trained(model, x)
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is before
    assert "apply" not in vars(CheckpointFunction)
    assert recomputes(reentrant=False) == recomputes(reentrant=True) == 2


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_serves_a_transformer_that_checkpoints(reentrant):
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=97)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 97, (2, 12))
    torchbay_loss = torchbay.compile(
        lambda: model(ids, labels=ids, use_cache=False).loss, backend="eager"
    )
    without = saved(model, torchbay_loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = losses(model, lambda: model(ids, labels=ids, use_cache=False).loss)
    compiled = torchbay.compile(
        lambda: model(ids, labels=ids, use_cache=False).loss, backend="eager"
    )
    assert_equal(losses(model, compiled), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}
    assert torchbay.explain(compiled).specializations[0].saved_bytes < 0.6 * without


def losses(model, function):
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = function()
        loss.backward()
        found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    return [*found, torch.rand(2)]


def saved(model, compiled):
    losses(model, compiled)
    return torchbay.explain(compiled).specializations[0].saved_bytes


@pytest.mark.slow
def test_gives_right_gradients_through_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = Residual(use_reentrant=False), torch.randn(BATCH, WIDTH)
    expected = trained(model, model, x, calls=2)
    compiled = torchbay.compile(model, backend="inductor_triton")
    for one, other in zip(trained(compiled, model, x, calls=2), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert served(compiled) == {"graph": 1, "eager": 1}
    report = torchbay.explain(compiled).specializations[0]
    assert report.saved_bytes == (DEPTH - 1) * x.nbytes


@pytest.mark.parametrize("mode", ["default", "min_cut"])
def test_serves_either_partitioner_without_checkpoints(mode):
    model, x = Plain(0.3), torch.randn(BATCH, WIDTH)
    expected = trained(model, model, x)
    compiled = torchbay.compile(model, backend="eager", partitioner=mode)
    assert_equal(trained(compiled, model, x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_keeps_more_with_the_default_partitioner():
    x = torch.randn(BATCH, WIDTH)
    least = saved_bytes(Plain(), x, partitioner="min_cut")
    assert saved_bytes(Plain(), x, partitioner="default") >= least > 0


def test_leaves_annotations_of_nodes_alone():
    model = Blocks(use_reentrant=False)

    def annotated(x):
        with torch.fx.traceback.annotate({"name": "inside"}):
            x = model(x)
        return x.sin()

    x = torch.randn(BATCH, WIDTH)
    expected = trained(annotated, model, x)
    compiled = torchbay.compile(annotated, backend="eager")
    assert_equal(trained(compiled, model, x), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}
