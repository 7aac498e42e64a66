# SPDX-License-Identifier: Apache-2.0
"""The memory estimate by hand: each part's formula, phases, pipeline stages, recomputation."""

import json
from typing import Any

import pytest

from tests.special_sanity.checks import REPO_ROOT
from tests.utils.estimates import part
from tests.utils.test_model_size_on_cpu import shape
from verl.utils.activation_memory import stage_activations
from verl.utils.memory_estimate import (
    NOT_COUNTED,
    Layout,
    MemoryEstimate,
    RolloutLoad,
    combine,
    estimate_memory,
    estimate_stages,
)
from verl.utils.model_size import num_parameters

DENSE = "Qwen2.5-7B-Instruct"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def estimate(name: str = DENSE, layout: Layout | None = None, **settings: Any) -> MemoryEstimate:
    return estimate_memory(shape(name), layout or Layout(world_size=8), **{"max_tokens_per_rank": 1000} | settings)


def test_state_of_a_dense_model_by_hand() -> None:
    parameters = 7_615_616_512
    found = estimate()
    padding = part(found, "weights").bytes // 2 - parameters
    assert 0 <= padding < 100_000
    assert part(found, "gradients").bytes == 4 * (parameters + padding)
    assert part(found, "optimizer state").bytes == 12 * (parameters + padding) // 8
    whole = estimate(use_distributed_optimizer=False)
    assert part(whole, "weights").bytes == 2 * parameters
    assert part(whole, "optimizer state").bytes == 12 * parameters


@pytest.mark.parametrize(
    ("settings", "weights", "gradients", "optimizer"),
    [
        ({}, 2, 4, 12),
        ({"dtype": "float32"}, 4, 4, 8),
        ({"dtype": "float64", "use_distributed_optimizer": False}, 8, 8, 16),
        ({"ddp": {"grad_reduce_in_fp32": False}}, 2, 2, 12),
        ({"optimizer": {"optimizer": "sgd"}, "use_distributed_optimizer": False}, 2, 4, 8),
    ],
)
def test_bytes_of_a_parameter(settings: dict[str, Any], weights: int, gradients: int, optimizer: int) -> None:
    found = estimate(layout=Layout(), **settings)
    numbers = part(found, "weights").bytes // weights
    assert part(found, "gradients").bytes == gradients * numbers
    assert part(found, "optimizer state").bytes == pytest.approx(optimizer * numbers, rel=1e-4)


def test_experts_share_their_optimizer_state_over_their_own_ranks() -> None:
    layout = Layout(cp=2, ep=8, etp=1, world_size=16)
    found = estimate("Qwen3-30B-A3B", layout)
    counts = num_parameters(shape("Qwen3-30B-A3B"))
    dense, experts = counts["total"] - counts["experts"], counts["experts"] // 8
    assert part(found, "weights").bytes == pytest.approx(2 * (dense + experts), rel=1e-4)
    assert part(found, "optimizer state").bytes == pytest.approx(12 * (dense / 16 + experts / 2), rel=1e-4)


def test_activations_of_a_dense_layer_by_hand() -> None:
    # 28 query and 4 key-value heads of 128, hidden 3584, MLP 18944; norms' input and output, fused matrix's output,
    # attention's output, and, without a fused activation, five MLP widths; statistics of two norms and the softmax.
    layer = 2 * (4 * 3584 + (28 + 8) * 128 + 28 * 128 + 5 * 18944) + 4 * (2 + 28)
    last = 2 * 2 * 3584 + 4
    found = part(estimate(), "activations")
    assert found.bytes == 1000 * (28 * layer + last)
    assert f"28 dense layers of {layer:,} bytes a token" in found.formula


