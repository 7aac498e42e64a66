# SPDX-License-Identifier: Apache-2.0
"""Write a Hugging Face model as a distributed checkpoint of megatron-core.

    python3 scripts/converter_hf_to_mcore.py --hf_model_path MODEL --output_path FOLDER [--test]
    torchrun --nproc_per_node 8 scripts/converter_hf_to_mcore.py --hf_model_path MODEL --output_path FOLDER \\
        --tensor_model_parallel_size 2 --expert_model_parallel_size 4

Train from it in any layout with megatron.use_dist_checkpointing=True megatron.dist_checkpointing_path=FOLDER, while
model.path stays the Hugging Face folder. With several processes each holds and writes its part of the model; without a
size the layers are divided over all of them as pipeline stages. Weights keep the type that most of them have in MODEL.

Exit code 1: --test found a difference. 2: refused, with one sentence a reason.
"""

import argparse
import contextlib
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl.utils.environment import use_environment  # noqa: E402

use_environment("megatron")

SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
# safetensors' names of types -> torch's
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf_model_path", required=True, help="folder of the Hugging Face model")
    parser.add_argument("--output_path", required=True, help="folder to write; new, or empty")
    parser.add_argument(
        "--use_cpu_initialization", action="store_true", help="work in host memory, also where there is an accelerator"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--test", action="store_true", help="read the checkpoint back and compare every tensor with MODEL's, bit by bit"
    )
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="of the layout while converting")
    return parser.parse_args(arguments)


def read_tensors(folder: Path) -> dict[str, Any]:
    """Name -> (dtype, shape) of every tensor in the folder's safetensors files, without reading the tensors.

    Raises:
        ValueError: there is none, one is not whole, or one that the folder's index names is missing.
    """
    from verl.trainer.ppo.preflight_folder import weights_problem
    from verl.utils.safetensors_header import read_header

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= read_header(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"--hf_model_path: {file} {error}") from error
    if not tensors:
        raise ValueError(f"--hf_model_path {folder}: no weights (*.safetensors) there")
    if problem := weights_problem(folder):
        raise ValueError(f"--hf_model_path {folder} {problem}")
    return tensors


def choose_dtype(tensors: dict[str, Any], folder: Path) -> str:
    """The floating-point type, as torch names it, of most numbers.

    Raises:
        ValueError: the weights are quantised.
    """
    numbers: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        numbers[dtype] += math.prod(shape)
    most = numbers.most_common(1)[0][0]
    if most not in DTYPES:
        raise ValueError(
            f"--hf_model_path {folder}: its weights are {most}; dequantise them to one of {', '.join(DTYPES)} first"
        )
    return DTYPES[most]


