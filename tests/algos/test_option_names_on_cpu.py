# SPDX-License-Identifier: Apache-2.0
"""A name that the configuration accepts is a name that the code knows, and the other way round."""

import torch

import verl.trainer.ppo.core_algos as core_algos
from verl.algos.kl import kl_penalty
from verl.workers.config.names import ADV_ESTIMATORS, KL_PENALTIES, POLICY_LOSSES


def test_registries_hold_what_the_configuration_accepts():
    assert core_algos.POLICY_LOSS_REGISTRY.names() == sorted(POLICY_LOSSES)
    assert core_algos.ADV_ESTIMATOR_REGISTRY.names() == sorted(ADV_ESTIMATORS)
    assert {member.value for member in core_algos.AdvantageEstimator} == set(ADV_ESTIMATORS)


def test_every_accepted_kl_type_is_computed():
    for name in KL_PENALTIES:
        assert kl_penalty(torch.ones(2), torch.ones(2), name).tolist() == [0.0, 0.0]


def test_the_face_exports_what_it_promises():
    assert all(hasattr(core_algos, name) for name in core_algos.__all__)
