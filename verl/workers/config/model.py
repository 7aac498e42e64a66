# SPDX-License-Identifier: Apache-2.0
"""Config of a Hugging Face model folder and of its multi-token prediction layers."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig


@dataclass
class MtpConfig(BaseConfig):
    """Multi-token prediction layers: built when ``enable``, trained when ``enable_train``.

    ``detach_encoder`` keeps their gradient out of the main model; their loss enters with
    ``mtp_loss_scaling_factor / number of layers``.
    """

    enable: bool = False
    enable_train: bool = False
    enable_rollout: bool = False
    detach_encoder: bool = False
    mtp_loss_scaling_factor: float = 0.1

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if self.enable_train and not self.enable:
            problems.append("enable_train=True trains layers that are not built; set enable=True too")
        return problems


@dataclass
class HFModelConfig(BaseConfig):
    """Where the model is and how it is run.

    ``path`` is a Hugging Face folder; ``hf_config_path`` and ``tokenizer_path`` default to it. ``use_remove_padding``
    packs sequences without padding (THD). ``override_config`` replaces entries of the Hugging Face config.
    """

    path: str = ""
    hf_config_path: str | None = None
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    use_remove_padding: bool = True
    use_fused_kernels: bool = False
    enable_gradient_checkpointing: bool = True
    lora: dict[str, Any] = field(default_factory=lambda: {"rank": 0})
    mtp: MtpConfig = field(default_factory=MtpConfig)
    override_config: dict[str, Any] = field(default_factory=dict)

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if not self.path:
            problems.append("path is empty; name a Hugging Face model folder")
        return problems
