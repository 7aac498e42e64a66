# SPDX-License-Identifier: Apache-2.0
"""Command lines with a dry run in them: what ``trainer.dry_run`` and ``--json`` mean, and that hydra writes nothing."""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight import call_with_config, refuse, refuse_old_python, run_hydra
from verl.utils.config import explain_hydra_error

KEY = "trainer.dry_run"
JSON_FLAG = "--json"

# Without a folder, a copy of the config in it, and log files.
_WRITE_NOTHING = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass(frozen=True)
class Request:
    """A command line: whether it asks for a dry run, in which form, and the arguments that hydra gets."""

    is_dry_run: bool
    as_json: bool
    arguments: list[str]


def read_request(arguments: Sequence[str]) -> Request:
    """Take the dry run's own words out of a command line.

    ``trainer.dry_run=True`` asks for one, ``--json`` or ``trainer.dry_run=json`` for its report as an object. What
    tells hydra where to write is left out then, and replaced by its writing nothing.

    Raises:
        ValueError: ``--json`` without a dry run or with a value, a dry run of many configurations or with a value that
            says neither yes nor no, or spaces around a ``=``.
    """
    _check_form(arguments)
    value, as_json = None, JSON_FLAG in arguments
    for argument in arguments:
        given = re.fullmatch(rf"\+{{0,2}}{re.escape(KEY)}=(.*)", argument)
        if given:
            value = given.group(1).strip("'\" ").lower()
    as_json |= value == "json"
    is_dry_run = value in ("true", "json", "yes", "on", "1")
    if value is not None and not is_dry_run and value not in ("false", "no", "off", "0"):
        raise ValueError(f"{KEY}={value} must be True, False or json")
    if as_json and not is_dry_run:
        raise ValueError(f"{JSON_FLAG} is the form of a dry run's report; add {KEY}=True, or leave out {JSON_FLAG}")
    if not is_dry_run:
        return Request(False, False, list(arguments))
    if {"-m", "--multirun"} & set(arguments):
        raise ValueError(f"{KEY} is of one configuration; leave out --multirun")
    kept, placed = [], False
    for argument in arguments:
        if re.match(rf"\+{{0,2}}{re.escape(KEY)}=", argument):
            # In the place of the key, because hydra wants all overrides in one row.
            if not placed:
                kept += [f"{KEY}=True", *_WRITE_NOTHING]
            placed = True
        elif argument != JSON_FLAG and not re.match(r"\+{0,2}~?hydra[./](?!searchpath)", argument):
            kept.append(argument)
    return Request(True, as_json, kept)


def _check_form(arguments: Sequence[str]) -> None:
    """Refuse what reads like a key and its value and is neither to hydra nor to the dry run."""
    for position, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key == JSON_FLAG and equals:
            raise ValueError(f"{argument}: {JSON_FLAG} takes no value; write {JSON_FLAG}")
        before = arguments[position - 1] if position else ""
        follows = arguments[position + 1] if position + 1 < len(arguments) else ""
        if equals and not key and "=" not in before:
            raise ValueError(f"there must be no spaces around =; write {before}={value or follows}")
        if not equals and before.endswith("=") and not argument.startswith(("-", "+", "~")):
            raise ValueError(f"there must be no spaces around =; write {before}{argument}")


def run_command(prepare: Callable[[DictConfig], Callable[[], Any] | None], config_name: str) -> None:
    """Run a command as `verl.trainer.ppo.preflight.run_hydra` does, or, where that is asked for, dryly.

    Args:
        prepare: of the command, as in `run_hydra`.
        config_name: a config in ``verl/trainer/config``.

    Raises:
        SystemExit: with 2 for what is wrong; a dry run ends with 0 if nothing is.
    """
    try:
        request = read_request(sys.argv[1:])
    except ValueError as error:
        refuse(str(error))
        return
    if not request.is_dry_run:

        @functools.wraps(prepare)
        def prepare_or_report(config: DictConfig) -> Callable[[], Any] | None:
            # Set in a config file of the user's own and not on the command line.
            if config.trainer.get("dry_run", False) is True:
                return functools.partial(_report_and_exit, config, config_name, (), False)
            return prepare(config)

        run_hydra(prepare_or_report, config_name)
        return
    refuse_old_python()
    _dry_run(prepare, config_name, request)


def _dry_run(prepare: Callable, config_name: str, request: Request) -> None:
    """Compose the config without the arguments that hydra refuses, each of which becomes an error, and report."""
    from hydra.errors import HydraException

    arguments, refused = request.arguments, []
    configs: list[DictConfig] = []

    @functools.wraps(prepare)
    def keep(config: DictConfig) -> None:
        configs.append(config)

    while not configs:
        sys.argv[1:] = arguments
        try:
            call_with_config(keep, config_name)
        except HydraException as error:
            guilty = guilty_argument(error, arguments)
            refused.append(explain_hydra_error(error, config_name, tables.MOVED))
            if guilty is None:
                break
            arguments = [argument for argument in arguments if argument != guilty]
        else:
            if not configs:
                return  # hydra has answered itself: --help, --cfg
    _report_and_exit(configs[0] if configs else None, config_name, refused, request.as_json)


def guilty_argument(error: Exception, arguments: Sequence[str]) -> str | None:
    """The argument that hydra refuses: the one that cannot be parsed, or that has the key which the refusal names."""
    own = getattr(error, "override", None)
    if own in arguments:
        return own
    for named in re.findall(r"'([^']+)'", str(error).splitlines()[0]):
        for argument in arguments:
            key = argument.lstrip("+~").partition("=")[0]
            names = (key, argument, f"{key}/{argument.partition('=')[2]}")
            if ("=" in argument or argument.startswith("~")) and key != KEY and named in names:
                return argument
    # Several may have been meant; what is still wrong without the first of them is found next.
    first = str(error).split(" ", 1)[0].rstrip(":")
    return first if first in arguments else None


def _report_and_exit(config: DictConfig | None, config_name: str, refused: Sequence[str], as_json: bool) -> None:
    from verl.trainer.dry_run.render import as_json as render_json
    from verl.trainer.dry_run.render import as_text
    from verl.trainer.dry_run.report import build_report

    logging.disable(logging.WARNING)
    report = build_report(config, config_name, refused)
    # Under a launcher every rank finds the same.
    if os.environ.get("RANK", "0") == "0":
        print(render_json(report) if as_json else as_text(report), flush=True)
    raise SystemExit(report.exit_code)
