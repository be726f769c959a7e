"""Checks inside the host: words under which newer hosts find the nodes."""

import dataclasses

from checks_common import replaced


def check_hosts_that_know_search_words_get_some_for_every_node(inside):
    io = inside.module("nodes.host").io
    newer = dataclasses.make_dataclass(
        "Newer", [("search_aliases", list, dataclasses.field(default_factory=list))], bases=(io.Schema,)
    )
    ours = {name: node for name, node in inside.nodes.items() if name.startswith("SCD_")}
    assert len(ours) >= 8
    with replaced(io, "Schema", newer):
        for name, node in ours.items():
            words = node.define_schema().search_aliases
            assert len(words) >= 2 and all(word == word.lower() for word in words), name