def check_output(arguments: argparse.Namespace) -> None:
    """Whether the output can be written.

    Raises:
        ValueError: it is not empty, cannot be made, or its disk has too little room.
    """
    output = Path(arguments.output_path)
    said = f"--output_path {output}"
    if output.exists() and not output.is_dir():
        raise ValueError(f"{said} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"{said} is not empty; name another folder, or remove it")
    existing = next(folder for folder in (output, *output.resolve().parents) if folder.is_dir())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{said}: {existing} cannot be written to")
    needed = sum(file.stat().st_size for file in Path(arguments.hf_model_path).glob("*.safetensors"))
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(f"{said}: the checkpoint needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")


def read_layout(arguments: argparse.Namespace, world_size: int) -> dict[str, int]:
    """The sizes that are asked for; pipeline stages on all processes if none is.

    Raises:
        ValueError: a size below 1.
    """
    layout = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    for name, size in layout.items():
        if size < 1:
            raise ValueError(f"--{name} {size}: at least 1 is needed")
    return layout or {"pipeline_model_parallel_size": world_size}


def check_layout(folder: str, layout: dict[str, int], world_size: int) -> None:
    """Whether processes and model can be laid out so, by the rules that the trainers check.

    Raises:
        ValueError: with a sentence for everything that is wrong.
    """
    from verl.trainer.ppo import preflight_layout, preflight_model, preflight_sources
    from verl.utils.config import default_tree, did_you_mean
    from verl.utils.hf_config import architecture_of, find_hf_config

    config, reason = find_hf_config({"path": folder})
    if config is None:
        raise ValueError(f"--hf_model_path {folder}: {reason}")
    architecture, known = architecture_of(config) or "", preflight_sources.supported_architectures()
    if known and architecture not in known:
        raise ValueError(
            f"--hf_model_path {folder}: megatron-bridge does not know the architecture {architecture!r} of its "
            f"config.json.{did_you_mean(architecture, known)} It knows {', '.join(sorted(known))}"
        )
    shipped = default_tree("sft_trainer_engine")
    engine, model = shipped["engine"] | layout, shipped["model"] | {"path": folder}
    errors = preflight_layout.check_layout(engine, "the layout", world_size, "nnodes x nproc_per_node")
    errors += preflight_model.check_model("model", model, "--", engine, (1, ""))
    if errors:
        # A key below this node is a flag here; keys that a trainer has besides are not advised.
        plain = (error.plain if isinstance(error, preflight_model.WithOverride) else error for error in errors)
        raise ValueError("\n".join(error.replace("--.", "--") for error in plain))


def build(folder: str, layout: dict[str, int], dtype: str, has_mtp: bool, trust_remote_code: bool) -> tuple[Any, list]:
    """(bridge, pipeline chunks of this process) of the model in ``folder``, with its weights."""
    import torch

    from verl.models.mcore.bridge import build_modules, build_provider, load_bridge, load_weights
    from verl.models.mcore.patch import apply_patches
    from verl.utils.megatron import cpu_backend
    from verl.workers.config import McoreEngineConfig, MtpConfig
    from verl.workers.engine.megatron.parallel import initialize_model_parallel

    cpu_backend.install()
    apply_patches()
    from megatron.core.utils import unwrap_model

    settings: dict[str, Any] = dict(layout)
    config = McoreEngineConfig(**settings, use_distributed_optimizer=False, forward_only=True)
    initialize_model_parallel(config)
    bridge = load_bridge(folder, trust_remote_code)
    kind = getattr(torch, dtype)
    provider = build_provider(bridge, config, kind, MtpConfig(enable=has_mtp))

    def load(chunks: list[Any]) -> None:
        load_weights(bridge, chunks, folder, train_mtp=False)

    return bridge, unwrap_model(build_modules(provider, kind, load))


def read_back(bridge: Any, chunks: list[Any], output: str) -> Iterator[tuple[str, Any]]:
    """Hub-named tensors of the checkpoint: nothing of what the model held before is left in them. Collective."""
    from verl.models.mcore.bridge import stream_hf_weights
    from verl.utils.checkpoint.dist_weights import load_dist_weights

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    load_dist_weights(chunks, output, bridge.hf_pretrained.config.get_text_config().vocab_size)
    return stream_hf_weights(bridge, chunks)


def compare(weights: Iterator[tuple[str, Any]], folder: Path, is_judge: bool) -> list[str]:
    """How ``weights`` differ from the safetensors of ``folder``, a line a tensor; only one process need judge.

    A tensor that the checkpoint holds in another type is equal if the conversion lost nothing.
    """
    import torch
    from safetensors import safe_open

    if not is_judge:
        for _ in weights:
            pass
        return []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, framework="pt")) for f in sorted(folder.glob("*.safetensors"))]
        place = {name: file for file in files for name in file.keys()}
        problems, seen = [], set()
        for name, tensor in weights:
            seen.add(name)
            if name not in place:
                problems.append(f"{name}: not in the source")
                continue
            source = place[name].get_tensor(name)
            tensor = tensor.detach().cpu().to(source.dtype)
            if tensor.shape != source.shape:
                problems.append(f"{name}: shape {list(tensor.shape)}, {list(source.shape)} in the source")
            elif not torch.equal(_bits(tensor), _bits(source)):
                different = (tensor != source).sum().item()
                problems.append(f"{name}: {different} of {source.numel()} numbers differ")
        # Computed, not learnt; in folders of older transformers.
        missing = [name for name in place if name not in seen and not name.endswith("rotary_emb.inv_freq")]
    return problems + [f"{name}: not in the checkpoint" for name in missing]


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


def convert(arguments: argparse.Namespace) -> int:
    """Check, convert, compare if asked; returns the exit code.

    Raises:
        ValueError: what a user can mend.
    """
    folder = Path(arguments.hf_model_path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--hf_model_path {folder}: no config.json there; give the folder of a Hugging Face model")
    tensors = read_tensors(folder)
    dtype = choose_dtype(tensors, folder)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    layout = read_layout(arguments, world_size)
    check_layout(str(folder), layout, world_size)
    check_output(arguments)

    import torch.distributed as dist

    from verl.single_controller.base import Worker
    from verl.utils.checkpoint.dist_weights import save_dist_weights
    from verl.utils.checkpoint.hf_export import holds_mtp

    worker = Worker()
    worker.init_distributed()
    dist.barrier()  # all have seen the folder empty
    if worker.rank == 0:
        Path(arguments.output_path).mkdir(parents=True, exist_ok=True)
    bridge, chunks = build(str(folder), layout, dtype, holds_mtp(tensors, folder), arguments.trust_remote_code)
    dist.barrier()
    save_dist_weights(chunks, arguments.output_path)
    if worker.rank == 0:
        words = ", ".join(f"{name}={size}" for name, size in layout.items())
        print(f"{len(tensors)} tensors as {dtype} in {arguments.output_path} ({world_size} processes, {words})")
    box = [0]
    if arguments.test:
        problems = compare(read_back(bridge, chunks, arguments.output_path), folder, worker.rank == 0)
        if worker.rank == 0:
            print("\n".join(problems) or "every tensor of the checkpoint is the source's, bit by bit")
        box = [len(problems)]
        dist.broadcast_object_list(box, src=0)
    return 1 if box[0] else 0


def main(argv: list[str]) -> int:
    """Run the command line ``argv``; returns the exit code."""
    arguments = parse(argv)
    if arguments.use_cpu_initialization:
        os.environ["VERL_DEVICE"] = "cpu"
    from verl.utils.quiet import quiet_libraries

    quiet_libraries()
    try:
        code = convert(arguments)
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine
            text = str(error).replace("model.path=", "--hf_model_path ")
            for line in filter(None, map(str.strip, text.splitlines())):
                print(f"error: {line}", file=sys.stderr)
        return 2
    import torch.distributed as dist

    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's teardown, in which threads of gloo can crash.
    os._exit(exit_code)
