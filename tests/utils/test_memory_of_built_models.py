# SPDX-License-Identifier: Apache-2.0
"""The estimate against real engines in real worlds: parameters, weights, gradients, optimizer state, activations."""

from pathlib import Path

import pytest

from tests.models.engine_world import Case
from tests.special_sanity.checks import REPO_ROOT
from tests.utils.estimates import part
from tests.utils.memory_world import LENGTHS, NUM_TOKENS, Held, Job, measure, read_config, save_models
from tests.utils_dist import run_world
from verl.utils.activation_memory import Activations, stage_activations
from verl.utils.memory_estimate import MemoryEstimate, estimate_stages
from verl.utils.model_size import Layout, parameters_on_rank, read_model_shape
from verl.workers.config import MtpConfig

pytestmark = pytest.mark.gloo

WORLD_SIZE = 2
TRAINED, FROZEN = MtpConfig(enable=True, enable_train=True), MtpConfig(enable=True)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LOSS_COUNTED = {"account_for_loss_in_pipeline_split": True, "num_layers": 3}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


def _case(name: str, **settings) -> Case:
    return Case(name, **{"lengths": LENGTHS, "micro_batch_size": None} | settings)


SHARDED = dict(distributed_optimizer=True, dtype="bfloat16")
STATE_JOBS = [
    Job("qwen2", _case("dp2", **SHARDED)),
    Job("qwen2", _case("dp2, whole optimizer state")),
    Job("qwen2", _case("pp2, sgd", pp=2, dtype="bfloat16"), optimizer="sgd"),
    Job("qwen2", _case("pp2, critic", pp=2, loss="value")),
    Job("qwen2", _case("pp2, loss counted as a layer", pp=2, overrides=LOSS_COUNTED)),
    Job("qwen2", _case("tp2, padded vocabulary", tp=2, overrides={"should_pad_vocab": True})),
    Job("qwen3", _case("cp2", cp=2, **SHARDED)),
    Job("qwen3", _case("cp2, float32", cp=2, distributed_optimizer=True)),
    Job("qwen3_moe", _case("ep2", ep=2, **SHARDED)),
    Job("qwen3_moe", _case("tp2 ep2", tp=2, ep=2, **SHARDED)),
    Job("qwen3_moe", _case("tp2 etp1", tp=2, etp=1, **SHARDED)),
    Job("deepseek", _case("tp2", tp=2)),
    Job("deepseek", _case("pp2 vpp2", pp=2, vpp=2)),
    Job("hy_v3", _case("pp2, mtp", pp=2, mtp=TRAINED)),
    Job("hy_v3", _case("ep2, mtp frozen", ep=2, mtp=FROZEN)),
]
ACTIVATION_JOBS = [
    Job("qwen3", _case("dp2 kept"), activations=True),
    Job("qwen3", _case("cp2 kept", cp=2), activations=True),
    Job("qwen3", _case("tp2 kept", tp=2), activations=True),
    Job("qwen3", _case("dp2, full recomputation", overrides=FULL), activations=True),
    Job("qwen2", _case("dp2, mlp recomputed", overrides=SELECTIVE), activations=True),
    Job("qwen3_moe", _case("dp2 kept"), activations=True),
    Job("deepseek", _case("dp2 kept"), activations=True),
]
PIPELINE_JOB = Job("qwen2", _case("pp2, 4 micro-batches", pp=2, micro_batch_size=1), activations=True)
JOBS = [*STATE_JOBS, *ACTIVATION_JOBS, PIPELINE_JOB]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Job, list[Held]]]:
    paths = save_models(str(Path(tmp_path_factory.mktemp("memory"))))
    ranks = run_world(measure, WORLD_SIZE, paths, JOBS, timeout_s=300)
    return {
        job.name: (paths[job.model], job, list(held)) for job, held in zip(JOBS, zip(*ranks, strict=True), strict=True)
    }


def _layout(case: Case) -> Layout:
    etp = case.etp if case.etp is not None else (1 if case.ep > 1 else None)
    engine = {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": True,
        "override_transformer_config": case.overrides,
    }
    return Layout.of_engine(engine, WORLD_SIZE)


