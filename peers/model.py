"""The model: its configuration, its first parameters, and its folder on disk."""

import copy
import difflib
import hashlib
import json
import os
import secrets
import shutil
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from opendiloco.errors import ConfigError, SchemaMismatchError
from peers.portable_random import PortableRandom
from peers.tokenizer import Tokenizer, import_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PRESET_MAX_POSITIONS = 2048


def preset_names() -> tuple[str, ...]:
    """Return the names of the files in `peers/configs`, smallest model first."""
    presets = {
        path.name.removesuffix(".toml"): tomllib.loads(path.read_text("utf-8"))
        for path in (files("peers") / "configs").iterdir()
        if path.name.endswith(".toml")
    }

    def size(name: str) -> int:
        shape = presets[name]
        return int(shape["num_hidden_layers"] * shape["hidden_size"] * shape["intermediate_size"])

    return tuple(sorted(presets, key=size))


def load_model_config(
    preset: str, config_path: Path | None, *, vocab_size: int, seq_len: int
) -> "PretrainedConfig":
    """Return the configuration of the model to train.

    Args:
        preset: A name of `preset_names`; used when `config_path` is None.
        config_path: A Hugging Face config.json, or its folder, of any causal language model.
        vocab_size: Of the tokenizer. A preset takes it; a config.json must not have less.
        seq_len: Tokens per sequence that the model must be able to read.

    Raises:
        ConfigError: If there is no such preset or file, or it does not fit.
    """
    if config_path is None:
        config = _preset_config(preset, vocab_size=vocab_size, seq_len=seq_len)
    else:
        config = _file_config(config_path.expanduser())
        _check_fit(config, config_path, vocab_size=vocab_size, seq_len=seq_len)
    config.use_cache = False
    return config


def config_digest(config: "PretrainedConfig") -> str:
    """Return a hash of all that makes the model compute what it does, hex.

    Models of equal shapes can differ in their activation, heads or positions. Only what
    differs from the library's defaults counts, so that its versions agree.
    """
    differing = config.to_diff_dict()
    for name in ("transformers_version", "_name_or_path", "dtype", "use_cache"):
        differing.pop(name, None)
    return hashlib.sha256(json.dumps(differing, sort_keys=True, default=str).encode()).hexdigest()


def parameter_shapes(config: "PretrainedConfig") -> dict[str, torch.Size]:
    """Return name and shape of every parameter in the model's order, using no memory.

    Tied weights appear once, under the first of their names.
    """
    return {name: parameter.shape for name, parameter in _on_meta(config).named_parameters()}


def build_model(config: "PretrainedConfig", *, seed: int) -> "PreTrainedModel":
    """Return a model with fresh float32 parameters on the CPU, ready to train.

    The bytes depend on `config` and `seed` only: not on the threads, the instruction set or
    the random state of the process, which stays as it was.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), PortableRandom(seed):
        # For whatever is drawn by other means than normal_ and uniform_; CPU generator only.
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = _causal_lm(config)
    return model.train()


def save_model(
    folder: Path,
    config: "PretrainedConfig",
    parameters: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; replaces an older one.

    It is written beside its place and renamed, so it is never half there.

    Args:
        folder: Where to; its parents are made.
        config: Of the model; stays as it is.
        parameters: The tensors of `parameter_shapes`, written in their own dtype.
        tokenizer: Goes beside the model; its end-of-text token becomes the model's.

    Raises:
        SchemaMismatchError: If the parameters are not those of the model.
        ConfigError: If the folder cannot be written.
    """
    config = copy.deepcopy(config)
    config.use_cache = True  # whoever generates text wants it
    config.eos_token_id = tokenizer.eos_id
    model = _on_meta(config)
    _load_parameters(model, parameters)
    mark = secrets.token_hex(4)
    temporary = folder.with_name(f".{folder.name}.tmp-{mark}")
    old = folder.with_name(f".{folder.name}.old-{mark}")
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save(temporary)
        _flush_to_disk(temporary)
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        if old.exists() and not folder.exists():
            old.replace(folder)
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot write the model to {folder}: {reason or error}; "
            "free space there or choose another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _preset_config(preset: str, *, vocab_size: int, seq_len: int) -> "PretrainedConfig":
    names = preset_names()
    if preset not in names:
        close = difflib.get_close_matches(preset.lower(), names, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"--model.preset: no preset {preset}; {hint}choose one of {', '.join(names)}, "
            "or give a config.json with --model.config"
        )
    shape = tomllib.loads((files("peers") / "configs" / f"{preset}.toml").read_text("utf-8"))
    return import_transformers().AutoConfig.for_model(
        **shape,
        vocab_size=vocab_size,
        max_position_embeddings=max(_PRESET_MAX_POSITIONS, seq_len),
        bos_token_id=None,
        eos_token_id=None,
    )


def _file_config(path: Path) -> "PretrainedConfig":
    if not path.exists():
        raise ConfigError(
            f"--model.config: {path} does not exist; "
            "give the config.json of a Hugging Face causal language model"
        )
    transformers = import_transformers()
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"--model.config: {path} is not usable ({reason}); "
            "give the config.json of a Hugging Face causal language model"
        ) from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"--model.config: {path} describes a {config.model_type}, which is no causal "
            "language model; give the config.json of one, for example of model_type llama"
        )
    return config


def _check_fit(config: "PretrainedConfig", path: Path, *, vocab_size: int, seq_len: int) -> None:
    has_vocab = getattr(config, "vocab_size", None)
    if has_vocab is not None and has_vocab < vocab_size:
        raise ConfigError(
            f"--model.config: {path} has vocab_size {has_vocab}, the tokenizer needs "
            f"{vocab_size}; raise it there or choose another --data.tokenizer"
        )
    has_positions = getattr(config, "max_position_embeddings", None)
    if has_positions is not None and has_positions < seq_len:
        raise ConfigError(
            f"--data.seq-len: {seq_len} is more than max_position_embeddings {has_positions} "
            f"in {path}; choose a smaller one or another --model.config"
        )


def _causal_lm(config: "PretrainedConfig") -> Any:  # noqa: ANN401 - transformers is untyped
    # A copy, because the model writes to its own. Attention is torch's sdpa where the
    # architecture has it: that is the default, and asking for it fails where it has not.
    return import_transformers().AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32
    )


def _on_meta(config: "PretrainedConfig") -> Any:  # noqa: ANN401
    with torch.device("meta"):
        return _causal_lm(config)


def _load_parameters(model: Any, parameters: Mapping[str, torch.Tensor]) -> None:  # noqa: ANN401
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrong = sorted(
        name
        for name in shapes.keys() | parameters.keys()
        if name not in shapes or name not in parameters or parameters[name].shape != shapes[name]
    )
    if wrong:
        raise SchemaMismatchError(
            f"these parameters do not fit the model: {', '.join(wrong[:3])} ({len(wrong)} in all)"
        )
    model.load_state_dict(dict(parameters), strict=False, assign=True)
    model.tie_weights()


def _flush_to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
