"""Chat templates of the families that are tried, and a tokenizer with their special tokens.

Each template is short, and has what matters of the family's own: where white space goes, how calls
and results are written, what is left out or moved once there is more, what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from rlinf_async.data.prompts import Tokenizer

Call = tuple[str, dict[str, Any]]


class Family(NamedTuple):
    """A chat template, and how its models write."""

    template: str
    end: str
    """what a model draws at the end of its answer"""
    parser: str
    write: Callable[[str, Sequence[Call]], str]
    """text and calls -> an answer, as the template writes it"""
    other_end: str = "<|endoftext|>"
    """another of the model's end tokens"""
    most_calls: int = 2
    """calls in one answer; 0: it has no tools"""
    text_with_calls: bool = True
    """whether an answer may have both"""
    user_with_tools: bool = True
    """whether the user may speak again where there are tools"""
    thoughts: bool = False
    """whether answers have thoughts, which are left out once the user speaks again"""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


QWEN: Final = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == 'user' %}
        {%- set ns.open = false %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        THINKING
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

NO_THOUGHTS: Final = "{%- set content = message.content %}{{- content }}"
THOUGHTS: Final = """
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}"""


def _qwen(text: str, calls: Sequence[Call]) -> str:
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    ]
    answer = text.rpartition("</think>\n\n")[2]
    return text + ("\n" if answer and calls else "") + "\n".join(written)