def _estimates(path: str, job: Job) -> list[MemoryEstimate]:
    case, layout = job.case, _layout(job.case)
    return estimate_stages(
        read_model_shape(read_config(path)),
        layout,
        dtype=case.dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        max_tokens_per_rank=NUM_TOKENS // (layout.dp * layout.cp),
        optimizer={"optimizer": job.optimizer},
        mtp_enable=case.mtp.enable,
        mtp_train=case.mtp.enable_train,
        value_head=case.loss == "value",
        recompute=case.overrides,
        transformer_engine=False,
    )


def _differences(path: str, job: Job, ranks: list[Held]) -> list[str]:
    """Where the estimate is not what the ranks hold, to the byte."""
    shape, layout = read_model_shape(read_config(path)), _layout(job.case)
    built = shape if job.case.mtp.enable else shape.without_mtp()
    found = []
    for held in ranks:
        estimate = _estimates(path, job)[held.pp_rank]
        parameters = parameters_on_rank(
            built, layout, held.pp_rank, value_head=job.case.loss == "value", transformer_engine=False
        )
        pairs = {
            "parameters": (parameters["total"], held.parameters),
            "weights": (part(estimate, "weights").bytes, held.weights),
            "gradients": (part(estimate, "gradients").bytes, held.gradients),
        }
        # The last rank's shard is shorter, by the padding at the buffer's end.
        most = max(other.optimizer for other in ranks if other.pp_rank == held.pp_rank)
        pairs["optimizer state"] = (part(estimate, "optimizer state").bytes, most)
        found += [f"{job.name}: {name} {a}, held {b}" for name, (a, b) in pairs.items() if a != b]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [job.name for job in STATE_JOBS])
def test_state_is_what_the_engine_holds_to_the_byte(measured, name: str) -> None:
    assert not _differences(*measured[name])


def test_a_planted_fault_is_seen(measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "dp_cp", property(lambda self: 1))  # the optimizer's state whole on every rank
    found = _differences(*measured["qwen3 cp2"])
    assert found and all("optimizer state" in text for text in found)
    assert not _differences(*measured["qwen2 dp2, whole optimizer state"])


def _activations(path: str, job: Job, pp_rank: int, tokens: int, **settings) -> Activations:
    return stage_activations(
        read_model_shape(read_config(path)).without_mtp(),
        _layout(job.case),
        pp_rank,
        tokens,
        element_size=4,
        overrides=job.case.overrides,
        transformer_engine=False,
        **settings,
    )


def _not_counted(path: str, tokens: int) -> int:
    """Ids, masks and the loss's columns, and the table of rotary angles that full recomputation keeps."""
    return 64 * tokens + sum(LENGTHS[0]) * read_model_shape(read_config(path)).query_head_dim * 4


@pytest.mark.parametrize("name", [job.name for job in ACTIVATION_JOBS])
def test_activations_are_what_autograd_saves_within_a_percent(measured, name: str) -> None:
    path, job, ranks = measured[name]
    tokens = NUM_TOKENS // _layout(job.case).dp_cp
    expected, once = _activations(path, job, 0, tokens), _not_counted(path, tokens)
    page = (REPO_ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert f"| {tokens} | {expected.bytes:,} | {ranks[0].peak:,} |" in page
    for held in ranks:
        assert held.activations - expected.kept == pytest.approx(once / 2, abs=once / 2 + 0.01 * expected.kept)
        assert held.peak == pytest.approx(expected.bytes + once / 2, abs=once / 2 + 0.01 * expected.bytes)


def test_earlier_pipeline_stages_hold_more_micro_batches(measured) -> None:
    path, job, ranks = measured[PIPELINE_JOB.name]
    tokens = NUM_TOKENS // len(LENGTHS)
    page = (REPO_ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for held in ranks:
        expected = _activations(path, job, held.pp_rank, tokens, num_micro_batches=len(LENGTHS))
        assert f"| {tokens} | {expected.bytes:,} | {held.peak:,} |" in page
        assert expected.micro_batches == (2, 1)[held.pp_rank]
        once = _not_counted(path, tokens)
        assert held.peak == pytest.approx(expected.bytes + once / 2, abs=once / 2 + 0.01 * expected.bytes)
