"""Facts about turning text into ids."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from opendiloco.errors import ConfigError
from peers.tokenizer import ByteTokenizer, import_transformers, load_tokenizer

TEXT = 'def f(x):\n\treturn "h\u00e9llo \u20ac \U0001f600"\r\n</s><pad>\x00'


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json that does not say which one ends a text."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 3 + ["the cat and the hat " * 20], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    bpe.save(str(path))
    return path


def test_bytes_get_the_ids_of_byt5() -> None:
    byt5 = import_transformers().ByT5Tokenizer()

    ids = load_tokenizer("bytes").encode(TEXT)

    expected = byt5.encode(TEXT, add_special_tokens=False, split_special_tokens=True)
    assert ids.tolist() == expected
    assert ids.dtype == np.uint16


def test_bytes_have_the_vocabulary_and_end_of_byt5() -> None:
    byt5 = import_transformers().ByT5Tokenizer()

    tokenizer = load_tokenizer("bytes")

    assert (tokenizer.vocab_size, tokenizer.eos_id) == (len(byt5), byt5.eos_token_id)


def test_a_saved_byte_tokenizer_decodes_our_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    text = "na\u00efve \u20ac\n"

    tokenizer.save(tmp_path)

    loaded = import_transformers().AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(tokenizer.encode(text).tolist()) == text


def test_half_a_surrogate_pair_is_encoded_as_a_question_mark() -> None:
    assert ByteTokenizer().encode("\ud800").tolist() == [ord("?") + 3]


def test_a_bare_tokenizer_json_gets_its_usual_end_token(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))

    vocabulary = json.loads(bpe_file.read_text())["model"]["vocab"]
    assert tokenizer.eos_id == vocabulary["<|endoftext|>"]
    assert tokenizer.vocab_size == len(vocabulary)


def test_a_hugging_face_tokenizer_survives_saving(bpe_file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))

    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path))

    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert again.eos_id == tokenizer.eos_id
    assert again.digest == tokenizer.digest


def test_special_tokens_in_the_text_are_plain_text(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))

    ids = tokenizer.encode("the <|endoftext|> cat")

    assert tokenizer.eos_id not in ids


def test_encoding_leaves_the_digest_alone(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))

    tokenizer.encode(TEXT)

    assert tokenizer.digest == load_tokenizer(str(bpe_file)).digest


def test_another_vocabulary_has_another_digest(bpe_file: Path, tmp_path: Path) -> None:
    changed = bpe_file.read_text().replace("<|endoftext|>", "<eos>")
    (tmp_path / "tokenizer.json").write_text(changed)

    digests = {load_tokenizer(str(path)).digest for path in (bpe_file, tmp_path / "tokenizer.json")}

    assert len(digests | {ByteTokenizer.digest}) == 3


def test_a_tokenizer_without_an_end_token_is_refused(bpe_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe_file.read_text().replace("<|endoftext|>", "<start>"))

    with pytest.raises(ConfigError, match=r"--data\.tokenizer.*end-of-text.*eos_token"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=r"--data\.tokenizer: no usable tokenizer") as caught:
        load_tokenizer(str(path))

    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data\.tokenizer: no usable tokenizer") as caught:
        load_tokenizer(str(tmp_path))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no-such-tokenizer-here", "/no/such/folder", "a b c"])
def test_an_unreachable_hub_is_reported_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    asked: list[float] = []

    def refuse(_api: object, _name: str, *, timeout: float) -> None:
        asked.append(timeout)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    import_transformers()
    started = time.monotonic()

    with pytest.raises(ConfigError, match=r'--data\.tokenizer.*use "bytes"'):
        load_tokenizer(name)

    assert time.monotonic() - started < 2.0
    assert asked in ([], [10.0])
