"""Name maps of decoder-only language models: their parameters in three backends.

All hold the same global tensors, which have the names that checkpoints of the architecture have. So
``plan(layout(huggingface(d), ...), layout(vllm(d), ...))`` publishes a trainer's weights to an
engine. Megatron and vLLM number the layers of a stage from 0 on; here a parameter has its layer's
number in the whole model.
"""

from rlinf_async.parallel.decoders.decoder import (
    ARCHITECTURES,
    Decoder,
    huggingface,
    megatron,
    vllm,
)

__all__ = ["ARCHITECTURES", "Decoder", "huggingface", "megatron", "vllm"]
