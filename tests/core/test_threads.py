"""Threads: they share a compiled object, wait for one another, and disturb nobody."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import torchbay

_PATIENCE = 60


def in_threads(count, work):
    """Run ``work(index)`` in that many threads that start together, and return the results."""
    start = threading.Barrier(count, timeout=_PATIENCE)

    def run(index):
        torch.set_grad_enabled(False)
        start.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return [
            future.result(timeout=_PATIENCE)
            for future in [pool.submit(run, i) for i in range(count)]
        ]


def test_serves_eight_threads_on_the_first_call(recording):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    compiled = torchbay.compile(module, backend=recording)
    inputs = [torch.randn(2, 3) for _ in range(8)]
    found = in_threads(8, lambda i: [compiled(inputs[i]) for _ in range(5)])
    for i, results in enumerate(found):
        assert all(torch.equal(result, module(inputs[i])) for result in results)
    assert len(torchbay.explain(compiled).specializations) == 1
    assert len(recording.requests) == 1


def test_serves_threads_with_other_shapes(recording):
    """https://github.com/pytorch/pytorch/pull/189884"""
    compiled = torchbay.compile(
        lambda x: x * 2 + 1, backend=recording, dynamic=False, recompile_limit=20
    )
    found = in_threads(8, lambda i: [compiled(torch.ones(i + 1)) for _ in range(4)])
    assert all(
        torch.equal(r, torch.full((i + 1,), 3.0))
        for i, results in enumerate(found)
        for r in results
    )
    assert len(torchbay.explain(compiled).specializations) == 8
    assert torch.equal(
        torchbay.compile(torch.neg, backend=recording)(torch.ones(1)), -torch.ones(1)
    )


def test_serves_threads_with_objects_of_their_own(recording):
    def work(index):
        module = nn.Linear(3, 3)
        compiled = torchbay.compile(module, backend=recording)
        return all(torch.equal(compiled(torch.ones(3)), module(torch.ones(3))) for _ in range(4))

    assert all(in_threads(8, work))


def test_counts_branches_once_in_threads(recording):
    compiled = torchbay.compile(lambda x: x * 2 if x.sum() > 0 else x * 3, backend=recording)
    found = in_threads(8, lambda i: [compiled(torch.ones(1) * (-1) ** k).item() for k in range(6)])
    assert all(results == [2, -3] * 3 for results in found)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_waits_for_another_thread_that_compiles(recording):
    barrier = threading.Barrier(2, timeout=_PATIENCE)
    other = torchbay.compile(lambda x: x + 1, backend=recording)

    def waits(x):
        if not met.is_set():
            barrier.wait()
            done.wait(_PATIENCE)
        return x * 2

    met, done = threading.Event(), threading.Event()
    compiled = torchbay.compile(waits, backend=recording)

    def work(index):
        if index == 0:
            return compiled(torch.ones(1)).item()
        barrier.wait()
        met.set()
        found = other(torch.ones(1)).item()
        done.set()
        return found

    assert in_threads(2, work) == [2, 2]


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_waits_for_a_thread_the_call_itself_started(recording):
    inner = torchbay.compile(lambda x: x + 1, backend=recording)

    def call(x):
        results = []
        thread = threading.Thread(target=lambda: results.append(inner(torch.ones(1))))
        thread.start()
        thread.join(_PATIENCE)
        return x * 2, len(results)

    compiled = torchbay.compile(call, backend=recording)
    found = in_threads(1, lambda _: compiled(torch.ones(1)))[0]
    assert found[0].item() == 2
    assert found[1] == 1


def test_shows_no_fake_tensor_to_another_thread(recording):
    module, stop, seen = nn.Linear(3, 3), threading.Event(), []

    def watch(_):
        while not stop.is_set():
            seen.append((type(module.weight), type(module(torch.ones(3)))))

    def work(index):
        if index == 0:
            return watch(index)
        try:
            for size in range(1, 6):
                compiled(torch.ones(size, 3))
        finally:
            stop.set()

    compiled = torchbay.compile(module, backend=recording, dynamic=False)
    in_threads(2, work)
    assert set(seen) <= {(nn.Parameter, torch.Tensor)}
    assert len(torchbay.explain(compiled).specializations) == 5


def test_keeps_the_modes_of_each_thread(recording):
    module = nn.Linear(3, 3)
    compiled = torchbay.compile(module, backend=recording)

    def work(index):
        with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 1):
            return [compiled(torch.ones(3)).dtype for _ in range(4)]

    for index, dtypes in enumerate(in_threads(4, work)):
        assert set(dtypes) == {torch.bfloat16 if index % 2 else torch.float32}


def test_resets_while_others_call(recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)

    def work(index):
        for _ in range(20):
            if index == 0:
                torchbay.reset()
            assert compiled(torch.ones(1)).item() == 2
        return True

    assert all(in_threads(3, work))


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_leaves_no_flag_behind_where_a_backend_sets_it_too(recording):
    observing, building, observed = threading.Event(), threading.Event(), threading.Event()

    class Flagging(type(recording)):
        def compile(self, request):
            before = torch.compiler._is_compiling_flag
            torch.compiler._is_compiling_flag = True
            building.set()
            assert observed.wait(10)
            time.sleep(0.2)  # until the other thread has stopped observing
            torch.compiler._is_compiling_flag = before
            return super().compile(request)

    def waits(x):
        observing.set()
        assert building.wait(10)
        observed.set()
        return x + 1

    def call_waiting():
        with torch.no_grad():
            torchbay.compile(waits, backend=recording)(torch.ones(2))

    thread = threading.Thread(target=call_waiting)
    thread.start()
    assert observing.wait(10)
    torchbay.compile(lambda x: x * 2, backend=Flagging())(torch.ones(2))
    thread.join()
    assert not torch.compiler.is_compiling()


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_leaves_no_flag_behind_that_another_thread_raised_meanwhile(recording):
    def call(x):
        torch.compiler._is_compiling_flag = False  # the other thread's trace ends
        return x + 1

    torch.compiler._is_compiling_flag = True  # and was on its way when the call began
    try:
        torchbay.compile(call, backend=recording)(torch.ones(2))
        assert not torch.compiler.is_compiling()
    finally:
        torch.compiler._is_compiling_flag = False
