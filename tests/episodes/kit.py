"""Chat templates of several families, and a tokenizer with their special tokens."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

from rlinf_async.data.prompts import Tokenizer


class Family(NamedTuple):
    """A chat template, and how its models write."""

    template: str
    end: str
    """what a model draws at the end of its answer"""
    call: str
    """a call of ``add(a=1, b=2)``, as the model writes it"""
    parser: str


CHATML: Final = """
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role != 'system' or not tools %}<|im_start|>{{ message.role }}
{{ THOUGHTS }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

KEEPS: Final = "message.content"
FORGETS: Final = (
    "message.content.split('</think>')[-1].lstrip('\\n') "
    "if messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list and "
    "message.role == 'assistant' else message.content"
)
"""earlier thoughts are left out once the user speaks again"""

LLAMA: Final = """<|begin_of_text|>
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{%- for call in message.tool_calls %}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

PYTHONIC: Final = """
{%- if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- elif message.role == 'tool' %}[RESULT] {{ message.content }} [/RESULT]
{%- else %}{{ message.content }}</s>{% endif %}
{%- endfor %}"""

HERMES_CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

FAMILIES: Final = {
    "chatml": Family(CHATML.replace("THOUGHTS", KEEPS), "<|im_end|>", HERMES_CALL, "hermes"),
    "llama": Family(
        LLAMA, "<|eot_id|>", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "llama"
    ),
    "pythonic": Family(PYTHONIC, "</s>", "[add(a=1, b=2)]", "pythonic"),
    "forgetful": Family(CHATML.replace("THOUGHTS", FORGETS), "<|im_end|>", HERMES_CALL, "hermes"),
}

SPECIAL: Final = (
    "<pad>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]",
    "[TOOLS]", "[/TOOLS]", "[RESULT]", "[/RESULT]",
)  # fmt: skip
CORPUS: Final = (
    (
        'the answer is "name": "add", "arguments": {"a": 1, "b": 2} system user assistant question '
        "error: there is no such tool, thinking about it. ipython Environment Tools 0123456789\n\n"
    ),
    "print json prompt renderer true false null </think> <think> tool_response",
)


@cache
def tokenizer_of(family: str) -> Tokenizer:
    """Byte-level BPE that has merged what its corpus repeats, with this family's template."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 8, trainer)
    load: Any = transformers.PreTrainedTokenizerFast  # untyped
    found: Tokenizer = load(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token=FAMILIES[family].end,
        chat_template=FAMILIES[family].template,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    return found
