# SPDX-License-Identifier: Apache-2.0
"""The two forms of a dry run's report: text to read, and one JSON object."""

import json
import textwrap
from dataclasses import asdict

from verl.trainer.dry_run.batches import BatchReport, MicroBatches, Schedule, Steps, Updates
from verl.trainer.dry_run.layout import LayoutReport, describe_groups
from verl.trainer.dry_run.memory import MemoryReport
from verl.trainer.dry_run.offline import OfflineReport
from verl.trainer.dry_run.regime import RegimeReport
from verl.trainer.dry_run.report import Report
from verl.trainer.ppo.preflight_repair import value_in_words

_WIDTH, _LABEL = 118, 20
_NO_BREAK = "\u00a0"


def as_json(report: Report) -> str:
    """The report as one JSON object; its keys are listed in docs/start/dry_run.md."""
    tree = {"ok": not report.errors, "exit_code": report.exit_code} | asdict(report)
    for regime, source in zip(tree["regimes"], report.regimes, strict=True):
        regime["means"] = source.means
    return json.dumps(tree, indent=1, default=str)


def as_text(report: Report) -> str:
    """The report in words, a section at a time, what is wrong at the end."""
    lines = [f"Dry run of {report.command}: nothing is started."]
    if report.layout is not None:
        lines += _section("Layout", _layout_rows(report.layout))
    if report.batches is not None:
        lines += _section("One step", _step_rows(report.batches))
        lines += _section("Tokens", _token_rows(report.batches))
        lines += _section("Run", _run_rows(report.batches))
    if report.offline is not None:
        lines += _section("Work", _offline_rows(report.offline))
    if report.regimes:
        lines += _section("Loss scaling", [row for regime in report.regimes for row in _regime_rows(regime)])
    if report.memory is not None:
        lines += _section("Memory of one rank", _memory_rows(report.memory))
    changed = [
        ("", f"{key.key}={value_in_words(key.value)}  (default {value_in_words(key.default)})")
        for key in report.changed
    ]
    lines += _section("Keys that differ from their defaults", changed)
    unread = [("", f"{key.key}={value_in_words(key.value)}: {key.reason}") for key in report.unread]
    lines += _section("Keys that are set and have no effect here", unread)
    lines += _section("Notes", [("", note) for note in report.notes])
    if report.errors:
        number = len(report.errors)
        title = "1 error" if number == 1 else f"{number} errors"
        lines += _section(title, [("", error) for error in report.errors])
    else:
        lines += ["", "Nothing is wrong."]
    return "\n".join(lines)


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    """A title and its rows of (label, text), wrapped; a line is not broken at a no-break space."""
    if not rows:
        return []
    lines = ["", title]
    for label, text in rows:
        first = f"  {label:<{_LABEL}}" if label else "  "
        rest = " " * (_LABEL + 2) if label else "    "
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _sizes(**sizes: int) -> str:
    """``tensor 2 x context 4``, not to be broken within an item."""
    return " x ".join(f"{name.replace('_', _NO_BREAK)}{_NO_BREAK}{size}" for name, size in sizes.items())


def _layout_rows(layout: LayoutReport) -> list[tuple[str, str]]:
    world = f"{layout.world_size} ranks ({layout.world_key})"
    sizes = _sizes(tensor=layout.tensor, pipeline=layout.pipeline, context=layout.context)
    if layout.data is None:
        rows = [("world", f"{world} do not divide into {sizes}")]
    else:
        rows = [("world", f"{world} = {sizes} x {_sizes(data=layout.data)}")]
    if layout.experts != 0:
        rows.append(("experts", _expert_words(layout)))
    for groups in layout.groups:
        if groups.size > 1 and not (layout.experts == 0 and groups.name.startswith("expert")):
            name = groups.name.replace("_", " ")
            rows.append((name, f"{groups.size} ranks {groups.what}: {describe_groups(groups, _NO_BREAK)}"))
    rows.append(("layers", _stages(layout)))
    if layout.tensor > 1:
        rows.append(("sequence", f"parallel between tensor ranks: {'yes' if layout.sequence_parallel else 'no'}"))
    rows.append(("each process", "holds " + "; ".join(layout.roles)))
    return rows + [("", note) for note in layout.notes]


