# SPDX-License-Identifier: Apache-2.0
"""docs/start/dry_run.md: its commands for verl.trainer.main_ppo and verl.trainer.sft_trainer print what it says."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.files import CHAT, PROMPT, write_rows
from verl.trainer.dry_run.command import read_request
from verl.trainer.dry_run.render import as_json, as_text
from verl.trainer.dry_run.report import COMMANDS, Report, build_report
from verl.utils.config import compose_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/start/dry_run.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:bash|text)\n(.*?)\n```", PAGE, re.DOTALL)
GSM8K = PROMPT | {"data_source": "openai/gsm8k"}


@pytest.fixture(autouse=True)
def in_a_folder_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k").mkdir()
    write_rows(tmp_path / "gsm8k" / "train.parquet", [GSM8K] * 7473)
    write_rows(tmp_path / "gsm8k" / "test.parquet", [GSM8K] * 1319)
    write_rows(tmp_path / "chats.parquet", [CHAT] * 512)
    model = tmp_path / "Qwen3-30B-A3B"
    model.mkdir()
    fixture = ROOT / "tests/fixtures/model_configs/Qwen3-30B-A3B/config.json"
    (model / "config.json").write_bytes(fixture.read_bytes())
    (model / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


def report_of(block: str) -> Report:
    """The report of a command in the page."""
    module, *arguments = shlex.split(block.partition(" > ")[0].replace("\\\n", " "))[2:]
    name = next(name for name, command in COMMANDS.items() if command == module)
    kept = [word for word in read_request(arguments).arguments if not word.startswith("hydra")]
    return build_report(compose_config(name, kept), name)


def test_the_page_shows_what_the_command_says() -> None:
    said = as_text(report_of(BLOCKS[0]))
    assert said == BLOCKS[1], f"the page must show:\n{said}"


def test_the_page_shows_what_is_wrong() -> None:
    said = as_text(report_of(BLOCKS[2]))
    errors = said[re.search(r"^\d+ errors$", said, re.MULTILINE).start() :]
    assert errors == BLOCKS[3], f"the page must show:\n{errors}"


def keys_of(value: Any) -> set[str]:
    """All keys of nested objects but those of the phases, which depend on the run."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    inner = (keys_of(part) for key, part in value.items() if key not in ("phases", "value", "default"))
    return set(value).union(*inner)


def test_the_page_names_every_key() -> None:
    reports = [report_of(BLOCKS[0]), report_of(BLOCKS[4])]
    arguments = ["data.path=gsm8k/test.parquet", "model.path=Qwen3-30B-A3B"]
    reports.append(build_report(compose_config("generation", arguments), "generation"))
    keys = set().union(*(keys_of(json.loads(as_json(report))) for report in reports))
    named = set(re.findall(r"`([\w.]+)`", PAGE))
    assert len(keys) > 90
    assert keys - {name for whole in named for name in whole.split(".")} == set()
