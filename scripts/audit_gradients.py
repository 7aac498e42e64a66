# SPDX-License-Identifier: Apache-2.0
"""Measure how exactly gradients agree between parallel layouts, for a model of yours.

    python3 scripts/audit_gradients.py [model folder] [key=value ...]

Takes the architecture of a Hugging Face folder (its config.json is enough; a tiny Qwen3-MoE without a folder), shrinks
it to random weights of a few thousand parameters, trains one step in every layout, regime, loss, split and kind of data
that fits the cores or accelerators at hand, and compares whole gradients, metrics, norm and update with plain autograd
of the unsharded model. Prints and writes a Markdown table; exit code 1 if an error is beyond its limit.

Keys: out=FILE (default outputs/exactness.md); world=N processes; cases=N per engine (default 2); tp, pp, vpp, cp, ep,
etp=N: one layout instead of all; layers=N (default 2); z_loss=X (default 0.1); timeout=SECONDS (default 900); faults=1:
also put known faults into the code (four processes, tiny Qwen3-MoE), to show that the comparison sees them.
"""

import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from verl.utils.environment import use_environment  # noqa: E402

use_environment("megatron")

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")
# Of the shrunk models and the batches in tests/models/exactness.
HEADS, EXPERTS, EXPERT_WIDTH, ROWS = 4, 4, 24, 8
DEFAULTS: dict[str, Any] = {
    "out": "outputs/exactness.md",
    "cases": 2,
    "layers": 2,
    "z_loss": 0.1,
    "faults": 0,
    "timeout": 900,
}


