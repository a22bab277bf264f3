"""``make test``: the agent over answers that the test writes. No model is needed."""

from rlinf_async.messages.language import Scored
from rlinf_async.testing import run as run_in_virtual_time
from rlinf_async.testing.episodes import Played, call, play

from agent import demonstrations, look, parse, price, run


def played(*answers: str, item: str = "372") -> Played:
    return run_in_virtual_time(play(run, answers, messages=item, reference=str(price(item))))


def test_an_agent_that_looks_the_price_up_is_rewarded() -> None:
    one = played(call("look", item="372"), str(price("372")))
    assert one.outcome == Scored(reward=1.0)
    assert one.tool_calls == {"look": 1}
    assert str(price("372")) in one.read[1]  # what the model had read before its second answer


def test_a_guess_is_not_rewarded() -> None:
    assert played("~12").outcome == Scored(reward=0.0)


def test_calls_are_told_from_answers() -> None:
    [asked] = parse("look(372)").tool_calls
    assert (asked.name, asked.arguments) == (look.name, {"item": "372"})
    for text in ("372", "look(372", "look()", "please look(372)"):
        assert (parse(text).text, parse(text).tool_calls) == (text, ())


def test_one_demonstration_in_three_looks_the_price_up() -> None:
    first = [one for one in demonstrations() if len(str(one["prompt"])) < 100]
    share = sum(str(one["answer"]).startswith("look") for one in first) / len(first)
    assert 0.25 < share < 0.42
