"""The Kimi-Linear witness itself: both layouts hold one model, its state matters, and its traces can be compared."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors import safe_open

from firstlight.adapt import record as recorder
from firstlight.adapt.compare import compare
from firstlight.adapt.record import Trace, record
from tests.models.hf_tiny import FULL_LAYERS, make_hf, reference_logits, reference_trace, write_original

NUM_TOKENS = 301


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kimi_linear")


@pytest.fixture(scope="module")
def model(folder):
    model = make_hf(folder / "hf")
    write_original(model, folder / "original")
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 320, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def trace(model, ids):
    return reference_trace(model, ids)


def _names(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return found


def test_layouts_differ_only_in_the_dense_mlp(model, folder):
    ours, theirs = _names(folder / "original"), _names(folder / "hf")
    renamed = {name.replace(".layers.0.block_sparse_moe.", ".layers.0.mlp."): shape for name, shape in theirs.items()}
    assert renamed == ours
    assert ours != theirs
    assert (1, 1, 3, 1) == ours["model.layers.0.self_attn.A_log"]
    index = json.loads((folder / "original" / "model.safetensors.index.json").read_text())
    assert set(ours) == set(index["weight_map"])
    assert 2 == len(set(index["weight_map"].values()))


def test_original_config_is_the_published_spelling(model, folder):
    config = json.loads((folder / "original" / "config.json").read_text())
    assert list(FULL_LAYERS) == config["linear_attn_config"]["full_attn_layers"]
    assert [1, 2, 3, 5, 6] == config["linear_attn_config"]["kda_layers"]
    assert (8, 2, 2) == tuple(config[key] for key in ("num_experts", "num_experts_per_token", "num_shared_experts"))
    assert not {"layer_types", "mlp_layer_types", "num_local_experts", "num_experts_per_tok"} & set(config)


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_transformers_reads_both_layouts_back(model, folder, ids, layout):
    from transformers import KimiLinearForCausalLM

    again, report = KimiLinearForCausalLM.from_pretrained(folder / layout, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert ([], []) == (sorted(report["missing_keys"]), sorted(report["unexpected_keys"]))
    assert torch.equal(reference_logits(model, ids), reference_logits(again.eval(), ids))


def test_seed_decides_the_weights(model):
    same, other = make_hf(None).state_dict(), make_hf(None, seed=1).state_dict()
    for name, want in model.state_dict().items():
        assert torch.equal(want, same[name])
        assert not torch.equal(want, other[name]), name


def test_every_token_matters_to_the_last_one(model, ids):
    """Also those four chunks of 64 back: random weights with fast decay would hide a lost state."""
    want = reference_logits(model, ids)
    for place in (0, 17, 100, 299):
        changed = [*ids]
        changed[place] = 3 + (ids[place] + 1) % 300
        assert 1e-2 < (reference_logits(model, changed)[-1] - want[-1]).abs().max()


def test_decay_is_near_one_and_depends_on_the_input(trace):
    gates = [output for name, output in trace.outputs.items() if name.endswith("forget_gate")]
    assert 5 == len(gates)
    for gate in gates:
        assert 0.98 < gate.exp().mean() < 0.996
        assert 1e-4 < gate.std(1).mean()


def test_routers_use_all_experts_and_their_bias(model, trace):
    ids = {name: output for name, output in trace.outputs.items() if name.endswith("mlp.gate")}
    assert 7 == len(ids)
    for name, chosen in ids.items():
        assert (NUM_TOKENS, 2) == chosen.shape
        assert 8 == len(chosen.unique())
        router = model.get_submodule(name)
        inputs = trace.outputs[name.replace(".mlp.gate", ".post_attention_layernorm")][0]
        scores = (inputs @ router.weight.T).sigmoid()
        assert 0.1 < (scores.topk(2)[1].sort()[0] != chosen.sort()[0]).any(1).float().mean()
        assert torch.equal((scores + router.e_score_correction_bias).topk(2)[1].sort()[0], chosen.sort()[0])


@pytest.mark.parametrize("split", [(64, 64, 64, 64, 45), (300, 1), (1, 2, 130, 168)])
def test_a_chunked_run_with_its_cache_records_the_same_trace(model, ids, trace, split):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    # Left out: router logits (the trace holds ids) and kv_b_proj (expands the whole cache in every call).
    with torch.no_grad(), record(model, "model.layers.*") as chunked:
        for piece in torch.tensor([ids]).split(split, 1):
            cache = model(piece, cache=cache, use_cache=True).cache
    want = Trace({name: output for name, output in trace.outputs.items() if "mlp.gate" not in name and "kv_b_proj" not in name}, trace.extra)
    found = compare(chunked, want, lambda name: name if name.startswith("model.layers.") else None, 1e-4)
    # Decode and chunked prefill of transformers itself agree to 1e-5 on the logits of tiny models.
    found.check(complete=True)
    assert 100 < len(found.compared)


def test_a_lost_state_is_found_at_the_first_linear_layer(model, ids, trace):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad(), record(model, "model.*") as broken:
        cache = model(torch.tensor([ids[:128]]), cache=cache, use_cache=True).cache
        cache.layers[1].recurrent_states[0].zero_()
        model(torch.tensor([ids[128:]]), cache=cache, use_cache=True)
    found = compare(broken, trace, None, 1e-4)
    assert ("model.layers.1.self_attn.o_norm", 128) == (found.first.name, found.first.first_token)


def test_the_script_records_a_folder(model, folder, ids, trace, capsys):
    out = folder / "trace.safetensors"
    arguments = ["--model", str(folder / "original"), "--ids", ",".join(map(str, ids)), "--out", str(out), "--dtype", "float32"]
    assert 0 == recorder.main(arguments)
    assert "module outputs, 301 tokens" in capsys.readouterr().out
    written = Trace.load(out)
    assert [ids] == written.extra["ids"].tolist()
    torch.testing.assert_close(written.extra["logits"], trace.extra["logits"], atol=1e-5, rtol=0)
    comparable = {name: name for name in trace.outputs if not name.endswith("mlp.gate")}
    assert compare(written, trace, comparable, 1e-5).check(complete=True).first is None
    assert 2 == recorder.main([*arguments[:3], "319,320", *arguments[4:]])
    assert "--ids holds 320, the embedding has 320 rows" in capsys.readouterr().err


def test_the_script_says_when_a_folder_is_unknown(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    assert 2 == recorder.main(["--model", str(tmp_path), "--ids", "1", "--out", str(tmp_path / "o")])
    assert f"cannot load {tmp_path}" in capsys.readouterr().err
    assert "transformers" in sys.modules
