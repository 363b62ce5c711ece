"""The recorder: what it keeps, in which order, and that it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import firstlight.adapt.record as recorder
from firstlight.adapt.record import Trace, TraceError, first_tensor, join, main, natural, record

DATA = Path(__file__).parents[1] / "data"
ORDER = [
    "embed", "layers.0.proj", "layers.0.mix", "layers.0.router", "layers.0", "layers.1.proj", "layers.1.mix", "layers.1.router", "layers.1", "head",
]  # fmt: skip


@dataclass
class Mixed:
    weights: None
    value: torch.Tensor


class Mix(nn.Module):
    """Running sum over the tokens; a state, so that chunks depend on what came before."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        y = x.cumsum(1) + (0 if self.state is None else self.state)
        self.state = y[:, -1:]
        return Mixed(None, y)


class Router(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dim))

    def forward(self, x):
        scores = x.reshape(-1, x.shape[-1]) @ self.weight.T
        return scores.topk(2)[1], scores


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj, self.mix, self.router, self.unused = nn.Linear(dim, dim), Mix(), Router(dim), nn.Linear(1, 1)

    def forward(self, x):
        y = self.proj(x)
        raw = y.clone()
        y.mul_(0.0)  # reference code that reuses its buffers must not reach into the trace
        self.router(raw)
        z = self.mix(raw).value
        return (x + 0.1 * z, None)


