# SPDX-License-Identifier: Apache-2.0
"""Command line that answers prompts: ``python3 -m verl.trainer.main_generation key=value ...``.

Reads chat prompts, samples ``data.n_samples`` responses for each, and writes the rows with the columns ``responses``
(list of texts) and ``finished`` (list of bools: whether the response ended by itself) to a parquet file, which
``verl.trainer.main_eval`` scores. One worker runs in this process; several run under Ray.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.dry_run.command import run_command
from verl.trainer.main_ppo import check_local_cpus, start_ray, stop_ray
from verl.trainer.ppo.preflight_offline import validate_generation_config
from verl.utils.device import DEVICE_ENV

# Seconds that workers may wait for each other.
NCCL_TIMEOUT_S = 600


def main() -> None:
    """Read the command line, check it, generate; exits non-zero on any failure."""
    run_command(prepare, "generation")


def prepare(config: DictConfig) -> Callable[[], None]:
    """Check ``config`` and tokenize the prompts; returns the generation, a function of no arguments.

    Raises:
        ValueError: the configuration or a prompt is not fit.
    """
    validate_generation_config(config)
    if config.trainer.device == "cpu":
        os.environ[DEVICE_ENV] = "cpu"
    if num_workers(config) > 1:
        check_local_cpus(config)
    prompts = Prompts(config)
    return lambda: run(config, prompts)


def num_workers(config: DictConfig) -> int:
    """Workers that generate."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


class Prompts:
    """The prompt files as left-padded token ids.

    Args:
        config: the ``generation`` tree.

    Attributes:
        table: the rows read, a pyarrow table of N rows.
        batch: `input_ids, attention_mask, position_ids`, int64 [N, P].

    Raises:
        ValueError: a file, a column or a row is not as it must be, or a prompt is too long.
    """

    def __init__(self, config: DictConfig):
        from verl.utils.dataset.common import open_data_files, require_chat_template
        from verl.utils.tokenizer import hf_tokenizer

        data, model = config.data, config.model
        self.tokenizer = hf_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code)
        require_chat_template(self.tokenizer)
        paths = [data.path] if isinstance(data.path, str) else list(data.path)
        table = open_data_files(paths, {data.prompt_key: [{"role": "user", "content": "17+25="}]})
        self.table = table.slice(0, data.max_samples) if data.max_samples > 0 else table
        self.batch = self._encode(data, config.rollout.prompt_length)

    def _encode(self, data: DictConfig, width: int) -> dict[str, Any]:
        import torch

        from verl.utils.dataset.common import clean_messages, encode_texts, kept_slices, overlong_error, render_chat
        from verl.utils.model import compute_position_id_with_mask

        kwargs = OmegaConf.to_container(data.apply_chat_template_kwargs, resolve=True)
        texts = []
        for row, value in enumerate(self.table.column(data.prompt_key).to_pylist()):
            where = f"the prompt of row {row} (column {data.prompt_key!r})"
            texts.append(render_chat(self.tokenizer, clean_messages(value, where), where, True, **kwargs))
        input_ids = torch.full((len(texts), width), self.tokenizer.pad_token_id, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(encode_texts(self.tokenizer, texts)):
            if not ids:
                raise ValueError(f"the prompt of row {row} is empty: the chat template makes no token of it")
            if len(ids) > width and data.truncation == "error":
                where = f"the prompt of row {row}"
                raise overlong_error(where, len(ids), "rollout.prompt_length", width, "or set data.truncation=left")
            ids = [token for part in kept_slices(len(ids), width, data.truncation) for token in ids[part]]
            input_ids[row, width - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
            mask[row, width - len(ids) :] = 1
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": compute_position_id_with_mask(mask),
        }


class LocalGroup:
    """One rollout in this process, with the face of a worker group."""

    world_size = 1

    def __init__(self, config: DictConfig):
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout import get_rollout_class

        rollout = omega_conf_to_dataclass(config.rollout)
        self.rollout = get_rollout_class(rollout.name, rollout.mode)(rollout, omega_conf_to_dataclass(config.model))

    def generate_sequences(self, prompts: Any) -> Any:
        """Answer every row."""
        return self.rollout.generate_sequences(prompts)


def ray_group(config: DictConfig) -> Any:
    """A worker group under Ray whose workers hold a rollout each.

    Raises:
        ValueError: the cluster is too small.
    """
    import ray

    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
    from verl.trainer.ppo.utils import Role

    trainer = config.trainer
    pools = ResourcePoolManager(
        resource_pool_spec={"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes},
        mapping={Role.Rollout: "global_pool"},
        num_cpus_per_worker=trainer.num_cpus_per_worker,
    )
    pools.create_resource_pool()
    from verl.workers.engine_workers import ActorRolloutRefWorker  # slow, so only when the cluster is large enough

    parts = OmegaConf.create({"model": config.model, "rollout": config.rollout, "nccl_timeout": NCCL_TIMEOUT_S})
    group = RayWorkerGroup(
        resource_pool=pools.get_resource_pool(Role.Rollout),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=parts, role=str(Role.Rollout)),
        ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
    )
    group.init_model()
    return group


def run(config: DictConfig, prompts: Prompts) -> None:
    """Start the workers, generate, write the file."""
    if num_workers(config) == 1:
        write(config, prompts, *generate_texts(config, prompts, LocalGroup(config)))
        return
    start_ray(config)
    try:
        write(config, prompts, *generate_texts(config, prompts, ray_group(config)))
    finally:
        stop_ray()


def generate_texts(config: DictConfig, prompts: Prompts, group: Any) -> tuple[list[list[str]], list[list[bool]]]:
    """``data.n_samples`` responses to every prompt, as text without special tokens, and whether each has ended."""
    from tqdm import tqdm

    from verl.trainer.ppo.batching import prompt_batch
    from verl.trainer.ppo.validation import generate, token_lists

    n, size, tokenizer = config.data.n_samples, config.data.batch_size, prompts.tokenizer
    responses, finished = [], []
    for number, start in enumerate(tqdm(range(0, prompts.table.num_rows, size), unit="batch", desc="generate")):
        rows = {name: tensor[start : start + size] for name, tensor in prompts.batch.items()}
        meta = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "global_steps": number,
            "validate": False,
        }
        _, tokens = token_lists(generate(group, prompt_batch(rows, n, uid_prefix=str(number)), meta))
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ended = [bool(ids) and ids[-1] == tokenizer.eos_token_id for ids in tokens]
        responses += [texts[i : i + n] for i in range(0, len(texts), n)]
        finished += [ended[i : i + n] for i in range(0, len(ended), n)]
    return responses, finished


def write(config: DictConfig, prompts: Prompts, responses: list[list[str]], finished: list[list[bool]]) -> None:
    """Write the rows with their responses; the file appears when it is whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, path = prompts.table, Path(config.data.output_path).expanduser()
    for name, values in (("responses", responses), ("finished", finished)):
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(values))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    pq.write_table(table, part)
    os.replace(part, path)
    print(f"{table.num_rows} prompts with {config.data.n_samples} responses each: {path}")


if __name__ == "__main__":
    main()
