# SPDX-License-Identifier: Apache-2.0
"""Which regime a run will be in, who decides, and the guards that go with it, before anything starts."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trainer.config.files import Files, write_files
from verl.trainer.ppo.preflight import validate_ppo_config, validate_sft_config
from verl.trainer.ppo.preflight_regime import PROVIDERS_THAT_SET_IT, find_guards, find_regime
from verl.utils.config import compose_config, default_tree

A = "actor_rollout_ref"
VL = "Qwen3VLMoeForConditionalGeneration"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_files(tmp_path)


def set_architecture(files: Files, name: str) -> None:
    (files.model / "config.json").write_text(json.dumps({"architectures": [name]}))


def regime(files: Files, cp: int, flag: bool | None = None):
    engine = dict(default_tree("sft_trainer_engine")["engine"], context_parallel_size=cp)
    if flag is not None:
        engine["override_transformer_config"] = {"calculate_per_token_loss": flag}
    model = dict(default_tree("sft_trainer_engine")["model"], path=str(files.model))
    return find_regime(engine, "engine", model, "model"), engine, model


def test_the_providers_are_those_of_the_installed_bridge() -> None:
    spec = find_spec("megatron")
    (root,) = [Path(place) / "bridge" / "models" for place in spec.submodule_search_locations if "site" in place]
    setters, sources = set(), {}
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and "self.calculate_per_token_loss = True" in ast.unparse(node):
                setters.add(node.name)
        constants = dict(re.findall(r"^(\w+) = [\"'](\w+)[\"']$", text, re.MULTILINE))
        for source, provider in re.findall(r"source=[\"']?(\w+)[^)]*?provider=(\w+)", text):
            sources[constants.get(source, source)] = provider
    assert {name: provider for name, provider in sources.items() if provider in setters} == PROVIDERS_THAT_SET_IT


def test_who_decides(files: Files) -> None:
    found, _, _ = regime(files, cp=2)
    assert (found.per_token, found.source) == (False, "off")
    found, _, _ = regime(files, cp=2, flag=True)
    assert (found.per_token, found.source) == (True, "config")
    set_architecture(files, VL)
    for flag in (None, False):
        found, _, _ = regime(files, cp=2, flag=flag)
        assert (found.per_token, found.source) == (True, "provider")
        assert "Qwen3VLMoEModelProvider" in found.why and "context_parallel_size=2" in found.why
    assert "although" in found.why
    found, _, _ = regime(files, cp=1)
    assert (found.per_token, found.source) == (False, "off")
    (files.model / "config.json").unlink()
    found, _, _ = regime(files, cp=2)
    assert (found.per_token, found.source) == (None, "unknown")
    assert "config.json does not exist" in found.why


def test_guards(files: Files) -> None:
    def guards(cp: int, mode: str | None, padding_free: bool = True, guarded: bool = True) -> dict[str, bool]:
        found, engine, model = regime(files, cp)
        engine, model = engine | {"per_token_loss_guards": guarded}, model | {"use_remove_padding": padding_free}
        made = find_guards(found, engine, "engine", model, "model", mode)
        return {guard.combination.split("=")[0]: guard.refuses for guard in made}

    assert guards(2, "seq-mean-token-mean") == {"loss_agg_mode": False, "model.use_remove_padding": False}
    set_architecture(files, VL)
    assert guards(2, "seq-mean-token-mean") == {"loss_agg_mode": True, "model.use_remove_padding": False}
    assert guards(2, "token-mean", padding_free=False) == {"loss_agg_mode": False, "model.use_remove_padding": True}
    assert guards(2, "seq-mean-token-mean", guarded=False)["loss_agg_mode"] is False
    assert guards(1, "seq-mean-token-mean")["loss_agg_mode"] is False
    assert guards(2, None) == {"model.use_remove_padding": False}


def refusal(files: Files, *changes: str) -> str:
    config = compose_config("ppo_trainer", [*files.ppo_arguments, *changes])
    try:
        validate_ppo_config(config, {})
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_is_refused_where_the_provider_sets_the_flag(files: Files) -> None:
    mode = f"{A}.actor.loss_agg_mode=seq-mean-token-mean"
    assert refusal(files, mode) == ""
    set_architecture(files, VL)
    said = refusal(files, mode)
    assert "loss_agg_mode='seq-mean-token-mean' is refused" in said and "Qwen3VLMoEModelProvider" in said
    assert f"{A}.actor.megatron.per_token_loss_guards=False" in said
    lifted = refusal(files, mode, f"{A}.actor.megatron.per_token_loss_guards=False")
    assert "seq-mean-token-mean" not in lifted  # what is left is that its layers need TransformerEngine
    assert "seq-mean-token-mean" not in refusal(files, mode, f"{A}.actor.megatron.context_parallel_size=1")


def test_sft_is_refused_too(files: Files) -> None:
    set_architecture(files, VL)
    changes = ["engine.context_parallel_size=2", "trainer.n_gpus_per_node=2", "model.use_remove_padding=False"]
    with pytest.raises(ValueError, match=r"model.use_remove_padding=False is refused together with .*Qwen3VLMoE"):
        validate_sft_config(compose_config("sft_trainer_engine", [*files.sft_arguments, *changes]), {})
