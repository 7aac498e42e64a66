# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face model folder to a megatron-core model and back, through megatron-bridge.

On a machine without TransformerEngine the layers are megatron-core's local ones with :class:`LocalCoreAttention`; with
it, the layers that the bridge chooses.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verl.utils.checkpoint.dist_weights import load_dist_weights
from verl.utils.config import did_you_mean
from verl.utils.device import get_device_name
from verl.utils.hf_config import MTP_COUNTS
from verl.utils.quiet import quiet_imports
from verl.workers.config.names import NOT_TRAINED, NPU_FIELDS

__all__ = [
    "build_modules",
    "build_provider",
    "has_transformer_engine",
    "is_mtp_task",
    "load_bridge",
    "load_weights",
    "stream_hf_weights",
]

logger = logging.getLogger(__name__)

_NEED_ACCELERATOR = (
    "apply_rope_fusion bias_activation_fusion bias_dropout_fusion cross_entropy_loss_fusion "
    "gradient_accumulation_fusion masked_softmax_fusion "
    "moe_grouped_gemm moe_permute_fusion moe_router_fusion persist_layer_norm"
).split()
_AUX_LOSS_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_MTP_KEYS = "model.mtp.enable, mtp_loss_scaling_factor, detach_encoder"


def has_transformer_engine() -> bool:
    """Whether the layers can be TransformerEngine's: an accelerator and the package."""
    return get_device_name() != "cpu" and importlib.util.find_spec("transformer_engine") is not None


def load_bridge(
    path: str,
    trust_remote_code: bool = False,
    *,
    config_path: str | None = None,
    override_config: Mapping[str, Any] | None = None,
) -> Any:
    """The ``AutoBridge`` of a Hugging Face model folder.

    Args:
        path: the folder.
        trust_remote_code: run model code that comes with the folder.
        config_path: folder to take the Hugging Face configuration from instead.
        override_config: entries of that configuration to replace.

    Raises:
        ValueError: when megatron-bridge has no mapping for the folder's architecture (names it and the supported ones),
            or the configuration has no such entry.
    """
    with quiet_imports():
        auto_bridge = _import_auto_bridge()
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(config_path or path, trust_remote_code=trust_remote_code)
    for name, value in (override_config or {}).items():
        if not hasattr(config, name):
            hint = did_you_mean(name, config.to_dict())
            raise ValueError(f"model.override_config.{name}: {type(config).__name__} has no such entry.{hint}")
        setattr(config, name, value)
    if not auto_bridge.supports(config):
        known = ", ".join(sorted(auto_bridge.list_supported_models()))
        raise ValueError(f"model.path={path}: architecture {config.architectures} is not supported; known: {known}")
    bridge = auto_bridge.from_hf_pretrained(path, trust_remote_code=trust_remote_code)
    if config_path or override_config:
        bridge.hf_pretrained.config = config
    return bridge


def _import_auto_bridge() -> type:
    # megatron.core must look for TransformerEngine before the stand-in exists, so that it still sees none.
    import megatron.core.extensions.transformer_engine
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    if has_transformer_engine() or "megatron.bridge" in sys.modules:
        from megatron.bridge import AutoBridge

        _register_own_bridges()
        return AutoBridge
    names = ["transformer_engine", "transformer_engine.pytorch"]
    sys.modules.update({name: _StandInModule(name) for name in names})
    sys.modules[names[0]].pytorch = sys.modules[names[1]]
    sys.modules[names[0]].__version__ = "2.9.0"
    try:
        from megatron.bridge import AutoBridge
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
    _register_own_bridges()
    return AutoBridge


def _register_own_bridges() -> None:
    """Import the ``bridge_<model>.py`` of this folder: each registers an architecture that megatron-bridge lacks."""
    for file in sorted(Path(__file__).parent.glob("bridge_*.py")):
        importlib.import_module(f"verl.models.mcore.{file.stem}")


