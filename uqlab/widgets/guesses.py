"""A place for a guess, before the answer is read."""

from collections.abc import Sequence

from uqlab.widgets.hand import Hand

Number = int | float


def guess(
    question: str,
    low: Number = 0,
    high: Number = 0,
    unit: str = "",
    *,
    choices: Sequence[str] = (),
    answer: Number | str | None = None,
    then: str = "",
    step: Number | None = None,
) -> Hand:
    """Ask for a guess, and open what it hides once the guess was made.

    `guess(question, low, high)` asks for a number, `guess(question, choices=[...])` for
    one of some words. `state` has the guess.

    Parameters
    ----------
    question
        Shown alone where nothing can be answered.
    low, high
        The ends of a slider.
    unit
        Of the number.
    choices
        In place of a slider.
    answer
        What was to be guessed, which may lie beyond the slider: how far off the guess
        was is then said.
    then
        What else is opened: paragraphs, with **bold**, *italic* and `code`.
    step
        Of the slider; else a round one.

    Raises
    ------
    ValueError
        If there is neither a range nor choices, or the answer is none of the choices.
    """
    if not choices and low >= high:
        raise ValueError(
            f"a guess needs choices, or a range from low to high; got {low} to {high}"
        )
    if choices and answer not in (None, *choices):
        raise ValueError(f"the answer {answer!r} is none of the choices {[*choices]}")
    data = {
        "question": question,
        "range": [low, high, step],
        "unit": unit,
        "choices": list(choices),
        "answer": answer,
        "then": then,
    }
    return Hand("guess", data, text=question)
