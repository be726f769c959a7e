"""Write the shipped workflows from named values, so that no value can land in the wrong box.

    python tools/make_workflows.py [--object-info FILE]

Widget order, sockets and types come from a running host (started for this) or from a saved /object_info.
Needed after an input was added to a node. The workflows themselves are functions in workflows_*.py.
"""

import copy
import json
import sys
import uuid

import workflows_bundled
import workflows_continuous
import workflows_image
import workflows_kept
from host_api import ROOT, object_info_asked_for, problems
from workflow_graph import REGISTRY_ID, WORKFLOWS, Graph

# imported for the workflows that they register
MODULES = (workflows_bundled, workflows_kept, workflows_image, workflows_continuous)


def with_models(object_info, names):
    """The same /object_info as that of a host which has these models, too."""
    info = copy.deepcopy(object_info)
    options = info["SCD_LoadARModel"]["input"]["required"]["model"][1]["options"]
    options += sorted(names - set(options))
    return info


def write(object_info, folder):
    """Make and check every workflow; returns the paths written."""
    paths = []
    for name, make in WORKFLOWS.items():
        graph = Graph(object_info)
        make(graph)
        workflow = graph.file()
        workflow["id"] = str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{REGISTRY_ID} {name}"))
        wrong = problems(workflow, with_models(object_info, graph.models))
        if wrong:
            raise SystemExit(f"{name}: {'; '.join(wrong)}")
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(workflow, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def main():
    info = object_info_asked_for(__doc__.splitlines()[0])
    for path in write(info, ROOT / "workflows"):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
