# SPDX-License-Identifier: Apache-2.0
"""Opening the tokenizer or processor of a Hugging Face model folder, with the checks that transformers leaves out."""

import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

__all__ = ["hf_tokenizer", "hf_processor", "set_pad_token_id"]

# Any one of these means that a folder holds a vocabulary. Without one, transformers does not fail for model types
# that it knows: it returns an empty tokenizer of that type, and the run dies much later.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
    "*.bpe.model",
    "tokenization_*.py",
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def set_pad_token_id(tokenizer: Any) -> None:
    """Give `tokenizer` a pad token when it has none: its EOS token, with a warning.

    Args:
        tokenizer: a transformers tokenizer; changed in place.

    Raises:
        ValueError: there is neither a pad token nor an EOS token.
    """
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has neither a pad token nor an EOS token; "
            "name at least eos_token in its tokenizer_config.json"
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning(
        "the tokenizer of %r has no pad token; its EOS token %r (id %d) is used for padding",
        tokenizer.name_or_path,
        tokenizer.eos_token,
        tokenizer.eos_token_id,
    )


def hf_tokenizer(
    name_or_path: str | os.PathLike, trust_remote_code: bool = False, correct_pad_token: bool = True, **kwargs: Any
) -> Any:
    """Open the tokenizer of a model folder (or of a hub id).

    Args:
        name_or_path: a local folder, or a Hugging Face hub id.
        trust_remote_code: run tokenizer code that the folder brings along.
        correct_pad_token: use EOS for padding when there is no pad token (`set_pad_token_id`).
        **kwargs: passed on to `AutoTokenizer.from_pretrained`.

    Returns:
        A transformers tokenizer.

    Raises:
        ValueError: the path does not exist, holds no tokenizer, or the tokenizer has neither pad nor EOS token.
    """
    path = _checked_path(name_or_path)
    if os.path.isdir(path) and not _has_any(path, _VOCABULARY_FILES):
        raise ValueError(
            f"the folder {path!r} holds no tokenizer (none of {', '.join(_VOCABULARY_FILES)}); "
            "save the model's tokenizer there, or point model.tokenizer_path to a folder that has one"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    except OSError as error:
        raise ValueError(f"no tokenizer could be opened at {path!r}: {error}") from error
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def hf_processor(name_or_path: str | os.PathLike, trust_remote_code: bool = False, **kwargs: Any) -> Any | None:
    """Open the multi-modal processor of a model folder (or of a hub id).

    Args:
        name_or_path: a local folder, or a Hugging Face hub id.
        trust_remote_code: run processor code that the folder brings along.
        **kwargs: passed on to `AutoProcessor.from_pretrained`.

    Returns:
        A transformers processor, or None for a text model.

    Raises:
        ValueError: the path does not exist.
    """
    path = _checked_path(name_or_path)
    # AutoProcessor answers with a bare tokenizer for text models; the files tell without loading anything.
    if os.path.isdir(path) and not _has_any(path, _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    except OSError as error:
        raise ValueError(f"no processor could be opened at {path!r}: {error}") from error
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _has_any(folder: str, patterns: tuple[str, ...]) -> bool:
    return any(next(Path(folder).glob(pattern), None) is not None for pattern in patterns)


def _checked_path(name_or_path: str | os.PathLike) -> str:
    """Expand `~`; refuse what is clearly a local path and is not there, instead of asking the hub for it."""
    path = os.path.expanduser(os.fspath(name_or_path))
    looks_local = path.startswith((os.sep, ".")) or path.count("/") > 1
    if looks_local and not os.path.isdir(path):
        raise ValueError(f"the model folder {path!r} does not exist")
    return path
