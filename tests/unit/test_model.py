"""Facts about the model's configuration, first parameters and folder."""

import hashlib
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from opendiloco.errors import ConfigError
from peers.model import (
    build_model,
    config_digest,
    load_model_config,
    parameter_shapes,
    preset_names,
)
from tests.support.models import small_llama

# hidden, intermediate, heads, key and value heads, layers: OpenDiLoCo's model files.
OPENDILOCO_SHAPES = {
    "2m": (64, 256, 2, 2, 2),
    "14m": (128, 512, 4, 4, 6),
    "60m": (1024, 2688, 16, 16, 3),
    "150m": (1024, 2688, 16, 16, 12),
    "1b": (2048, 5632, 32, 4, 22),
}


def llama_parameters(preset: str, vocab_size: int) -> int:
    """Count from the architecture: attention, gated MLP and norms per layer, two embeddings."""
    hidden, intermediate, heads, kv_heads, layers = OPENDILOCO_SHAPES[preset]
    key_value = hidden * hidden * kv_heads // heads
    layer = 2 * hidden * hidden + 2 * key_value + 3 * hidden * intermediate + 2 * hidden
    return layers * layer + hidden + 2 * vocab_size * hidden


def model_digest(model: torch.nn.Module) -> str:
    content = hashlib.sha256()
    for name, parameter in model.named_parameters():
        content.update(name.encode() + parameter.detach().numpy().tobytes())
    return content.hexdigest()


def test_the_presets_are_those_of_opendiloco() -> None:
    assert preset_names() == tuple(OPENDILOCO_SHAPES)


@pytest.mark.parametrize("preset", OPENDILOCO_SHAPES)
def test_a_preset_has_the_shape_of_opendiloco(preset: str) -> None:
    config = load_model_config(preset, None, vocab_size=32_000, seq_len=256)

    shape = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
    )
    assert shape == OPENDILOCO_SHAPES[preset]
    assert (config.model_type, config.rms_norm_eps) == ("llama", 1e-5)
    assert config.tie_word_embeddings is False
    assert config.use_cache is False


@pytest.mark.parametrize("preset", OPENDILOCO_SHAPES)
def test_a_preset_has_the_counts_of_its_comment(preset: str) -> None:
    comment = (files("peers") / "configs" / f"{preset}.toml").read_text().splitlines()[0]

    counts = [
        sum(
            shape.numel()
            for shape in parameter_shapes(
                load_model_config(preset, None, vocab_size=vocab_size, seq_len=256)
            ).values()
        )
        for vocab_size in (32_000, 384)
    ]

    assert counts == [llama_parameters(preset, 32_000), llama_parameters(preset, 384)]
    written = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", comment)]
    assert written == [counts[0], 32_000, counts[1], 384]


@pytest.mark.parametrize(("seq_len", "positions"), [(256, 2048), (4096, 4096)])
def test_a_preset_reads_sequences_of_any_length(seq_len: int, positions: int) -> None:
    config = load_model_config("2m", None, vocab_size=384, seq_len=seq_len)

    assert config.max_position_embeddings == positions


def test_an_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError, match=r"--model\.preset: no preset 150M; did you mean 150m\? .*2m, 14m, 60m"
    ):
        load_model_config("150M", None, vocab_size=384, seq_len=256)


def test_a_config_file_wins_over_the_preset(tmp_path: Path) -> None:
    path = small_llama(tmp_path)

    config = load_model_config("no such preset", path, vocab_size=384, seq_len=128)

    assert (config.hidden_size, config.vocab_size, config.use_cache) == (16, 400, False)


def test_the_folder_of_a_config_file_is_as_good(tmp_path: Path) -> None:
    small_llama(tmp_path)

    config = load_model_config("2m", tmp_path, vocab_size=384, seq_len=128)

    assert config.hidden_size == 16


@pytest.mark.parametrize(
    ("vocab_size", "seq_len", "message"),
    [
        (401, 128, r"--model\.config: .* vocab_size 400, the tokenizer needs 401"),
        (400, 129, r"--data\.seq-len: 129 is more than max_position_embeddings 128"),
    ],
)
def test_a_config_file_that_is_too_small_is_refused(
    vocab_size: int, seq_len: int, message: str, tmp_path: Path
) -> None:
    path = small_llama(tmp_path)

    with pytest.raises(ConfigError, match=message):
        load_model_config("2m", path, vocab_size=vocab_size, seq_len=seq_len)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model_type": "nonsense"}',
        '{"model_type": "t5"}',
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 2}',
    ],
)
def test_a_broken_config_file_is_refused_with_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=r"--model\.config: ") as caught:
        load_model_config("2m", path, vocab_size=384, seq_len=8)

    assert "\n" not in str(caught.value)


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model\.config: .*nowhere does not exist"):
        load_model_config("2m", tmp_path / "nowhere", vocab_size=384, seq_len=8)


