"""Formats of responses in vLLM: those of the transformers engine, told as it tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.transformers.folder import ModelFolder, open_folder
from rlinf_async.backends.transformers.formats import ResponseFormats
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.messages.language import Generated, Grammar, Request, Sampling
from tests.backends.formats import GRAMMARS, answered, asked, check_formats
from tests.backends.requests import request
from tests.backends.vllm.kit import SMALL, Served
from tests.jobs.language.checkpoints import save_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


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
    path = save_checkpoint(tmp_path_factory.mktemp("model") / "model", "qwen3")
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
        allowed = formats.sets(one.sampling.grammar, "r", [], tokens)
        assert made.kept is not None
        for kept, every in zip(made.kept.sets(), allowed, strict=True):
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


def test_a_mass_beside_a_format_is_not_told() -> None:
    digits = Grammar(regex="[0-9]")
    assert VllmEngineConfig().untold(Sampling(grammar=digits)) == ""
    assert VllmEngineConfig().untold(Sampling(grammar=digits, top_k=5)) == ""
    assert "with top_p = 0.5 alone" in VllmEngineConfig().untold(
        Sampling(grammar=digits, top_p=0.5)
    )
