# SPDX-License-Identifier: Apache-2.0
"""The free-form groups that go to megatron-core: unknown fields, wrong kinds of values, contradictions."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.trainer.ppo import preflight_sources as sources
from verl.trainer.ppo.preflight_overrides import check_ppo_overrides, check_sft_overrides
from verl.utils.config import compose_config, to_tree

ROOT = Path(__file__).resolve().parents[3]
A = "actor_rollout_ref"
PPO = to_tree(compose_config("ppo_trainer", [f"{A}.rollout.name=hf", "algorithm.adv_estimator=gae"]))
SFT = to_tree(compose_config("sft_trainer_engine"))


def set_value(tree: dict, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree[parent]
    tree[leaf] = value


def in_sft(**fields: Any) -> list[str]:
    tree = copy.deepcopy(SFT)
    tree["engine"]["override_transformer_config"] |= fields
    return check_sft_overrides(tree)


WRONG = [
    ({"moe_z_loss_coef": 0.1}, ["moe_z_loss_coef=0.1 is not a field", "Did you mean moe_z_loss_coeff?"]),
    ({"moe_z_loss_coeff": "abc"}, ["moe_z_loss_coeff='abc' must be a number"]),
    ({"moe_z_loss_coeff": float("nan")}, ["moe_z_loss_coeff=nan is not a number"]),
    ({"moe_z_loss_coeff": [0.1]}, ["moe_z_loss_coeff=[0.1] must be a number"]),
    ({"moe_router_topk": "two"}, ["moe_router_topk='two' must be a whole number"]),
    ({"calculate_per_token_loss": "yes"}, ["calculate_per_token_loss='yes' must be True or False"]),
    ({"moe_router_dtype": "fp16"}, ["moe_router_dtype='fp16' must be fp32 or fp64"]),
    ({"attention_backend": "flesh"}, ["attention_backend='flesh' is not known", "Did you mean flash?"]),
    ({"mtp_num_layers": 1}, ["mtp_num_layers=1 is not taken", "model.mtp.enable"]),
    ({"moe_router_load_balancing_type": "aux"}, ["'aux' is not known", "aux_loss, seq_aux_loss"]),
    ({"moe_router_load_balancing_type": "aux_loss"}, ["has no effect without", "moe_aux_loss_coeff=0.001"]),
    ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1}, ["no effect with", "seq_aux_loss"]),
    ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": -1.0}, ["must not be negative"]),
    (
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1},
        ["moe_aux_loss_coeff=0.1 must be a list"],
    ),
    ({"recompute_granularity": "full"}, ["needs engine.override_transformer_config.recompute_method=uniform"]),
    ({"recompute_granularity": "full", "recompute_method": "block"}, ["recompute_num_layers=None must be"]),
    ({"recompute_granularity": "half"}, ["recompute_granularity='half' must be full or selective"]),
    ({"recompute_granularity": "selective", "recompute_num_layers": 1}, ["contradicts", "'selective'"]),
    ({"moe_token_dispatcher_type": "allgather"}, ["'allgather' does not go with", "alltoall"]),
    ({"fp16": True}, ["fp16=True contradicts engine.dtype='bfloat16'"]),
    ({"bf16": False}, ["bf16=False contradicts engine.dtype='bfloat16'"]),
]


@pytest.mark.parametrize(("fields", "parts"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_refused_in_one_sentence(fields: dict, parts: list[str]) -> None:
    found = in_sft(**fields)
    assert len(found) == 1, found
    assert found[0].startswith("engine.override_transformer_config.")
    for part in parts:
        assert part in found[0], found[0]


RIGHT = [
    {"moe_z_loss_coeff": 1, "calculate_per_token_loss": True, "moe_router_dtype": "fp32"},
    {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001},
    {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
    {"moe_router_load_balancing_type": "none"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    {"pipeline_model_parallel_layout": "Et|tL", "attention_backend": "flash", "bf16": True, "fp8": False},
    {"use_ascend_gdn": True, "use_fused_rmsnorm": True},
    {"moe_layer_freq": [0, 1], "params_dtype": "bf16", "seq_length": 4096, "should_pad_vocab": True},
    {"num_layers_in_first_pipeline_stage": None, "no_such_field": None},
]


@pytest.mark.parametrize("fields", RIGHT, ids=lambda value: ",".join(value)[:60])
def test_right_fields_pass(fields: dict) -> None:
    assert in_sft(**fields) == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (f"{A}.actor.megatron.override_transformer_config", {"hiden_size": 1}, "Did you mean hidden_size?"),
        (f"{A}.ref.megatron.override_transformer_config", {"hiden_size": 1}, "Did you mean hidden_size?"),
        ("critic.megatron.override_transformer_config", {"moe_aux_loss_coeff": -1.0}, "must not be negative"),
        (f"{A}.actor.megatron.override_ddp_config", {"overlap_grad_reduc": True}, "Did you mean overlap_grad_reduce?"),
        (f"{A}.actor.megatron.override_ddp_config", {"bucket_size": "big"}, "bucket_size='big' must be a whole number"),
        (f"{A}.actor.megatron.override_ddp_config", {"use_distributed_optimizer": False}, "contradicts"),
        (f"{A}.actor.optim.override_optimizer_config", {"adam_epss": 1e-8}, "Did you mean adam_eps?"),
        (f"{A}.actor.optim.override_optimizer_config", {"adam_eps": "tiny"}, "adam_eps='tiny' must be a number"),
        ("critic.optim.override_optimizer_config", {"betas": [0.9, 0.99]}, "is not a field of megatron-core's optimi"),
    ],
)
def test_every_group_of_ppo_is_looked_at(key: str, value: dict, words: str) -> None:
    tree = copy.deepcopy(PPO)
    assert check_ppo_overrides(tree) == []
    set_value(tree, key, value)
    (found,) = check_ppo_overrides(tree)
    assert found.startswith(f"{key}.{next(iter(value))}=") and words in found, found


def test_what_the_critic_copies_from_the_actor_is_said_once() -> None:
    tree = copy.deepcopy(PPO)
    for part in (f"{A}.actor", f"{A}.ref", "critic"):
        set_value(tree, f"{part}.megatron.override_transformer_config", {"hiden_size": 1})
    assert len(check_ppo_overrides(tree)) == 1


def test_without_sources_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_package", lambda name: None)
    sources.provider_fields.cache_clear()
    try:
        assert in_sft(no_such_field=1) == []
    finally:
        sources.provider_fields.cache_clear()


def test_the_fields_read_from_the_sources_are_those_of_the_classes() -> None:
    """In a process of its own: megatron-core wants its patches before it is imported."""
    code = """
