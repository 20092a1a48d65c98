"""Facts about the tokens on disk."""

import json
import math
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from opendiloco.errors import ConfigError
from peers import corpus, data
from peers.data import build_token_cache
from peers.tokenizer import ByteTokenizer

EOS = 1


class WideTokenizer(ByteTokenizer):
    """Bytes in a vocabulary that needs 32 bits."""

    vocab_size = 70_000
    digest = "wide"


def byte_ids(*documents: str) -> list[int]:
    """The expected tokens, written without numpy."""
    return [
        token
        for document in documents
        for token in [byte + 3 for byte in document.encode()] + [EOS]
    ]


def write(folder: Path, **documents: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in documents.items():
        (folder / f"{name}.txt").write_bytes(text.encode())
    return folder


def build(source: Path, cache_dir: Path) -> data.TokenCache:
    return build_token_cache([str(source)], ByteTokenizer(), cache_dir)


def test_every_document_ends_with_the_end_token(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="h\u00e9", b="", c="xyz\n")

    cache = build(source, tmp_path / "cache")

    assert cache.tokens.tolist() == byte_ids("h\u00e9", "xyz\n")
    assert (cache.num_tokens, cache.num_documents) == (9, 2)


@pytest.mark.parametrize(
    ("tokenizer", "dtype"), [(ByteTokenizer(), np.uint16), (WideTokenizer(), np.uint32)]
)
def test_tokens_are_as_wide_as_the_vocabulary_needs(
    tokenizer: ByteTokenizer, dtype: type, tmp_path: Path
) -> None:
    source = write(tmp_path / "text", a="abc")

    cache = build_token_cache([str(source)], tokenizer, tmp_path / "cache")

    assert cache.tokens.dtype == dtype
    assert cache.tokens.tolist() == byte_ids("abc")
    assert isinstance(cache.tokens, np.memmap)


def test_a_second_build_tokenises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "text", a="abc")
    first = build(source, tmp_path / "cache")
    monkeypatch.setattr(data, "_write_tokens", None)

    second = build(source, tmp_path / "cache")

    assert (second.folder, second.digest) == (first.folder, first.digest)


def test_changed_text_is_tokenised_again(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc")
    build(source, tmp_path / "cache")
    write(source, a="abcd")

    cache = build(source, tmp_path / "cache")

    assert cache.tokens.tolist() == byte_ids("abcd")


def test_the_digest_depends_on_the_tokens_only(tmp_path: Path) -> None:
    one = write(tmp_path / "one", a="abc")
    two = write(tmp_path / "two", other="abc")

    caches = [build(source, tmp_path / "cache") for source in (one, two)]

    assert caches[0].digest == caches[1].digest
    assert caches[0].folder != caches[1].folder


@pytest.mark.parametrize("damage", ["cut", "no meta", "bad meta", "no tokens"])
def test_a_damaged_cache_is_built_anew(damage: str, tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc")
    folder = build(source, tmp_path / "cache").folder
    if damage == "cut":
        os.truncate(folder / "tokens.bin", 3)
    elif damage == "no meta":
        (folder / "meta.json").unlink()
    elif damage == "bad meta":
        (folder / "meta.json").write_text(json.dumps({"dtype": "uint16"}))
    else:
        (folder / "tokens.bin").unlink()

    cache = build(source, tmp_path / "cache")

    assert cache.tokens.tolist() == byte_ids("abc")


def test_progress_reaches_the_size_of_the_text(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="\u20acuro", b="xyz")
    seen: list[tuple[int, int]] = []

    build_token_cache(
        [str(source)],
        ByteTokenizer(),
        tmp_path / "cache",
        on_progress=lambda done, total: seen.append((done, total)),
    )

    assert seen == [(6, 9), (9, 9)]


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="", b="")

    with pytest.raises(ConfigError, match=r"--data\.sources: .*0 tokens in 2 files"):
        build(source, tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc")
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"--data\.cache-dir: cannot keep .*another folder"):
        build(source, tmp_path / "file" / "cache")


def test_a_full_disk_leaves_nothing_and_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "text", a="abc")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(ConfigError, match=r"--data\.cache-dir: .*No space left.*free space"):
        build(source, tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_a_stopped_builder_leaves_no_cache_and_no_remains(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc")

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_token_cache([str(source)], ByteTokenizer(), tmp_path / "cache", on_progress=stop)

    assert list((tmp_path / "cache").iterdir()) == []


def test_remains_of_a_dead_builder_are_removed(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc")
    remains = write(tmp_path / "cache" / "tmp-1234", a="half")
    os.utime(remains, (0, 0))

    cache = build(source, tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == [cache.folder]


def test_the_folder_of_a_living_builder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_STALE_AFTER", 0.0)
    one, two = write(tmp_path / "one", a="abc"), write(tmp_path / "two", a="abcd")
    others: list[data.TokenCache] = []

    cache = build_token_cache(
        [str(one)],
        ByteTokenizer(),
        tmp_path / "cache",
        on_progress=lambda _done, _total: others.append(build(two, tmp_path / "cache")),
    )

    assert cache.tokens.tolist() == byte_ids("abc")
    assert others[0].tokens.tolist() == byte_ids("abcd")


def test_the_slower_of_two_builders_uses_the_faster_ones_cache(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc")
    faster: list[data.TokenCache] = []

    slower = build_token_cache(
        [str(source)],
        ByteTokenizer(),
        tmp_path / "cache",
        on_progress=lambda _done, _total: faster.append(build(source, tmp_path / "cache")),
    )

    assert slower.folder == faster[0].folder
    assert list((tmp_path / "cache").iterdir()) == [slower.folder]
    assert faster[0].tokens.tolist() == slower.tokens.tolist() == byte_ids("abc")


def test_many_builders_at_once_agree(tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="abc" * 1000)
    caches: list[data.TokenCache] = []
    threads = [
        threading.Thread(target=lambda: caches.append(build(source, tmp_path / "cache")))
        for _ in range(8)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [cache.tokens.tolist() for cache in caches] == [byte_ids("abc" * 1000)] * 8


def test_the_unigram_entropy_is_that_of_the_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "hello world, so many letters"
    monkeypatch.setattr(data, "_COUNTED_AT_ONCE", 5)

    entropy = build(write(tmp_path / "text", a=text), tmp_path / "cache").unigram_entropy()

    counts = Counter([*text, "end"])
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert entropy == pytest.approx(expected, rel=1e-12)


def test_a_corpus_is_never_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "text", a="0123456789abcde\n" * 10_000)
    monkeypatch.setattr(corpus, "CHUNK_CHARS", 1024)
    sizes: list[int] = []

    class Watching(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            sizes.append(sys.getsizeof(text))
            return super().encode(text)

    build_token_cache([str(source)], Watching(), tmp_path / "cache")

    assert len(sizes) > 100
    assert max(sizes) < 4096


def test_the_standard_library_is_tokenised_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()

    cache = build_token_cache(["stdlib"], ByteTokenizer(), tmp_path)

    assert cache.num_tokens > 5_000_000
    assert time.monotonic() - started < 20.0
