"""Text to token ids: plain bytes, or any Hugging Face tokenizer."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from opendiloco.errors import ConfigError
from opendiloco.units import Seconds

TokenArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

HUB_TIMEOUT = Seconds(10.0)

# ByT5's ids: pad, end of text, unknown, the 256 bytes, 125 sentinels that text never holds.
_BYT5_EOS = 1
_BYT5_FIRST_BYTE = 3
_BYT5_VOCAB_SIZE = 384

# Tried in this order where a bare tokenizer.json does not say which token ends a text.
_USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Turns text into ids; documents are separated by `eos_id`.

    Attributes:
        vocab_size: All ids are below it.
        eos_id: The token that ends a text.
        digest: Hex hash of what defines it; equal digests mean equal ids.
    """

    vocab_size: int
    eos_id: int
    digest: str

    def encode(self, text: str) -> TokenArray:
        """Return the ids, [num_tokens] of `token_dtype(vocab_size)`, without special tokens."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` loads it."""
        ...


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that holds every id below `vocab_size`."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def load_tokenizer(name: str) -> Tokenizer:
    """Find a tokenizer by its name.

    Args:
        name: "bytes", a folder or a tokenizer.json, or a name on the Hugging Face hub.

    Raises:
        ConfigError: If there is none by that name, or the hub cannot be reached; within
            seconds, not after the hub client's minutes of retries.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    tokenizer = _load_local(path) if path.exists() else _load_from_hub(name)
    return HuggingFaceTokenizer(tokenizer, name=name)


class ByteTokenizer:
    """The UTF-8 bytes of the text, with the ids of ByT5."""

    vocab_size = _BYT5_VOCAB_SIZE
    eos_id = _BYT5_EOS
    digest = hashlib.sha256(b"bytes: ByT5 ids, 384").hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """Return byte + 3 for every byte, uint16 [num_bytes]."""
        codes = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        return codes.astype(np.uint16) + np.uint16(_BYT5_FIRST_BYTE)

    def save(self, folder: Path) -> None:
        """Write the files of a ByT5 tokenizer."""
        import_transformers().ByT5Tokenizer().save_pretrained(folder)


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library."""

    def __init__(self, tokenizer: Any, *, name: str) -> None:  # noqa: ANN401 - transformers is untyped
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        if tokenizer.eos_token is None:
            tokenizer.eos_token = next((eos for eos in _USUAL_EOS if eos in vocabulary), None)
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"--data.tokenizer: {name} has no end-of-text token; "
                'set eos_token in its tokenizer_config.json or use "bytes"'
            )
        self._tokenizer = tokenizer
        self.vocab_size = max(len(tokenizer), max(vocabulary.values()) + 1)
        self.eos_id: int = tokenizer.eos_token_id
        self.digest = _digest(tokenizer, vocabulary)

    def encode(self, text: str) -> TokenArray:
        """Return the ids; what looks like a special token in the text is plain text."""
        ids = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's own files."""
        self._tokenizer.save_pretrained(folder)


def import_transformers() -> Any:  # noqa: ANN401 - an untyped module
    """Return the transformers package, told to keep its advice to itself; takes seconds."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _load_local(path: Path) -> Any:  # noqa: ANN401
    transformers = import_transformers()
    is_whole = path.is_dir() or (path.parent / "tokenizer_config.json").exists()
    try:
        if is_whole:
            folder = path if path.is_dir() else path.parent
            return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    # A broken file surfaces as anything, a bare Exception of the Rust library included.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"--data.tokenizer: no usable tokenizer in {path} ({_one_line(error)}); "
            'give a Hugging Face tokenizer folder, a tokenizer.json or "bytes"'
        ) from None


def _load_from_hub(name: str) -> Any:  # noqa: ANN401
    transformers = import_transformers()
    import huggingface_hub

    try:
        return transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        pass  # not in the local cache
    try:
        # One bounded question first: from_pretrained retries for most of a minute offline.
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT)
        return transformers.AutoTokenizer.from_pretrained(name)
    # Which HTTP library raises here changes with the hub client's version.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(
            f"--data.tokenizer: {name} is no local path and the Hugging Face hub does not give it "
            f'({_one_line(error)}); use "bytes", or download it and give its folder'
        ) from None


def _digest(tokenizer: Any, vocabulary: dict[str, int]) -> str:  # noqa: ANN401
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Set by earlier calls; they do not change the ids that `encode` gives.
        definition = {**backend, "padding": None, "truncation": None}
    else:
        definition = {"class": type(tokenizer).__name__, "vocabulary": vocabulary}
    text = json.dumps([definition, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__