def parse(arguments: list[str]) -> tuple[str | None, dict[str, Any], dict[str, int]]:
    """(model folder or None, settings, the layout asked for).

    Raises:
        ValueError: unknown key, a value that is no number, a folder without config.json.
    """
    folder, settings, layout = None, dict(DEFAULTS), {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            folder = argument
            if not (Path(folder) / "config.json").is_file():
                raise ValueError(f"{folder}: no config.json there; give a Hugging Face model folder")
        elif key in SIZES:
            layout[key] = _number(int, key, value)
        elif key == "world":
            settings[key] = _number(int, key, value)
        elif key in DEFAULTS:
            settings[key] = value if key == "out" else _number(type(DEFAULTS[key]), key, value)
        else:
            known = ["world", *SIZES, *DEFAULTS]
            from verl.utils.config import did_you_mean

            raise ValueError(f"{key}: no such key; known: {', '.join(known)}.{did_you_mean(key, known)}")
    return folder, settings, layout


def _number(kind: type, key: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{key}={value}: a number is needed, for example {key}={DEFAULTS.get(key, 2)}") from None


def check_numbers(settings: dict[str, Any], layout: dict[str, int], most: int, at_most_why: str) -> None:
    """Whether the numbers make sense for the shrunk model, its batch and this machine; nothing is started before.

    Args:
        settings: as from `parse`, with the number of processes in ``world``.
        layout: the sizes asked for.
        most: the largest number of processes, for the reason ``at_most_why``.

    Raises:
        ValueError: names the key, its value and the nearest right ones.
    """
    world, layers = settings["world"], settings["layers"]
    for key, least in {"world": 1, "cases": 1, "layers": 1, "timeout": 1, **dict.fromkeys(SIZES, 1)}.items():
        value = (settings | layout).get(key, least)
        if value < least:
            raise ValueError(f"{key}={value}: at least {least} is needed; use {key}={least}")
    if settings["faults"] not in (0, 1):
        raise ValueError(f"faults={settings['faults']}: 0 or 1 is needed; use faults=1")
    if not 0 <= settings["z_loss"] < math.inf:
        raise ValueError(f"z_loss={settings['z_loss']}: a coefficient of at least 0 is needed; use z_loss=0.1")
    if world > most:
        raise ValueError(f"world={world}: {at_most_why}; use world={most}")
    tp, pp, vpp, cp, ep, etp = (layout.get(key, 1) for key in SIZES)
    depth = 2 * layers if vpp > 1 else layers
    if vpp > 1 and pp == 1:
        raise ValueError(f"vpp={vpp}: virtual stages need a pipeline; add pp=2")
    _must_divide("tp", tp, HEADS, "the heads of the shrunk model")
    _must_divide("etp", etp, EXPERT_WIDTH, "the width of the shrunk model's experts")
    _must_divide("ep", ep, EXPERTS, "the experts of the shrunk model")
    _must_divide("pp", pp, depth, f"the layers of the shrunk model (layers={layers})")
    _must_divide("vpp", vpp, depth // pp, f"a stage's layers (layers={layers}, twice as many with vpp)")
    if not layout and world > 1 and layers % 2:
        raise ValueError(f"layers={layers}: layouts with two stages need an even number; use layers={layers + 1}")
    size = tp * pp * cp
    if world % size:
        below = world // size * size
        near = [f"world={number}" for number in (below, below + size) if 0 < number <= most]
        use = f"use {' or '.join(near)}" if near else f"with at most {most} processes they must be smaller"
        raise ValueError(f"world={world}: not a multiple of tp x pp x cp = {size}; {use}")
    if ROWS % (world // size):
        near = [f"world={size * dp}" for dp in (1, 2, 4, 8) if size * dp <= most and abs(size * dp - world) < world]
        raise ValueError(
            f"world={world}: {world // size} data-parallel ranks do not divide the {ROWS} rows of a batch; "
            f"use {' or '.join(near[-2:])}"
        )


def _must_divide(key: str, size: int, number: int, what: str) -> None:
    if number % size == 0:
        return
    right = [d for d in range(1, number + 1) if number % d == 0]
    near = [d for d in right if d < size][-1:] + [d for d in right if d > size][:1]
    use = " or ".join(f"{key}={divisor}" for divisor in near)
    raise ValueError(f"{key}={size}: does not divide {what}, {number}; use {use}")


def at_hand() -> tuple[int, bool]:
    """(processes to use, whether they are accelerators)."""
    from verl.utils.device import get_device_name, get_torch_device

    if get_device_name() == "cpu":
        return 4, False
    return max(n for n in (1, 2, 4) if n <= get_torch_device().device_count()), True


def most_processes(accelerators: bool) -> tuple[int, str]:
    """(the largest number of processes, why no more)."""
    if accelerators:
        from verl.utils.device import get_torch_device

        number = get_torch_device().device_count()
        return number, f"there are {number} accelerators"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 4 * cores, f"there are {cores} CPU cores, for at most 4 processes each"


def fitting_layouts(world: int, has_experts: bool, asked: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Layouts for a number of processes, by name.

    Raises:
        ValueError: the layout asked for does not fit.
    """
    from tests.models.exactness.checks import LAYOUTS

    candidates = [asked] if asked else list(LAYOUTS.values())
    fitting = {}
    for known in candidates:
        sizes = {key: known.get(key) or 1 for key in SIZES}
        dense, experts = sizes["tp"] * sizes["pp"] * sizes["cp"], sizes["ep"] * sizes["etp"] * sizes["pp"]
        without_experts = known.get("model") == "dense" or not has_experts
        fits = world % dense == 0 and world % experts == 0 and not (without_experts and sizes["ep"] * sizes["etp"] > 1)
        if asked and not fits:
            raise ValueError(
                f"{asked}: does not fit {world} processes{'' if has_experts else ' and a model without experts'}; "
                f"tp x pp x cp = {dense} must divide world"
            )
        if not fits or (without_experts and has_experts and not asked):
            continue
        words = [f"{key}{size}" for key, size in sizes.items() if size > 1]
        words += [f"dp{world // dense}"] if world > dense else []
        words += ["overlapped"] * known.get("overlap_grad_reduce", False)
        words += ["without sp"] * (known.get("sequence_parallel") is False)
        model = (
            ("deep" if sizes["vpp"] > 1 else "moe") if has_experts else ("deep dense" if sizes["vpp"] > 1 else "dense")
        )
        fitting[" ".join(words) or "one process"] = known | {"model": model}
    return fitting


def planted_faults(accelerators: bool, timeout_s: int) -> str:
    """The table of what the comparison says about known faults."""
    from tests.models.exactness import report
    from tests.models.exactness.faults import try_faults
    from tests.models.exactness.models import save_models
    from tests.utils_dist import run_world

    with tempfile.TemporaryDirectory(prefix="verl_audit_") as place:
        outcomes, _ = run_world(try_faults, 4, save_models(place), timeout_s=timeout_s, on_accelerators=accelerators)[0]
    return (
        "\n## Faults that the comparison sees\n\n"
        "Each was put into the code alone, on one check. The error is that of the whole gradient, else the largest.\n\n"
        f"{report.fault_table(outcomes)}\n"
    )


def audit(folder: str | None, settings: dict[str, Any], asked: dict[str, int]) -> int:
    """Run, print, write; returns the exit code."""
    from tests.models.engine_world import save_sharp_model
    from tests.models.exactness import report
    from tests.models.exactness.checks import design
    from tests.models.exactness.limits import errors_beyond_limits
    from tests.models.exactness.models import shrink
    from tests.models.exactness.world import run_checks
    from tests.utils_dist import run_world

    world, accelerators = at_hand()
    world = settings["world"] if "world" in settings else world
    check_numbers(settings | {"world": world}, asked, *most_processes(accelerators))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verl_audit_") as place:
        source = folder or save_sharp_model(os.path.join(place, "source"))
        shallow, deep = os.path.join(place, "model"), os.path.join(place, "deep")
        has_experts = shrink(source, shallow, settings["layers"])
        shrink(source, deep, 2 * settings["layers"])
        layouts = fitting_layouts(world, has_experts, asked)
        checks = design(settings["cases"], layouts, world=world, z_loss=settings["z_loss"])
        paths = {"moe": shallow, "dense": shallow, "deep": deep, "deep dense": deep}
        where = f"{world} {'accelerators' if accelerators else 'CPU processes'}"
        print(f"{len(checks)} cases in {len(layouts)} layouts on {where}", flush=True)
        results = run_world(
            run_checks, world, paths, checks, timeout_s=settings["timeout"], on_accelerators=accelerators
        )[0]
    seconds = time.monotonic() - started
    beyond = [result for result in results if errors_beyond_limits(result)]
    words = [Path(folder).name if folder else "", *(f"{key}={value}" for key, value in asked.items())]
    words += [f"{key}={value}" for key, value in settings.items() if value != DEFAULTS.get(key) and key != "timeout"]
    command = " ".join(["python3 scripts/audit_gradients.py", *filter(None, words)])
    table = report.summary(results)
    text = (
        f"# Measured exactness\n\nMade by `{command}` on {where}, {len(checks)} cases in {seconds:.0f} s. Numbers are\n"
        "the largest relative L2 differences from plain autograd of the unsharded model (see\n"
        f"[objective.md](objective.md)); {len(beyond)} cases are beyond their limits\n({report.limits()}).\n"
        "Megatron keeps the gradient norm and the clipping factor in float32, which is what the norm and update show.\n"
        f"{report.ELSEWHERE}\n"
        f"\n{table}\n\n## Every case\n\n{report.every_case(results)}\n"
    )
    if settings["faults"]:
        text += planted_faults(accelerators, settings["timeout"])
    out = Path(settings["out"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{table}\n\n{len(beyond)} of {len(results)} cases beyond their limits; {seconds:.0f} s; written to {out}")
    return 1 if beyond else 0


def main() -> int:
    """Run the audit that the command line asks for; returns the exit code."""
    if set(sys.argv[1:]) & {"-h", "--help", "help"}:
        print(__doc__)
        return 0
    try:
        return audit(*parse(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
