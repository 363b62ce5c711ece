"""Ways to spoil a checkpoint in Kimi K3's layout: {kind: function(folder)}.

Each function works on a copy of tests/data/kimi_k3_tiny, spoils one thing and returns what a good message must name.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

SOUND = Path(__file__).parent.parent / "data" / "kimi_k3_tiny"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
LAYER = "language_model.model.layers.{}."
Q_PROJ = LAYER.format(0) + "self_attn.q_proj.weight"
NORM = "language_model.model.norm.weight"
EXPERT = LAYER.format(1) + "block_sparse_moe.experts.{}.{}.weight{}"


def copy_sound(folder: Path) -> Path:
    """A sound copy to spoil."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", INDEX, FIRST, SECOND):
        shutil.copyfile(SOUND / file, folder / file)
    return folder


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> shard."""
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Replace the index."""
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(folder: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the shard that holds `name`; the index follows."""
    weight_map = read_index(folder)
    shard = weight_map[name]
    tensors = load((folder / shard).read_bytes())
    change(tensors)
    save_file(tensors, folder / shard, metadata={"format": "pt"})
    write_index(folder, {each: file for each, file in weight_map.items() if file != shard} | dict.fromkeys(tensors, shard))


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file says about its bytes, and leave the bytes."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _missing_tensor(folder: Path) -> str:
    edit(folder, Q_PROJ, lambda tensors: tensors.pop(Q_PROJ))
    return Q_PROJ


def _extra_tensor(folder: Path) -> str:
    name = LAYER.format(0) + "self_attn.rotary.inv_freq"
    edit(folder, Q_PROJ, lambda tensors: tensors.update({name: torch.ones(4)}))
    return name


def _layer_too_many(folder: Path) -> str:
    name = LAYER.format(8) + "input_layernorm.weight"
    edit(folder, Q_PROJ, lambda tensors: tensors.update({name: torch.ones(128, dtype=torch.bfloat16)}))
    return name


def _in_two_shards(folder: Path) -> str:
    weight_map = read_index(folder)
    other = next(name for name, shard in weight_map.items() if shard != weight_map[Q_PROJ])
    value = load((folder / weight_map[Q_PROJ]).read_bytes())[Q_PROJ]
    edit(folder, other, lambda tensors: tensors.update({Q_PROJ: value}))
    return Q_PROJ


def _transposed(folder: Path) -> str:
    name = LAYER.format(0) + "mlp.gate_proj.weight"
    edit(folder, name, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    return name


def _wrong_dtype(folder: Path) -> str:
    edit(folder, Q_PROJ, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int64)}))
    return Q_PROJ


def _float8_without_scale(folder: Path) -> str:
    edit(folder, Q_PROJ, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)}))
    return Q_PROJ


def _truncated(folder: Path) -> str:
    file = folder / SECOND
    file.write_bytes(file.read_bytes()[:-1000])
    return SECOND


def _truncated_header(folder: Path) -> str:
    file = folder / FIRST
    file.write_bytes(file.read_bytes()[:5000])
    return FIRST


def _empty_file(folder: Path) -> str:
    (folder / FIRST).write_bytes(b"")
    return FIRST


def _header_garbage(folder: Path) -> str:
    file = folder / FIRST
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"{" + b"\xff" * 63 + content[72:])
    return FIRST


def _header_length_garbage(folder: Path) -> str:
    file = folder / FIRST
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    return FIRST


def _header_beyond_the_file(folder: Path) -> str:
    """A length that the format allows, of a header longer than its file."""
    file = folder / FIRST
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", len(content) - 7) + content[8:])
    return FIRST


def _unknown_dtype(folder: Path) -> str:
    edit_header(folder / read_index(folder)[Q_PROJ], lambda header: header[Q_PROJ].update(dtype="Q4_K"))
    return Q_PROJ


def _sizes_disagree(folder: Path) -> str:
    edit_header(folder / read_index(folder)[Q_PROJ], lambda header: header[Q_PROJ].update(shape=[128, 127]))
    return Q_PROJ


def _overlapping(folder: Path) -> str:
    def shift(header: dict[str, Any]) -> None:
        begin, end = header[Q_PROJ]["data_offsets"]
        header[Q_PROJ]["data_offsets"] = [begin - 64, end - 64]

    edit_header(folder / read_index(folder)[Q_PROJ], shift)
    return Q_PROJ


def _beyond_the_end(folder: Path) -> str:
    def shift(header: dict[str, Any]) -> None:
        begin, end = header[Q_PROJ]["data_offsets"]
        header[Q_PROJ]["data_offsets"] = [begin + 10**9, end + 10**9]

    edit_header(folder / read_index(folder)[Q_PROJ], shift)
    return Q_PROJ


def _pointer(folder: Path) -> str:
    (folder / FIRST).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1481520\n")
    return FIRST


def _absent_shard(folder: Path) -> str:
    (folder / SECOND).unlink()
    return SECOND


def _absent_shard_without_index(folder: Path) -> str:
    (folder / INDEX).unlink()
    (folder / FIRST).rename(folder / "model-00001-of-00002.safetensors")
    (folder / SECOND).unlink()
    return "model-00002-of-00002.safetensors"


def _index_lacks_a_tensor(folder: Path) -> str:
    weight_map = read_index(folder)
    del weight_map[NORM]
    write_index(folder, weight_map)
    return NORM


def _shard_lacks_a_tensor(folder: Path) -> str:
    name = LAYER.format(0) + "self_attn.forgotten.weight"
    write_index(folder, read_index(folder) | {name: FIRST})
    return name


def _index_names_the_other_shard(folder: Path) -> str:
    weight_map = read_index(folder)
    write_index(folder, weight_map | {Q_PROJ: SECOND if weight_map[Q_PROJ] == FIRST else FIRST})
    return Q_PROJ


def _index_leaves_the_folder(folder: Path) -> str:
    write_index(folder, read_index(folder) | {NORM: "../elsewhere.safetensors"})
    return "../elsewhere.safetensors"


def _index_garbage(folder: Path) -> str:
    (folder / INDEX).write_text('{"weight_map": ')
    return INDEX


def _two_checkpoints(folder: Path) -> str:
    shutil.copyfile(folder / FIRST, folder / "model.safetensors")
    return "model.safetensors"


def _pickle_only(folder: Path) -> str:
    for file in (INDEX, FIRST, SECOND):
        (folder / file).unlink()
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    return "pytorch_model.bin"


def _empty_folder(folder: Path) -> str:
    for file in (INDEX, FIRST, SECOND):
        (folder / file).unlink()
    return folder.name


def _nan_weight(folder: Path) -> str:
    edit(folder, Q_PROJ, lambda tensors: tensors[Q_PROJ][3, 5].fill_(float("nan")))
    return Q_PROJ


def _nan_norm(folder: Path) -> str:
    edit(folder, NORM, lambda tensors: tensors[NORM][127].fill_(float("nan")))
    return NORM


def _infinite_a_log(folder: Path) -> str:
    """Among the model's own heads, so that it is not the padding that is found."""
    name = LAYER.format(4) + "self_attn.A_log"
    edit(folder, name, lambda tensors: tensors[name][2].fill_(float("inf")))
    return name


def _infinite_bias(folder: Path) -> str:
    name = LAYER.format(2) + "block_sparse_moe.gate.e_score_correction_bias"
    edit(folder, name, lambda tensors: tensors[name][7].fill_(float("-inf")))
    return name


def _nan_scale(folder: Path) -> str:
    name = EXPERT.format(6, "w2", "_scale")
    edit(folder, name, lambda tensors: tensors[name][63, 1].fill_(255))
    return name


def _padding_not_zero(folder: Path) -> str:
    name = LAYER.format(1) + "self_attn.A_log"
    edit(folder, name, lambda tensors: tensors[name][31].fill_(1e-30))
    return name


def _packed_without_scale(folder: Path) -> str:
    name = EXPERT.format(3, "w1", "_scale")
    edit(folder, name, lambda tensors: tensors.pop(name))
    return EXPERT.format(3, "w1", "_packed")


def _scale_without_packed(folder: Path) -> str:
    name = EXPERT.format(3, "w1", "_packed")
    edit(folder, name, lambda tensors: tensors.pop(name))
    return EXPERT.format(3, "w1", "_scale")


def _scale_shape(folder: Path) -> str:
    name = EXPERT.format(0, "w3", "_scale")
    edit(folder, name, lambda tensors: tensors.update({name: tensors[name].repeat_interleave(2, dim=1)}))
    return name


def _scale_as_float(folder: Path) -> str:
    name = EXPERT.format(0, "w3", "_scale")
    edit(folder, name, lambda tensors: tensors.update({name: torch.exp2(tensors[name].float() - 127)}))
    return name


def _expert_gap(folder: Path) -> str:
    name = EXPERT.format(7, "w1", "_packed")

    def drop(tensors: dict[str, Tensor]) -> None:
        for form in ("_packed", "_scale"):
            tensors.pop(EXPERT.format(7, "w1", form))

    edit(folder, name, drop)
    return name


def _expert_too_many(folder: Path) -> str:
    name = EXPERT.format(0, "w1", "_packed")
    edit(folder, name, lambda tensors: tensors.update({EXPERT.format(8, "w1", "_packed"): tensors[name].clone()}))
    return EXPERT.format(8, "w1", "_packed")


def _expert_twice(folder: Path) -> str:
    """The same expert under two spellings of its number."""
    name = EXPERT.format("05", "w1", "_packed")
    sound = EXPERT.format(5, "w1", "_packed")
    edit(folder, sound, lambda tensors: tensors.update({name: tensors[sound].clone()}))
    return name


def _mixed_formats(folder: Path) -> str:
    name = EXPERT.format(2, "w1", "")

    def unpack(tensors: dict[str, Tensor]) -> None:
        for form in ("_packed", "_scale"):
            tensors.pop(EXPERT.format(2, "w1", form))
        tensors[name] = torch.ones(64, 64, dtype=torch.bfloat16)

    edit(folder, EXPERT.format(2, "w1", "_packed"), unpack)
    return name


def _packed_and_plain(folder: Path) -> str:
    name = LAYER.format(0) + "mlp.up_proj.weight_packed"

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(256, 64, dtype=torch.uint8)
        tensors[name.replace("_packed", "_scale")] = torch.full((256, 4), 127, dtype=torch.uint8)

    edit(folder, LAYER.format(0) + "mlp.up_proj.weight", add)
    return name


def _two_names_for_one(folder: Path) -> str:
    """A name that lands where another one has landed already."""
    name = LAYER.format(1) + "mlp.router.weight"
    there = LAYER.format(1) + "block_sparse_moe.gate.weight"
    edit(folder, there, lambda tensors: tensors.update({name: tensors[there].clone()}))
    return name


KINDS: dict[str, Callable[[Path], str]] = {
    function.__name__.strip("_"): function
    for function in (
        _missing_tensor, _extra_tensor, _layer_too_many, _in_two_shards, _transposed, _wrong_dtype, _float8_without_scale,
        _truncated, _truncated_header, _empty_file, _header_garbage, _header_length_garbage,
        _header_beyond_the_file, _unknown_dtype, _sizes_disagree, _overlapping,
        _beyond_the_end, _pointer, _absent_shard, _absent_shard_without_index, _index_lacks_a_tensor, _shard_lacks_a_tensor,
        _index_names_the_other_shard, _index_leaves_the_folder, _index_garbage, _two_checkpoints, _pickle_only, _empty_folder,
        _nan_weight, _nan_norm, _infinite_a_log, _infinite_bias, _nan_scale, _padding_not_zero,
        _packed_without_scale, _scale_without_packed, _scale_shape, _scale_as_float,
        _expert_gap, _expert_too_many, _expert_twice, _mixed_formats, _packed_and_plain, _two_names_for_one,
    )
}
