"""Comparing traces: the first divergence in execution order, by name, with its place."""

from __future__ import annotations

import pytest
import torch

from firstlight.adapt.compare import Divergence, compare
from firstlight.adapt.record import Trace
from firstlight.ops.registry import Tolerance
from firstlight.spec.errors import PrecisionError

T, D = 70, 12


def _values(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _trace(**changes):
    outputs = {
        "embed": _values(0, T, D), "layers.2.mixer": _values(1, T, D), "layers.2.ffn.router": torch.arange(2 * T).view(T, 2) % 7,
        "layers.2": _values(2, T, D), "layers.10.mixer": _values(3, T, 3, 4), "head": _values(4, T, D),
    }  # fmt: skip
    return Trace({name: changes.get(name, value.clone()) for name, value in outputs.items()})


def _reference(trace=None, prefix="model."):
    """As another code base would give it: a batch dim, other names, routers without it."""
    trace = trace or _trace()
    outputs = {prefix + name: value if "router" in name else value[None] for name, value in trace.outputs.items()}
    return Trace(outputs, {"ids": torch.zeros(1, T, dtype=torch.int64)})


def _ours(name):
    return name.removeprefix("model.")


def test_equal_traces_agree():
    found = compare(_trace(), _reference(), _ours, 0.0)
    assert (6, ()) == (len(found.compared), found.divergences)
    assert found.first is None
    assert found is found.check(complete=True)
    assert 0.0 == found.worst.max_abs
    assert str(found).startswith("6 of 6 modules agree")


def test_first_divergence_is_first_in_execution_order_not_in_the_file_and_not_the_worst():
    got = _trace()
    got.outputs["layers.2.mixer"][65, 7] += 0.5
    got.outputs["layers.2"][65, 1] -= 1.0
    got.outputs["head"][1, 0] += 100.0
    want = _reference()
    want.outputs = dict(sorted(want.outputs.items()))
    want.ordered = False
    found = compare(got, want, _ours, 1e-3)
    assert ["layers.2.mixer", "layers.2", "head"] == [row.name for row in found.divergences]
    first = found.first
    assert ("layers.2.mixer", "model.layers.2.mixer") == (first.name, first.reference)
    assert (0, 65, 7) == first.position
    assert 65 == first.first_token
    assert 0.5 == pytest.approx(first.max_abs, abs=1e-6)
    assert 0.5 / _values(1, T, D).abs().max().item() == pytest.approx(first.max_rel, rel=1e-5)
    assert ((T, D), (1, T, D)) == (first.got_shape, first.want_shape)
    assert "head" == found.worst.name
    text = str(found)
    assert "first divergence: layers.2.mixer: max abs 5.00e-01" in text
    assert "first at token 65" in text
    with pytest.raises(PrecisionError, match=r"3 of 6 modules diverge, the first is layers\.2\.mixer.*everything up to embed agrees"):
        found.check()


def test_order_of_the_reference_counts_when_ours_has_none():
    got = _trace()
    got.ordered = False
    got.outputs = dict(sorted(got.outputs.items()))
    assert list(_trace().outputs) == [row.name for row in compare(got, _reference(), _ours).compared]


@pytest.mark.parametrize(("error", "agrees"), [(0.9e-3, True), (1.1e-3, False)])
def test_bound_is_relative_above_one_and_absolute_below(error, agrees):
    small, large = _trace(), _trace()
    small.outputs["embed"] = _values(0, T, D) * 0.01
    large.outputs["embed"] = _values(0, T, D) * 50
    for want in (small, large):
        scale = max(1.0, want.outputs["embed"].abs().max().item())
        got = Trace({"embed": want.outputs["embed"].clone()})
        got.outputs["embed"][3, 3] += error * scale
        assert agrees is (compare(got, want, None, 1e-3).first is None)


def test_tolerance_is_read_by_the_coarser_dtype():
    tol = Tolerance(float32=1e-6, bfloat16=2e-2)
    got, want = _trace(), _trace()
    got.outputs["head"] = got.outputs["head"] + 1e-3
    assert "head" == compare(got, want, None, tol).first.name
    want.outputs["head"] = want.outputs["head"].bfloat16()
    assert compare(got, want, None, tol).first is None


@pytest.mark.parametrize("side", ["got", "want", "both"])
def test_nan_is_a_divergence_whoever_has_it(side):
    got, want = _trace(), _trace()
    for trace in [got] * (side != "want") + [want] * (side != "got"):
        trace.outputs["layers.2"][41, 2] = float("nan")
    first = compare(got, want).first
    assert ("layers.2", 41, (41, 2), float("inf")) == (first.name, first.first_token, first.position, first.max_abs)


def test_equal_infinities_agree():
    got, want = _trace(), _trace()
    for trace in (got, want):
        trace.outputs["head"][5, :4] = float("-inf")
    assert compare(got, want, None, 1e-6).check().first is None


def test_expert_ids_are_sets_per_token():
    got = _trace()
    got.outputs["layers.2.ffn.router"] = got.outputs["layers.2.ffn.router"].flip(1)
    assert compare(got, _reference(), _ours, 0.0).first is None
    got.outputs["layers.2.ffn.router"][33, 0] = 99
    got.outputs["layers.2.ffn.router"][34] = torch.tensor([98, 97])
    first = compare(got, _reference(), _ours, 1e9).first
    assert ("layers.2.ffn.router", 33, 2.0, 2 / T) == (first.name, first.first_token, first.max_abs, pytest.approx(first.max_rel))
    assert (34, 0) == first.position
    assert compare(got, _reference(), _ours, 0.0, id_share=0.03).first is None
    assert compare(got, _reference(), _ours, 0.0, id_share=0.02).first is not None


def test_a_repeated_id_is_not_a_hit():
    got = _trace()
    ids = got.outputs["layers.2.ffn.router"]
    ids[8] = ids[8, 0].expand(2).clone()
    assert (8, 1.0) == (compare(got, _trace()).first.first_token, compare(got, _trace()).first.max_abs)


def test_shapes_that_are_views_agree_and_others_are_said():
    got, want = _trace(), _reference()
    want.outputs["model.layers.10.mixer"] = want.outputs["model.layers.10.mixer"].reshape(1, T, D)
    want.outputs["model.layers.2.mixer"] = want.outputs["model.layers.2.mixer"][None]
    assert compare(got, want, _ours, 0.0).first is None
    want.outputs["model.layers.10.mixer"] = want.outputs["model.layers.10.mixer"].view(1, T, 4, 3)
    assert "shape [70, 3, 4] is not [1, 70, 4, 3]" == compare(got, want, _ours).first.reason
    want.outputs["model.layers.10.mixer"] = want.outputs["model.layers.10.mixer"][:, : T - 1]
    assert "shape [70, 3, 4] is not [1, 69, 4, 3]" == compare(got, want, _ours).first.reason
    want.outputs["model.layers.2.ffn.router"] = torch.zeros(T, 8)
    assert "int64 cannot be compared with float32" == compare(got, want, _ours).first.reason


def test_one_token_is_one_row():
    got, want = Trace({"o": _values(0, 1, 3, 4)}), Trace({"o": _values(0, 1, 1, 12)}, {"ids": torch.tensor([[7]])})
    got.outputs["o"][0, 2, 1] += 1
    first = compare(got, want).first
    assert (0, (0, 0, 9)) == (first.first_token, first.position)


def test_missing_modules_are_listed_on_either_side():
    got, want = _trace(), _reference()
    del got.outputs["layers.2"]
    del want.outputs["model.head"]
    want.outputs["model.rotary"] = torch.ones(1)
    found = compare(got, want, lambda name: None if "rotary" in name else _ours(name))
    assert (("head",), ("model.layers.2",), ("model.rotary",)) == (found.only_got, found.only_want, found.unmapped)
    assert "only in the reference (1): model.layers.2" in str(found)
    found.check()
    with pytest.raises(PrecisionError, match=r"1 modules of the reference have no output here: model\.layers\.2"):
        found.check(complete=True)


def test_nothing_in_common_is_no_success():
    with pytest.raises(PrecisionError, match="no module could be compared"):
        compare(_trace(), _reference()).check()


def test_names_may_be_a_mapping_and_the_table_has_a_line_each():
    found = compare(_trace(), _reference(), {"model.embed": "embed", "model.head": "head"}, 0.0)
    assert ["embed", "head"] == [row.name for row in found.compared]
    assert 4 == len(found.unmapped)
    assert 2 == len(found.table().splitlines())
    assert isinstance(found.compared[0], Divergence)
