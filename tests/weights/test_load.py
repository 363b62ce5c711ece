"""From disk to tensors: right bytes, right dtype, no copy where none is needed, damage in numbers found, too large refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firstlight.models.registry import read
from firstlight.spec.errors import CapacityError, CheckpointError
from firstlight.spec.model import ModelSpec, TensorSpec
from firstlight.weights import load as loading
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import Loaded, load
from tests.tree import ROOT
from tests.weights.damage import EXPERT, FIRST, LAYER, SECOND, SOUND, copy_sound, edit_header, read_index
from tests.weights.tiny import NAMES, model_of, write_file

TRACE, LONG = SOUND.parent / "kimi_k3_text_trace", SOUND.parent / "kimi_k3_long"


def load_folder(folder: Path, dtype: str | None = None) -> Loaded:
    model = read(folder)
    return load(Checkpoint.open(folder), model.spec.with_dtype(dtype) if dtype else model.spec, model.names)


def raw_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("model*.safetensors") for name, value in load_file(file).items()}


def write_model(folder: Path, **tensors: tuple[str, tuple[int, ...], bytes]) -> None:
    """A file with an embedding [3, 5], a last norm, and `tensors` under "output."; a double underscore stands for a dot."""
    given = {f"output.{name.replace('__', '.')}": value for name, value in tensors.items()}
    write_file(folder / "model.safetensors", {
        "embed.weight": ("BF16", (3, 5), bytes(30)), "norm.weight": ("BF16", (5,), bytes(10))} | given)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def load_model(folder: Path, *tensors: TensorSpec, check: loading.Check = "auto", dtype: str = "bfloat16") -> Loaded:
    return load(Checkpoint.open(folder), model_of(*tensors, dtype=dtype), NAMES, check=check)


def mapped_ranges(file: Path) -> list[range]:
    """Where a file is mapped into this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file.resolve())):
            begin, end = line.split()[0].split("-")
            found.append(range(int(begin, 16), int(end, 16)))
    return found


def all_values(loaded: Loaded) -> list[Tensor]:
    """Parameters, experts and scales."""
    parts = [part for bank in loaded.banks.values() for part in (bank.gate, bank.up, bank.down, bank.gate_scale, bank.up_scale, bank.down_scale)]
    return [*loaded.tensors.values(), *(each for part in parts for each in part or ())]


