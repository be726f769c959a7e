"""Workflow files into prompts, and what is wrong with a file: no server needed."""

import copy

import pytest
from host_api import WorkflowError, problems, to_api

MODEL = {"input": {"required": {"file": [["a", "b"], {}]}}, "output": ["X_MODEL"], "output_name": ["model"]}
SAMPLER = {
    "input": {
        "required": {"model": ["X_MODEL", {}], "method": ["COMBO", {"options": ["slow", "fast"]}],
                     "seed": ["INT", {"min": 0, "max": 2**64 - 1, "control_after_generate": True}],
                     "temperature": ["FLOAT", {"min": 0.0, "max": 2.0}]},
        "optional": {"note": ["STRING", {"forceInput": True}], "preview": ["BOOLEAN", {}]},
    },
    "input_order": {"required": ["model", "method", "seed", "temperature"], "optional": ["note", "preview"]},
    "output": ["IMAGE"], "output_name": ["image"], "display_name": "Sampler",
}
SAVE = {"input": {"required": {"images": ["IMAGE", {}], "prefix": ["STRING", {}]}}, "output": []}
FLIP = {"input": {"required": {"image": ["IMAGE", {}]}}, "output": ["IMAGE"], "output_name": ["IMAGE"]}
INFO = {"SCD_Model": MODEL, "SCD_Sampler": SAMPLER, "Save": SAVE, "Flip": FLIP}


def node(number, kind, widgets=(), inputs=(), outputs=()):
    return {"id": number, "type": kind, "mode": 0, "widgets_values": list(widgets),
            "inputs": [{"name": n, "type": t, "link": link} for n, t, link in inputs],
            "outputs": [{"name": n, "type": t, "links": list(links)} for n, t, links in outputs],
            "properties": {"Node name for S&R": kind, "cnr_id": "speculative-coupled-decoding", "ver": "0.1"}}


@pytest.fixture
def workflow():
    """Model -> Sampler -> Flip -> Save."""
    return {"version": 0.4, "nodes": [
        node(1, "SCD_Model", ["a"], (), [("model", "X_MODEL", [10])]),
        node(2, "SCD_Sampler", ["fast", 2**63 + 1, "randomize", 0.5, True], [("model", "X_MODEL", 10)],
             [("image", "IMAGE", [11])]),
        node(3, "Flip", [], [("image", "IMAGE", 11)], [("IMAGE", "IMAGE", [12])]),
        node(4, "Save", ["out"], [("images", "IMAGE", 12)]),
        {"id": 5, "type": "Note", "widgets_values": ["hello"]},
    ], "links": [[10, 1, 0, 2, 0, "X_MODEL"], [11, 2, 0, 3, 0, "IMAGE"], [12, 3, 0, 4, 0, "IMAGE"]]}


def test_widget_values_go_to_their_names(workflow):
    prompt = to_api(workflow, INFO)
    assert prompt["2"]["inputs"] == {"model": ["1", 0], "method": "fast", "seed": 2**63 + 1,
                                     "temperature": 0.5, "preview": True}
    assert set(prompt) == {"1", "2", "3", "4"}
    assert problems(workflow, INFO) == []


def test_links_as_objects_are_read_too(workflow):
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    newer = {**workflow, "links": [dict(zip(keys, link)) for link in workflow["links"]]}
    assert to_api(newer, INFO) == to_api(workflow, INFO)


@pytest.mark.parametrize("mode, feeds_save", [(4, ["2", 0]), (2, None)])
def test_bypassed_passes_on_and_muted_does_not(workflow, mode, feeds_save):
    workflow["nodes"][2]["mode"] = mode
    prompt = to_api(workflow, INFO)
    assert "3" not in prompt
    assert prompt["4"]["inputs"].get("images") == feeds_save


def test_reroute_and_primitive_are_resolved(workflow):
    workflow["nodes"] += [node(6, "Reroute", [], [("", "*", 11)], [("", "IMAGE", [13])]),
                          node(7, "PrimitiveNode", [5, "fixed"], [], [("INT", "INT", [14])])]
    workflow["nodes"][2]["inputs"][0]["link"] = 13
    seed = {"name": "seed", "type": "INT", "link": 14, "widget": {"name": "seed"}}
    workflow["nodes"][1]["inputs"].append(seed)
    workflow["links"][1] = [11, 2, 0, 6, 0, "IMAGE"]
    workflow["links"] += [[13, 6, 0, 3, 0, "IMAGE"], [14, 7, 0, 2, 1, "INT"]]
    prompt = to_api(workflow, INFO)
    assert prompt["3"]["inputs"]["image"] == ["2", 0]
    assert prompt["2"]["inputs"]["seed"] == 5
    assert prompt["2"]["inputs"]["temperature"] == 0.5


def test_what_cannot_be_converted_is_named(workflow):
    with pytest.raises(WorkflowError, match="SCD_Sampler"):
        to_api(workflow, {k: v for k, v in INFO.items() if k != "SCD_Sampler"})
    with pytest.raises(WorkflowError, match="subgraphs"):
        to_api({**workflow, "definitions": {"subgraphs": [{"id": "x"}]}}, INFO)


def broken(change):
    def apply(workflow):
        workflow = copy.deepcopy(workflow)
        change({n["id"]: n for n in workflow["nodes"]}, workflow)
        return workflow
    return apply


BREAKAGES = {
    "unknown node type": broken(lambda n, w: n[3].update(type="Gone")),
    "saves 4 widget values": broken(lambda n, w: n[2]["widgets_values"].pop()),
    "saves 6 widget values": broken(lambda n, w: n[2]["widgets_values"].append(1)),
    "not among": broken(lambda n, w: n[2]["widgets_values"].__setitem__(0, "warp")),
    "outside 0.0..2.0": broken(lambda n, w: n[2]["widgets_values"].__setitem__(3, 9.0)),
    "expected INT": broken(lambda n, w: n[2]["widgets_values"].__setitem__(1, "x")),
    "expected BOOLEAN": broken(lambda n, w: n[2]["widgets_values"].__setitem__(4, 1)),
    "not connected": broken(lambda n, w: n[4]["inputs"][0].update(link=None)),
    "has no input 'pictures'": broken(lambda n, w: n[4]["inputs"][0].update(name="pictures")),
    "does not lead to it": broken(lambda n, w: n[4]["inputs"][0].update(link=10)),
    "does not start there": broken(lambda n, w: n[3]["outputs"][0].update(links=[10])),
    "joins X_MODEL to IMAGE": broken(lambda n, w: w["links"].__setitem__(1, [11, 1, 0, 3, 0, "IMAGE"])),
    "one of which is missing": broken(lambda n, w: w["links"].append([99, 77, 0, 4, 0, "IMAGE"])),
    "the node makes": broken(lambda n, w: n[2]["outputs"][0].update(type="LATENT")),
    "must name cnr_id": broken(lambda n, w: n[1]["properties"].pop("ver")),
    "same id": broken(lambda n, w: n[3].update(id=4)),
}


@pytest.mark.parametrize("sentence", BREAKAGES)
def test_every_kind_of_damage_is_reported(workflow, sentence):
    assert any(sentence in found for found in problems(BREAKAGES[sentence](workflow), INFO))
