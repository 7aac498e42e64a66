# SPDX-License-Identifier: Apache-2.0
"""The rules of the house hold for every module, and each check is shown to fail on a planted fault."""

import pytest

from tests.special_sanity import checks

PATHS = checks.python_files()
MODULES = {checks.module_name(path) for path in PATHS}
TEXT_CHECKS = [
    checks.check_spdx,
    checks.check_docstrings,
    checks.check_device_literals,
    checks.check_lengths,
    checks.check_no_dataproto_in_engine,
]


def report(problems: list[str]) -> str:
    return "\n".join(["", *problems])


def read(path) -> str:
    return (checks.REPO_ROOT / path).read_text(encoding="utf-8")


def test_there_are_modules_to_check():
    assert "verl.utils.device" in MODULES and len(MODULES) > 10


def test_imports_go_down_the_floors():
    problems = [problem for path in PATHS for problem in checks.check_floors(path, read(path), MODULES)]
    assert not problems, report(problems)


@pytest.mark.parametrize("check", TEXT_CHECKS, ids=lambda check: check.__name__)
def test_every_module_keeps(check):
    problems = [problem for path in PATHS for problem in check(path, read(path))]
    assert not problems, report(problems)


def test_config_keys_are_documented():
    paths = sorted((checks.REPO_ROOT / "verl/trainer/config").rglob("*.yaml"))
    names = [path.relative_to(checks.REPO_ROOT) for path in paths]
    problems = [problem for name in names for problem in checks.check_yaml_documented(name, read(name))]
    assert not problems, report(problems)


@pytest.mark.parametrize("folder", ["tests", "examples", "scripts", "recipe"])
def test_files_outside_the_package_name_the_licence(folder):
    paths = sorted(path.relative_to(checks.REPO_ROOT) for path in (checks.REPO_ROOT / folder).rglob("*.py"))
    problems = [problem for path in paths for problem in checks.check_spdx(path, read(path))]
    assert not problems, report(problems)


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
        (checks.check_spdx, "verl/a.py", '"""Text."""\n'),
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
    ],
)
def test_a_planted_fault_is_found(check, path, source):
    assert len(check(path, source)) == 1


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (checks.check_spdx, "verl/a.py", checks.SPDX_LINE + "\nx = 1\n"),
        (checks.check_spdx, "verl/__init__.py", ""),
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
