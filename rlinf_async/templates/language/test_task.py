"""``make test``: the verifier says what it should, and every question has one right answer."""

from rlinf_async.rewards import Answer

from task import careless, questions, score


def judged(text: str, reference: str) -> float:
    return score(Answer(prompt="", text=text, reference=reference))


def test_the_right_answer_is_rewarded_and_no_other() -> None:
    assert judged("7", "7") == 1.0
    assert judged(" 7 ", "7") == 1.0
    assert judged("77", "7") == judged("3", "7") == judged("", "7") == 0.0


def test_every_question_has_the_larger_digit_as_its_answer() -> None:
    for one in questions():
        assert one["answer"] == max(one["prompt"].split(","))


def test_careless_answers_are_right_more_often_than_half() -> None:
    right = {one["prompt"]: one["answer"] for one in questions()}
    share = sum(right[one["prompt"]] == one["answer"] for one in careless()) / len(careless())
    assert 0.5 < share < 0.65  # of two equal digits, any is right