def _expert_words(layout: LayoutReport) -> str:
    sizes = _sizes(expert_tensor=layout.expert_tensor, expert=layout.expert, pipeline=layout.pipeline)
    if layout.expert_data is None:
        words = f"{layout.world_size} ranks do not divide into {sizes}"
    else:
        words = f"{layout.world_size} ranks = {sizes} x {_sizes(expert_data=layout.expert_data)}"
    if layout.experts is None:
        return words + ", if the model has experts"
    if layout.experts % layout.expert == 0:
        words += f"; {layout.experts} experts a layer, {layout.experts // layout.expert} of them on a rank"
    return words


def _stages(layout: LayoutReport) -> str:
    stages = layout.stages
    if stages is None:
        return f"not known: {layout.stages_unknown}"
    if len(stages) == 1:
        return f"{stages[0]}, all in one stage"
    size = layout.world_size // len(stages)
    words = f"{sum(stages)} = {' + '.join(map(str, stages))} over the pipeline stages"
    if layout.data is not None:
        starts = range(0, layout.world_size, size)
        words += f" (ranks {', '.join(str(i) if size == 1 else f'{i}-{i + size - 1}' for i in starts)})"
    if layout.virtual_pipeline:
        words += f", each in {layout.virtual_pipeline} chunks"
    return words


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _counted(value: int | None, noun: str) -> str:
    """The number with its noun, in the plural unless it is 1."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{_number(value)} {noun if value == 1 else plural}"


def _step_rows(batches: BatchReport) -> list[tuple[str, str]]:
    if batches.items == "prompts":
        n = batches.responses_per_prompt
        step = f"{_counted(batches.items_per_step, 'prompt')} (data.train_batch_size) x {_counted(n, 'response')} "
        step += f"(actor_rollout_ref.rollout.n) = {_counted(batches.rows_per_step, 'response')}"
        rows = [("batch", step)]
        rows += [(updates.name, _ppo_updates(updates, batches)) for updates in batches.updates]
    else:
        step = f"{batches.items_per_step} conversations (data.train_batch_size), one update"
        rows = [("batch", step)]
        rows += [("one rank", _share(updates.micro_batches, batches)) for updates in batches.updates]
    return rows + [(part.name, _share(part, batches)) for part in batches.passes]


def _ppo_updates(updates: Updates, batches: BatchReport) -> str:
    mini, n = updates.mini_batch_prompts, batches.responses_per_prompt
    if updates.mini_batches is None:
        count = f"{batches.items_per_step} prompts do not divide into mini-batches of {mini}"
    else:
        parts = _counted(updates.mini_batches, "mini-batch")
        count = f"{batches.items_per_step} / {mini} (ppo_mini_batch_size) = {parts} x "
        count += f"{updates.epochs} (ppo_epochs) = {_counted(updates.updates_per_step, 'update')}"
    rows = f"a mini-batch is {mini} x {n} = {_counted(updates.mini_batch_responses, 'response')}"
    return f"{count}; {rows}; {_share(updates.micro_batches, batches, updates.mini_batch_responses)}"


def _share(part: MicroBatches, batches: BatchReport, rows: int | None = None) -> str:
    """What one data-parallel rank gets, and its micro-batches."""
    total, dp = batches.rows_per_step if rows is None else rows, batches.data_parallel
    unit = "conversation" if batches.items == "conversations" else "response"
    if dp is None:
        return "what a rank gets is not known, because the ranks do not divide"
    if part.rows is None:
        return f"{_counted(total, unit)} do not divide over {dp} data-parallel ranks"
    share = f"{total} / {_counted(dp, 'data-parallel rank')} = {_counted(part.rows, unit)} a rank"
    if part.dynamic:
        return f"{share}, in {_count(part)} by tokens"
    if part.size is None:
        return f"{share}; {part.size_key} is not set"
    return f"{share} / {part.size} ({part.size_key}) = {_count(part)}"


def _count(part: MicroBatches) -> str:
    if part.least is None:
        return "? micro-batches"
    most = _counted(part.most, "micro-batch")
    return f"{part.least} to {most}" if part.least != part.most else most


def _token_rows(batches: BatchReport) -> list[tuple[str, str]]:
    padding = f"each sequence to a multiple of {batches.padding_multiple}"
    rows = [
        ("longest sequence", f"{batches.longest} tokens = {batches.longest_formula}"),
        ("padding", f"{padding} (tensor x 2 x context; tensor alone without context parallelism)"),
    ]
    for part in [*(updates.micro_batches for updates in batches.updates), *batches.passes]:
        if part.dynamic:
            rows.append((part.name, _budget(part)))
    return rows


def _budget(part: MicroBatches) -> str:
    if part.tokens is None or part.tokens_times_cp is None:
        return f"{part.budget_key} is not set"
    factor = part.tokens_times_cp // part.tokens
    words = f"{part.tokens} a rank ({part.budget_key}) x context {factor} = {part.tokens_times_cp} a micro-batch"
    if part.tokens_times_cp < part.longest:
        return f"{words}, less than the longest sequence"
    words += f": at least {_counted(part.tokens_times_cp // part.longest, 'sequence')} of the longest kind"
    if part.most is not None:
        words += f", so {_counted(part.rows, 'sequence')} make {_counted(part.most, 'micro-batch')} at most"
    return words


def _run_rows(batches: BatchReport) -> list[tuple[str, str]]:
    rows = [("steps", _steps(batches.steps, batches.items))]
    rows += [(_schedule_name(schedule), _schedule(schedule)) for schedule in batches.schedules]
    rows += [("validation", _validation(batches.steps, batches.items)), ("checkpoints", _checkpoints(batches.steps))]
    return rows + [("", note) for note in batches.notes]


def _validation(steps: Steps, items: str) -> str:
    if not steps.validate_first and steps.validate_every is None:
        return "none (trainer.test_freq is not positive)"
    when = ["before the first step (trainer.val_before_train)"] if steps.validate_first else []
    if steps.validate_every is not None:
        when.append(f"every {_counted(steps.validate_every, 'step')} (trainer.test_freq) and after the last")
    words = f"{_number(steps.validation_rows)} {items} of data.val_files"
    if items == "prompts":
        words += f" x {steps.validation_samples} (actor_rollout_ref.rollout.val_kwargs.n)"
    return f"{words}, {' and '.join(when)}"


def _checkpoints(steps: Steps) -> str:
    if steps.save_every is None:
        return "none (trainer.save_freq is not positive)"
    return f"every {_counted(steps.save_every, 'step')} (trainer.save_freq) and after the last"


def _steps(steps: Steps, items: str) -> str:
    if steps.rows is None:
        total = (
            "" if steps.total_steps is None else f"; {_counted(steps.total_steps, 'step')} in all ({steps.total_key})"
        )
        return f"the rows of data.train_files are not known{total}"
    used = "" if steps.rows_used == steps.rows else f", of which {steps.rows_used} (data.train_max_samples) are used"
    words = f"{steps.rows} {items} in data.train_files{used}; / {steps.batch_size} ({steps.batch_key}) = "
    words += f"{_counted(steps.steps_per_epoch, 'step')} an epoch"
    if steps.total_key == "trainer.total_epochs":
        words += f" x {steps.epochs} (trainer.total_epochs) = {_counted(steps.total_steps, 'step')}"
    else:
        words += f"; {_counted(steps.total_steps, 'step')} in all (trainer.total_training_steps)"
    if steps.rows_used and steps.steps_per_epoch and (left := steps.rows_used % steps.batch_size):
        words += f"; the last {left} of an epoch make no whole batch and are left out"
    if steps.may_shrink:
        words += "; data.filter_overlong_prompts drops prompts that are not counted here, so there may be fewer"
    return words


def _schedule_name(schedule: Schedule) -> str:
    return "critic's rate" if schedule.key.startswith("critic") else "learning rate"


def _schedule(schedule: Schedule) -> str:
    words = f"{schedule.lr:g} ({schedule.key}.lr) after {_counted(schedule.warmup_steps, 'step')} of warm-up, then "
    if schedule.style == "constant":
        return words + "constant"
    return words + f"{schedule.style} to {schedule.min_lr:g} at step {_number(schedule.decay_steps)}"


def _regime_rows(report: RegimeReport) -> list[tuple[str, str]]:
    state = {True: "on", False: "off", None: "not known"}[report.regime.per_token]
    name = report.key.split(".")[-2] if "." in report.key else "model"
    rows = [
        (name, f"calculate_per_token_loss is {state}: {report.regime.why}"),
        ("that means", report.means),
    ]
    refused = [guard.combination for guard in report.guards if guard.refuses]
    allowed = [guard.combination for guard in report.guards if guard.present and not guard.refuses]
    words = "on" if report.guards_on else f"lifted ({report.key}.per_token_loss_guards=False)"
    words += ", refusing " + " and ".join(guard.combination for guard in report.guards) + " where the flag is on"
    if refused:
        words += f"; here they refuse {' and '.join(refused)}"
    elif allowed:
        words += f"; here {' and '.join(allowed)} is set and not refused"
    else:
        words += "; here they refuse nothing"
    return [*rows, ("guards", words)]


def _offline_rows(offline: OfflineReport) -> list[tuple[str, str]]:
    if offline.workers is None:
        rows = [("rows", f"{_number(offline.rows)} in data.path")]
    else:
        some = offline.rows_used != offline.rows
        used = f", of which {offline.rows_used} (data.max_samples) are used" if some else ""
        responses = f"{_number(offline.rows_used)} x {offline.samples} (data.n_samples) = {_number(offline.responses)}"
        rows = [
            ("prompts", f"{_number(offline.rows)} in data.path{used}"),
            ("responses", responses),
            (
                "batches",
                f"{offline.batch_size} prompts (data.batch_size) at a time, {_number(offline.batches)} times; "
                f"{offline.batch_size} x {offline.samples} / {offline.workers} workers = "
                f"{offline.rows_per_worker} responses a worker at most",
            ),
            ("workers", f"{offline.workers} (trainer.nnodes x trainer.n_gpus_per_node), each with a whole copy"),
            ("longest", f"{offline.longest} tokens = rollout.prompt_length + rollout.response_length"),
        ]
    return [*rows, ("output", value_in_words(offline.output))]


def bytes_in_words(number: int) -> str:
    """Bytes in the unit that leaves a readable number."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} bytes"


