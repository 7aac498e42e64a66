# SPDX-License-Identifier: Apache-2.0
"""The rules of the house hold for every file, and each check is shown to fail on a planted fault."""

from pathlib import Path

import pytest

from tests.special_sanity import checks

FILES = checks.source_files()
MODULES = {checks.module_name(path) for path in FILES if path.parts[0] == "verl" and path.suffix == ".py"}
RULES = sorted({rule for path in FILES for rule in checks.rules_for(path)}, key=lambda rule: rule.__name__)


def report(problems: list[str]) -> str:
    return "\n".join(["", *problems])


def read(path: Path) -> str:
    return (checks.REPO_ROOT / path).read_text(encoding="utf-8")


def test_there_are_files_to_check():
    assert "verl.utils.device" in MODULES and len(MODULES) > 10
    found = {str(path) for path in FILES}
    assert {"setup.py", "docs/conf.py", "scripts/test.sh", "docker/Dockerfile.gpu", ".ci/run"} <= found
    assert {"verl/trainer/config/ppo_trainer.yaml", "examples/common.sh", "tests/trainer/ppo/fakes.py"} <= found
    assert len(RULES) == 6


def test_imports_go_down_the_floors():
    modules = [path for path in FILES if path.parts[0] == "verl" and path.suffix == ".py"]
    problems = [problem for path in modules for problem in checks.check_floors(path, read(path), MODULES)]
    assert not problems, report(problems)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule):
    problems = [problem for path in FILES if rule in checks.rules_for(path) for problem in rule(path, read(path))]
    assert not problems, report(problems)


def check_planted(path: str, planted: str, said: str) -> None:
    """A file of ours with one fault in it gives one problem, at this file and in these words."""
    assert Path(path) in FILES
    problems = [problem for rule in checks.rules_for(Path(path)) for problem in rule(path, planted)]
    assert len(problems) == 1 and problems[0].startswith(f"{path}:") and said in problems[0], problems


LICENSED = """
    setup.py docs/conf.py scripts/setup_env.sh examples/common.sh .ci/run docker/Dockerfile.cpu docs/_static/site.css
    verl/trainer/config/ppo_trainer.yaml verl/trainer/config/model_engine/megatron.yaml
    verl/trainer/config/_generated_ppo_megatron_trainer.yaml
""".split()


@pytest.mark.parametrize("path", LICENSED)
def test_a_licence_line_taken_away_is_missed(path):
    source = read(Path(path))
    assert source.count(checks.LICENCE) == 1
    without = "".join(line for line in source.splitlines(keepends=True) if checks.LICENCE not in line)
    check_planted(path, without, "no licence line; write")


@pytest.mark.parametrize(
    ("path", "lines", "said"),
    [
        ("scripts/diagnose.py", "def late():\n    pass\n", "late has no docstring; write one"),
        ("setup.py", "def late():\n    pass\n", "late has no docstring; write one"),
        ("scripts/diagnose.py", "DEVICE = 'cuda:0'\n", "literal 'cuda:0'; ask verl.utils.device"),
        ("scripts/diagnose.py", "def _late():\n" + "    x = 1\n" * 80, "_late has 81 lines"),
        ("tests/trainer/ppo/fakes.py", "def late():\n" + "    x = 1\n" * 80, "at most 80 are allowed; divide"),
        ("tests/conftest.py", "x = 1\n" * 600, "at most 600 are allowed; divide"),
    ],
)
def test_a_fault_below_a_file_of_ours_is_found(path, lines, said):
    check_planted(path, f"{read(Path(path))}\n\n{lines}", said)


