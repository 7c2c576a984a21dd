"""Which letter a response states: the phrasings of MMLU's and GPQA's prompts, and what is no answer."""

from __future__ import annotations

import pytest

from rljob_trainer.rewards.choices import multiple_choice, stated_letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: C", "C"),
        ("**Answer:** C", "C"),
        ("Answer: **(C)**", "C"),
        ("so the answer is (C).", "C"),
        ("The correct answer is C, because of gravity.", "C"),
        ("The best answer is option B", "B"),
        (r"Therefore \boxed{C}", "C"),
        (r"Therefore $\boxed{\text{(C)}}$.", "C"),
        (r"\boxed{C. Gravity}", "C"),
        ("C", "C"),
        ("(C).", "C"),
        ("The answer is A. No, wait: the answer is B.", "B"),
        (r"\boxed{A} is wrong. Answer: D", "D"),
        (r"Answer: D, so \boxed{A}", "A"),
        # No single one, or none at all.
        ("Answer: A or B", None),
        ("The answer is A, B", None),
        (r"\boxed{A and C}", None),
        (r"\boxed{AC}", None),
        ("Answer: E", None),
        ("The answer is A matter of taste", None),
        ("The answer is clear. C may be", None),
        ("I think C", None),
        ("", None),
    ],
)
def test_statements(response: str, letter: str | None) -> None:
    assert stated_letter(response, 4, "strict") == letter


def test_the_last_resort() -> None:
    assert stated_letter("It must be C I guess", 4, "flexible") == "C"
    assert stated_letter("Answer: A or B", 4, "flexible") is None
    assert stated_letter("nothing", 4, "flexible") is None


def test_reference_answers() -> None:
    for answer in ("C", "(C)", " C. "):
        verdict = multiple_choice("Answer: C", answer)
        assert (verdict.score, verdict.prediction, verdict.correct) == (1.0, "C", True)
    assert multiple_choice("Answer: C", "2", answer_is="index").score == 1.0
    assert multiple_choice("Answer: J", "J", options=10).score == 1.0
    assert multiple_choice("nothing", "C").correct is False
    for answer in ("2", "E", "gravity", "A or B", ""):
        with pytest.raises(ValueError, match="is not a letter from A to D"):
            multiple_choice("Answer: C", answer)
    with pytest.raises(ValueError, match="is not a number from 0 to 3"):
        multiple_choice("Answer: C", "4", answer_is="index")


@pytest.mark.parametrize("text", ["answer:" + " " * 200_000, "answer is " * 30_000, "A " * 100_000, "(" * 200_000])
def test_long_responses_take_no_long_time(text: str) -> None:
    """A pattern that went through a text over and over would need minutes for these."""
    stated_letter(text, 4, "flexible")
