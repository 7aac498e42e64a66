# SPDX-License-Identifier: Apache-2.0
"""The user's audit: its arguments, the layouts it picks, and one small run on a folder that holds only a config."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.audit_gradients import (
    EXPERT_WIDTH,
    EXPERTS,
    HEADS,
    ROWS,
    SIZES,
    check_numbers,
    fitting_layouts,
    main,
    most_processes,
    parse,
)
from tests.models.engine_world import save_sharp_model
from tests.models.exactness.checks import DATA, LAYOUTS
from tests.models.exactness.models import shrink
from tests.models.exactness.report import ELSEWHERE
from tests.utils_dist import REPO_ROOT


def test_keys_and_folders_are_checked_by_name(tmp_path: Path) -> None:
    folder, settings, layout = parse(["cp=2", "z_loss=0.5", "out=x.md"])
    assert folder is None and layout == {"cp": 2} and settings["z_loss"] == 0.5 and settings["out"] == "x.md"
    for arguments, message in {
        ("wolrd=2",): "Did you mean world?",
        ("cp=two",): "cp=two: a number is needed",
        (str(tmp_path),): "no config.json there",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse(list(arguments))


def test_layouts_fit_the_processes_and_the_model() -> None:
    assert set(fitting_layouts(1, True, {})) == {"one process", "overlapped"}
    four = fitting_layouts(4, True, {})
    assert {"dp4", "cp2 dp2", "cp4", "tp2 cp2", "pp2 vpp2 dp2", "tp2 cp2 ep2"} <= set(four)
    assert four["pp2 vpp2 dp2"]["model"] == "deep"
    dense = fitting_layouts(4, False, {})
    assert not any("ep" in name.split("dp")[0] for name in dense) and "tp2 dp2 without sp" in dense
    assert fitting_layouts(2, True, {"cp": 2}) == {"cp2": {"cp": 2, "model": "moe"}}
    with pytest.raises(ValueError, match="does not fit 2 processes"):
        fitting_layouts(2, True, {"cp": 4})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp=0", "tp=0: at least 1 is needed; use tp=1"),
        ("world=0", "world=0: at least 1 is needed; use world=1"),
        ("cases=-1", "cases=-1: at least 1 is needed; use cases=1"),
        ("layers=0", "layers=0: at least 1"),
        ("timeout=0", "timeout=0: at least 1"),
        ("faults=2", "faults=2: 0 or 1"),
        ("z_loss=-1", "z_loss=-1.0: a coefficient of at least 0"),
        ("z_loss=nan", "z_loss=nan: a coefficient"),
        ("world=9", "world=9: there are 2 CPU cores, for at most 4 processes each; use world=8"),
        ("tp=3", "tp=3: does not divide the heads of the shrunk model, 4; use tp=2 or tp=4"),
        ("ep=8", "ep=8: does not divide the experts of the shrunk model, 4; use ep=4"),
        ("etp=5", "etp=5: does not divide the width"),
        ("pp=3", r"pp=3: does not divide the layers of the shrunk model \(layers=2\), 2; use pp=2"),
        ("vpp=2", "vpp=2: virtual stages need a pipeline; add pp=2"),
        ("pp=2 vpp=3", "vpp=3: does not divide a stage's layers .*, 2; use vpp=2"),
        ("layers=1", "layers=1: layouts with two stages need an even number; use layers=2"),
        ("world=3 cp=2", "world=3: not a multiple of tp x pp x cp = 2; use world=2 or world=4"),
        (
            "world=8 cp=16",
            "world=8: not a multiple of tp x pp x cp = 16; with at most 8 processes they must be smaller",
        ),
        ("world=6 cp=2", "world=6: 3 data-parallel ranks do not divide the 8 rows of a batch; use world=4 or world=8"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_the_nearest_that_can(words: str, said: str) -> None:
    _, settings, layout = parse(words.split())
    with pytest.raises(ValueError, match=said):
        check_numbers({"world": 4} | settings, layout, 8, "there are 2 CPU cores, for at most 4 processes each")


def test_every_layout_of_the_exactness_tests_passes_the_checks() -> None:
    _, settings, _ = parse([])
    for known in LAYOUTS.values():
        asked = {key: known[key] for key in SIZES if known.get(key)}
        check_numbers(settings | {"world": 4}, asked, *most_processes(accelerators=False))


def test_a_refusal_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["audit_gradients.py", "tp=0"])
    assert main() == 2
    assert capsys.readouterr().err == "error: tp=0: at least 1 is needed; use tp=1\n"


def test_the_numbers_of_the_shrunk_model_are_those_of_the_exactness_tests(tmp_path: Path) -> None:
    source, target = save_sharp_model(str(tmp_path / "a")), tmp_path / "b"
    shrink(source, str(target), 2)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    sizes = (
        config["num_attention_heads"],
        config.get("num_experts", config.get("num_local_experts")),
        config["moe_intermediate_size"],
    )
    assert sizes == (HEADS, EXPERTS, EXPERT_WIDTH)
    assert len(DATA["odd"]) == ROWS


def test_the_page_says_what_the_script_writes_about_latent_attention() -> None:
    assert ELSEWHERE in (REPO_ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")


@pytest.mark.gloo
@pytest.mark.slow
def test_a_folder_with_only_a_config_is_audited(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    out = tmp_path / "table.md"
    script = str(REPO_ROOT / "scripts" / "audit_gradients.py")
    command = [sys.executable, script, str(tmp_path), "world=2", "cp=2", "cases=1", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 3 cases beyond their limits" in done.stdout
    assert "| cp2 | 3 |" in out.read_text(encoding="utf-8")