@pytest.mark.parametrize(
    ("module", "floor"),
    [
        ("verl", 2),
        ("verl.version", 1),
        ("verl.utils.megatron.cpu_backend", 1),
        ("verl.protocol", 2),
        ("verl.workers.config.actor", 2),
        ("verl.algos.kl", 3),
        ("verl.models.mcore.mtp_patch", 4),
        ("verl.workers.utils.losses", 4),
        ("verl.workers.engine.megatron.loss_scale", 5),
        ("verl.workers.engine_workers", 6),
        ("verl.trainer.ppo.core_algos", 7),
        ("verl.trainer.ppo.preflight", 7),
        ("verl.trainer.main_ppo", 8),
        ("verl.workers.unplaced", None),
        ("verl.unplaced", None),
    ],
)
def test_floor_of(module, floor):
    assert checks.floor_of(module) == floor


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("verl/utils/a.py", "from verl.protocol import DataProto"),
        ("verl/utils/a.py", "from verl import DataProto"),
        ("verl/utils/a.py", "import verl.workers.engine.base as base"),
        ("verl/utils/a.py", "from verl.workers import engine_workers"),
        ("verl/utils/a.py", "from ..algos import kl"),
        ("verl/utils/sub/__init__.py", "from ...algos import kl"),
        ("verl/utils/a.py", "from .. import algos"),
        ("verl/algos/kl.py", "def f():\n    from verl.trainer.ppo import core_algos"),
        ("verl/algos/kl.py", "if TYPE_CHECKING:\n    import verl.models.mcore"),
        ("verl/algos/kl.py", "importlib.import_module('verl.trainer.main_ppo')"),
        ("verl/workers/utils/losses.py", "import verl.trainer.ppo.core_algos"),
        ("verl/models/mcore/packing.py", "from verl.workers.engine import utils"),
        ("verl/algos/kl.py", "import verl.unplaced"),
        ("verl/unplaced.py", ""),
        ("verl/workers/__init__.py", "import verl.protocol"),
    ],
)
def test_an_import_upwards_is_found(path, line):
    modules = MODULES | {"verl.workers.engine_workers", "verl.algos", "verl.workers.engine.utils", "verl.trainer.ppo"}
    assert len(checks.check_floors(path, line + "\n", modules)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("verl/utils/a.py", "from verl.utils import device"),
        ("verl/protocol.py", "from verl.utils.device import get_device_name"),
        ("verl/workers/engine/megatron/transformer_impl.py", "from verl.models.mcore import packing"),
        ("verl/trainer/main_ppo.py", "from verl import DataProto"),
        ("verl/workers/__init__.py", checks.SPDX_LINE),
        ("verl/utils/a.py", "import verlike.trainer"),
        ("verl/utils/sub/b.py", "from ..device import get_device_name"),
    ],
)
def test_an_import_downwards_is_allowed(path, line):
    assert checks.check_floors(path, line + "\n", MODULES) == []


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (checks.check_licence, "verl/a.py", '"""Text."""\n'),
        (checks.check_licence, "a.sh", "#!/usr/bin/env bash\n"),
        (checks.check_docstrings, "verl/a.py", "X = 1\n"),
        (checks.check_docstrings, "verl/a.py", '"""Text."""\ndef f():\n    pass\n'),
        (checks.check_docstrings, "verl/a.py", '"""Text."""\nclass A:\n    x = 1\n'),
        (
            checks.check_docstrings,
            "verl/a.py",
            '"""Text."""\nclass A:\n    """Text."""\n    async def f(self):\n        pass\n',
        ),
        (checks.check_device_literals, "verl/utils/a.py", "x = 'cuda'\n"),
        (checks.check_device_literals, "verl/utils/a.py", "f('NCCL')\n"),
        (checks.check_device_literals, "verl/utils/a.py", "x = f'cuda:{i}'\n"),
        (checks.check_device_literals, "verl/utils/a.py", "x = 'cpu:gloo,cuda:nccl'\n"),
        (checks.check_device_literals, "verl/utils/a.py", "def f(device: str = 'cuda'):\n    pass\n"),
        (checks.check_lengths, "verl/a.py", "x = 1\n" * 601),
        (checks.check_lengths, "verl/a.py", "def f():\n" + "    x = 1\n" * 80),
        (checks.check_no_dataproto_in_engine, "verl/workers/engine/a.py", "from verl.protocol import DataProto\n"),
        (checks.check_no_dataproto_in_engine, "verl/workers/engine/a.py", "def f(data: 'DataProto'):\n    pass\n"),
        (checks.check_no_dataproto_in_engine, "verl/workers/engine/a.py", "x = protocol.DataProto()\n"),
        (checks.check_yaml_documented, "a.yaml", "x: 1\n"),
        (checks.check_yaml_documented, "a.yaml", "# about a\na:\n  x: 1\n"),
        (checks.check_yaml_documented, "a.yaml", "# about x\nx: 1\ny: {z: 1}\n"),
        (checks.check_yaml_documented, "a.yaml", "x: 'a#b'\n"),
        (checks.check_yaml_documented, "a.yaml", f"{checks.SPDX_LINE}\nx: 1\n"),
    ],
)
def test_a_planted_fault_is_found(check, path, source):
    assert len(check(path, source)) == 1


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (checks.check_licence, "verl/a.py", checks.SPDX_LINE + "\nx = 1\n"),
        (checks.check_licence, "verl/__init__.py", ""),
        (checks.check_docstrings, "verl/__init__.py", checks.SPDX_LINE + "\n"),
        (checks.check_docstrings, "verl/a.py", '"""Text."""\ndef _f():\n    pass\n'),
        (
            checks.check_docstrings,
            "verl/a.py",
            '"""Text."""\nclass A(B):\n    """Text."""\n    def f(self):\n        pass\n',
        ),
        (checks.check_device_literals, "verl/a.py", '"""cuda"""\n'),
        (checks.check_device_literals, "verl/a.py", "raise ValueError('cuda is not usable here')\n"),
        (checks.check_device_literals, "verl/utils/device.py", "x = 'cuda'\n"),
        (checks.check_lengths, "verl/a.py", "def f():\n" + "    x = 1\n" * 79 + "x = 1\n" * 520),
        (checks.check_no_dataproto_in_engine, "verl/workers/engine_workers.py", "x = DataProto()\n"),
        (checks.check_no_dataproto_in_engine, "verl/workers/engine/a.py", '"""No DataProto comes here."""\n'),
        (checks.check_yaml_documented, "a.yaml", "defaults:\n  - b\n# about x\nx: 1\ny: 2  # about y\n"),
        (checks.check_yaml_documented, "a.yaml", "a:\n  _target_: b.C\n  # about x\n  x: 1\n"),
        (checks.check_yaml_documented, "_generated_a.yaml", "x: 1\n"),
        (checks.check_yaml_documented, "a.yaml", ""),
    ],
)
def test_what_is_allowed_passes(check, path, source):
    assert check(path, source) == []
