"""`torchbay.explain` draws the branches on data, and holds guards as data."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import pytest
import torch
from torch import nn

import torchbay

UP, DOWN = torch.ones(2), -torch.ones(2)


def branch(x, k=2):
    y = x * k
    if y.sum() > 0:
        return y + 1
    return y - 1


def nested(x):
    if x.sum() > 0:
        if x.max() > 5:
            return x * 3
        return x + 2 + x
    return x - int(x.min())


def plain(x, k=2):
    return x * k


def compiled_for(function, backend, *calls):
    compiled = torchbay.compile(function, backend=backend)
    for call in calls:
        compiled(*call)
    return compiled


def line_of(function, offset):
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


@pytest.fixture
def explanation(recording):
    calls = [(UP,), (DOWN,), (UP * 9,), (UP,), (UP,), (UP * 9,)]
    return torchbay.explain(compiled_for(nested, recording, *calls))


def test_groups_leaves_by_guards(recording):
    compiled = compiled_for(branch, recording, (UP,), (DOWN,), (UP, 3), (UP, 3), (DOWN,))
    explanation = torchbay.explain(compiled)
    first, second = explanation.trees
    assert [len(first.leaves), len(second.leaves)] == [2, 1]
    assert (first.calls, second.calls) == (1, 1)
    assert [leaf.calls for leaf in first.leaves] == [0, 1]
    assert explanation.specializations == (*first.leaves, *second.leaves)


def test_lists_leaves_in_the_order_of_the_specializations(explanation):
    (tree,) = explanation.trees
    assert tree.leaves == explanation.specializations
    assert [leaf.calls for leaf in tree.leaves] == [2, 0, 1]


def test_shows_what_a_fork_reads_where_and_what_it_costs(explanation):
    (tree,) = explanation.trees
    assert tree.root.reads.startswith("item(gt")
    assert tree.root.where == line_of(nested, 1)
    assert tree.root.operators == 2
    assert tree.root.backend == "recording"
    assert [outcome for outcome, _ in tree.root.branches] == ["True", "False"]
    inner = dict(tree.root.branches)["True"]
    assert inner.where == line_of(nested, 2)
    assert [outcome for outcome, _ in inner.branches] == ["False", "True"]
    assert dict(inner.branches)["False"] is tree.leaves[0]
    assert tree.leaves[0].operators == 2
    assert tree.leaves[2].operators == 1


def test_draws_the_tree(explanation):
    drawn = str(explanation.trees[0]).splitlines()
    first = next(i for i, line in enumerate(drawn) if "item(gt" in line)
    rows = drawn[first : first + 7]
    assert line_of(nested, 1) in rows[0]
    assert "2 operators by recording" in rows[0]
    assert rows[1].startswith("├─ True: item(gt")
    assert line_of(nested, 2) in rows[1]
    assert rows[2].startswith(
        "│  ├─ False: specialization 0, served 2 calls, 2 operators, compiled in "
    )
    assert rows[3].startswith(
        "│  └─ True: specialization 2, served 1 call, 1 operator, compiled in "
    )
    assert rows[4].startswith("└─ False: ")
    assert line_of(nested, 5) in rows[4]
    assert rows[5].startswith("   └─ ")


def test_draws_every_tree_of_an_explanation(recording):
    compiled = compiled_for(branch, recording, (UP,), (DOWN,), (UP, 3), (DOWN, 3))
    text = str(torchbay.explain(compiled))
    assert text.count("├─ True: ") == 2
    assert text.count("└─ False: ") == 2
    for number in range(4):
        assert f"specialization {number}, served" in text
        assert f"specialization {number}: " in text


def test_draws_no_tree_without_a_branch(recording):
    compiled = compiled_for(plain, recording, (UP,), (UP, 3))
    text = str(torchbay.explain(compiled))
    assert "─" not in text
    assert "specialization 0: compiled by recording in " in text
    assert "specialization 1: compiled by recording in " in text


@pytest.fixture
def reports(recording):
    compiled = compiled_for(plain, recording, (UP,), (UP, 3))
    yield torchbay.explain(compiled).specializations
    assert torchbay.explain(compiled).calls == {"graph": 0, "eager": 2}


def guard(report, path):
    (found,) = [guard for guard in report.guard_list if guard.path == path]
    return found


def test_holds_guards_as_data(reports):
    number, tensor = guard(reports[0], "k"), guard(reports[0], "x")
    assert (number.kind, number.expected) == ("value", "3")
    assert "args[1] == 3" in number.source
    assert number.source in reports[0].guards
    assert tensor.kind == "tensor"
    assert "float32[2]" in tensor.expected
    assert "float32[2]" in tensor.source
    assert str(number) == "k: 3"


def test_describes_every_guard(reports, recording, monkeypatch):
    monkeypatch.setenv("SWITCH", "on")
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    compiled = compiled_for(module, recording, (torch.ones(3, 2),))
    (report,) = torchbay.explain(compiled).specializations
    for found in (*report.guard_list, *reports[0].guard_list):
        assert found.kind
        assert found.path
        assert found.expected
        assert found.source


def test_dumps_a_report_as_json(reports, explanation):
    for report in (*reports, *explanation.specializations):
        dumped = report.as_dict()
        assert json.loads(json.dumps(dumped)) == dumped
        assert dumped["calls"] == report.calls
        assert len(dumped["guard_list"]) == len(report.guard_list)
    assert {"kind", "path", "expected", "source"} == reports[0].as_dict()["guard_list"][0].keys()


def test_tells_how_guards_differ(reports):
    second, first = reports
    assert first.guard_differences(second) == [
        "the call: 1 positional arguments here, 2 positional arguments there",
        "k: not guarded here, 3 there",
    ]
    assert first.guard_differences(first) == []


def test_tells_which_guards_another_does_not_have(recording):
    def call(x, items):
        return x * len(items) if isinstance(items, list) else x

    compiled = compiled_for(call, recording, (UP, None), (UP, [1, 2]))
    second, first = torchbay.explain(compiled).specializations
    forth, back = second.guard_differences(first), first.guard_differences(second)
    assert "items[0]: 1 here, not guarded there" in forth
    assert "items[0]: not guarded here, 1 there" in back
    assert len(forth) == len(back)


def test_evaluates_guards_again(reports):
    second, first = reports
    assert first.mismatches(UP) == []
    assert first.mismatches(UP, 3) != []
    assert second.mismatches(UP, 3) == []
    assert second.mismatches(UP, 4) == ["k: compiled for 3, seen 4"]
    found = second.mismatches(torch.ones(3), k=3)
    assert found
    assert all(found)


def test_evaluates_guards_of_the_ambient_state(reports):
    second, _ = reports
    with torch.enable_grad():
        (reason,) = second.mismatches(UP, 3)
    assert "grad mode" in reason


def test_evaluates_guards_of_methods(recording):
    class Layer:
        def __init__(self):
            self.scale = 3

        @torchbay.compile(backend=recording)
        def apply(self, x):
            return x * self.scale

    layer = Layer()
    layer.apply(UP)
    (report,) = torchbay.explain(layer.apply).specializations
    assert report.mismatches(UP) == []
    layer.scale = 4
    (reason,) = report.mismatches(UP)
    assert "scale" in reason


def test_says_that_a_specialization_was_dropped(recording):
    compiled = compiled_for(plain, recording, (UP,))
    (report,) = torchbay.explain(compiled).specializations
    torchbay.reset()
    gc.collect()
    (reason,) = report.mismatches(UP)
    assert "dropped" in reason
    assert guard(report, "x").kind == "tensor"


def test_keeps_nothing_alive(recording):
    module = nn.Linear(2, 2)
    weight, owner = weakref.ref(module.weight), weakref.ref(module)
    compiled = compiled_for(lambda m, x: m(x), recording, (module, UP), (module, UP))
    explanation = torchbay.explain(compiled)
    assert explanation.specializations
    del module
    gc.collect()
    assert owner() is None
    assert weight() is None
    assert "dropped" in explanation.specializations[0].mismatches(None, UP)[0]


def test_names_the_fork_where_a_call_left_the_tree(recording):
    compiled = compiled_for(nested, recording, (UP,), (DOWN,), (UP * 9,))
    first, second = torchbay.explain(compiled).recompiles
    assert len(first) == len(second) == 1
    assert "went another way than item(gt" in first[0]
    assert f"== True at {line_of(nested, 1)}: seen False" in first[0]
    assert f"== False at {line_of(nested, 2)}: seen True" in second[0]
    assert line_of(nested, 1) not in second[0]


def test_names_every_outcome_that_is_compiled(recording):
    def call(x, n):
        return x + list(range(int(n)))[-1]

    calls = [(UP, torch.tensor(n)) for n in (1, 2, 4)]
    reasons = torchbay.explain(compiled_for(call, recording, *calls)).recompiles
    assert "seen 4" in reasons[-1][0]
    assert "1 or 2" in reasons[-1][0]


def test_names_no_outcome_of_an_earlier_call_for_a_warmup(recording):
    compiled = compiled_for(branch, recording, (UP,))
    compiled.warmup(DOWN)
    (reasons,) = torchbay.explain(compiled).recompiles
    assert "branch on data" in reasons[0]
    assert "seen" not in reasons[0]


def test_gives_a_reason_for_one_tensor_passed_twice(recording):
    compiled = compiled_for(lambda x, y: x + y, recording, (UP, DOWN), (UP, UP))
    (reasons,) = torchbay.explain(compiled).recompiles
    assert reasons == ("y: compiled for a tensor of its own, seen the same tensor as x",)


def test_gives_a_reason_for_state_that_torch_alone_names(recording):
    compiled = compiled_for(plain, recording, (UP,))
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    try:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not before
        compiled(UP)
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before
    for reasons in torchbay.explain(compiled).recompiles:
        assert all(reasons)
        assert "ambient state" in reasons[0]


def test_gives_a_reason_to_each_of_many_threads(recording):
    compiled = torchbay.compile(lambda x, k: x * len(k), backend=recording)
    start = threading.Barrier(4)

    def run(k):
        start.wait()
        with torch.no_grad():
            compiled(UP, k)

    threads = [threading.Thread(target=run, args=(k,)) for k in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recompiles = torchbay.explain(compiled).recompiles
    assert len(recompiles) == 3
    assert all(reasons and all(reasons) for reasons in recompiles)
