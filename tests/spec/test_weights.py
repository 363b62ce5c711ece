"""Name rules: numbers, rests, expert places, and rules that tell numbers apart."""

from __future__ import annotations

from firstlight.spec.weights import Landing, NameMap, Rename, Skip


def test_numbers_and_rests() -> None:
    names = NameMap((Rename("model.layers.{i}.a.{rest*}", "layers.{i}.b.{rest*}"), Rename("m.{i}.experts.{e}.w.weight", "m.{i}.experts.gate")))
    assert Landing("layers.17.b.q.weight", None, "exact") == names.find("model.layers.17.a.q.weight")
    assert Landing("layers.3.b.q.weight", None, "exact") == names.find("model.layers.3.a.q.weight")
    assert Landing("m.2.experts.gate", 895, "exact") == names.find("m.2.experts.895.w.weight")
    assert names.find("model.layers.x.a.q.weight") is None


def test_a_rule_may_name_a_number() -> None:
    names = NameMap((Rename("proj.0.weight", "first"), Rename("proj.2.weight", "last")), (Skip("tower.1.{rest*}", "not needed"),))
    assert Landing("first", None, "exact") == names.find("proj.0.weight")
    assert Landing("last", None, "exact") == names.find("proj.2.weight")
    assert names.find("proj.1.weight") is None
    assert isinstance(names.find("tower.1.weight"), Skip)
    assert names.find("tower.2.weight") is None


def test_moving_spares_other_places() -> None:
    skips = (Skip("a.s", "why"), Skip("d.s", "why"))
    names = NameMap((Rename("a.{i}.w", "b.{i}"), Rename("ab.w", "c")), skips, (("a.{i}", "b.{i}"),)).moved("a.", "a.x.")
    assert Landing("b.4", None, "exact") == names.find("a.x.4.w")
    assert Landing("c", None, "exact") == names.find("ab.w")
    assert ["a.x.s", "d.s"] == [skip.source for skip in names.skips]
    assert names.find("a.4.w") is None
    assert "b.4" == names.module("a.x.4")


def test_nesting_moves_everything() -> None:
    names = NameMap((Rename("a.{i}.w", "b.{i}"),), (Skip("c.w", "why"),), (("a.{i}", "b.{i}"),)).nested("outer.")
    assert Landing("b.4", None, "exact") == names.find("outer.a.4.w")
    assert names.find("a.4.w") is None
    assert "b.4" == names.module("outer.a.4")
