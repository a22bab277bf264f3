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
from rlinf_async.data.prompts import arithmetic_tokenizer
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

QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    # of the 8 frequencies: along time, height and width
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
QWEN2_VL: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "initializer_range": 0.1,
    },
    "text_config": QWEN_TEXT,
}
QWEN2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    },
    "text_config": QWEN_TEXT,
}
TINY = {one["model_type"]: one for one in (IDEFICS3, QWEN2_VL, QWEN2_5_VL)}
"""configurations, by ``model_type``"""
QWEN_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QWEN_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def example() -> Any:
    """The module ``examples/vlm_counting.py``."""
    path = ROOT / "examples" / "vlm_counting.py"
    described = importlib.util.spec_from_file_location("vlm_counting", path)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def save_processor(family: str, folder: Path) -> None:
    """Write tokenizer, chat template and processor: that of Qwen cuts images into at most 8 x 8
    patches of 4 pixels, of which 2 x 2 are a token."""
    if family == "idefics3":
        example().processor().save_pretrained(folder)
        return
    from transformers import Qwen2VLImageProcessorPil

    tokenizer = arithmetic_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL)})
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)


def seeing_folder(folder: Path, family: str = "idefics3") -> Path:
    """Write configuration, tokenizer and processor of a model without weights.

    The processor of Idefics3 cuts each image into four parts, beside one of the whole.
    """
    save_processor(family, folder / "processor")
    if family == "idefics3":
        processor = example().processor()
        processor.image_processor.do_image_splitting = True
        processor.image_processor.size = {"longest_edge": 64}
        processor.save_pretrained(folder / "processor")
    described = ModelConfig(config=TINY[family], tokenizer=str(folder / "processor"))
    return make_model_folder(described, folder / "model")


def picture(seed: int, kind: str = "PNG", side: int = 32, height: int | None = None) -> bytes:
    """An encoded image of random pixels."""
    shape = (height or side, side, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


def prompts(folder: Path, model: Path, height: int = 50) -> list[Prompt]:
    """Prompts with two images, one (twice the same text, with another image) and none. ``height``:
    of one of the images, which is 50 wide."""
    for seed in range(3):
        (folder / f"{seed}.png").write_bytes(picture(seed))
    (folder / "3.jpg").write_bytes(picture(3, "JPEG", side=50, height=height))
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