def test_shapes_are_those_of_the_built_model_in_its_order() -> None:
    config = load_model_config("2m", None, vocab_size=384, seq_len=8)

    shapes = parameter_shapes(config)

    model = build_model(config, seed=0)
    assert list(shapes.items()) == [(name, p.shape) for name, p in model.named_parameters()]


def test_tied_weights_count_once(tmp_path: Path) -> None:
    path = small_llama(tmp_path, tie_word_embeddings=True)

    shapes = parameter_shapes(load_model_config("", path, vocab_size=384, seq_len=8))

    assert "model.embed_tokens.weight" in shapes
    assert "lm_head.weight" not in shapes


def test_a_model_is_float32_in_training_mode_with_fast_attention(tmp_path: Path) -> None:
    config = load_model_config(
        "", small_llama(tmp_path, dtype="bfloat16"), vocab_size=384, seq_len=8
    )

    model = build_model(config, seed=0)

    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_an_architecture_without_fast_attention_is_built_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 384}'
    )
    config = load_model_config("", path, vocab_size=384, seq_len=8)

    loss = build_model(config, seed=0)(**batch()).loss

    assert loss.item() == pytest.approx(np.log(384), rel=0.05)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 8).reshape(2, 8)
    return {"input_ids": ids, "labels": ids}


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    config = load_model_config("2m", None, vocab_size=384, seq_len=8)

    loss = build_model(config, seed=0)(**batch()).loss

    assert loss.item() == pytest.approx(np.log(384), rel=0.02)


def test_the_same_seed_gives_the_same_model_whatever_ran_before() -> None:
    config = load_model_config("2m", None, vocab_size=384, seq_len=8)
    torch.manual_seed(1)
    first = model_digest(build_model(config, seed=5))
    torch.manual_seed(2)
    np.random.seed(3)  # noqa: NPY002 - the global state is the point

    second = model_digest(build_model(config, seed=5))

    assert first == second
    assert first != model_digest(build_model(config, seed=6))


def test_building_leaves_the_random_state_and_the_config_alone() -> None:
    config = load_model_config("2m", None, vocab_size=384, seq_len=8)
    before, described = torch.get_rng_state(), config.to_json_string()

    parameter_shapes(config)
    build_model(config, seed=5)

    assert torch.equal(torch.get_rng_state(), before)
    assert config.to_json_string() == described


def test_first_parameters_are_normal_with_the_spread_of_the_config() -> None:
    config = load_model_config("14m", None, vocab_size=384, seq_len=8)

    model = build_model(config, seed=0)

    weights = dict(model.named_parameters())
    layer = weights["model.layers.0.mlp.up_proj.weight"].detach()
    assert layer.std().item() == pytest.approx(config.initializer_range, rel=0.02)
    assert abs(layer.mean().item()) < 4 * config.initializer_range / layer.numel() ** 0.5
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))
    assert not torch.equal(layer, weights["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.timeout(60)
def test_another_process_of_another_kind_builds_the_same_bytes(tmp_path: Path) -> None:
    path = small_llama(tmp_path)
    code = (
        "import sys, hashlib; from pathlib import Path\n"
        "from peers.model import build_model, load_model_config\n"
        "config = load_model_config('', Path(sys.argv[1]), vocab_size=384, seq_len=8)\n"
        "content = hashlib.sha256()\n"
        "for name, p in build_model(config, seed=5).named_parameters():\n"
        "    content.update(name.encode() + p.detach().numpy().tobytes())\n"
        "sys.stdout.write(content.hexdigest())\n"
    )

    # One thread and no vector instructions: torch alone would draw other numbers.
    output = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )

    config = load_model_config("", path, vocab_size=384, seq_len=8)
    assert output.stdout == model_digest(build_model(config, seed=5))
    assert output.stderr == ""


def test_first_parameters_never_change_between_versions() -> None:
    config = load_model_config("2m", None, vocab_size=384, seq_len=8)

    weights = dict(build_model(config, seed=0).named_parameters())

    start = weights["model.layers.0.self_attn.q_proj.weight"].detach().flatten()[:3]
    assert [float.hex(value) for value in start.tolist()] == [
        "0x1.4576f40000000p-6",
        "-0x1.c6bb420000000p-10",
        "-0x1.1ebb360000000p-10",
    ]


def test_models_of_equal_shapes_that_compute_otherwise_have_another_digest() -> None:
    from transformers import LlamaConfig

    def digest(**changes: object) -> str:
        return config_digest(
            LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, **changes)
        )

    same = digest()

    assert digest() == same
    assert digest(use_cache=False) == same
    assert digest(hidden_act="gelu") != same
    assert digest(rms_norm_eps=1e-3) != same
