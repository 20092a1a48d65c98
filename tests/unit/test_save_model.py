"""Facts about a model's folder on disk."""

import os
from pathlib import Path

import pytest
import torch

from opendiloco.errors import ConfigError, SchemaMismatchError
from peers.model import build_model, load_model_config, parameter_shapes, save_model
from peers.tokenizer import ByteTokenizer, import_transformers
from tests.support.models import small_llama


def weights_equal(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_gives_the_same_logits(tied: bool, tmp_path: Path) -> None:  # noqa: FBT001
    path = small_llama(tmp_path, tie_word_embeddings=tied)
    config = load_model_config("", path, vocab_size=384, seq_len=8)
    model = build_model(config, seed=5)
    folder = tmp_path / "deep" / "model"

    save_model(folder, config, dict(model.named_parameters()), ByteTokenizer())

    transformers = import_transformers()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(2 * 8).reshape(2, 8)
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    assert loaded.config.eos_token_id == ByteTokenizer.eos_id
    assert loaded.config.use_cache is True
    assert config.use_cache is False
    assert transformers.AutoTokenizer.from_pretrained(folder).decode([107, 108]) == "hi"


def test_saving_again_replaces_the_folder_and_leaves_no_remains(tmp_path: Path) -> None:
    config = load_model_config("", small_llama(tmp_path), vocab_size=384, seq_len=8)
    folder = tmp_path / "out" / "model"
    for seed in (1, 2):
        model = build_model(config, seed=seed)

        save_model(folder, config, dict(model.named_parameters()), ByteTokenizer())

    loaded = import_transformers().AutoModelForCausalLM.from_pretrained(folder)
    assert weights_equal(loaded, build_model(config, seed=2))
    assert list(folder.parent.iterdir()) == [folder]


def test_views_of_one_flat_vector_are_saved_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_model_config("", small_llama(tmp_path), vocab_size=384, seq_len=8)
    model = build_model(config, seed=1)
    shapes = parameter_shapes(config)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = flat.split([shape.numel() for shape in shapes.values()])
    views = {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }

    save_model(tmp_path / "out", config, views, ByteTokenizer())

    assert capfd.readouterr() == ("", "")
    loaded = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert weights_equal(loaded, model)


def test_a_failed_save_leaves_the_older_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config("", small_llama(tmp_path), vocab_size=384, seq_len=8)
    parameters = dict(build_model(config, seed=1).named_parameters())
    folder = tmp_path / "out" / "model"
    save_model(folder, config, parameters, ByteTokenizer())

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(ConfigError, match=r"cannot write the model .*No space left.*free space"):
        save_model(folder, config, parameters, ByteTokenizer())

    assert list(folder.parent.iterdir()) == [folder]
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_parameters_of_another_model_are_not_saved(change: str, tmp_path: Path) -> None:
    config = load_model_config("", small_llama(tmp_path), vocab_size=384, seq_len=8)
    parameters = dict(build_model(config, seed=1).named_parameters())
    if change == "missing":
        del parameters["model.norm.weight"]
    elif change == "unknown":
        parameters["model.norm.weight2"] = parameters["model.norm.weight"]
    else:
        parameters["model.norm.weight"] = torch.nn.Parameter(torch.ones(3))

    with pytest.raises(SchemaMismatchError, match=r"model\.norm\.weight"):
        save_model(tmp_path / "out", config, parameters, ByteTokenizer())

    assert not (tmp_path / "out").exists()


def test_the_old_model_stays_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ByteTokenizer()
    config = load_model_config("2m", None, vocab_size=tokenizer.vocab_size, seq_len=32)
    parameters = dict(build_model(config, seed=1).named_parameters())
    folder = tmp_path / "model"
    save_model(folder, config, parameters, tokenizer)
    before = (folder / "model.safetensors").read_bytes()
    replace = Path.replace

    def fail_for_the_new_one(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_for_the_new_one)
    with pytest.raises(ConfigError, match="No space left"):
        save_model(folder, config, parameters, tokenizer)

    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
