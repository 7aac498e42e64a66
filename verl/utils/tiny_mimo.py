# SPDX-License-Identifier: Apache-2.0
"""MiMo's architecture for transformers, which does not ship it: Qwen2 plus multi-token prediction layers.

Tiny model folders take a copy of this file as their own model code. The prediction layers hold weights and are never
run here: generation needs the main model only, and training goes through megatron-core.
"""

from typing import Any

import torch
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2RMSNorm

__all__ = ["MiMoConfig", "MiMoForCausalLM"]


class MiMoConfig(Qwen2Config):
    """Qwen2's configuration with a number of prediction layers."""

    model_type = "mimo"
    num_nextn_predict_layers: int = 0


class _PredictionLayer(Qwen2DecoderLayer):
    """A decoder layer behind a projection of the hidden state and the next token's embedding, side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, layer_idx=0)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(self, name, Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Generates as Qwen2 does; its prediction layers are weights under the hub's names."""

    config_class = MiMoConfig

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config)
        layers = (_PredictionLayer(config) for _ in range(config.num_nextn_predict_layers))
        self.model.mtp_layers = torch.nn.ModuleList(layers)
        self.post_init()
