"""Reading configs: kinds, absences, and what nobody read."""

from __future__ import annotations

import pytest

from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError


def test_unread_keys_are_reported_with_their_path() -> None:
    config = ConfigReader({"a": 1, "b": {"c": 2, "d": 0, "e": 3}, "f": None, "g": 4})
    config.take("a", int)
    config.child("b").take("c", int)
    config.ignore("g", "a reason")
    assert ["f", "b.d", "b.e"] == config.unread()
    assert ["b.e"] == config.active_unread()
    assert {"g": "a reason"} == config.ignored()


def test_kinds() -> None:
    config = ConfigReader({"i": 3, "f": 2.5, "b": True, "l": [1, 2], "n": None, "s": "x"})
    assert 3.0 == config.take("i", float)
    assert [1, 2] == config.take_list("l", int)
    assert 7 == config.take("n", int, 7)
    assert config.take("absent", int, None) is None
    for key, kind in (("b", int), ("f", int), ("s", float), ("i", str), ("absent", int), ("n", int)):
        with pytest.raises(ConfigError) as caught:
            config.take(key, kind)
        assert f"`{key}`" in str(caught.value)
    with pytest.raises(ConfigError, match=r"l\[0\]"):
        config.take_list("l", str)


def test_expect_and_positive() -> None:
    config = ConfigReader({"mode": "a", "size": 0})
    assert "a" == config.expect("mode", ("a", "b"), "why")
    with pytest.raises(ConfigError, match="'a'"):
        config.expect("mode", ("b", "c"), "Use another checkpoint.")
    with pytest.raises(ConfigError, match="size"):
        config.positive("size")


def test_ids_and_dtypes() -> None:
    config = ConfigReader({"one": 3, "many": [1, 2], "wrong": "2", "odd": [True], "torch_dtype": "float32"})
    assert ((3,), (1, 2), ()) == (config.take_ids("one"), config.take_ids("many"), config.take_ids("absent"))
    for key in ("wrong", "odd"):
        with pytest.raises(ConfigError, match=f"`{key}`"):
            config.take_ids(key)
    assert ("float32", "bfloat16") == (config.take_dtype(), ConfigReader({}).take_dtype())
    both = ConfigReader({"dtype": "float16", "torch_dtype": "float32"})
    assert ("float16", []) == (both.take_dtype(), both.unread())
    with pytest.raises(ConfigError, match="float8"):
        ConfigReader({"dtype": "float8"}).take_dtype()
