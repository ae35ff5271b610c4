"""Kimi K2: DeepSeek-V3 with other sizes."""

from __future__ import annotations

from shared.model.config_reader import ConfigReader
from shared.model.families.deepseek_v3 import latent_model
from shared.model.spec import ModelSpec


def spec(read: ConfigReader) -> ModelSpec:
    return latent_model("kimi_k2", read, lambda _, n_layers, rope: (None,) * (n_layers + 1))
