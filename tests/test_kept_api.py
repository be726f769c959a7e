"""What people saved with release 0.1.0 still fits the nodes: tests/data/api_v1.json, made by tools/freeze_api.py."""

import copy
import json

import pytest
from scd_tests import fake_host


@pytest.fixture(scope="module")
def tools(root):
    """tools/freeze_api.py and what it is made of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "tools")
        import freeze_api
        import workflow_json

        yield freeze_api, workflow_json


@pytest.fixture(scope="module")
def kept(tools):
    return json.loads(tools[0].OUT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def infos(tmp_path_factory):
    """{node id: its /object_info entry}, without a host."""
    with fake_host.pack(tmp_path_factory.mktemp("host")) as module:
        told = [(node.define_schema().node_id, fake_host.in_host_form(node)) for node in module("nodes").NODES]
        return json.loads(json.dumps(dict(told)))


def own(kept, group):
    """(workflow, node id, node type, entry of `group`) of all our nodes in the frozen workflows."""
    for name, prompt in kept["prompts"].items():
        for number, node in prompt.items():
            if node["class_type"] in kept["nodes"]:
                yield name, number, node["class_type"], kept[group][name][number]


def test_nodes_keep_what_the_release_promised(tools, kept, infos):
    assert len(kept["nodes"]) >= 8 and set(kept["nodes"]) <= set(infos)
    broken = {name: list(tools[0].breaches(node, infos[name])) for name, node in kept["nodes"].items()}
    assert not {name: told for name, told in broken.items() if told}


def test_prompts_of_the_release_fit_the_nodes(kept, infos):
    assert len(kept["prompts"]) >= 12
    for name, number, kind, node in own(kept, "prompts"):
        inputs, where = infos[kind]["input"], (name, number)
        known = {**inputs["required"], **inputs.get("optional", {})}
        assert set(inputs["required"]) <= set(node["inputs"]) <= set(known), where
        for key, value in node["inputs"].items():
            source = isinstance(value, list) and kept["prompts"][name][value[0]]["class_type"]
            if source in infos:
                assert infos[source]["output"][value[1]] in known[key][0].split(","), (where, key)


def test_saved_widgets_go_to_the_names_they_had(tools, kept, infos):
    for name, number, kind, saved in own(kept, "saved"):
        values, _ = tools[1].widget_values({"widgets_values": saved}, infos[kind])
        inputs = kept["prompts"][name][number]["inputs"]
        assert values.items() >= {k: v for k, v in inputs.items() if not isinstance(v, list)}.items(), (name, number)


def later(info, change):
    """An /object_info entry in which somebody changed something."""
    info = copy.deepcopy(info)
    order, inputs, out = info["input_order"], info["input"], (info["output"], info["output_name"])
    seed = inputs["required"]["seed"][1]
    changes = {
        "renamed": lambda: (order["required"].__setitem__(3, "number"), inputs["required"].update(
            number=inputs["required"].pop("seed"))),
        "reordered": lambda: order["required"].reverse(),
        "dropped": lambda: (order["required"].remove("seed"), inputs["required"].pop("seed")),
        "required": lambda: (order["required"].append("extra"), inputs["required"].update(extra=["INT", {}])),
        "in front": lambda: (order["optional"].insert(0, "extra"), inputs["optional"].update(extra=["INT", {}])),
        "type": lambda: inputs["required"]["seed"].__setitem__(0, "FLOAT"),
        "default": lambda: seed.update(default=1),
        "range": lambda: seed.update(max=2**32),
        "choice": lambda: inputs["required"]["method"][1]["options"].remove("sjd"),
        "button": lambda: seed.update(control_after_generate=False),
        "output": lambda: [names.reverse() for names in out],
        "appended": lambda: (order["optional"].append("extra"), inputs["optional"].update(extra=["INT", {}])),
        "new choice": lambda: inputs["required"]["method"][1]["options"].append("new"),
        "new output": lambda: [names.append("STRING") for names in out],
        "wider": lambda: inputs["required"]["window"][1].update(max=10_000),
        "nothing": lambda: None,
    }
    changes[change]()
    return info


@pytest.mark.parametrize("change, word", [
    ("renamed", "required inputs were"), ("reordered", "required inputs were"), ("dropped", "required inputs were"),
    ("required", "new inputs must be optional"), ("in front", "optional inputs were"), ("type", "seed: its type was"),
    ("default", "seed: its default was 0, now it is 1"), ("range", "seed: it took 0 to 18446744073709551615"),
    ("choice", "method: the choices ['sjd'] are gone"), ("button", "seed: its saves was 2"),
    ("output", "its outputs were"), ("appended", None), ("new choice", None), ("new output", None), ("wider", None),
    ("nothing", None),
])  # fmt: skip
def test_every_breach_is_told(tools, infos, change, word):
    before = tools[0].described(infos["SCD_Sampler"])
    found = list(tools[0].breaches(before, later(infos["SCD_Sampler"], change)))
    assert any(word in told for told in found) if word else not found