class _StandInType(type):
    """Class whose unknown attributes are classes of the same kind: enough for annotations and subclassing."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StandInType(name, (torch.nn.Module,), {})
        setattr(cls, name, made)
        return made


class _StandInModule(types.ModuleType):
    """TransformerEngine for the time of one import: megatron-bridge names its classes without asking if it is there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StandInType(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


def build_provider(bridge: Any, engine_config: Any, dtype: torch.dtype, mtp_config: Any = None) -> Any:
    """A finalised provider: at once the model's transformer configuration and its builder.

    Args:
        bridge: from :func:`load_bridge`.
        engine_config: layout and ``override_transformer_config``.
        dtype: of parameters and pipeline messages.
        mtp_config: ``model.mtp``; multi-token-prediction layers are built only if it enables them.

    Raises:
        ValueError: for an override that the transformer configuration does not have (with the nearest name), for
            auxiliary-loss settings that contradict each other, and for a model that cannot be trained here.
    """
    provider = bridge.to_megatron_provider(load_weights=False)
    for prefix, reason in NOT_TRAINED.items():
        if type(provider).__name__.startswith(prefix):
            raise ValueError(f"{type(provider).__name__}: {reason}")
    expert_tp = engine_config.expert_tensor_parallel_size
    settings = {
        "tensor_model_parallel_size": engine_config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": engine_config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": engine_config.virtual_pipeline_model_parallel_size,
        "context_parallel_size": engine_config.context_parallel_size,
        "expert_model_parallel_size": engine_config.expert_model_parallel_size,
        "expert_tensor_parallel_size": engine_config.tensor_model_parallel_size if expert_tp is None else expert_tp,
        "sequence_parallel": engine_config.sequence_parallel and engine_config.tensor_model_parallel_size > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "hidden_dropout": 0.0,  # log-probs of one policy must not depend on a random mask
        "attention_dropout": 0.0,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "deallocate_pipeline_outputs": True,
    }
    if engine_config.virtual_pipeline_model_parallel_size:
        # Batched messages get mixed up where the previous and the next stage are the same rank.
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if dtype == torch.float64:
        settings["moe_router_dtype"] = "fp64"
    settings |= _mtp_settings(provider, mtp_config)
    overrides = {k: v for k, v in dict(engine_config.override_transformer_config or {}).items() if v is not None}
    _check_overrides(provider, overrides)
    if get_device_name() == "cpu":
        ignored = [name for name in _NEED_ACCELERATOR if overrides.pop(name, False)]
        if ignored:
            logger.warning("no accelerator here, so these settings are off: %s", ", ".join(ignored))
        settings.update(dict.fromkeys(_NEED_ACCELERATOR, False))
        overrides.pop("attention_backend", None)
        settings["use_cpu_initialization"] = True
    settings.update(overrides)
    for name, value in settings.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    if isinstance(getattr(provider, "attention_backend", None), str):
        from megatron.core.transformer.enums import AttnBackend

        provider.attention_backend = AttnBackend[provider.attention_backend]
    if not has_transformer_engine():
        provider.transformer_layer_spec = _local_layer_spec
        _build_local_mtp_layers()
    provider.finalize()
    return provider


def _mtp_settings(provider: Any, mtp_config: Any) -> dict[str, Any]:
    if mtp_config is None or not mtp_config.enable:
        return dict.fromkeys(MTP_COUNTS)  # every name of the field, so that none brings the layers back
    if not getattr(provider, "mtp_num_layers", None):
        raise ValueError(
            "model.mtp.enable=True: the model has no multi-token prediction layer "
            "(num_nextn_predict_layers in its config.json); set model.mtp.enable=False"
        )
    return {"mtp_loss_scaling_factor": mtp_config.mtp_loss_scaling_factor}


def _check_overrides(provider: Any, overrides: dict[str, Any]) -> None:
    prefix = "override_transformer_config"
    for name in overrides:
        if not hasattr(provider, name) and name not in NPU_FIELDS:
            hint = did_you_mean(name, vars(provider))
            raise ValueError(f"{prefix}.{name}: the transformer configuration has no such field.{hint}")
    for name in (*MTP_COUNTS, "mtp_loss_scaling_factor", "mtp_detach_heads"):
        if name in overrides:
            raise ValueError(
                f"{prefix}.{name}: multi-token prediction is set under model.mtp, for instance {_MTP_KEYS}"
            )
    kinds = overrides.get("moe_router_load_balancing_type", "none")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if overrides.get("moe_aux_loss_coeff") and not set(kinds) & set(_AUX_LOSS_TYPES):
        raise ValueError(
            f"{prefix}.moe_aux_loss_coeff={overrides['moe_aux_loss_coeff']} has no effect with "
            f"moe_router_load_balancing_type={kinds[0]}; set the type to one of {', '.join(_AUX_LOSS_TYPES)}"
        )
    if set(kinds) & set(_AUX_LOSS_TYPES) and not overrides.get("moe_aux_loss_coeff"):
        raise ValueError(
            f"{prefix}.moe_router_load_balancing_type={kinds[0]} has no effect without a coefficient; "
            f"set {prefix}.moe_aux_loss_coeff, for instance to 0.001"
        )


def _local_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        _use_local_attention(config, layer)
    return block


def _use_local_attention(config: Any, layer: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    from verl.models.mcore.attention import LocalCoreAttention

    parts = layer.submodules.self_attention.submodules
    parts.core_attention = LocalCoreAttention
    # Latent attention without compressed queries has no norm for them, whatever the local specification says.
    if config.multi_latent_attention and config.q_lora_rank is None:
        parts.q_layernorm = IdentityOp


def _local_decoder_layer(config: Any) -> Any:
    """The last decoder layer, whatever the pipeline stage: the layer inside each depth of multi-token prediction."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    layer = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization=config.normalization)[-1]
    _use_local_attention(config, layer)
    return layer


def _build_local_mtp_layers() -> None:
    """megatron-bridge names TransformerEngine's layers for multi-token prediction, installed or not.

    It also knows the local layers' separate norms by their name in the decoder only (idempotent).
    """
    from megatron.bridge.models import gpt_provider
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    def block_spec(config: Any, vp_stage: int | None = None) -> Any:
        if not config.mtp_num_layers:
            return None
        layer = _local_decoder_layer(config)
        return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)

    gpt_provider.mtp_block_spec = block_spec
    if getattr(MegatronMappingRegistry, "_names_mtp_norms", False):
        return
    add_decoder_norms = MegatronMappingRegistry._add_separate_layernorm_mappings

    def add_norms(self: Any) -> None:
        add_decoder_norms(self)
        known = {mapping.megatron_param for mapping in self.mappings}
        for mapping in list(self.mappings):
            for fused, separate in self._SEPARATE_LAYERNORM_REWRITES:
                name = mapping.megatron_param
                if not (name.startswith("mtp.") and name.endswith(f".{fused}")):
                    continue
                name = name.removesuffix(fused) + separate
                if name not in known:
                    self.mappings.append(type(mapping)(name, mapping.hf_param))
                    known.add(name)

    MegatronMappingRegistry._add_separate_layernorm_mappings = add_norms
    MegatronMappingRegistry._names_mtp_norms = True


def build_modules(
    provider: Any, dtype: torch.dtype, load: Callable[[list[Any]], None], ddp_config: Any = None
) -> list[Any]:
    """The model's pipeline chunks on this rank, wrapped by Megatron, with their weights. A collective call.

    Routers keep their buffers (the experts' bias, the counts that move it and those of the balancing losses) in float32
    where ``dtype`` is narrower; a float64 model has them in float64.

    Args:
        provider: from :func:`build_provider`.
        dtype: of the parameters.
        load: gets the chunks before they are wrapped and reads weights into them.
        ddp_config: Megatron's settings of gradient reduction; None for a model that has no gradients.
    """
    from megatron.core.transformer.module import Float16Module

    def cast_and_load(chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            with _router_buffers_kept(chunk) if dtype.itemsize < 4 else contextlib.nullcontext():
                chunk.to(dtype)
        load(chunks)
        return chunks

    def wrap(config: Any, chunk: Any) -> Any:
        with _router_buffers_kept(chunk):
            return Float16Module(config, chunk)

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        modules: list[Any] = provider.provide_distributed_model(
            ddp_config=ddp_config,
            wrap_with_ddp=ddp_config is not None,
            use_cpu_initialization=get_device_name() == "cpu",
            pre_wrap_hook=cast_and_load,
            mixed_precision_wrapper=wrap,
        )
    return modules


@contextlib.contextmanager
def _router_buffers_kept(chunk: Any) -> Iterator[None]:
    """A cast of the chunk within the context leaves the routers' buffers, and tasks that hold them, as they are.

    Megatron casts the bias back to float32 at the first forward only, when the bits of the folder are lost, and counts
    of tokens never.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    kept = [(part, dict(part._buffers)) for part in chunk.modules() if isinstance(part, TopKRouter)]
    yield
    for router, buffers in kept:
        router._buffers.update(buffers)


def load_weights(
    bridge: Any, modules: list[Any], path: str, train_mtp: bool, dist_checkpoint: str | None = None
) -> None:
    """Read the first weights into a distributed model; a collective call.

    Args:
        bridge: from :func:`load_bridge`.
        modules: the model's pipeline chunks on this rank, not yet wrapped for gradient reduction.
        path: the Hugging Face folder.
        train_mtp: whether multi-token prediction layers are trained; if not, they are frozen.
        dist_checkpoint: megatron-core checkpoint to read instead of the weights in ``path``.

    Raises:
        ValueError: on every rank, naming weights that the folder or the checkpoint lacks.
    """
    if dist_checkpoint is not None:
        load_dist_weights(modules, dist_checkpoint, bridge.hf_pretrained.config.get_text_config().vocab_size)
    else:
        _load_hf_weights(bridge, modules, path)
    for module in modules:
        for name, parameter in module.named_parameters():
            if "mtp.layers." in name:
                parameter.requires_grad_(train_mtp)


def _load_hf_weights(bridge: Any, modules: list[Any], path: str) -> None:
    """megatron-bridge only warns of parameters that the folder lacks, and leaves them random: refused here."""
    bridge.load_hf_weights(modules, path)
    # Heads and embeddings are left out: tied ones, and those of a critic, are rightly not in the folder.
    own = {
        name: parameter
        for module in modules
        for name, parameter in module.named_parameters()
        if "mtp.layers." in name or "decoder.layers." in name or "decoder.final_layernorm" in name
    }
    tasks = bridge.get_conversion_tasks(modules)
    loaded = {id(task.param_weight) for task in tasks if task is not None and task.megatron_module is not None}
    everywhere: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    mine = [name for name, parameter in own.items() if id(parameter) not in loaded]
    torch.distributed.all_gather_object(everywhere, mine)
    missing = sorted({name for names in everywhere for name in names})
    if missing:
        of_mtp = all("mtp.layers." in name for name in missing)
        layers = "multi-token prediction layers" if of_mtp else "layers"
        way_out = (
            "set model.mtp.enable=False, or use a folder that holds them" if of_mtp else "the folder is incomplete"
        )
        raise ValueError(
            f"model.path={path}: no weights for {len(missing)} parameters of the {layers} that its config.json "
            f"implies, such as {missing[0]}; {way_out}"
        )


def is_mtp_task(task: Any) -> bool:
    """Whether a conversion task belongs to a multi-token prediction layer."""
    return task is not None and "mtp.layers." in task.global_param_name


def stream_hf_weights(
    bridge: Any, modules: list[Any], tasks: list[Any] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hub-named tensors of a distributed model, one after the other, whole on every rank; a collective call.

    Args:
        bridge: from :func:`load_bridge`.
        modules: the model's pipeline chunks on this rank.
        tasks: conversion tasks built earlier by ``bridge.get_conversion_tasks``; they hold the parameters themselves.
    """
    for item in bridge.export_hf_weights(modules, cpu=False, show_progress=False, conversion_tasks=tasks):
        name, weight = item
        yield name, weight