class Small(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(11, dim), nn.ModuleList([Layer(dim), Layer(dim)]), nn.Linear(dim, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)

    def reset(self):
        for layer in self.layers:
            layer.mix.state = None


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def ids():
    return torch.randint(0, 11, (1, 37), generator=torch.Generator().manual_seed(1))


def _num_hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def _whole(model, ids, where="*", **options):
    model.reset()
    with torch.no_grad(), record(model, where, **options) as trace:
        model(ids)
    return trace


def test_keeps_every_output_in_execution_order(model, ids):
    trace = _whole(model, ids)
    expected = [name for layer in ("layers.0", "layers.1") for name in (f"{layer}.proj", f"{layer}.router", f"{layer}.mix", layer)]
    assert ["embed", *expected, "head"] == list(trace.outputs)
    assert sorted(ORDER) == sorted(trace.outputs)
    assert torch.equal(model.embed(ids), trace.outputs["embed"])
    assert torch.equal(model.layers[0].proj(model.embed(ids)), trace.outputs["layers.0.proj"])
    assert torch.int64 == trace.outputs["layers.0.router"].dtype
    assert (37, 2) == trace.outputs["layers.0.router"].shape
    assert torch.equal(trace.outputs["layers.0.proj"].cumsum(1), trace.outputs["layers.0.mix"])


def test_recording_does_not_change_the_run(model, ids):
    model.reset()
    plain = model(ids)
    model.reset()
    with record(model):
        recorded = model(ids)
    assert torch.equal(plain, recorded)


def test_hooks_are_gone_after_the_block_and_after_an_error(model, ids):
    _whole(model, ids)
    assert 0 == _num_hooks(model)
    with pytest.raises(RuntimeError, match="stop"), record(model) as trace:
        model(ids)
        assert 10 < _num_hooks(model)
        raise RuntimeError("stop")
    assert 0 == _num_hooks(model)
    assert "head" in trace.outputs
    kept = trace.outputs["head"].clone()
    model(ids)
    assert torch.equal(kept, trace.outputs["head"])


@pytest.mark.parametrize("split", [(37,), (5, 1, 31), (1, 36), (12, 12, 13), (1,) * 37])
def test_chunks_join_into_the_whole(model, ids, split):
    whole = _whole(model, ids)
    model.reset()
    with torch.no_grad(), record(model) as chunked:
        for piece in ids.split(split, dim=1):
            model(piece)
    assert list(whole.outputs) == list(chunked.outputs)
    for name, want in whole.outputs.items():
        assert want.shape == chunked.outputs[name].shape
        # fp32 sums of 37 unit values in another order
        torch.testing.assert_close(chunked.outputs[name], want, atol=2e-5, rtol=0)


def test_join_finds_the_token_dim():
    def ones(*shape):
        return torch.ones(shape)

    assert (1, 8, 6) == join([ones(1, 4, 6), ones(1, 4, 6)]).shape
    assert (8, 6) == join([ones(4, 6), ones(4, 6)]).shape
    assert (2, 6) == join([ones(1, 6), ones(1, 6)]).shape
    assert (6, 3, 16) == join([ones(5, 3, 16), ones(1, 3, 16)]).shape
    assert (1, 6, 3, 16) == join([ones(1, 5, 3, 16), ones(1, 1, 3, 16)]).shape
    singles = torch.arange(5 * 3 * 4.0).view(5, 1, 3, 4)
    assert torch.equal(singles.flatten(), join(list(singles)).flatten())
    assert "differ in dims [0, 1]" in join([ones(2, 3), ones(3, 4)])
    assert "no token dim" in join([ones(2, 3), ones(2, 3, 1)])
    assert "no token dim" in join([torch.tensor(1.0), torch.tensor(2.0)])


def test_globs_choose_and_a_typo_is_said(model, ids):
    assert ["layers.0.proj", "layers.1.proj"] == list(_whole(model, ids, "*.proj").outputs)
    assert ["layers.0", "layers.1", "head"] == list(_whole(model, ids, ["layers.?", "head"]).outputs)
    with pytest.raises(TraceError, match=r"none of 14 modules fits \['layer.\*'\]\. Names look like"), record(model, "layer.*"):
        pass
    assert 0 == _num_hooks(model)


def test_dtype_pick_and_outputs_without_tensors(model, ids):
    trace = _whole(model, ids, dtype=torch.bfloat16)
    assert {"bfloat16"} == {str(t.dtype)[6:] for name, t in trace.outputs.items() if "router" not in name}
    assert "bfloat16" == trace.dtype
    scores = _whole(model, ids, "*.router", pick=lambda name, output: output[1])
    assert (37, 6) == scores.outputs["layers.1.router"].shape
    nothing = _whole(model, ids, "*.router", pick=lambda name, output: None)
    assert {} == nothing.outputs
    assert {"layers.0.router": "not picked", "layers.1.router": "not picked"} == nothing.skipped
    silent = nn.Sequential(nn.Identity())
    with record(silent) as trace:
        silent("text")
    assert {"0": "no tensor in its output, a str"} == trace.skipped


def test_first_tensor_goes_depth_first():
    one, two = torch.tensor(1), torch.tensor(2)
    assert one is first_tensor((None, {"a": [one], "b": two}, two))
    assert two is first_tensor(Mixed(None, two))
    assert first_tensor((None, "text", 3)) is None


def test_round_trip_keeps_values_order_and_metadata(model, ids, tmp_path):
    trace = _whole(model, ids)
    trace.skipped["layers.0.odd"] = "why not"
    logits = trace.outputs["head"]
    trace.extra["logits"] = logits
    trace.save(tmp_path / "t.safetensors", ids=ids)
    back = Trace.load(tmp_path / "t.safetensors")
    assert list(trace.outputs) == list(back.outputs)
    assert all(torch.equal(want, back.outputs[name]) for name, want in trace.outputs.items())
    assert {"ids", "logits"} == set(back.extra)
    assert torch.equal(ids, back.extra["ids"])
    assert trace.skipped == back.skipped
    assert back.ordered
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        header = file.metadata()
        assert {"ids", "logits"} | {f"trace.{name}" for name in ORDER} == set(file.keys())
    assert ("firstlight-trace", "1", "as computed", str(torch.__version__)) == tuple(header[k] for k in ("format", "version", "dtype", "torch"))


def test_a_trace_without_metadata_loads_unordered():
    trace = Trace.load(DATA / "kimi_k3_text_trace" / "trace.safetensors")
    assert not trace.ordered
    assert (1, 60) == trace.extra["ids"].shape
    assert torch.equal(trace.extra["logits"], trace.outputs["lm_head"])
    assert torch.int64 == trace.outputs["model.layers.1.block_sparse_moe.gate"].dtype
    assert {"ids", "logits"} == set(trace.extra)


def test_natural_order():
    assert ["layers.2", "layers.2.mixer", "layers.10", "norm"] == sorted(["layers.10", "norm", "layers.2.mixer", "layers.2"], key=natural)


def test_broken_files_are_refused(tmp_path, model, ids):
    (tmp_path / "text").write_text("not safetensors")
    with pytest.raises(TraceError, match="cannot be read as safetensors"):
        Trace.load(tmp_path / "text")
    with pytest.raises(TraceError, match="cannot be read as safetensors"):
        Trace.load(tmp_path / "absent")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(TraceError, match="holds no tensor named trace"):
        Trace.load(tmp_path / "other")
    save_file({"trace.x": torch.ones(1)}, tmp_path / "later", metadata={"format": "firstlight-trace", "version": "2"})
    with pytest.raises(TraceError, match="version 2, this code reads 1"):
        Trace.load(tmp_path / "later")
    save_file({"trace.x": torch.ones(1)}, tmp_path / "short", metadata={"format": "firstlight-trace", "version": "1", "order": '["x", "y"]'})
    with pytest.raises(TraceError, match="orders 2 modules and holds 1"):
        Trace.load(tmp_path / "short")
    with pytest.raises(TraceError, match=r"begin with `trace\.`"):
        _whole(model, ids).save(tmp_path / "clash", **{"trace.x": torch.ones(1)})
    with pytest.raises(TraceError, match="cannot be written"):
        _whole(model, ids).save(tmp_path / "no" / "folder")


BESIDE = """
import sys
sys.modules["firstlight"] = None  # any import of it fails
import torch
from record import Trace, record
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
with torch.no_grad(), record(model) as trace:
    y = model(torch.arange(6.0).view(2, 3))
trace.save("out.safetensors", ids=[5, 6])
back = Trace.load("out.safetensors")
assert list(back.outputs) == ["0", "1"], back.outputs
assert torch.equal(back.outputs["1"], y)
assert back.extra["ids"].tolist() == [5, 6]
print("recorded", sorted(name for name in sys.modules if name.startswith("firstlight")), "numpy-free")
"""


def test_the_file_works_beside_any_code(tmp_path):
    shutil.copy(recorder.__file__, tmp_path / "record.py")
    (tmp_path / "use.py").write_text(BESIDE)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith("recorded ['firstlight']")
    assert Trace.load(tmp_path / "out.safetensors").ordered


def test_script_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    assert 2 == main(["--model", str(tmp_path), "--ids", "1,x", "--out", "o"])
    assert "--ids is '1,x', not a list of token ids" in capsys.readouterr().err
    assert 2 == main(["--model", str(tmp_path), "--ids", "1", "--out", "o", "--dtype", "nn"])
    assert "--dtype is 'nn', not a torch dtype" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert 2 == main(["--model", str(tmp_path), "--ids", "1 2", "--out", "o"])
    assert "transformers cannot be imported here" in capsys.readouterr().err
