"""Draws the data of examples/vlm_counting.toml: images of one to five squares, and their number.

    python examples/vlm_counting.py      makes examples/counting/, always the same

    counting/train.parquet     images (as Hugging Face datasets have them), prompts, right answers
    counting/careless.parquet  other images, three of five answers one off
    counting/processor/        tokenizer, chat template, and how images are prepared

White squares on black, on a grid of eight by eight places; none touches another.
"""

from __future__ import annotations

import importlib
import io
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import Idefics3ImageProcessorPil, Idefics3Processor

from rlinf_async.data.prompts import arithmetic_tokenizer

FOLDER = Path(__file__).parent / "counting"
SIDE = 32
PATCH, SCALE = 8, 2
MOST = 5
IMAGES = {"train": 1200, "careless": 2400}
CARELESS = 0.6
SPECIAL = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def drawn(chance: random.Random, count: int) -> bytes:
    """Return a PNG of ``count`` squares."""
    image = Image.new("RGB", (SIDE, SIDE), "black")
    pen, taken = ImageDraw.Draw(image), set[tuple[int, int]]()
    while len(taken) < count:
        x, y = chance.randrange(8), chance.randrange(8)
        if any(abs(x - a) < 2 and abs(y - b) < 2 for a, b in taken):
            continue
        taken.add((x, y))
        pen.rectangle((4 * x, 4 * y, 4 * x + 3, 4 * y + 3), fill="white")
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def records(name: str, chance: random.Random) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    found = []
    for _ in range(IMAGES[name]):
        count = answer = chance.randint(1, MOST)
        if name == "careless" and chance.random() < CARELESS:
            answer = count % MOST + 1
        image = {"bytes": drawn(chance, count), "path": None}
        found.append({"image": image, "prompt": "How many?", "answer": str(answer)})
    return found


def processor() -> Any:
    """Return the processor: one token for each character, four for each image."""
    tokenizer = arithmetic_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=False,
    )
    tokens = (SIDE // PATCH // SCALE) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=TEMPLATE)


def main(folder: Path = FOLDER) -> None:
    chance, arrow = random.Random(0), importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    processor().save_pretrained(folder / "processor")
    for name in IMAGES:
        table = arrow.Table.from_pylist(records(name, chance))
        parquet.write_table(table, folder / f"{name}.parquet")


if __name__ == "__main__":
    main()
