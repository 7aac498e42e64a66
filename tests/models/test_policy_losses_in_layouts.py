# SPDX-License-Identifier: Apache-2.0
"""Every registered policy loss has one gradient: data, context and tensor parallel, split, flag on or off; float64.

The values of the losses are checked against slow references in tests/algos; here the layouts are checked against each
other, whole gradients by name.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.models.engine_world import Case, actor_config, engine, rank_batch, save_sharp_model
from tests.models.gradients import difference, whole_gradients
from tests.utils_dist import run_world
from verl.workers.config import PolicyLossConfig
from verl.workers.config.names import POLICY_LOSSES
from verl.workers.config.rollout_correction import RolloutCorrectionConfig
from verl.workers.utils.losses import ppo_loss

# They choose tokens inside a micro-batch (docs/algorithms.md), so they depend on the split, not on the layout.
WITHIN_MICRO_BATCH = ("clip_cov", "kl_cov")
BASE = Case("tp2", tp=2, z_loss=0.1, dtype="float64", micro_batch_size=None)
LAYOUTS = [
    replace(BASE, name="cp2 flag", tp=1, cp=2, per_token_loss=True),
    replace(BASE, name="cp2 dense", tp=1, cp=2, dense=True),
    replace(BASE, name="cp2 flag, split", tp=1, cp=2, per_token_loss=True, token_budget=16),
    replace(BASE, name="dp2", tp=1),
    replace(BASE, name="dp2 flag, split", tp=1, per_token_loss=True, micro_batch_size=1),
]


def settings(mode: str) -> PolicyLossConfig:
    """A loss with what it needs; bypass_mode with weights for whole sequences and a rejection."""
    rules = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type="reinforce",
        rollout_is="sequence",
        rollout_rs="token_k1",
        rollout_rs_threshold=8.0,
    )
    return PolicyLossConfig(loss_mode=mode, dro_beta=0.05, rollout_correction=rules if mode == "bypass_mode" else None)


def gradients(path: str, case: Case, modes: tuple[str, ...]) -> dict[str, tuple[dict, float]]:
    """(whole gradient, reported loss) of each mode in one layout."""
    found = {}
    with engine(path, case) as built, built.train_mode():
        for mode in modes:
            config = replace(actor_config(case), policy_loss=settings(mode))
            built.optimizer_zero_grad()
            output = built.forward_backward_batch(rank_batch(case, built), partial(ppo_loss, config=config))
            found[mode] = whole_gradients(built), output["loss"]
    return found


def compare(rank: int, world: int, path: str) -> dict[str, Any]:
    expected = gradients(path, BASE, POLICY_LOSSES)
    results = {}
    for case in LAYOUTS:
        same_micro_batches = case.name in ("cp2 flag", "cp2 dense")
        modes = tuple(mode for mode in POLICY_LOSSES if same_micro_batches or mode not in WITHIN_MICRO_BATCH)
        for mode, (gradient, loss) in gradients(path, case, modes).items():
            whole, worst, name = difference(gradient, expected[mode][0])
            scale = max(abs(expected[mode][1]), 1e-3)
            results[f"{mode}, {case.name}"] = (whole, worst, name, abs(loss - expected[mode][1]) / scale)
    norms = {mode: sum(float(g.square().sum()) for g in expected[mode][0].values()) ** 0.5 for mode in POLICY_LOSSES}
    return {"results": results, "norms": norms}


@pytest.mark.gloo
def test_every_policy_loss_has_one_gradient_in_every_layout(tmp_path: Path) -> None:
    path = save_sharp_model(str(tmp_path / "model"))
    found = run_world(compare, 2, path, timeout_s=400)[0]
    assert len(found["results"]) == len(LAYOUTS) * len(POLICY_LOSSES) - 3 * len(WITHIN_MICRO_BATCH)
    assert len({f"{norm:.9e}" for norm in found["norms"].values()}) >= len(POLICY_LOSSES) - 1, found["norms"]
    print("largest:", max(found["results"].values()))
    for name, (whole, worst, parameter, loss) in found["results"].items():
        assert whole <= 1e-13 and worst <= 1e-13 and loss <= 1e-12, f"{name}: {whole:.1e}, {worst:.1e} in {parameter}"