@pytest.mark.parametrize("folder", [SOUND, LONG, TRACE])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_parameter_comes_in_the_shape_and_dtype_it_was_asked_for(folder: Path, dtype: str) -> None:
    spec = read(folder).spec.with_dtype(dtype)
    loaded = load_folder(folder, dtype)
    banks = {f"{name}.{leaf}" for name in loaded.banks for leaf in ("gate", "up", "down")}
    wanted = {each.name: (each.shape, f"torch.{each.dtype}") for each in spec.weights() if each.name not in banks}
    assert wanted == {name: (tuple(value.shape), str(value.dtype)) for name, value in loaded.tensors.items()}
    for name, bank in loaded.banks.items():
        shapes = {each.name: each.shape for each in spec.weights() if each.name.startswith(name)}
        packing = 2 if bank.format == "mxfp4" else 1
        for leaf in ("gate", "up", "down"):
            num_experts, rows, columns = shapes[f"{name}.{leaf}"]
            assert [(rows, columns // packing)] * num_experts == [tuple(each.shape) for each in getattr(bank, leaf)]


def test_values_land_where_they_belong() -> None:
    """Names written out by hand, not by the rules under test."""
    raw, loaded = raw_tensors(SOUND), load_folder(SOUND)
    pairs = {
        "embed.weight": "language_model.model.embed_tokens.weight", "head.weight": "language_model.lm_head.weight",
        "layers.0.mixer.q_proj.weight": LAYER.format(0) + "self_attn.q_proj.weight",
        "layers.3.mixer.kv_b_proj.weight": LAYER.format(3) + "self_attn.kv_b_proj.weight",
        "layers.4.mixer.dt_bias": LAYER.format(4) + "self_attn.dt_bias",
        "layers.2.ffn.router.bias": LAYER.format(2) + "block_sparse_moe.gate.e_score_correction_bias",
        "layers.5.ffn.shared_experts.down_proj.weight": LAYER.format(5) + "block_sparse_moe.shared_experts.down_proj.weight",
        "layers.6.residual.ffn_norm.weight": LAYER.format(6) + "mlp_res_norm.weight",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(raw[theirs], loaded.tensors[ours]), ours
    conv = raw[LAYER.format(1) + "self_attn.k_conv1d.weight"]
    assert torch.equal(conv[:, 0, :], loaded.tensors["layers.1.mixer.k_conv1d.weight"])
    a_log = raw[LAYER.format(1) + "self_attn.A_log"]
    assert 32 == len(a_log)
    assert torch.equal(a_log[:4], loaded.tensors["layers.1.mixer.A_log"])


@pytest.mark.parametrize(("folder", "prefix"), [(SOUND, "language_model."), (TRACE, "")])
def test_experts_land_where_they_belong(folder: Path, prefix: str) -> None:
    """w1 is gate, w3 is up, w2 is down, expert by expert, byte by byte."""
    raw, bank = raw_tensors(folder), load_folder(folder).banks["layers.5.ffn.experts"]
    assert 8 == bank.num_experts
    for e in range(8):
        for theirs, leaf in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            name = f"{prefix}model.layers.5.block_sparse_moe.experts.{e}.{theirs}.weight"
            if bank.format == "dense":
                assert torch.equal(raw[name], getattr(bank, leaf)[e])
            else:
                assert torch.equal(raw[name + "_packed"], getattr(bank, leaf)[e])
                assert torch.equal(raw[name + "_scale"], getattr(bank, f"{leaf}_scale")[e])


def test_fp32_leaves_stay_fp32_in_a_bf16_model() -> None:
    """Cast to bf16 they would change the choice of experts and the decay."""
    loaded = load_folder(TRACE, "bfloat16")
    leaves = {name.rpartition("mixer.")[2] if "mixer." in name else name.rpartition("ffn.")[2]
              for name, value in loaded.tensors.items() if value.dtype is torch.float32}
    assert {"A_log", "dt_bias", "o_norm.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "router.bias"} == leaves
    raw = raw_tensors(TRACE)
    assert torch.equal(raw["model.layers.2.block_sparse_moe.gate.e_score_correction_bias"], loaded.tensors["layers.2.ffn.router.bias"])
    assert torch.equal(raw["lm_head.weight"].bfloat16(), loaded.tensors["head.weight"])
    assert torch.bfloat16 is loaded.banks["layers.1.ffn.experts"].gate[0].dtype


def test_bf16_checkpoint_in_float32() -> None:
    raw, loaded = raw_tensors(SOUND), load_folder(SOUND, "float32")
    assert torch.equal(raw["language_model.lm_head.weight"].float(), loaded.tensors["head.weight"])
    assert torch.uint8 is loaded.banks["layers.1.ffn.experts"].gate[0].dtype


def test_what_fits_already_stays_mapped() -> None:
    loaded = load_folder(SOUND)
    ranges = [*mapped_ranges(SOUND / FIRST), *mapped_ranges(SOUND / SECOND)]
    assert ranges
    for value in all_values(loaded):
        assert any(value.data_ptr() in each for each in ranges)
    cast = load_folder(SOUND, "float32").tensors["head.weight"]
    ranges = [*mapped_ranges(SOUND / FIRST), *mapped_ranges(SOUND / SECOND)]
    assert not any(cast.data_ptr() in each for each in ranges)


def test_writing_to_a_mapped_tensor_never_reaches_the_disk(tmp_path: Path) -> None:
    folder = copy_sound(tmp_path / "model")
    before = (folder / FIRST).read_bytes()
    loaded = load_folder(folder)
    for value in loaded.tensors.values():
        value.zero_()
    assert before == (folder / FIRST).read_bytes()


def test_tensors_outlive_checkpoint_and_file(tmp_path: Path) -> None:
    folder = copy_sound(tmp_path / "model")
    model = read(folder)
    with Checkpoint.open(folder) as checkpoint:
        loaded = load(checkpoint, model.spec, model.names)
    for file in (FIRST, SECOND):
        (folder / file).unlink()
    assert torch.equal(raw_tensors(SOUND)["language_model.lm_head.weight"], loaded.tensors["head.weight"])


RESIDENT = """
import sys
from pathlib import Path
import torch
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import load
from tests.weights.tiny import NAMES, model_of

def anonymous_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon:"))

spec = model_of(num_vocab=65536, dim=2048)
torch.isfinite(torch.ones(1 << 22, dtype=torch.bfloat16)).sum()
for check in ("light", "full"):
    before = anonymous_kib()
    loaded = load(Checkpoint.open(sys.argv[1]), spec, NAMES, check=check)
    print(anonymous_kib() - before, loaded.report.mapped_bytes)
"""


def test_a_large_tensor_costs_no_memory(tmp_path: Path) -> None:
    """256 MiB (a hole in a file) loaded and checked lightly, then in full; the process itself may grow by 128 MiB at most."""
    file = tmp_path / "model.safetensors"
    num_bytes = 65536 * 2048 * 2
    write_file(file, {"norm.weight": ("BF16", (2048,), bytes(4096))})
    edit_header(file, lambda header: header.update(
        {"embed.weight": {"dtype": "BF16", "shape": [65536, 2048], "data_offsets": [4096, 4096 + num_bytes]}}))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + num_bytes)
    run = subprocess.run([sys.executable, "-c", RESIDENT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    light, full = (tuple(map(int, line.split())) for line in run.stdout.splitlines())
    for grown_kib, mapped_bytes in (light, full):
        assert num_bytes + 4096 == mapped_bytes
        assert grown_kib < 128 * 1024


def test_e8m0_scales_are_copied_byte_by_byte(tmp_path: Path) -> None:
    """A conversion of E8M0 to uint8 would turn the scale 2^0, byte 127, into 1."""
    folder = copy_sound(tmp_path / "model")
    name = EXPERT.format(4, "w2", "_scale")

    def mark(header: dict[str, dict[str, object]]) -> None:
        for each in header:
            if each.endswith("weight_scale"):
                header[each]["dtype"] = "F8_E8M0"

    for shard in (FIRST, SECOND):
        edit_header(folder / shard, mark)
    entry = Checkpoint.open(folder).entries[name]
    assert "float8_e8m0" == entry.dtype
    special = bytes([120, 125, 127, 130, 140, 0, 1, 254]) * 16
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(special)
    scale = load_folder(folder).banks["layers.1.ffn.experts"].down_scale
    assert scale is not None
    assert special == bytes(scale[4].reshape(-1).tolist())
    assert torch.uint8 is scale[4].dtype
    assert any(scale[4].data_ptr() in each for each in mapped_ranges(entry.file))


def test_nan_scale_in_e8m0(tmp_path: Path) -> None:
    pieces = {f"experts__0__{leaf}__packed": ("U8", (32, 16), bytes(512)) for leaf in ("gate", "up", "down")}
    scales = {f"experts__0__{leaf}__scale": ("F8_E8M0", (32, 1), bytes([127] * 31 + [255])) for leaf in ("gate", "up", "down")}
    write_model(tmp_path, **pieces, **scales)
    bank = [TensorSpec(f"experts.{leaf}", (1, 32, 32), "bfloat16") for leaf in ("gate", "up", "down")]
    with pytest.raises(CheckpointError, match=r"not finite \(3\): output.experts.0.gate.scale \(1 scales are NaN\)"):
        load_model(tmp_path, *bank, check="light")


def test_stacked_experts_are_views_of_one_mapped_tensor(tmp_path: Path) -> None:
    content = torch.arange(2 * 32 * 32, dtype=torch.float32)
    stacked = {f"experts__{leaf}": ("F32", (2, 32, 32), bytes(content.view(torch.uint8).tolist())) for leaf in ("gate", "up", "down")}
    write_model(tmp_path, **stacked)
    bank = load_model(tmp_path, *(TensorSpec(f"experts.{leaf}", (2, 32, 32), "float32") for leaf in ("gate", "up", "down"))).banks["output.experts"]
    assert torch.equal(content.view(2, 32, 32)[1], bank.up[1])
    assert any(bank.up[1].data_ptr() in each for each in mapped_ranges(tmp_path / "model.safetensors"))


def test_gate_and_up_in_one_tensor_are_views_of_its_halves(tmp_path: Path) -> None:
    content = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
    down = torch.arange(2 * 4 * 3, dtype=torch.float32)
    write_model(
        tmp_path, experts__gate_up=("F32", (2, 6, 4), floats(*content.flatten().tolist())), experts__down=("F32", (2, 4, 3), floats(*down.tolist())))
    specs = (TensorSpec(f"experts.{leaf}", (2, *shape), "float32") for leaf, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3))))
    bank = load_model(tmp_path, *specs).banks["output.experts"]
    for expert in range(2):
        assert torch.equal(content[expert, :3], bank.gate[expert])
        assert torch.equal(content[expert, 3:], bank.up[expert])
        assert bank.up[expert].is_contiguous()
    assert any(bank.up[1].data_ptr() in each for each in mapped_ranges(tmp_path / "model.safetensors"))


def test_packed_matrices_outside_of_banks_are_unpacked(tmp_path: Path) -> None:
    """Two rows of 32: all sixteen codes in the order low nibble first, under two scales."""
    codes = bytes((2 * k + 1) % 16 << 4 | 2 * k % 16 for k in range(16))
    write_model(tmp_path, proj__weight_packed=("U8", (2, 16), codes * 2), proj__weight_scale=("U8", (2, 1), bytes([127, 130])))
    loaded = load_model(tmp_path, TensorSpec("proj.weight", (2, 32), "bfloat16"))
    row = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2)
    assert torch.equal(torch.stack((row, 8 * row)).bfloat16(), loaded.tensors["output.proj.weight"])


def test_padding_is_cut_and_must_be_zero(tmp_path: Path) -> None:
    spec = TensorSpec("padded.a", (2,), "float32")
    write_model(tmp_path, padded__a=("F32", (4,), floats(1, 2, 0, -0.0)))
    assert [1, 2] == load_model(tmp_path, spec).tensors["output.padded.a"].tolist()
    write_model(tmp_path, padded__a=("F32", (4,), floats(1, 2, 0, 1e-45)))
    with pytest.raises(CheckpointError, match=r"padding \(1\): output.padded.a \(1 values beyond 2 are not zero\)"):
        load_model(tmp_path, spec)


def test_dims_of_size_one_are_dropped_and_added(tmp_path: Path) -> None:
    write_model(tmp_path, squeezed__a=("F32", (3, 1, 2), floats(*range(6))), squeezed__b=("F32", (2,), floats(8, 9)),
                padded__c=("F32", (1, 1, 2, 1), floats(4, 5)))
    specs = [TensorSpec("squeezed.a", (3, 2), "float32"), TensorSpec("squeezed.b", (1, 2), "float32"), TensorSpec("padded.c", (2,), "float32")]
    loaded = load_model(tmp_path, *specs).tensors
    assert [[0, 1], [2, 3], [4, 5]] == loaded["output.squeezed.a"].tolist()
    assert [[8, 9]] == loaded["output.squeezed.b"].tolist()
    assert [4, 5] == loaded["output.padded.c"].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("check", ["auto", "light", "full"])
def test_small_tensors_are_always_checked(tmp_path: Path, value: float, check: loading.Check) -> None:
    write_model(tmp_path, a=("F32", (3,), floats(0, value, 1)))
    with pytest.raises(CheckpointError, match=r"not finite \(1\): output.a \(1 values are NaN or infinite\)"):
        load_model(tmp_path, TensorSpec("a", (3,), "float32"), check=check)


def test_a_light_check_leaves_large_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are cast, which reads them anyway; small checkpoints are checked in full by default, larger ones lightly."""
    size = loading.LIGHT_BYTES // 4 + 1
    write_model(tmp_path, a=("F32", (size,), bytes(4 * size - 4) + floats(float("nan"))))
    spec = TensorSpec("a", (size,), "float32")
    load_model(tmp_path, spec, check="light")
    for bad in ("full", "auto"):
        with pytest.raises(CheckpointError, match=r"output.a \(1 values"):
            load_model(tmp_path, spec, check=bad)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"output.a \(1 values"):
        load_model(tmp_path, TensorSpec("a", (size,), "bfloat16"), check="light")
    monkeypatch.setattr(loading, "FULL_BYTES", 1000)
    load_model(tmp_path, spec, check="auto")


def test_every_piece_of_a_large_tensor_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PIECE", 8)
    for place in (0, 7, 8, 15, 16, 20):
        values = [0.0] * 21
        values[place] = float("nan")
        write_model(tmp_path, a=("F32", (3, 7), floats(*values)))
        with pytest.raises(CheckpointError, match=r"output.a \(1 values"):
            load_model(tmp_path, TensorSpec("a", (3, 7), "float32"))


def test_values_beyond_the_range_of_the_wanted_dtype(tmp_path: Path) -> None:
    write_model(tmp_path, a=("F32", (3,), floats(1, 70000, -1e9)))
    with pytest.raises(CheckpointError, match=r"output.a \(2 values are beyond the range of float16\)"):
        load_model(tmp_path, TensorSpec("a", (3,), "float16"))
    assert [1, 137 * 2**9, -238 * 2**22] == load_model(tmp_path, TensorSpec("a", (3,), "bfloat16")).tensors["output.a"].tolist()


def test_all_bad_numbers_in_one_message(tmp_path: Path) -> None:
    write_model(tmp_path, a=("F32", (1,), floats(float("nan"))), b=("F32", (1,), floats(float("inf"))), padded__c=("F32", (2,), floats(1, 1)))
    with pytest.raises(CheckpointError, match=r"3 problems: padding \(1\): output.padded.c.*not finite \(2\): output.a.*output.b"):
        load_model(tmp_path, *(TensorSpec(name, (1,), "float32") for name in ("a", "b", "padded.c")))


def test_too_large_is_refused_with_the_numbers_before_any_tensor_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checkpoint = read(SOUND), Checkpoint.open(SOUND)
    need = load(checkpoint, model.spec, model.names).report.memory_bytes
    load(checkpoint, model.spec, model.names, memory_bytes=need)
    monkeypatch.setattr(checkpoint, "tensor", lambda name: pytest.fail(f"{name} was touched"))
    with pytest.raises(CapacityError, match=f"{need:,} bytes .* {need - 1:,} bytes"):
        load(checkpoint, model.spec, model.names, memory_bytes=need - 1)


def test_the_dtype_decides_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits in bf16 may not fit in fp32; the system is asked when nothing is given."""
    model, checkpoint = read(SOUND), Checkpoint.open(SOUND)
    need = load(checkpoint, model.spec, model.names).report.memory_bytes
    monkeypatch.setattr(loading, "available_bytes", lambda: need)
    load(checkpoint, model.spec, model.names)
    with pytest.raises(CapacityError):
        load(checkpoint, model.spec.with_dtype("float32"), model.names)
    monkeypatch.setattr(loading, "available_bytes", lambda: None)
    load(checkpoint, model.spec.with_dtype("float32"), model.names)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_report_counts_the_bytes_that_are_there(dtype: str) -> None:
    loaded = load_folder(SOUND, dtype)
    values = all_values(loaded)
    ranges = [*mapped_ranges(SOUND / FIRST), *mapped_ranges(SOUND / SECOND)]
    mapped = sum(each.nbytes for each in values if any(each.data_ptr() in place for place in ranges))
    assert loaded.report.memory_bytes == sum(each.nbytes for each in values)
    assert loaded.report.mapped_bytes == mapped


def test_progress_counts_to_the_end() -> None:
    model, checkpoint = read(SOUND), Checkpoint.open(SOUND)
    seen: list[tuple[int, int]] = []
    load(checkpoint, model.spec, model.names, progress=lambda done, total: seen.append((done, total)))
    total = sum(not name.startswith(("vision_tower", "mm_projector")) for name in read_index(SOUND))
    assert [(k + 1, total) for k in range(total)] == seen


def test_damaged_names_refuse_before_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole book is settled first: a terabyte is not read to find a tensor missing at its end."""
    model, checkpoint = read(SOUND), Checkpoint.open(SOUND)
    del checkpoint.entries["language_model.model.norm.weight"]
    monkeypatch.setattr(checkpoint, "tensor", lambda name: pytest.fail(f"{name} was touched"))
    with pytest.raises(CheckpointError, match="language_model.model.norm.weight for norm.weight"):
        load(checkpoint, model.spec, model.names)


def test_spec_of_the_test_is_a_model(tmp_path: Path) -> None:
    """The free-form networks above go through the same door as real ones."""
    write_model(tmp_path)
    spec: ModelSpec = model_of()
    assert {"embed.weight", "norm.weight"} == load(Checkpoint.open(tmp_path), spec, NAMES).tensors.keys()


def test_eight_bit_weights_are_scaled_block_by_block(tmp_path: Path) -> None:
    """Two rows of 129 ones and a two, times 0.5 in the first block of columns and 3 in the second."""
    row = bytes([0x38] * 129 + [0x40])
    write_model(tmp_path, a__weight=("F8_E4M3", (2, 130), row + row), a__weight_scale_inv=("F32", (1, 2), floats(0.5, 3.0)))
    got = load_model(tmp_path, TensorSpec("a.weight", (2, 130), "bfloat16")).tensors["output.a.weight"]
    assert torch.bfloat16 == got.dtype
    assert [[0.5] * 128 + [3.0, 6.0]] * 2 == got.tolist()


@pytest.mark.parametrize(("name", "value", "told"), [
    ("a__weight_scale_inv", ("F32", (1, 2), floats(0.5, float("nan"))), "output.a.weight_scale_inv (1 values are NaN or infinite)"),
    ("a__weight", ("F8_E4M3", (2, 130), bytes([0x7F, 0xFF] + [0x7E] * 258)), "output.a.weight (2 codes are NaN)"),
])
def test_damaged_eight_bits(tmp_path: Path, name: str, value: tuple[str, tuple[int, ...], bytes], told: str) -> None:
    given = {"a__weight": ("F8_E4M3", (2, 130), bytes([0x38] * 260)), "a__weight_scale_inv": ("F32", (1, 2), floats(0.5, 3.0))} | {name: value}
    write_model(tmp_path, **given)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, TensorSpec("a.weight", (2, 130), "bfloat16"))
    assert told in caught.value.fact
