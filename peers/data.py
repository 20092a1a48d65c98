"""Tokens on disk: the text is tokenised once and memory-mapped from then on."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from opendiloco.errors import ConfigError
from opendiloco.units import Seconds, now
from peers.corpus import CHUNK_CHARS, TextFile, find_text_files, read_chunks
from peers.tokenizer import TokenArray, Tokenizer, token_dtype

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes of text tokenised so far and in all."""

_FORMAT = 1
_TOKENS_FILE = "tokens.bin"
_META_FILE = "meta.json"
_TEMPORARY = "tmp-"
_COUNTED_AT_ONCE = 1 << 22

# A builder locks its folder right after making it; a younger one may not be locked yet.
_STALE_AFTER = Seconds(60.0)


@dataclass(frozen=True, slots=True)
class TokenCache:
    """A tokenised text in a memory-mapped file.

    Attributes:
        tokens: uint16 or uint32 [num_tokens], read-only; every document is followed by eos.
        num_documents: Documents with at least one token.
        digest: Hex hash of the tokens; equal digests mean equal text.
        folder: Where they lie.
    """

    tokens: TokenArray
    num_documents: int
    digest: str
    folder: Path

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return int(self.tokens.size)

    def unigram_entropy(self) -> float:
        """Return the entropy of the token frequencies, nats per token.

        It is the loss of the best model that ignores the context: what a language model
        must beat.
        """
        counts = np.zeros(1, dtype=np.int64)
        for start in range(0, self.num_tokens, _COUNTED_AT_ONCE):
            part = np.bincount(self.tokens[start : start + _COUNTED_AT_ONCE])
            longer = max(part.size, counts.size)
            counts = np.pad(counts, (0, longer - counts.size)) + np.pad(
                part, (0, longer - part.size)
            )
        frequencies = counts[counts > 0] / self.num_tokens
        return float(-(frequencies * np.log(frequencies)).sum())


def build_token_cache(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    on_progress: ProgressCallback | None = None,
) -> TokenCache:
    """Tokenise the sources once; later calls map what the first one wrote.

    A cache is complete or absent, and any number of builders may run at once: the first to
    finish wins, the others use its result.

    Args:
        sources: See `peers.corpus.find_text_files`.
        tokenizer: Defines the ids and the token between documents.
        cache_dir: Holds one folder per (files, their sizes and times, tokenizer).
        on_progress: Called after every piece of text, only while building.

    Raises:
        ConfigError: If a source is missing or all are empty, or the cache cannot be written.
    """
    files = find_text_files(sources)
    folder = cache_dir.expanduser() / _cache_key(files, tokenizer)
    try:
        cache = _open_cache(folder)
        if cache is None:
            _build(files, tokenizer, folder, on_progress or _ignore_progress)
            cache = _open_cache(folder)
    except OSError as error:
        raise ConfigError(
            f"--data.cache-dir: cannot keep the tokens in {cache_dir}: {error.strerror}; "
            "free space there or choose another folder"
        ) from None
    if cache is None:
        raise ConfigError(f"--data.cache-dir: {folder} was damaged while in use; start again")
    return cache


def _cache_key(files: Sequence[TextFile], tokenizer: Tokenizer) -> str:
    described = [[str(file.path), file.num_bytes, file.modified_ns] for file in files]
    text = json.dumps([_FORMAT, CHUNK_CHARS, tokenizer.digest, described])
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:32]


def _open_cache(folder: Path) -> TokenCache | None:
    """Map a cache; None if it is absent or not whole."""
    path = folder / _TOKENS_FILE
    try:
        meta = json.loads((folder / _META_FILE).read_text("utf-8"))
        dtype = np.dtype(meta["dtype"])
        if path.stat().st_size != meta["num_tokens"] * dtype.itemsize:
            return None
        return TokenCache(
            tokens=np.memmap(path, dtype=dtype, mode="r"),
            num_documents=meta["num_documents"],
            digest=meta["digest"],
            folder=folder,
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _build(
    files: Sequence[TextFile], tokenizer: Tokenizer, folder: Path, on_progress: ProgressCallback
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder.parent)
    temporary = folder.parent / f"{_TEMPORARY}{folder.name[:8]}-{secrets.token_hex(4)}"
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY)
    try:
        _try_lock(lock)
        with (temporary / _TOKENS_FILE).open("wb") as stream:
            meta = _write_tokens(files, tokenizer, stream, on_progress)
        with (temporary / _META_FILE).open("w", encoding="utf-8") as text_stream:
            json.dump(meta, text_stream)
            text_stream.flush()
            os.fsync(text_stream.fileno())
        _move_into_place(temporary, folder)
    finally:
        os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokens(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    stream: IO[bytes],
    on_progress: ProgressCallback,
) -> dict[str, str | int]:
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eos_id], dtype=dtype).tobytes()
    content = hashlib.sha256()
    num_documents = num_bytes = num_read = 0
    total = sum(file.num_bytes for file in files)
    for file in files:
        is_empty = True
        for chunk in read_chunks(file.path):
            piece = tokenizer.encode(chunk).astype(dtype, copy=False).tobytes()
            is_empty = is_empty and not piece
            num_bytes += stream.write(piece)
            content.update(piece)
            num_read += len(chunk.encode("utf-8"))
            on_progress(min(num_read, total), total)
        if not is_empty:
            num_documents += 1
            num_bytes += stream.write(end)
            content.update(end)
    if num_bytes == 0:
        raise ConfigError(
            f"--data.sources: the text is empty (0 tokens in {len(files)} files); give other files"
        )
    stream.flush()
    os.fsync(stream.fileno())
    return {
        "dtype": np.dtype(dtype).name,
        "num_tokens": num_bytes // np.dtype(dtype).itemsize,
        "num_documents": num_documents,
        "digest": content.hexdigest(),
    }


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename a finished cache, unless another builder was faster; a damaged one makes room."""
    for last_try in (False, True):
        try:
            temporary.replace(folder)
        except OSError:
            if _open_cache(folder) is not None:
                return  # of another builder, and as good as this one
            if last_try or not folder.exists():
                raise
        else:
            return
        # Renamed, not deleted in place: meanwhile another builder may have put a whole one there.
        aside = temporary.with_name(f"{temporary.name}-damaged")
        with contextlib.suppress(FileNotFoundError):
            folder.replace(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _remove_stale(cache_dir: Path) -> None:
    """Delete what builders left behind that died; a living one holds a lock on its folder."""
    for temporary in cache_dir.glob(f"{_TEMPORARY}*"):
        try:
            if now() - temporary.stat().st_mtime < _STALE_AFTER:
                continue
            lock = os.open(temporary, os.O_RDONLY)
        except OSError:
            continue  # another builder was faster
        try:
            if _try_lock(lock):
                shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Take the lock; False if it is held, or if this file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ignore_progress(_done: int, _total: int) -> None:
    """Report to nobody."""
