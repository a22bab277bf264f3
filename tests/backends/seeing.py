"""A tiny vision-language model in a folder, and prompts with images for it."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.data import DataConfig, Prompts, load_tokenizer
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.language import Prompt
from rlinf_async.runtime.jobs.language.config import ModelConfig
from rlinf_async.runtime.jobs.language.model import make_model_folder
from tests.docs.pages import ROOT

IDEFICS3: dict[str, Any] = {
    "model_type": "idefics3",
    "scale_factor": 2,
    "tie_word_embeddings": True,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,  # more than the text has: then they are what FSDP divides
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "initializer_range": 0.1,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
}


def example() -> Any:
    """The module ``examples/vlm_counting.py``."""
    path = ROOT / "examples" / "vlm_counting.py"
    described = importlib.util.spec_from_file_location("vlm_counting", path)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def seeing_folder(folder: Path) -> Path:
    """Write configuration, tokenizer and processor of a model without weights.

    The processor cuts each image into four parts, beside one of the whole.
    """
    processor = example().processor()
    processor.image_processor.do_image_splitting = True
    processor.image_processor.size = {"longest_edge": 64}
    processor.save_pretrained(folder / "processor")
    described = ModelConfig(config=IDEFICS3, tokenizer=str(folder / "processor"))
    return make_model_folder(described, folder / "model")


def picture(seed: int, kind: str = "PNG", side: int = 32) -> bytes:
    """An encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


def prompts(folder: Path, model: Path) -> list[Prompt]:
    """Prompts with two images, one (twice the same text, with another image) and none."""
    for seed in range(3):
        (folder / f"{seed}.png").write_bytes(picture(seed))
    (folder / "3.jpg").write_bytes(picture(3, "JPEG", side=50))
    image, text = {"type": "image"}, {"type": "text", "text": "Which?"}
    asked = [{"role": "user", "content": [image, text, image, {"type": "text", "text": "!"}]}]
    records: list[dict[str, Any]] = [
        {"prompt": asked, "images": ["0.png", {"path": "3.jpg", "bytes": None}]},
        {"prompt": "How many?", "images": "1.png"},
        {"prompt": "How many?", "images": ["2.png"]},
        {"prompt": "12+3=", "images": None},
    ]
    lines = [json.dumps(one | {"answer": "1"}) for one in records]
    (folder / "seen.jsonl").write_text("\n".join(lines))
    config = DataConfig(
        path=str(folder / "seen.jsonl"), image_column="images", verifier="exact", shuffle=False
    )
    made = Prompts(config, load_tokenizer(model), processor=ImageProcessor(model))
    return [next(made) for _ in records]


def seeing_trainer(model: Path, **fields: Any) -> LanguageTrainerConfig:
    """The configuration of a trainer of new weights."""
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=LanguageModelConfig(path=str(model), random=True),
            optimizer=OptimizerConfig(lr=1e-2, eps=1e-6, max_grad_norm=0.5),
        ),
        **fields,
    )
