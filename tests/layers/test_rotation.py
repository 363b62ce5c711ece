"""YaRN's frequencies against transformers, for published settings and for ramps at the ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from firstlight.layers.leaves import inv_freq_of
from firstlight.parts.rotation import Rotation, Yarn

SETTINGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {"width": 64, "theta": 10000.0, "factor": 40.0, "fast": 32.0, "slow": 1.0, "context": 4096},
    "wide ramp": {"width": 32, "theta": 50000.0, "factor": 4.0, "fast": 200.0, "slow": 0.01, "context": 2048},
    "no ramp": {"width": 8, "theta": 1000.0, "factor": 8.0, "fast": 5.0, "slow": 5.0, "context": 32},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies(name: str) -> None:
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = SETTINGS[name]
    config = DeepseekV3Config(qk_rope_head_dim=given["width"], rope_parameters={
        "rope_type": "yarn", "rope_theta": given["theta"], "factor": given["factor"], "beta_fast": given["fast"], "beta_slow": given["slow"],
        "original_max_position_embeddings": given["context"], "mscale": 1.0, "mscale_all_dim": 1.0})
    want, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    yarn = Yarn(factor=given["factor"], fast=given["fast"], slow=given["slow"], context=given["context"])
    got = inv_freq_of(Rotation(width=given["width"], theta=given["theta"], yarn=yarn))
    assert 1.0 == magnitude
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)
    plain = inv_freq_of(Rotation(width=given["width"], theta=given["theta"]))
    assert not torch.equal(plain, got)
    assert 1.5 < float((plain / got).max()) <= given["factor"] * (1 + 1e-6)
