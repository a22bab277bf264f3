"""What vLLM samples with every setting is what a trainer computes, or is refused for training."""

from __future__ import annotations

import asyncio
import importlib
import tracemalloc
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from torch import nn

from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.vllm.config import MOST_KEPT, VllmEngineConfig
from rlinf_async.messages.language import Generated, Request, Sampling
from tests.backends.distributions import (
    BAR,
    LOSS,
    PROXIMAL,
    RULES,
    UNBOUNDED,
    asked,
    check_computed,
    check_each_token_is_trained,
    check_kept,
    computed,
    episode_of,
    fields_of,
    sample_of,
    save_with_defaults,
    twin_model,
)
from tests.backends.requests import request
from tests.backends.vllm.kit import SMALL, Served

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Twins(NamedTuple):
    """An engine and a trainer of one model."""

    served: Served
    trainer: PolicyTrainer
    model: nn.Module
    path: str

    def generate(self, *requests: Request) -> list[Generated]:
        """All at once."""

        async def body() -> list[Generated]:
            return await asyncio.gather(*(self.served.engine.generate(one) for one in requests))

        return self.served.run(body())


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    model = twin_model()
    path = save_with_defaults(tmp_path_factory.mktemp("model"), model)
    config = LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(**fields_of(path)), loss=LOSS, reference=True
    )
    with Served(VllmEngineConfig(model=path, weights="folder", **SMALL)) as served:
        yield Twins(served, PolicyTrainer(config, 1, 0), model, path)


def test_fsdp_trains_what_vllm_sampled(twins: Twins) -> None:
    rules = [rule for rule in RULES if rule not in UNBOUNDED]
    assert "twenty and mass" in rules
    every = [(rule, one) for rule in rules for one in asked(rule)]
    made = twins.generate(*(one for _, one in every))  # settings are beside one another in a batch
    for rule in rules:
        found = [
            sample_of(one, got) for (of, one), got in zip(every, made, strict=True) if of == rule
        ]
        found.append(twins.served.run(episode_of(twins.served.engine.generate, rule)))
        for one in found:
            check_kept(rule, one.generated)
        check_computed(twins.model, found, computed(twins.trainer, found))


def test_no_token_of_a_negative_advantage_is_silenced(twins: Twins) -> None:
    fields = fields_of(twins.path)
    for loss in PROXIMAL.values():
        config = LanguageTrainerConfig(fsdp=LanguageFSDPConfig(**fields), loss=loss, reference=True)
        trainer = PolicyTrainer(config, 1, 0)
        for rule in BAR:
            if rule not in UNBOUNDED:
                every = asked(rule)
                made = [
                    sample_of(*pair) for pair in zip(every, twins.generate(*every), strict=True)
                ]
                check_each_token_is_trained(trainer, made)


def test_a_partial_response_keeps_what_it_was_drawn_from(twins: Twins) -> None:
    short = request(3, range(2, 9), top_k=5, max_tokens=6)
    [begun] = twins.generate(short)
    longer = msgspec.structs.replace(
        short,
        partial=msgspec.structs.replace(begun, finish="abort"),
        sampling=msgspec.structs.replace(short.sampling, max_tokens=14),
    )
    [whole] = twins.generate(longer)
    assert whole.token_ids[:6].tolist() == begun.token_ids.tolist()
    found = [sample_of(short, whole)]
    check_computed(twins.model, found, computed(twins.trainer, found))


@pytest.mark.parametrize("rule", UNBOUNDED)
def test_a_mass_alone_is_generated_and_refused_for_training(twins: Twins, rule: str) -> None:
    one = asked(rule, 1)[0]
    [made] = twins.generate(one)
    assert np.isfinite(made.log_prob).all()
    assert not made.tells_of(one.sampling)
    assert "set top_k (at most 1024) as well" in VllmEngineConfig().untold(one.sampling)


def test_what_vllm_cannot_tell_is_said() -> None:
    config = VllmEngineConfig()
    assert config.untold(Sampling(top_k=MOST_KEPT, top_p=0.9)) == ""
    assert config.untold(Sampling(temperature=0.0, top_p=0.9)) == ""
    assert "top_k is 1025: lower it" in config.untold(Sampling(top_k=MOST_KEPT + 1))


@pytest.mark.parametrize("name", ["logprobs_mode", "generation_config", "logits_processors"])
def test_arguments_that_change_the_distribution_are_refused(name: str) -> None:
    given: dict[str, Any] = {name: "auto"}
    with pytest.raises(ValueError, match=f"extra has '{name}'.*leave it out"):
        VllmEngineConfig(extra=given)


def test_ties_beyond_what_is_asked_for_are_named() -> None:
    """Of a larger vocabulary than is told, all of it is equally likely."""
    from rlinf_async.backends.vllm.library import Output, joined

    class Flat:
        start_indices = (0,)
        token_ids = (5, *range(17))
        logprobs = (-7.0,) * 18

    output = Output([5], Flat(), (), "length")
    with pytest.raises(RuntimeError, match=r"at least 17 tokens are as likely .* top_k = 1,"):
        joined(request(top_k=1), output, 1000)


def test_what_a_token_was_drawn_from_takes_less_than_a_kilobyte() -> None:
    """In the library's own lists 8 kB, for each token of each response under way."""
    engine: Any = importlib.import_module("vllm.v1.engine")
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    library: Any = importlib.import_module("vllm.v1.engine.output_processor")

    from rlinf_async.backends.vllm.library import Output, collect_in_arrays, joined, make_sampling

    count, asked_for, one = 500, 91, request(top_k=50)
    processor = library.OutputProcessor(None, log_stats=False)
    collect_in_arrays(processor)
    params = make_sampling(logprobs=asked_for)
    core = engine.EngineCoreRequest("a", [1], None, params, None, 0.0, None, None, None)
    core.external_req_id = "a"
    processor.add_request(core, None)
    collecting: Any = processor.request_states["a"].logprobs_processor
    ids = np.arange(1000, 1000 + asked_for + 1)[None]
    likely = np.where(ids < 1051, -1.5, -np.inf).astype(np.float32)  # the drawn one, and 50
    ids[0, 0] = 1050
    tracemalloc.start()
    for _ in range(count):
        lists = outputs.LogprobsLists(ids, likely, np.array([50]))
        collecting.update_from_output(engine.EngineCoreOutput("a", [1050], new_logprobs=lists))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / count < 1024
    made = joined(one, Output([1050] * count, collecting.logprobs, (), "length"), 2000)
    assert made.kept is not None
    assert [each.tolist() for each in made.kept.sets()] == [[*range(1001, 1051)]] * count
    assert made.log_prob.tolist() == [-1.5] * count
