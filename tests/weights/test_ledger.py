"""Double entry: each rule of the book on its own, on names and shapes only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from firstlight.models.registry import read
from firstlight.spec.errors import CheckpointError
from firstlight.spec.model import TensorSpec
from firstlight.spec.weights import NameMap, Rename, Skip
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.header import Entry
from firstlight.weights.ledger import Plan, bank_of, fits, match
from tests.weights.damage import SOUND

NAMES = NameMap(
    (
        Rename("w{e}.{leaf*}", "ffn.experts.{leaf*}"),
        Rename("other.{leaf*}", "{leaf*}"),
        Rename("pad.{leaf*}", "{leaf*}", "pad"),
        Rename("squeeze.{leaf*}", "{leaf*}", "squeeze"),
        Rename("{leaf*}", "{leaf*}"),
    ),
    (Skip("vision.{leaf*}", "no images"), Skip("{leaf*}.inv_freq", "computed")),
)
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "float8_e8m0": 1, "int64": 8, "float8_e4m3": 1, "float4_e2m1": 0.5}


def entry(name: str, *shape: int, dtype: str = "bfloat16") -> Entry:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return Entry(name, shape, dtype, Path("model.safetensors"), 0, int(num_elements * SIZES[dtype]))


def settle(wanted: Iterable[TensorSpec], *entries: Entry) -> Plan:
    return match(entries, wanted, NAMES, "here")


def refusal(wanted: Iterable[TensorSpec], *entries: Entry) -> str:
    with pytest.raises(CheckpointError) as caught:
        settle(wanted, *entries)
    return caught.value.fact


MATRIX = (TensorSpec("a.weight", (4, 64), "bfloat16"),)
BANK = tuple(TensorSpec(f"ffn.experts.{leaf}", (2, *shape), "bfloat16") for leaf, shape in (("gate", (8, 32)), ("up", (8, 32)), ("down", (32, 64))))
SQUARE_BANK = tuple(TensorSpec(f"ffn.experts.{leaf}", (2, 32, 32), "bfloat16") for leaf in ("gate", "up", "down"))


def dense_bank(*skip: str) -> list[Entry]:
    every = [entry(f"w{e}.{leaf}", 32, 32) for e in range(2) for leaf in ("gate", "up", "down")]
    return [each for each in every if each.name not in skip]


def packed_bank(*skip: str) -> list[Entry]:
    every = [
        entry(f"w{e}.{leaf}.{form}", 32, width, dtype="uint8")
        for e in range(2) for leaf in ("gate", "up", "down") for form, width in (("packed", 16), ("scale", 1))
    ]
    return [each for each in every if each.name not in skip]


@pytest.mark.parametrize(("fit", "found", "wanted", "right"), [
    ("exact", (4, 3), (4, 3), True), ("exact", (4, 3), (3, 4), False), ("exact", (4, 1, 3), (4, 3), False), ("exact", (5, 3), (4, 3), False),
    ("squeeze", (4, 1, 3), (4, 3), True), ("squeeze", (1, 1, 4, 1), (4,), True), ("squeeze", (1,), (), True), ("squeeze", (4, 2), (8,), False),
    ("squeeze", (3, 1, 4), (4, 3), False), ("squeeze", (5,), (4,), False),
    ("pad", (4,), (4,), True), ("pad", (7,), (4,), True), ("pad", (3,), (4,), False), ("pad", (1, 1, 4, 1), (4,), True), ("pad", (1, 7), (4,), True),
    ("pad", (7, 3), (4, 3), True), ("pad", (4, 5), (4, 3), False), ("pad", (7,), (1,), True), ("pad", (7,), (), False), ("pad", (7, 3), (4,), False),
])
def test_fits(fit: str, found: tuple[int, ...], wanted: tuple[int, ...], right: bool) -> None:
    assert right is fits(found, wanted, fit)  # type: ignore[arg-type]


def test_bank_names() -> None:
    assert "layers.3.ffn.experts" == bank_of("layers.3.ffn.experts.gate")
    for name in ("layers.3.ffn.shared_experts.gate", "layers.3.ffn.experts.weight", "gate", "layers.3.ffn.experts.gate.packed"):
        assert bank_of(name) is None


def test_every_tensor_of_the_fixtures_is_accounted_for() -> None:
    for name, num_banks, form in (("kimi_k3_tiny", 7, "mxfp4"), ("kimi_k3_long", 8, "mxfp4"), ("kimi_k3_text_trace", 7, "dense")):
        folder = SOUND.parent / name
        model, checkpoint = read(folder), Checkpoint.open(folder)
        plan = match(checkpoint.entries.values(), model.spec.weights(), model.names, name)
        report = plan.report
        assert len(checkpoint.entries) == report.num_tensors
        assert len(plan.moves) == report.num_tensors - sum(report.num_skipped.values())
        assert model.spec.num_text_params == report.num_params
        assert num_banks == len(report.expert_formats)
        assert {form} == set(report.expert_formats.values())
        assert checkpoint.num_bytes == report.checkpoint_bytes


def test_moves_follow_the_bytes_on_disk() -> None:
    model, checkpoint = read(SOUND), Checkpoint.open(SOUND)
    moves = match(checkpoint.entries.values(), model.spec.weights(), model.names, "").moves
    places = [(move.entry.file.name, move.entry.offset) for move in moves]
    assert sorted(places) == places
    assert len(set(places)) == len(places)


def test_summary_is_readable() -> None:
    model, checkpoint = read(SOUND), Checkpoint.open(SOUND)
    text = match(checkpoint.entries.values(), model.spec.weights(), model.names, "").report.summary()
    assert "7 banks of experts in mxfp4" in text
    assert "tensors left out (" in text
    assert f"{model.spec.num_text_params:,} parameters" in text


def test_skips_are_counted_by_reason() -> None:
    plan = settle(MATRIX, entry("a.weight", 4, 64), entry("vision.a", 2), entry("vision.b", 2), entry("a.inv_freq", 2))
    assert {"no images": 2, "computed": 1} == plan.report.num_skipped
    assert "2 tensors left out (no images)" in plan.report.summary()


def test_missing_names_the_tensor_and_the_parameter() -> None:
    """Of the names that would do, the one whose module is in the checkpoint."""
    wanted = (*MATRIX, TensorSpec("a.bias", (4,), "bfloat16"))
    assert "missing (1): a.bias for a.bias" in refusal(wanted, entry("a.weight", 4, 64))
    assert "missing (1): other.a.bias for a.bias" in refusal(wanted, entry("other.a.weight", 4, 64))


def test_a_skipped_tensor_that_is_needed_is_missing() -> None:
    assert "for vision.a" in refusal((TensorSpec("vision.a", (2,), "bfloat16"),), entry("vision.a", 2))


def test_unexpected() -> None:
    assert "unexpected (1): b.weight (the model has no b.weight)" in refusal(MATRIX, entry("a.weight", 4, 64), entry("b.weight", 4, 64))
    unknown = NameMap((Rename("a.weight", "a.weight"),))
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): b.weight"):
        match([entry("a.weight", 4, 64), entry("b.weight", 4, 64)], MATRIX, unknown, "here")


def test_two_names_for_one_parameter() -> None:
    said = refusal(MATRIX, entry("a.weight", 4, 64), entry("other.a.weight", 4, 64))
    assert "duplicated (1): other.a.weight and a.weight both hold a.weight" in said


@pytest.mark.parametrize(("dtype", "wanted", "right"), [
    ("float32", "bfloat16", True), ("bfloat16", "float32", True), ("float16", "bfloat16", True), ("float64", "float32", True),
    ("int64", "bfloat16", False), ("uint8", "bfloat16", False), ("float8_e8m0", "float32", False),
    ("float4_e2m1", "bfloat16", False), ("int64", "int64", True), ("float32", "int64", False),
])
def test_dtypes(dtype: str, wanted: str, right: bool) -> None:
    specs, found = (TensorSpec("a", (4, 64), wanted),), entry("a", 4, 64, dtype=dtype)
    if right:
        assert wanted == settle(specs, found).moves[0].dtype
    else:
        assert f"wrong dtype (1): a is {dtype}" in refusal(specs, found)


@pytest.mark.parametrize("entries", [dense_bank(), packed_bank()])
def test_banks_one_by_one(entries: list[Entry]) -> None:
    plan = settle(SQUARE_BANK, *entries)
    assert {"ffn.experts": 2} == plan.banks
    assert len(entries) == len(plan.moves)
    assert sum(each.num_bytes for each in entries) == plan.report.memory_bytes == plan.report.mapped_bytes


def test_stacked_banks() -> None:
    dense = [entry(f"ffn.experts.{leaf}", 2, 32, 32) for leaf in ("gate", "up", "down")]
    assert {"ffn.experts": "dense"} == settle(SQUARE_BANK, *dense).report.expert_formats
    forms = (("packed", 16, "uint8"), ("scale", 1, "float8_e8m0"))
    packed = [entry(f"ffn.experts.{leaf}.{form}", 2, 32, width, dtype=dtype) for leaf in ("gate", "up", "down") for form, width, dtype in forms]
    assert {"ffn.experts": "mxfp4"} == settle(SQUARE_BANK, *packed).report.expert_formats


def fused_bank(rows: int = 16, dtype: str = "bfloat16") -> list[Entry]:
    return [entry("ffn.experts.gate_up", 2, rows, 32, dtype=dtype), entry("ffn.experts.down", 2, 32, 64)]


def test_gate_and_up_in_one_tensor() -> None:
    plan = settle(BANK, *fused_bank())
    assert {("ffn.experts.gate", 0), ("ffn.experts.up", 1), ("ffn.experts.down", None)} == {(move.param, move.half) for move in plan.moves}
    assert sum(each.num_bytes for each in fused_bank()) == plan.report.memory_bytes == plan.report.mapped_bytes
    assert (2, {"ffn.experts": "dense"}) == (plan.report.num_tensors, plan.report.expert_formats)


def test_gate_and_up_in_one_tensor_are_checked_as_one() -> None:
    assert "misshapen (1): ffn.experts.gate_up is [2, 8, 32], [2, 16, 32] is needed" in refusal(BANK, *fused_bank(8))
    assert "wrong dtype (1): ffn.experts.gate_up is int64" in refusal(BANK, *fused_bank(dtype="int64"))
    assert "missing (1): w0.down for ffn.experts.down" in refusal(BANK, fused_bank()[0])
    twice = (*fused_bank(), *(entry(f"w{e}.up", 8, 32) for e in range(2)))
    assert "duplicated (1): ffn.experts.gate_up holds all experts of ffn.experts.up" in refusal(BANK, *twice)
    assert "unexpected (2): ffn.experts.gate_up (the model has no ffn.experts.gate)" in refusal(MATRIX, entry("a.weight", 4, 64), fused_bank()[0])


def test_shapes_of_packed_pieces_follow_their_own_matrix() -> None:
    """Gate and up read 32 columns, down reads 64: widths must not be mixed up."""
    matrices, forms = (("gate", 8, 32), ("up", 8, 32), ("down", 32, 64)), (("packed", 2), ("scale", 32))
    entries = [
        entry(f"w{e}.{leaf}.{form}", rows, columns // div, dtype="uint8") for e in range(2) for leaf, rows, columns in matrices for form, div in forms
    ]
    assert 12 == len(settle(BANK, *entries).moves)
    swapped = [entry("w0.down.scale", 32, 1, dtype="uint8") if each.name == "w0.down.scale" else each for each in entries]
    assert "misshapen (1): w0.down.scale is [32, 1], [32, 2] is needed" in refusal(BANK, *swapped)


def test_packed_columns_must_be_whole_groups() -> None:
    specs = (TensorSpec("a.weight", (4, 48), "bfloat16"),)
    found = (entry("a.weight_packed", 4, 24, dtype="uint8"), entry("a.weight_scale", 4, 1, dtype="uint8"))
    assert "a.weight_scale is scale, but a.weight is [4, 48], no multiple of 32 columns" in refusal(specs, *found)


def fp8_bank(*skip: str) -> list[Entry]:
    """Gate and up [200, 130], down [130, 200]: every matrix has cut-off blocks."""
    every = []
    for e in range(2):
        for leaf, shape in (("gate", (200, 130)), ("up", (200, 130)), ("down", (130, 200))):
            every += [entry(f"w{e}.{leaf}", *shape, dtype="float8_e4m3"), entry(f"w{e}.{leaf}_scale_inv", 2, 2, dtype="float32")]
    return [each for each in every if each.name not in skip]


FP8_BANK = tuple(
    TensorSpec(f"ffn.experts.{leaf}", (2, *shape), "bfloat16") for leaf, shape in (("gate", (200, 130)), ("up", (200, 130)), ("down", (130, 200))))
BLOCKS = (TensorSpec("a.weight", (129, 256), "bfloat16"),)


def test_eight_bit_banks_and_matrices() -> None:
    plan = settle(FP8_BANK, *fp8_bank())
    assert ({"ffn.experts": "fp8"}, 12) == (plan.report.expert_formats, len(plan.moves))
    assert sum(each.num_bytes for each in fp8_bank()) == plan.report.memory_bytes == plan.report.mapped_bytes
    plan = settle(BLOCKS, entry("a.weight", 129, 256, dtype="float8_e4m3"), entry("a.weight_scale_inv", 2, 2, dtype="float32"))
    assert (frozenset({"a.weight"}), 129 * 256 * 2, 0) == (plan.unpacked, plan.report.memory_bytes, plan.report.mapped_bytes)


def test_eight_bit_pieces_that_do_not_add_up() -> None:
    codes, scale = entry("a.weight", 129, 256, dtype="float8_e4m3"), entry("a.weight_scale_inv", 2, 2, dtype="float32")
    assert "unpaired (1): a.weight has no scale" in refusal(BLOCKS, codes)
    assert "unpaired (1): a.weight_scale_inv has no packed codes" in refusal(BLOCKS, scale)
    assert "a.weight_scale_inv is [1, 2], [2, 2] is needed" in refusal(BLOCKS, codes, entry("a.weight_scale_inv", 1, 2, dtype="float32"))
    assert "a.weight is [256, 129], [129, 256] is needed" in refusal(BLOCKS, entry("a.weight", 256, 129, dtype="float8_e4m3"), scale)
    assert "a.weight_scale_inv is uint8, bfloat16 or float32 can be read" in refusal(BLOCKS, codes, entry("a.weight_scale_inv", 2, 2, dtype="uint8"))
    assert "mixed formats (1): a.weight and a.weight_scale_inv" in refusal(BLOCKS, entry("a.weight", 129, 256), scale)
    assert "duplicated (1): other.a.weight and a.weight" in refusal(BLOCKS, codes, scale, entry("other.a.weight", 129, 256, dtype="float8_e4m3"))
    vector = (TensorSpec("a.weight", (64,), "bfloat16"),)
    assert "wrong dtype (1): a.weight is float8_e4m3" in refusal(vector, entry("a.weight", 64, dtype="float8_e4m3"))
    assert "unpaired (1): w1.up has no scale" in refusal(FP8_BANK, *fp8_bank("w1.up_scale_inv"))
    assert "expert gap (1): ffn.experts.up lacks 1 of 2 experts: 1 (w1.up for ffn.experts.up)" in refusal(
        FP8_BANK, *fp8_bank("w1.up", "w1.up_scale_inv"))
    dense = [entry(each.name, *each.shape) if each.name == "w1.up" else each for each in fp8_bank("w1.up_scale_inv")]
    assert "mixed formats (1): ffn.experts has" in refusal(FP8_BANK, *dense)


def test_expert_gaps_name_the_numbers_and_a_tensor() -> None:
    said = refusal(SQUARE_BANK, *packed_bank("w1.up.packed", "w1.up.scale"))
    assert "expert gap (1): ffn.experts.up lacks 1 of 2 experts: 1 (w1.up.packed for ffn.experts.up.packed)" in said
    assert "experts: 1 (w1.up for ffn.experts.up)" in refusal(SQUARE_BANK, *dense_bank("w1.up"))


def test_a_bank_without_one_matrix_is_missing_it() -> None:
    said = refusal(SQUARE_BANK, *dense_bank("w0.up", "w1.up"))
    assert "missing (1): w0.up for ffn.experts.up" in said


def test_experts_beyond_the_bank() -> None:
    assert "unexpected (1): w2.gate (ffn.experts.gate has 2 experts)" in refusal(SQUARE_BANK, *dense_bank(), entry("w2.gate", 32, 32))


def test_stacked_and_single_experts_exclude_each_other() -> None:
    said = refusal(SQUARE_BANK, *dense_bank(), entry("ffn.experts.up", 2, 32, 32))
    assert "duplicated (1): ffn.experts.up holds all experts of ffn.experts.up, which are there one by one too" in said


@pytest.mark.parametrize("name", ["w1.down.packed", "w1.down.scale"])
def test_halves_of_a_packed_expert(name: str) -> None:
    other = "scale" if name.endswith("packed") else "packed"
    assert f"unpaired (1): w1.down.{other} has no" in refusal(SQUARE_BANK, *packed_bank(name))


def test_mixed_formats_across_experts_and_across_matrices() -> None:
    across_experts = [*packed_bank("w1.up.packed", "w1.up.scale"), entry("w1.up", 32, 32)]
    up = [f"w{e}.up.{form}" for e in range(2) for form in ("packed", "scale")]
    across_matrices = [*packed_bank(*up), entry("w0.up", 32, 32), entry("w1.up", 32, 32)]
    both_forms = [*packed_bank(), entry("w1.up", 32, 32)]
    for entries in (across_experts, across_matrices, both_forms):
        assert "mixed formats (1): ffn.experts has " in refusal(SQUARE_BANK, *entries)


@pytest.mark.parametrize("style", ["a.weight_{}", "a.weight.{}", "a.{}"])
def test_packed_tensors_outside_of_banks_are_understood(style: str) -> None:
    plan = settle(MATRIX, entry(style.format("packed"), 4, 32, dtype="uint8"), entry(style.format("scale"), 4, 2, dtype="uint8"))
    assert {"a.weight"} == plan.unpacked
    assert 4 * 64 * 2 == plan.report.memory_bytes
    assert 0 == plan.report.mapped_bytes


def test_packed_outside_of_banks_must_be_whole_and_alone() -> None:
    packed, scale = entry("a.weight_packed", 4, 32, dtype="uint8"), entry("a.weight_scale", 4, 2, dtype="uint8")
    assert "unpaired (1): a.weight_packed has no scale" in refusal(MATRIX, packed)
    assert "a.weight and a.weight_packed both hold a.weight" in refusal(MATRIX, packed, scale, entry("a.weight", 4, 64))
    assert "a.weight_scale has no packed codes" in refusal(MATRIX, scale, entry("a.weight", 4, 64))


def test_bytes_count_what_is_cast_and_what_is_mapped() -> None:
    specs = (TensorSpec("a", (10,), "float32"), TensorSpec("b", (10,), "float32"), TensorSpec("c", (3,), "float32"))
    names = NameMap((Rename("c", "c", "pad"), Rename("{leaf*}", "{leaf*}")))
    plan = match([entry("a", 10), entry("b", 10, dtype="float32"), entry("c", 8, dtype="float32")], specs, names, "")
    assert 92 == plan.report.memory_bytes
    assert 52 == plan.report.mapped_bytes
    assert 20 + 40 + 32 == plan.report.checkpoint_bytes


def test_problems_of_all_kinds_come_together() -> None:
    said = refusal(
        (*MATRIX, TensorSpec("b", (2,), "bfloat16"), TensorSpec("c", (2,), "bfloat16")),
        entry("a.weight", 64, 4), entry("c", 2, dtype="int64"), entry("d", 1))
    assert said.startswith("here: 4 problems: missing (1): ")
    assert [] == [kind for kind in ("missing", "unexpected", "misshapen", "wrong dtype") if f"{kind} (1)" not in said]


def test_a_tensor_that_must_repeat_another() -> None:
    """Only when the model says that they are one; the bytes are compared when they are read."""
    wanted, tied = (TensorSpec("embed", (4, 8), "bfloat16"),), {"head": "embed"}
    first, second = entry("embed", 4, 8), entry("head", 4, 8)
    plan = match((first, second), wanted, NAMES, "here", tied=tied)
    assert (((second, first),), {"repeats embed, which the head is tied to": 1}, 1) == (plan.twins, dict(plan.report.num_skipped), len(plan.moves))
    assert "unexpected (1): head" in refusal(wanted, first, second)
    for others, told in (
        ((first, entry("head", 8, 4)), "untied (1): head is bfloat16 [8, 4], embed is bfloat16 [4, 8]"),
        ((first, second, entry("other.head", 4, 8)), "unexpected (1): other.head"),
        ((second,), "untied (1): head has no plain embed beside it to repeat"),
    ):
        with pytest.raises(CheckpointError) as caught:
            match(others, wanted, NAMES, "here", tied=tied)
        assert told in caught.value.fact
