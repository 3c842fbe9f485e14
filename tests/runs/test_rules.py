"""Parameters of pages: each has a rule, every page asks for them before it computes, and wrong ones are refused."""

import math

import pytest
from small_pages import checking

from uqlab import data, runs
from uqlab.runs import parameters

PAGES = parameters.all_notebooks()
pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem[:2])


@pages
def test_a_page_checks_its_parameters_before_it_begins(path):
    """As its own lines do it, with the values of every profile; each of its parameters has a rule."""
    known = parameters.defaults(path)
    assert known.keys() <= parameters.RULES.keys()
    lines = checking(path)
    assert lines.startswith("runs.check(globals()")
    assert "dataset" not in known or "check(dataset" in lines
    for profile in parameters.profiles(path).values():
        legal = known | parameters.checked(profile.get(path.stem, {}), known, path.stem)
        exec(lines, legal | {"runs": runs, "data": Anything, "check": Anything.check})


class Anything:
    """Stands in for the data sets, of which some must be fetched."""

    @staticmethod
    def check(*_, **__):
        pass


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"members": 1}, "members must be greater than or equal to 2, got 1"),
        ({"members": 2.5}, "members must be a valid integer, got 2.5"),
        ({"epochs": "5"}, "epochs must be a valid integer, got '5'"),
        ({"epochs": True}, "epochs must be a valid integer, got True"),
        ({"epochs": 10**9}, "epochs must be less than or equal to 10000000, got 10"),
        ({"limit": 1}, "limit must be at least 10, or 0 .*, got 1"),
        ({"train_limit": 9}, "train_limit must be at least 10"),
        ({"near": ["letters"], "ood": []}, "ood must have 1 different values or more"),
        ({"lr": math.nan}, "lr must be a finite number, got nan"),
        ({"level": 1.0}, "level must be less than 1, got 1.0"),
        ({"seeds": [3]}, r"seeds must have 2 different values or more, got \[3\]"),
        ({"ood": ["letters", "letters"]}, "ood must have no value twice"),
        ({"ood": "letters"}, "ood must be a valid list, got 'letters'"),
        ({"ood": ["letters", 3]}, r"ood\[1\] must be a valid string, got 3"),
        ({"sizes": [1, 0]}, r"sizes\[1\] must be greater than or equal to 1, got 0"),
        ({"precision": "float64"}, "precision must be 'float32' or 'bfloat16', got"),
        ({"augment": 1}, "augment must be a valid boolean, got 1"),
    ],
)
def test_wrong_parameters_are_refused_by_name(wrong, words):
    with pytest.raises(ValueError, match=words):
        runs.check(wrong)


def test_what_is_no_parameter_is_left_alone():
    others = {"methods": parameters, "seed": 2**40, "something": object()}
    runs.check({"near": [], "epochs": 3, "seeds": range(3)} | others)


@pytest.mark.parametrize(
    ("rules", "legal", "wrong"),
    [
        ({"width": 1}, {"width": 3}, {"width": 1.5}),
        ({"ood": str}, {"ood": "letters"}, {"ood": ["letters"]}),
        ({"held_out": "(0, 1)"}, {"held_out": 0.3}, {"held_out": 1.0}),
        ({"shown": (2, 3)}, {"shown": 2}, {"shown": 4}),
        ({"methods": [str] * 2}, {"methods": []}, {"methods": ["deep"]}),
        ({"widths": ["(0, inf)"] * 2}, {"widths": [1, 2.0]}, {"widths": [1.0, 1.0]}),
    ],
)
def test_a_page_may_have_rules_of_its_own(rules, legal, wrong):
    runs.check(legal, **rules)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        runs.check(wrong, **rules)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Sentences, images without labels, and images of one class."""
    import numpy as np

    folder, x = tmp_path_factory.mktemp("own"), np.zeros((30, 8, 8), np.uint8)
    (folder / "texts.tsv").write_text(
        "\n".join(["sentence\tlabel", *(f"word {i}\t{i % 2}" for i in range(30))])
    )
    np.savez(folder / "bare.npz", x=x)
    np.savez(folder / "one.npz", x=x, y=np.zeros(30, int))
    return folder


@pytest.mark.parametrize(
    ("sets", "kinds", "words"),
    [
        (
            ("digits", "leters"),
            ["images"],
            "unknown data set 'leters'.*did you mean 'letters'",
        ),
        (("digits", "letters[40]"), ["images"], "classes are 0"),
        (("digits[3]",), ["images"], "must have labels of two classes or more"),
        (("one.npz",), ["images"], "must have labels of two classes or more"),
        (("bare.npz",), ["images"], "must have labels of two classes or more"),
        (("texts.tsv",), ["images"], "texts holds texts, and this page takes images"),
        (
            ("digits", "texts.tsv"),
            ["images", "texts"],
            "texts holds texts, and digits does not",
        ),
        (
            ("texts.tsv", "letters"),
            ["images", "texts"],
            "letters holds images, and texts does not",
        ),
        (
            ("digits[0,1]", "ambiguous-digits"),
            ["images"],
            "soft labels of 10 classes, and digits.0,1. has 2",
        ),
        (("digits",), ["sounds"], "digits holds images, and this page takes sounds"),
    ],
)
def test_sets_that_a_page_cannot_take_are_refused(sets, kinds, words, own):
    named = [str(own / name) if "." in name else name for name in sets]
    with pytest.raises(ValueError, match=words):
        data.check(*named, kinds=kinds)


def test_sets_that_a_page_can_take(own):
    data.check("digits", "letters", "", str(own / "bare.npz"))
    data.check("spoken-digits[0,1]", "letters")  # their pictures
    data.check(str(own / "texts.tsv"), kinds=["images", "texts"])


def judged(page, given):
    """The names of a page after its own check of other values than its own."""
    path = parameters.find(page)
    names = parameters.defaults(path) | given
    names |= {"runs": runs, "data": data, "check": data.check}
    exec(checking(path), names)
    return names


@pytest.mark.parametrize(
    ("page", "given", "left"),
    [
        ("03", {"members": 5}, {"sizes": [1]}),
        ("03", {"members": 10}, {"sizes": [1, 2]}),
        ("02", {"members": 8}, {"sizes": [1, 2, 4], "counts": [2, 4, 8]}),
        ("studies/02", {"members": 8}, {"sizes": [1, 2, 4], "counts": [2, 4]}),
        ("05", {"side": 16}, {"sizes": [2, 4]}),
        ("05", {"patch": 2}, {"sizes": [2, 4, 8, 16]}),
        ("studies/05", {"map_side": 5}, {"sizes": [2, 3, 4, 5]}),
        ("studies/07", {"top": 20}, {"k": 20}),
        ("studies/09", {"removed": [2]}, {"removed": [2, 3]}),
        ("studies/09", {"ood": ["letters"]}, {"near": ["letters"]}),
        ("studies/14", {"removed": [8]}, {"removed": [4, 8]}),
    ],
)
def test_a_default_follows_the_parameter_that_it_depends_on(page, given, left):
    assert {name: judged(page, given)[name] for name in left} == left


@pytest.mark.parametrize(
    ("page", "given", "words"),
    [
        ("03", {"members": 9, "sizes": [2]}, "must divide members=9"),
        ("02", {"members": 7}, "members=7 must be even"),
        ("05", {"side": 28}, "shown=4 and one of sizes must divide the map, 28 / 4"),
        ("studies/09", {"near": ["leters"]}, "did you mean 'letters'"),
    ],
)
def test_a_page_refuses_what_leaves_nothing(page, given, words):
    with pytest.raises(ValueError, match=words):
        judged(page, given)
