"""Nodes, graphs and API prompts of release 0.1.0 (tests/data/api_v1.json) in a running host."""

import json

import freeze_api
import pytest
from scd_tests.host.miniatures import fitted
from workflow_json import input_specs, is_widget

pytestmark = pytest.mark.host

KEPT = json.loads(freeze_api.OUT.read_text(encoding="utf-8"))


def optional(host, node):
    """{input: default} of the widgets that a prompt need not name."""
    specs = input_specs(host.object_info[node["class_type"]]).items()
    return {name: options["default"] for name, (kind, options) in specs
            if options["kind"] == "optional" and is_widget(kind, options)}


def result(host, prompt):
    """What a prompt draws: its pictures, or names of other files."""
    done = host.run(fitted(prompt))
    assert done.status == "success", done.error
    return [picture.tolist() for picture in host.pictures(done)] or [item["filename"] for _, item in done.files()]


@pytest.mark.parametrize("name", KEPT["nodes"])
def test_nodes_keep_what_the_release_promised(host, name):
    assert list(freeze_api.breaches(KEPT["nodes"][name], host.object_info[name])) == []


@pytest.mark.slow
def test_a_prompt_without_the_optional_inputs_gives_the_same(host):
    """API clients saved the inputs that there were; whatever came later has a default that changes nothing."""
    short, full = (json.loads(json.dumps(KEPT["prompts"]["SCD text to image"])) for _ in range(2))
    for number, node in short.items():
        later = optional(host, node) if node["class_type"] in KEPT["nodes"] else {}
        node["inputs"] = {name: value for name, value in node["inputs"].items() if name not in later}
        full[number]["inputs"] = {**node["inputs"], **later}
    assert short != full
    for prompt in (short, full):
        prompt[host.sampler(prompt)]["inputs"]["seed"] = 977  # drawn by no other test
    assert result(host, short) == result(host, full)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT["prompts"])
def test_prompts_of_the_release_still_run(host, name):
    """A prompt that the shipped workflow gives today runs in the test of the workflows."""
    if KEPT["prompts"][name] != freeze_api.to_api(host.workflow(name), host.object_info):
        assert result(host, KEPT["prompts"][name])
