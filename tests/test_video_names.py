"""Words in file name prefixes: dates, values of other nodes, and what stays as it is."""

import datetime

import pytest
from scd_tests.conftest import ROOT, load_package

load_package("scd_nodes_alone", ROOT / "nodes")

from scd_nodes_alone.naming import expand  # noqa: E402

NOW = datetime.datetime(2031, 2, 3, 4, 5, 6)
PROMPT = {
    "3": {"class_type": "SCD_Sampler", "inputs": {"seed": 42, "model": ["1", 0], "preview": True, "cfg": 1.5}},
    "4": {"class_type": "SCD_TextEncode", "inputs": {"text": 'a/b: "c"'}, "_meta": {"title": "My words"}},
}
WORKFLOW = {"workflow": {"nodes": [{"id": 4, "properties": {"Node name for S&R": "words"}}, {"id": 3}]}}


@pytest.mark.parametrize(
    "given, filled",
    [
        ("SCD/clip", "SCD/clip"),
        ("%date:yyyy-MM-dd%/clip", "2031-02-03/clip"),
        ("%date:yyyy/MM/dd%/c", "2031/02/03/c"),
        ("c_%date:yyMMdd_hhmmss%", "c_310203_040506"),
        ("%date:d.M.yyyy h.m.s%", "3.2.2031 4.5.6"),
        ("%date:hh:mm%", "04_05"),
        ("%date%", "2031-02-03"),
        ("%SCD_Sampler.seed%", "42"),
        ("%SCD_Sampler.cfg%_%SCD_Sampler.preview%", "1.5_true"),
        ("%words.text%", "a_b_ _c_"),
        ("%My words.text%", "a_b_ _c_"),
        # the host knows these, nobody knows those, and a wire has no value
        ("%width%x%height% %year%", "%width%x%height% %year%"),
        ("%nobody.seed% %SCD_Sampler.nothing%", "%nobody.seed% %SCD_Sampler.nothing%"),
        ("%SCD_Sampler.model%", "%SCD_Sampler.model%"),
        ("100% of %a.b.c%", "100% of %a.b.c%"),
    ],
)
def test_words_are_filled_in(given, filled):
    assert expand(given, PROMPT, WORKFLOW, NOW) == filled


def test_without_a_graph_only_dates_are_known():
    assert expand("%SCD_Sampler.seed%_%date:dd%", now=NOW) == "%SCD_Sampler.seed%_03"
    assert expand("%SCD_Sampler.seed%", PROMPT, {"workflow": None}) == "42"


def test_values_cannot_lead_out_of_the_folder():
    prompt = {"1": {"class_type": "T", "inputs": {"text": "../../etc/x", "other": "C:\\x"}}}
    assert expand("a/%T.text%_%T.other%", prompt) == "a/.._.._etc_x_C__x"