def _memory_rows(memory: MemoryReport) -> list[tuple[str, str]]:
    estimate = memory.estimate
    if estimate is None:
        return [("not estimated", memory.unknown)]
    most = f"{bytes_in_words(estimate['total'])} in the phase {estimate['worst_phase']}"
    phases = ", ".join(f"{name} {bytes_in_words(size)}" for name, size in estimate["phases"].items())
    rows = [("at most", f"{most} (pipeline stage {estimate['pipeline_stage']}); by phase: {phases}")]
    for part in estimate["parts"]:
        when = f", in {_listed(part['phases'])}" if part["phases"] else ", always"
        rows.append((bytes_in_words(part["bytes"]), f"{part['name']}{when}: {part['formula']}"))
    moved = [(part["name"], part["bytes"]) for part in estimate["parts"] if part["host"]]
    if moved:
        rows.append(("host memory", _host_memory(memory, estimate["host_bytes"], moved)))
    rows.append(("assumed", "; ".join(estimate["assumptions"]) or "nothing"))
    return [*rows, ("not counted", "; ".join(estimate["not_counted"]))]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _host_memory(memory: MemoryReport, of_a_rank: int, moved: list[tuple[str, int]]) -> str:
    parts = " + ".join(f"{name} {bytes_in_words(size)}" for name, size in moved)
    return (
        f"{bytes_in_words(memory.host_bytes_of_a_machine)} of a machine's, for what is offloaded: at most "
        f"{bytes_in_words(of_a_rank)} a rank ({parts}) x {memory.ranks_per_machine} ranks a machine"
    )