from verl.utils.megatron import cpu_backend
cpu_backend.install()
from verl.models.mcore.bridge import _import_auto_bridge
from verl.trainer.ppo import preflight_sources as sources
auto = _import_auto_bridge()
from dataclasses import fields
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from verl.trainer.ppo.preflight_overrides import ATTENTION_BACKENDS
def names(cls): return {field.name for field in fields(cls)}
for cls, read in ((GPTModelProvider, sources.provider_fields("Qwen3MoeForCausalLM")),
                  (MLAModelProvider, sources.provider_fields("DeepseekV3ForCausalLM")),
                  (DistributedDataParallelConfig, sources.ddp_fields()), (OptimizerConfig, sources.optimizer_fields())):
    assert names(cls) <= set(read), (cls, names(cls) - set(read))
assert not names(MLAModelProvider) <= set(sources.provider_fields("Qwen3MoeForCausalLM"))
assert names(OptimizerConfig) == set(sources.optimizer_fields())
defaults = {field.name: field.default for field in fields(MLAModelProvider)}
read = sources.provider_fields("DeepseekV3ForCausalLM")
wrong = [n for n, v in defaults.items() if isinstance(v, (bool, int, float, str)) and not read[n].allows(v)]
assert not wrong, wrong
assert set(ATTENTION_BACKENDS) == {member.name for member in AttnBackend}
assert sources.supported_architectures() <= {str(name) for name in auto.list_supported_models()}, (
    sources.supported_architectures() - set(auto.list_supported_models()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_reading_the_sources_takes_a_moment_and_no_torch() -> None:
    code = (
        "import sys, time\nfrom verl.trainer.ppo import preflight_sources as sources\nstart = time.process_time()\n"
        "assert len(sources.provider_fields('Qwen3MoeForCausalLM')) > 300\n"
        "assert time.process_time() - start < 3\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
