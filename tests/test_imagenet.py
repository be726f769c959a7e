"""ImageNet's classes: the table, and what people may write for one."""

import pytest
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.imagenet import ClassEncoder, class_names

CLASSES = ClassEncoder(1000)


def test_table_is_in_the_order_of_the_challenge():
    names = class_names()
    assert len(names) == 1000 and all(all(group) for group in names)
    known = {0: "tench", 1: "goldfish", 207: "golden retriever", 281: "tabby", 388: "giant panda", 404: "airliner",
             717: "pickup", 980: "volcano", 999: "toilet tissue"}  # fmt: skip
    assert {n: names[n][0] for n in known} == known


def test_every_class_can_be_named():
    """By at least one of its names, or the sentence for a name that several have lists it."""
    for number, names in enumerate(class_names()):
        found = set()
        for name in names:
            try:
                found.add(CLASSES.number(name))
            except UserError as error:
                assert f"{number} (" in str(error), name
        assert found <= {number}, names


@pytest.mark.parametrize(
    "text, number",
    [
        ("207", 207), (" 007 ", 7), ("golden retriever", 207), ("Golden  Retriever", 207), ("a golden retriever", 207),
        ("golden-retriever", 207), ("tabby_cat", 281), ("Ursus maritimus", 296), ("T-shirt", 610), ("crane bird", 134),
        ("tusker", 101), ("", None), ("  ", None),
    ],
)  # fmt: skip
def test_spellings(text, number):
    assert CLASSES.number(text) == number
    assert CLASSES.encode(text).text == text


@pytest.mark.parametrize(
    "text, told",
    [
        ("crane", r"fits several .*134 \(crane, crane bird\); 517 \(crane, lifting crane\)"),
        ("retriever", r"fits several .*205 \(flat-coated retriever\).*209 "),
        ("dog", r"and \d+ more; write the number"),
        ("zebr", r"none of the 1000 .*did you mean 340 \(zebra\)"),
        ("a zebra on the grass", r"none of the 1000 .*did you mean 340 \(zebra\)"),
        ("qqqq", r"none of the 1000 .*golden retriever"),
        ("1000", "0 to 999"), ("-1", "0 to 999"),
    ],
)  # fmt: skip
def test_what_names_no_single_class_is_told(text, told):
    with pytest.raises(UserError, match=told):
        CLASSES.encode(text)