HERMES: Final = """
{{- bos_token or '' }}
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"arguments": ' }}{{- call.function.arguments | tojson }}
            {{- ', "name": "' + call.function.name + '"}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if message.name is not defined %}{{- raise_exception('a tool has a name') }}{% endif %}
        {{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' + message.name }}
        {{- '", "content": ' }}{{- message.content | tojson }}
        {{- '}\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def _hermes(text: str, calls: Sequence[Call]) -> str:
    return text or "\n".join(
        f'<tool_call>\n{{"arguments": {_json(arguments)}, "name": "{name}"}}\n</tool_call>'
        for name, arguments in calls
    )


LLAMA3: Final = """
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: 26 Jul 2024\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- {'output': message.content} | tojson }}{{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.first %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""


def _llama3(text: str, calls: Sequence[Call]) -> str:
    return text or "; ".join(
        f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls
    )


LLAMA4: Final = """
{{- '<|begin_of_text|>' }}
{%- if messages[0].role == 'system' or tools %}
    {{- '<|header_start|>system<|header_end|>\\n\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content | trim }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {%- if tools %}{{- tools | tojson(indent=4) }}{%- endif %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|header_start|>ipython<|header_end|>\\n\\n' }}
        {{- message.content | tojson }}{{- '<|eot|>' }}
    {%- else %}
        {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' + message.content }}
        {%- if message.tool_calls %}
            {{- '[' }}
            {%- for call in message.tool_calls %}
                {{- call.function.name + '(' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- name + '=' + value | tojson }}{%- if not loop.last %}{{- ', ' }}{% endif %}
                {%- endfor %}
                {{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ']' }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""


def _llama4(text: str, calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return text + (f"[{', '.join(written)}]" if calls else "")


MISTRAL: Final = """
{%- set loop_messages = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- for message in loop_messages | rejectattr('role', 'equalto', 'tool')
        | selectattr('tool_calls', 'undefined') %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
{%- endfor %}
{%- set last = (loop_messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- '<s>' }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}
        {%- if loop.last and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('id: nine letters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' }}{{- message.content | tojson }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""


def _mistral(text: str, calls: Sequence[Call]) -> str:
    if not calls:
        return " " + text
    written = (
        f'{{"name": "{name}", "arguments": {_json(arguments)}, "id": "call{at:05d}"}}'
        for at, (name, arguments) in enumerate(calls)
    )
    return f"[TOOL_CALLS] [{', '.join(written)}]"


GEMMA: Final = """
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


def _gemma(text: str, calls: Sequence[Call]) -> str:
    del calls
    return text


DEEPSEEK: Final = """
{%- set ns = namespace(is_tool=false, first_output=true, last_user=false) %}
{{- '<|begin▁of▁sentence|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}{{- '\\n\\n# Tools\\n' + tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.is_tool = false %}{%- set ns.last_user = true %}
        {{- '<|User|>' + message.content + '<|Assistant|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set ns.last_user = false %}
        {%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}
        {%- set ns.is_tool = false %}
        {{- message.content }}
        {%- if message.tool_calls is defined %}
            {%- set ns.first_output = true %}
            {{- '<|tool▁calls▁begin|>' }}
            {%- for call in message.tool_calls %}
                {%- if not loop.first %}{{- '\\n' }}{%- endif %}
                {{- '<|tool▁call▁begin|>' + call.type + '<|tool▁sep|>' + call.function.name }}
                {{- '\\n```json\\n' + call.function.arguments + '\\n```<|tool▁call▁end|>' }}
            {%- endfor %}
            {{- '<|tool▁calls▁end|>' }}
        {%- endif %}
        {{- '<|end▁of▁sentence|>' }}
    {%- elif message.role == 'tool' %}
        {%- set ns.last_user = false %}{%- set ns.is_tool = true %}
        {%- if ns.first_output %}{{- '<|tool▁outputs▁begin|>' }}{%- else %}{{- '\\n' }}{%- endif %}
        {%- set ns.first_output = false %}
        {{- '<|tool▁output▁begin|>' + message.content + '<|tool▁output▁end|>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.last_user and not ns.is_tool %}
    {{- '<|Assistant|>' }}
{%- endif %}"""


def _deepseek(text: str, calls: Sequence[Call]) -> str:
    written = (
        f"<|tool▁call▁begin|>function<|tool▁sep|>{name}\n```json\n{_json(arguments)}\n```"
        "<|tool▁call▁end|>"
        for name, arguments in calls
    )
    return text + (
        f"<|tool▁calls▁begin|>{chr(10).join(written)}<|tool▁calls▁end|>" if calls else ""
    )


FAMILIES: Final = {
    "qwen2.5": Family(QWEN.replace("THINKING", NO_THOUGHTS), "<|im_end|>", "hermes", _qwen),
    "qwen3": Family(
        QWEN.replace("THINKING", THOUGHTS), "<|im_end|>", "hermes", _qwen, thoughts=True
    ),
    "hermes": Family(HERMES, "<|im_end|>", "hermes", _hermes, text_with_calls=False),
    "llama3": Family(
        LLAMA3, "<|eot_id|>", "llama", _llama3, "<|eom_id|>",
        most_calls=1, text_with_calls=False,
    ),
    "llama4": Family(
        LLAMA4, "<|eot|>", "pythonic", _llama4, "<|eom|>", text_with_calls=False
    ),
    "mistral": Family(
        MISTRAL, "</s>", "mistral", _mistral, text_with_calls=False, user_with_tools=False
    ),
    "gemma": Family(GEMMA, "<end_of_turn>", "hermes", _gemma, "<eos>", most_calls=0),
    "deepseek": Family(DEEPSEEK, "<|end▁of▁sentence|>", "deepseek", _deepseek),
}  # fmt: skip

SPECIAL: Final = (
    "<pad>", "<bos>", "<eos>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<start_of_turn>", "<end_of_turn>",
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|begin▁of▁sentence|>", "<|end▁of▁sentence|>",
    "<|User|>", "<|Assistant|>", "<|tool▁calls▁begin|>", "<|tool▁calls▁end|>",
    "<|tool▁call▁begin|>", "<|tool▁call▁end|>", "<|tool▁sep|>", "<|tool▁outputs▁begin|>",
    "<|tool▁outputs▁end|>", "<|tool▁output▁begin|>", "<|tool▁output▁end|>",
)  # fmt: skip
ADDED: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""tokens of their own that are no special ones"""
CORPUS: Final = (
    (
        'the answer is "name": "add", "arguments": {"a": 1, "b": 2} system user assistant question '
        "error: there is no such tool, thinking about it. ipython Environment Tools 0123456789\n\n"
    ),
    "print json prompt renderer true false null tool_response parameters output content model",
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
    made.add_tokens(list(ADDED))
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


def ends_of(family: str) -> set[int]:
    """Tokens at which the family's models stop."""
    tokenizer: Any = tokenizer_of(family)
    one = FAMILIES[family]
    return {tokenizer.convert_tokens_to_ids(text) for text in (one.end, one.other_end)}