def test_full_recomputation_keeps_what_enters_each_layer() -> None:
    everything, entering = part(estimate(), "activations"), 2 * 3584
    # While a layer runs again, what entered it is kept already, and the final norm's 14,340 bytes are gone.
    one, two = (
        part(estimate(recompute=FULL | {"recompute_num_layers": number}), "activations").bytes for number in (1, 2)
    )
    layer = (everything.bytes // 1000 - 14340) // 28
    assert one == 1000 * (28 * entering + layer - entering)
    assert two == 1000 * (14 * entering + 2 * layer - entering)
    block = FULL | {"recompute_method": "block", "recompute_num_layers": 8}
    assert part(estimate(recompute=block), "activations").bytes == 1000 * (8 * entering + 20 * layer + layer - entering)


def test_selective_recomputation_drops_what_it_names() -> None:
    moe = shape("Qwen3-30B-A3B")
    settings = dict(element_size=2, transformer_engine=True)
    kept = {
        modules: stage_activations(
            moe,
            Layout(),
            0,
            1,
            overrides={"recompute_granularity": "selective", "recompute_modules": list(modules)},
            **settings,
        )
        for modules in ((), ("moe_act",), ("moe",))
    }
    act, whole = (kept[()].kept - kept[modules].kept for modules in (("moe_act",), ("moe",)))
    assert act == 48 * 8 * 4 * 768 * 2  # unfused: silu's output, the second half, their product and its weighted copy
    assert whole == act + 48 * 8 * ((2048 + 2 * 768) * 2 + 4 + 36)
    assert kept[("moe",)].recomputed == whole // 48


def test_tensor_parallelism_splits_all_activations_only_with_sequence_parallelism() -> None:
    one = part(estimate(), "activations").bytes
    split = part(estimate(layout=Layout(tp=4, world_size=8)), "activations").bytes
    whole = part(estimate(layout=Layout(tp=4, world_size=8, sequence_parallel=False)), "activations").bytes
    assert split == one // 4
    assert whole - split == 1000 * (28 * 2 + 1) * (2 * 2 * 3584 + 4) * 3 // 4


def test_earlier_pipeline_stages_hold_more_micro_batches_and_the_last_one_the_logits() -> None:
    stages = estimate_stages(shape(DENSE), Layout(pp=4, world_size=8), max_tokens_per_rank=1000)
    layers = [part(stage, "activations").bytes for stage in stages]
    assert layers[0] == 4 * (layers[3] - 1000 * 14340) and layers[1] * 4 == layers[0] * 3
    assert [any(part.name == "logits" for part in stage.parts) for stage in stages] == [False, False, False, True]
    few = estimate_stages(shape(DENSE), Layout(pp=4, world_size=8), max_tokens_per_rank=1000, num_micro_batches=2)
    assert part(few[0], "activations").bytes * 2 == layers[0]
    interleaved = estimate_stages(shape(DENSE), Layout(pp=2, vpp=2, world_size=8), max_tokens_per_rank=1000)
    assert "x 2.50 micro-batches in flight" in part(interleaved[0], "activations").formula


def test_worst_stage_is_the_one_returned() -> None:
    layout, settings = Layout(pp=4, world_size=8), {"max_tokens_per_rank": 20000, "recompute": FULL}
    stages = estimate_stages(shape(DENSE), layout, **settings)
    assert estimate_memory(shape(DENSE), layout, **settings).total == max(stage.total for stage in stages)


def test_logits_are_held_once_and_once_more_for_each_trained_prediction_depth() -> None:
    plain = part(estimate("MiMo-7B-RL"), "logits").bytes
    temporaries = 6 * ((1 << 22) // 151_680) * 151_680 * 4  # chunks of at most 16 MiB
    assert plain == 1000 * 151_680 * 2 + temporaries
    trained = estimate("MiMo-7B-RL", mtp_enable=True, mtp_train=True)
    assert part(trained, "logits").bytes == plain + 1000 * 151_680 * 2
    frozen = estimate("MiMo-7B-RL", mtp_enable=True)
    assert part(frozen, "logits").bytes == plain
    assert part(frozen, "weights").bytes > part(estimate("MiMo-7B-RL"), "weights").bytes
    assert part(frozen, "gradients").bytes == part(estimate("MiMo-7B-RL"), "gradients").bytes


def test_rollout_holds_the_whole_model_and_a_cache_by_hand() -> None:
    found = estimate(layout=Layout(tp=4, world_size=8), rollout=RolloutLoad(rows=16, tokens=2048), reference=True)
    assert part(found, "rollout's copy of the model").bytes == 2 * 7_615_616_512
    assert part(found, "rollout's KV cache").bytes == 16 * 2048 * 4 * 256 * 2 * 29
    assert part(found, "reference model's weights").bytes == pytest.approx(2 * 7_615_616_512 / 4, rel=1e-3)
    phases = ["generate", "log_prob", "ref_log_prob", "update", "update_weights", "save_checkpoint"]
    assert list(found.phases) == phases
    assert list(estimate().phases) == ["log_prob", "update", "save_checkpoint"]


def test_what_is_on_the_device_in_each_phase_by_hand() -> None:
    # Qwen2.5-7B on 8 ranks, each with all of its P parameters: numbers below are bytes for each of them.
    size = 7_615_616_512
    weights, gradients, optimizer = 2 * size, 4 * size, 12 * size / 8
    copy, reference = 2 * size, 2 * size
    cache = 16 * 2048 * 4 * 256 * 2 * 29 + 16 * 152_064 * (2 + 3 * 4)
    settings = dict(
        reference=True, max_tokens_per_rank=1000, max_tokens_without_grad=2000, max_tokens_of_reference=3000
    )
    kept = estimate(**settings)
    layer = part(kept, "working memory of log-probs").bytes // 2000
    assert part(kept, "working memory of reference log-probs").bytes == 3000 * layer
    temporaries = 3 * ((1 << 22) // 152_064) * 152_064 * 4
    passes = {tokens: tokens * (layer + 152_064 * 2) + temporaries for tokens in (2000, 3000)}
    step = part(kept, "activations").bytes + part(kept, "logits").bytes
    gathered = 4 * (size + size / 8)  # moments and master weights go to the file one after the other

    def phases(gives_way: bool, offload: bool, reference_offload: bool) -> dict[str, float]:
        found = estimate(
            **settings,
            rollout=RolloutLoad(rows=16, tokens=2048, gives_way=gives_way),
            param_offload=offload,
            optimizer_offload=offload,
            reference_offload=reference_offload,
        )
        assert found.total == found.phases[found.worst_phase] == max(found.phases.values())
        return {name: pytest.approx(number, rel=1e-4) for name, number in found.phases.items()}

    state = weights + gradients + optimizer
    always = state + copy + reference
    assert phases(False, False, False) == {
        "generate": always + cache,
        "log_prob": always + passes[2000],
        "ref_log_prob": always + passes[3000],
        "update": always + step,
        "update_weights": always,
        "save_checkpoint": always + gathered,
    }
    always = state + reference
    assert phases(True, False, False) == {
        "generate": always + copy + cache,
        "log_prob": always + passes[2000],
        "ref_log_prob": always + passes[3000],
        "update": always + step,
        "update_weights": always,
        "save_checkpoint": always + gathered,
    }
    assert phases(True, True, True) == {
        "generate": copy + cache,
        "log_prob": weights + passes[2000],
        "ref_log_prob": reference + passes[3000],
        "update": state + step,
        "update_weights": weights,
        "save_checkpoint": weights + optimizer + gathered,
    }
    assert phases(False, True, False) == {
        "generate": copy + reference + cache,
        "log_prob": copy + reference + weights + passes[2000],
        "ref_log_prob": copy + reference + passes[3000],
        "update": copy + reference + state + step,
        "update_weights": copy + reference + weights,
        "save_checkpoint": copy + reference + weights + optimizer + gathered,
    }
    assert "save_checkpoint" not in estimate(saves=False).phases
    plain = estimate(use_distributed_optimizer=False)
    assert plain.phases["save_checkpoint"] == (2 + 4 + 12) * size


def test_only_the_optimizer_moves_with_optimizer_offload() -> None:
    stays, moves = estimate(), estimate(optimizer_offload=True)
    optimizer = part(stays, "optimizer state").bytes
    assert {name: stays.phases[name] - number for name, number in moves.phases.items()} == {
        "log_prob": optimizer,
        "update": 0,
        "save_checkpoint": 0,
    }


def test_what_waits_in_host_memory_by_hand() -> None:
    size, load = 7_615_616_512, RolloutLoad(rows=16, tokens=2048)
    assert estimate().host_bytes == 0
    assert estimate(rollout=load).host_bytes == 2 * size
    everything = dict(param_offload=True, optimizer_offload=True, reference=True, reference_offload=True)
    found = estimate(rollout=load, **everything)
    # Weights, optimizer state, reference model, rollout's copy; gradients are given up and made anew.
    assert found.host_bytes == pytest.approx(2 * size + 12 * size / 8 + 2 * size + 2 * size, rel=1e-4)
    assert [part.name for part in found.parts if part.host] == [
        "weights",
        "optimizer state",
        "reference model's weights",
        "rollout's copy of the model",
    ]
    critic = estimate(value_head=True, param_offload=True)
    assert combine({"actor": found, "critic": critic}).host_bytes == found.host_bytes + critic.host_bytes
    # The last stage has the head, the first holds more activations: the two figures may be of different stages.
    stages = estimate_stages(shape(DENSE), Layout(pp=2, world_size=8), max_tokens_per_rank=9000, **everything)
    together = estimate_memory(shape(DENSE), Layout(pp=2, world_size=8), max_tokens_per_rank=9000, **everything)
    assert together.host_bytes == max(stage.host_bytes for stage in stages)


def test_a_model_that_is_only_evaluated_has_neither_gradients_nor_optimizer() -> None:
    names = {part.name for part in estimate(forward_only=True).parts}
    assert names == {"weights", "working memory of log-probs", "logits of log-probs"}


def test_critic_beside_an_actor() -> None:
    actor, critic = estimate(rollout=RolloutLoad(4, 512)), estimate(value_head=True)
    assert not [part for part in critic.parts if "logits" in part.name]
    both = combine({"actor": actor, "critic": critic})
    always = sum(part.bytes for part in critic.parts if not part.phases)
    assert both.phases["actor update"] == actor.phases["update"] + always
    assert both.total == max(both.phases.values())


def test_what_is_not_counted_and_what_is_assumed_is_said() -> None:
    found = estimate("Qwen3-30B-A3B", optimizer={"override_optimizer_config": {"optimizer_cpu_offload": True}})
    said = json.loads(json.dumps(found.to_dict()))
    assert said["not_counted"] == list(NOT_COUNTED) and said["total"] == found.total
    assert [part["name"] for part in said["parts"]] == [part.name for part in found.parts]
    text = " ".join(said["assumptions"])
    assert "same number of tokens" in text and "not measured" in text and "optimizer_cpu_offload" in text


def test_the_python_on_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    page = (REPO_ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    monkeypatch.chdir(REPO_ROOT)
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("generate 168")


def test_the_example_on_the_page_is_what_comes_out() -> None:
    page = (REPO_ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    lines = page.partition("## Example")[2].partition("\n## ")[0].replace("*", "").splitlines()
    rows = {row[0]: row[1:3] for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    for column, (ranks, offload) in enumerate(((8, False), (16, True))):
        found = estimate(
            "Qwen3-30B-A3B",
            Layout(cp=2, ep=8, etp=1, world_size=ranks),
            max_tokens_per_rank=8192,
            recompute=FULL,
            reference=True,
            rollout=RolloutLoad(rows=64, tokens=3072),
            param_offload=offload,
            optimizer_offload=offload,
            reference_offload=offload,
        )
        expected = {part.name: part.bytes for part in found.parts}
        expected |= {f"phase {name}": number for name, number in found.phases.items()}
        expected |= {"host memory": found.host_bytes}
        for name, number in expected.items():
            assert rows[name][column] == f"{number / 2**30:.2f}", name


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "fp8"}, "dtype=fp8 is not known"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0 must be at least 1"),
        ({"layout": Layout(tp=3, world_size=3)}, "cannot divide the 28 attention heads"),
        ({"rollout": RolloutLoad(1, 1, "int4")}, "rollout.dtype=int4"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        estimate(**settings)


def test_what_an_engine_builds_differently_changes_nothing_for_the_rollout() -> None:
    load = RolloutLoad(16, 2048)
    plain = estimate(layout=Layout(tp=2, world_size=8), rollout=load)
    layout = Layout(tp=2, world_size=8, pads_vocabulary=True, vocabulary_multiple=1 << 16, num_layers=4)
    built = estimate(layout=layout, rollout=load)
    # 152,064 tokens are padded to 2 x 131,072, and 24 of 28 layers left out.
    assert part(plain, "logits").formula.startswith("1,000 tokens x 76,032 columns")
    assert part(built, "logits").formula.startswith("1,000 tokens x 131,072 columns")
    assert part(built, "weights").bytes < 0.4 * part(plain, "weights").bytes
    for name in ("rollout's copy of the model", "rollout's KV cache", "rollout's logits"):
        assert part(built, name) == part(plain, name)
