"""A model small enough for any test."""

import json
from pathlib import Path


def small_llama(folder: Path, **changes: object) -> Path:
    config = {
        "model_type": "llama",
        "vocab_size": 400,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
    }
    path = folder / "config.json"
    path.write_text(json.dumps({**config, **changes}))
    return path
