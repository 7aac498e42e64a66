# SPDX-License-Identifier: Apache-2.0
import pickle

import pytest

from verl.trainer.config import AlgoConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import (
    HFModelConfig,
    McoreActorConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    TrainingWorkerConfig,
)


def test_engine_batches_are_set_later_and_the_layout_is_not() -> None:
    engine = McoreEngineConfig(context_parallel_size=2)
    engine.max_token_len_per_gpu = 64
    engine.forward_only = True
    with pytest.raises(AttributeError, match="context_parallel_size is set once"):
        engine.context_parallel_size = 4


def test_a_worker_config_travels() -> None:
    config = TrainingWorkerConfig(
        model_config=HFModelConfig(path="model"),
        engine_config=McoreEngineConfig(override_transformer_config={"moe_router_dtype": "fp32"}),
        optimizer_config=McoreOptimizerConfig(lr=1e-4),
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_defaults_are_not_shared() -> None:
    first, second = McoreActorConfig(), McoreActorConfig()
    first.megatron.override_transformer_config["a"] = 1
    assert second.megatron.override_transformer_config == {}


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (McoreEngineConfig, {"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0 must be at least 1"),
        (McoreEngineConfig, {"dtype": "half"}, "dtype='half' is not known"),
        (McoreOptimizerConfig, {"lr": -1.0}, "lr=-1.0 must be a number that is not negative"),
        (McoreOptimizerConfig, {"lr": 1e-6, "min_lr": 1e-5}, "min_lr=1e-05 must lie between 0 and lr=1e-06"),
        (McoreOptimizerConfig, {"lr_decay_style": "WSD"}, "needs lr_wsd_decay_steps"),
        (McoreActorConfig, {"clip_ratio_c": 1.0}, "clip_ratio_c=1.0 must be above 1"),
        (
            McoreActorConfig,
            {"clip_ratio": 1.5},
            "clip_ratio=1.5 must lie between 0 and 1, unless",
        ),
        (McoreActorConfig, {"clip_ratio_low": 1.5}, "clip_ratio_low=1.5 must lie between 0 and 1"),
        (McoreActorConfig, {"loss_agg_mode": "mean"}, "loss_agg_mode='mean' is not known"),
        (RolloutConfig, {"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
        (RolloutConfig, {"top_k": 0}, "top_k=0 must be -1"),
        (SamplingConfig, {"do_sample": True}, "do_sample=True needs a temperature above 0"),
        (HFModelConfig, {}, "path is empty"),
        (AlgoConfig, {"kl_penalty": "k9"}, "kl_penalty='k9' is not known"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(cls: type, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**values)


def test_building_names_every_wrong_key_with_its_path() -> None:
    values = {"ppo_epoch": 2, "shuffle": "maybe", "megatron": {"seed": 1.5}, "optim": {"lr": 1}}
    with pytest.raises(ValueError) as caught:
        omega_conf_to_dataclass(values, McoreActorConfig, path="actor")
    assert str(caught.value).splitlines() == [
        "actor.ppo_epoch is not a field of McoreActorConfig. Did you mean ppo_epochs?",
        "actor.shuffle='maybe' must be True or False",
        "actor.megatron.seed=1.5 must be a whole number",
    ]
    built = omega_conf_to_dataclass({"optim": {"lr": 1, "betas": [0, 0.5]}}, McoreActorConfig)
    assert built.optim.lr == 1.0 and isinstance(built.optim.lr, float) and built.optim.betas == (0, 0.5)
    assert omega_conf_to_dataclass(None) is None
