"""Formats of responses in vLLM: those of the transformers engine, told as it tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.transformers.folder import ModelFolder, open_folder
from rlinf_async.backends.transformers.formats import ResponseFormats
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.following import Following, RequestedFormat
from rlinf_async.backends.vllm.formats import FormatProcessor
from rlinf_async.backends.vllm.library import _set_environment
from rlinf_async.messages.language import Generated, Grammar, Request, Sampling
from tests.backends.formats import GRAMMARS, answered, asked, check_formats
from tests.backends.requests import request
from tests.backends.vllm.kit import CONTEXT, SMALL, Served
from tests.jobs.language.checkpoints import save_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


LONG = 200
"""tokens of a response that takes longer than to look at it"""


class Answering(NamedTuple):
    """An engine, and the folder of its model, which has one token for each character."""

    served: Served
    folder: ModelFolder

    def generate(self, *requests: Request) -> list[Generated]:
        """All at once."""

        async def body() -> list[Generated]:
            return await asyncio.gather(*(self.served.engine.generate(one) for one in requests))

        return self.served.run(body())


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    path = save_checkpoint(
        tmp_path_factory.mktemp("model") / "model", "qwen3", max_position_embeddings=CONTEXT
    )
    config = VllmEngineConfig(model=str(path), weights="folder", formats=True, **SMALL)
    with Served(config) as served:
        yield Answering(served, open_folder(str(path)))


@pytest.mark.parametrize("kind", GRAMMARS)
def test_every_response_that_ends_has_its_format_and_tells_what_it_was_drawn_from(
    answering: Answering, kind: str
) -> None:
    found = answering.served.run(answered(answering.served.engine, kind))
    check_formats(answering.folder, kind, *found, exact=False)


def test_what_a_format_and_top_k_leave_is_told(answering: Answering) -> None:
    """The two most likely of the tokens that the format allows; all, where it allows fewer."""
    wanted = asked("regex", top_k=2)[:12]
    formats = ResponseFormats(answering.folder)
    for one, made in zip(wanted, answering.generate(*wanted), strict=True):
        tokens = made.token_ids.tolist()
        plain = msgspec.structs.replace(one.sampling, top_k=0)
        every_one = Following(formats, msgspec.structs.replace(one, sampling=plain), [])
        allowed = every_one.kept(tokens)
        assert made.kept is not None
        assert allowed is not None
        for kept, every in zip(made.kept.sets(), allowed.sets(), strict=True):
            assert set(kept.tolist()) <= set(every.tolist())
            assert len(kept) == min(2, len(every))


def test_a_token_that_was_the_only_one_was_certain(answering: Answering) -> None:
    [made] = answering.generate(request(grammar=Grammar(choices=("305",)), max_tokens=9))
    assert answering.folder.decode(made.token_ids) == "305"
    np.testing.assert_array_equal(made.log_prob, 0.0)
    assert made.kept is not None
    assert made.kept.counts.tolist() == [1, 1, 1, 1]


def test_what_cannot_go_on_fails_alone_and_says_why(answering: Answering) -> None:
    nothing = request(1, grammar=Grammar(choices=("1\N{SNOWMAN}",)), max_tokens=9)
    with pytest.raises(ModelOutputError, match=r"the format of .* no token"):
        answering.generate(nothing)
    other = Generated(
        token_ids=np.array([answering.folder.tokenizer.convert_tokens_to_ids("9")], np.int32),
        log_prob=np.zeros(1, np.float32),
        version=np.zeros(1, np.int32),
        finish="abort",
    )
    digits = Grammar(regex="[1-3]{2,4}")
    with pytest.raises(ModelOutputError, match="was the response begun without it"):
        answering.generate(request(2, grammar=digits, partial=other))
    [made] = answering.generate(request(3, grammar=digits))
    assert made.finish == "stop"


def test_what_is_under_way_is_told_as_far_as_it_is(answering: Answering) -> None:
    """Again and again, without being worked out anew; tokens are counted without their sets."""
    letters = Grammar(regex="[a-z]{400}")
    engine = answering.served.engine
    name = request(5).name

    async def body() -> tuple[Generated, list[Generated], int]:
        running = asyncio.ensure_future(
            engine.generate(request(5, grammar=letters, max_tokens=LONG))
        )
        seen: list[Generated] = []
        counted = 0
        while len(seen) < 3:
            assert not running.done()
            await asyncio.sleep(0)
            found = (await engine.so_far()).get(name)
            if found is not None and len(found.token_ids) > (
                len(seen[-1].token_ids) if seen else 0
            ):
                seen.append(found)
                counted = (await engine.made())[name]
                assert counted >= len(found.token_ids)
        await engine.abort([name])
        return await running, seen, counted

    whole, seen, counted = answering.served.run(body())
    assert counted <= len(whole.token_ids)
    assert whole.kept is not None
    for one in seen:
        assert one.kept is not None
        size = len(one.token_ids)
        assert one.token_ids.tolist() == whole.token_ids[:size].tolist()
        pairs = zip(one.kept.sets(), whole.kept.sets()[:size], strict=True)
        assert all(kept.tolist() == same.tolist() for kept, same in pairs)


def test_a_row_whose_response_has_ended_is_left_alone(answering: Answering) -> None:
    """Where steps are scheduled ahead, one more is computed after the end."""
    config = SimpleNamespace(model_config=SimpleNamespace(model=answering.folder.path))
    processor = FormatProcessor(config, "cpu", False)
    stop = min(answering.folder.stop_token_ids)
    one = answering.folder.tokenizer.convert_tokens_to_ids("1")
    for choice, drawn in (("1\N{SNOWMAN}", [one, stop, stop]), ("1", [one, stop, one])):
        made: list[int] = []
        wanted = RequestedFormat(Grammar(choices=(choice,)), "r", ())
        params = SimpleNamespace(extra_args=wanted.as_arguments())
        processor.update_state(
            SimpleNamespace(added=[(1, params, None, made)], removed=[], moved=[])
        )
        for token in drawn:
            logits = torch.zeros(2, int(answering.folder.config.vocab_size))
            left = processor.apply(logits)
            assert left[0].isfinite().all()
            if made[-1:] != [stop]:
                assert left[1].isfinite()[token]
                assert left[1].isfinite().sum() < left.shape[1]
            else:
                assert left[1].isfinite().all()
            made.append(token)


def test_a_variable_that_chooses_the_other_runner_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(
        ValueError, match="VLLM_USE_V2_MODEL_RUNNER = 1, but responses have a format"
    ):
        _set_environment(VllmEngineConfig(formats=True), on_cpu=True)


def test_a_mass_beside_a_format_is_not_told() -> None:
    digits = Grammar(regex="[0-9]")
    assert VllmEngineConfig().untold(Sampling(grammar=digits)) == ""
    assert VllmEngineConfig().untold(Sampling(grammar=digits, top_k=5)) == ""
    assert "with top_p = 0.5 alone" in VllmEngineConfig().untold(
        Sampling(grammar=digits, top_p=0.5)
    )
