# SPDX-License-Identifier: Apache-2.0
"""What the finished model's configuration says: router losses, the flag, gradient precision; and the patches' edges."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.engine_world import Case, engine, save_sharp_model
from tests.utils_dist import run_world


class _Alone:
    """A process group of one."""

    size = staticmethod(lambda: 1)
    rank = staticmethod(lambda: 0)


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def router_facts(path: str) -> dict[str, Any]:
    """Defaults, and what is refused."""
    facts: dict[str, Any] = {}
    with engine(path, Case("default")) as built:
        config = built.tf_config
        facts["default"] = (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, config.moe_z_loss_coeff)
        facts["float32"] = (built.module[0].ddp_config.grad_reduce_in_fp32, main_grad_types(built))

    def build(**overrides: Any) -> None:
        with engine(path, Case("refused", overrides=overrides)):
            pass

    facts["coefficient alone"] = error_of(build, moe_aux_loss_coeff=0.01)
    facts["type alone"] = error_of(build, moe_router_load_balancing_type="seq_aux_loss")
    return facts


def main_grad_types(built: Any) -> set[str]:
    return {str(p.main_grad.dtype) for module in built.module for p in module.parameters()}


def bfloat16_facts(path: str) -> dict[str, Any]:
    """Gradient precision, and the counts of the global auxiliary loss, in a bfloat16 model."""
    from megatron.core.transformer.moe.router import TopKRouter

    overrides = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    facts: dict[str, Any] = {}
    with engine(path, Case("bfloat16", dtype="bfloat16", overrides=overrides)) as built, built.train_mode():
        facts["bfloat16"] = (built.module[0].ddp_config.grad_reduce_in_fp32, main_grad_types(built))
        router = next(part for part in built.module[0].modules() if isinstance(part, TopKRouter))
        scores = torch.full((300, 4), 0.25, requires_grad=True)
        chosen = torch.tensor([True, True, False, False]).expand(300, 4)
        router._apply_global_aux_loss(scores * 1.0, scores, chosen, with_padding_mask=True)
        facts["counts"] = router.global_tokens_per_expert.tolist()
    return facts


def patch_facts() -> dict[str, Any]:
    """An empty micro-batch, and another version of megatron-core."""
    from megatron.core.transformer.moe import router

    from verl.models.mcore import patch

    counts = router.get_tokens_per_expert_and_token_count
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    whole, share, total = counts(routing_map=nothing, reduce_group=_Alone, topk=2, with_padding_mask=True)
    scores = torch.zeros(3, 4, requires_grad=True)
    loss = router.switch_load_balancing_loss_func(
        probs=scores, tokens_per_expert=whole, total_num_tokens=total, topk=2, num_experts=4, moe_aux_loss_coeff=0.1
    )
    (loss * share).backward()
    facts: dict[str, Any] = {"empty": (float(loss), scores.grad.abs().sum().item())}
    patch._applied, patch.version = False, lambda name: "0.99.0"
    facts["version"] = error_of(patch.apply_patches)
    return facts


def flag_of_a_vision_provider(path: str) -> tuple[bool, bool, bool]:
    """(flag at CP = 1, flag at CP = 2, what the engine reads from the latter)."""
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLMoEModelProvider

    from verl.models.mcore.bridge import _NEED_ACCELERATOR
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    plain = dict.fromkeys(_NEED_ACCELERATOR, False)
    flags = []
    for cp in (1, 2):
        provider = Qwen3VLMoEModelProvider(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, context_parallel_size=cp, **plain
        )
        provider.finalize()
        flags.append(provider.calculate_per_token_loss)
    engine_like = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    engine_like.tf_config = provider
    return *flags, engine_like.per_token_loss


def facts_of_one_process(rank: int, world: int, path: str) -> dict[str, Any]:
    facts = router_facts(path) | bfloat16_facts(path)
    facts["vision"] = flag_of_a_vision_provider(path)
    return facts | patch_facts()


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = save_sharp_model(str(Path(tmp_path_factory.mktemp("settings")) / "model"))
    return run_world(facts_of_one_process, 1, path)[0]


@pytest.mark.gloo
def test_auxiliary_losses_are_off_unless_type_and_coefficient_are_set(facts: dict[str, Any]) -> None:
    # The Hugging Face configuration has router_aux_loss_coef=0.001, which is for pre-training.
    assert facts["default"] == ("none", 0.0, None)
    assert "moe_aux_loss_coeff=0.01 has no effect" in facts["coefficient alone"]
    assert "moe_router_load_balancing_type=seq_aux_loss has no effect" in facts["type alone"]
    assert "moe_aux_loss_coeff" in facts["type alone"]


@pytest.mark.gloo
def test_bfloat16_gradients_are_summed_in_float32(facts: dict[str, Any]) -> None:
    assert facts["bfloat16"] == (True, {"torch.float32"})
    assert facts["float32"] == (False, {"torch.float32"})


@pytest.mark.gloo
def test_global_expert_counts_stay_exact_in_a_bfloat16_model(facts: dict[str, Any]) -> None:
    assert facts["counts"] == [300, 300, 0, 0]


@pytest.mark.gloo
def test_a_micro_batch_without_tokens_has_no_auxiliary_loss(facts: dict[str, Any]) -> None:
    assert facts["empty"] == (0.0, 0.0)


@pytest.mark.gloo
def test_another_megatron_core_is_refused(facts: dict[str, Any]) -> None:
    assert "0.19.2" in facts["version"] and "0.99.0" in facts["version"]


@pytest.mark.gloo
def test_the_flag_that_a_provider_sets_itself_is_seen(facts: dict[str, Any]) -> None:
    assert facts["vision"] == (False, True, True)


def overridden(rank: int, world: int, path: str) -> dict[str, Any]:
    """What ``model.override_config`` does to the model that is built."""
    from verl.models.mcore.bridge import load_bridge
    from verl.utils.megatron.cpu_backend import install

    install()
    bridge = load_bridge(path, override_config={"rms_norm_eps": 0.125})
    return {
        "eps": bridge.to_megatron_provider(load_weights=False).layernorm_epsilon,
        "unknown": error_of(load_bridge, path, override_config={"rms_norm_epsi": 1.0}),
    }


@pytest.mark.gloo
def test_entries_of_the_hugging_face_configuration_can_be_replaced(tmp_path: Path) -> None:
    path = save_sharp_model(str(tmp_path / "model"))
    facts = run_world(overridden, 1, path)[0]
    assert facts["eps"] == 0.125
    assert "rms_norm_epsi" in facts["unknown"] and "rms_norm_eps?" in facts["unknown"]


def incomplete(rank: int, world: int, path: str) -> str:
    def build() -> None:
        with engine(path, Case("incomplete", pp=2)):
            pass

    return error_of(build)


@pytest.mark.gloo
def test_a_folder_without_some_weights_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The bridge only warns and leaves them random."""
    from safetensors.torch import load_file, save_file

    path = save_sharp_model(str(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    for error in run_world(incomplete, 2, path):
        assert "model.path=" in error and "decoder.layers.0.self_attention.linear_qkv.weight" in error, error
