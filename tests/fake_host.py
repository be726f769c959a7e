"""A stand-in for ComfyUI, for tests of what the nodes say and of the files that they name. No node runs in it."""

import contextlib
import dataclasses
import importlib
import os
import sys
import types

from scd_tests.conftest import load_package

NAMES = ("comfy", "comfy.cli_args", "comfy.model_management", "comfy.model_patcher", "comfy.ops", "comfy.utils",
         "comfy_api", "comfy_api.latest", "folder_paths")


class Kind:
    """A socket type; its inputs and outputs are kept as they were written down."""

    def __init__(self, name):
        self.name = name

    def Input(self, name, **options):
        return name, self.name, options

    def Output(self, **options):
        return self.name, options


class Kinds(types.SimpleNamespace):
    """`io`: classes that the nodes need, and any socket type by its name."""

    def __getattr__(self, name):
        return Kind(name.upper())


@dataclasses.dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    description: str
    inputs: list
    outputs: list
    is_output_node: bool = False


def in_host_form(node):
    """One node as the host's /object_info tells it."""
    schema = node.define_schema()
    info = {"input": {"required": {}}, "display_name": schema.display_name,
            "output": [kind for kind, _ in schema.outputs],
            "output_name": [options.get("display_name", kind) for kind, options in schema.outputs]}
    for name, kind, options in schema.inputs:
        group = "optional" if options.get("optional") else "required"
        kind = ",".join(one.name for one in options["types"]) if "types" in options else kind
        told = {key: value for key, value in options.items() if key not in ("optional", "types")}
        info["input"].setdefault(group, {})[name] = [kind, told]
    return {**info, "input_order": {group: list(entries) for group, entries in info["input"].items()}}


def modules(base):
    """{name: module} of a host whose folders lie in `base` (path)."""
    made = {name: types.ModuleType(name) for name in NAMES}
    made["comfy"].__path__ = made["comfy_api"].__path__ = []
    made["comfy.cli_args"].args = types.SimpleNamespace(disable_metadata=False)
    manage = made["comfy.model_management"]
    manage.OOM_EXCEPTION = Exception
    manage.InterruptProcessingException = type("InterruptProcessingException", (Exception,), {})
    manage.throw_exception_if_processing_interrupted = lambda: None
    made["comfy_api.latest"].__dict__.update(
        io=Kinds(ComfyNode=type("ComfyNode", (), {}), Schema=Schema, Custom=Kind, NodeOutput=tuple),
        ui=types.SimpleNamespace(SavedImages=type("SavedImages", (), {})), InputImpl=types.SimpleNamespace(),
        Types=types.SimpleNamespace(VideoComponents=type("VideoComponents", (), {})),
        ComfyExtension=type("ComfyExtension", (), {}),
    )
    paths, known = made["folder_paths"], {}
    paths.models_dir, paths.folder_names_and_paths = str(base / "models"), known
    paths.add_model_folder_path = lambda key, path: known.setdefault(key, ([], set()))[0].append(path)
    paths.get_output_directory = lambda: str(base / "output")
    paths.get_temp_directory = lambda: str(base / "temp")
    paths.get_save_image_path = save_path
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, module)
    return made


def save_path(prefix, base, width=0, height=0):
    """As the host's own: (folder, name, first free number, subfolder, prefix); the folder is made."""
    prefix = prefix.replace("%width%", str(width)).replace("%height%", str(height))
    subfolder, name = os.path.split(os.path.normpath(prefix))
    folder = os.path.join(base, subfolder)
    os.makedirs(folder, exist_ok=True)
    return folder, name, 1, subfolder, prefix


@contextlib.contextmanager
def pack(base, alias="scd_faked"):
    """Import the pack's nodes over a fake host -> function that gives a module of the pack by name."""
    before = dict(sys.modules)
    sys.modules.update(modules(base))
    try:
        root = sys.modules["scd_pack"].__path__[0]
        load_package(alias, root)
        importlib.import_module(f"{alias}.nodes").host.register_model_folder()
        yield lambda name: importlib.import_module(f"{alias}.{name}")
    finally:
        for name in [name for name in sys.modules if name not in before and name.split(".")[0] in (alias, *NAMES)]:
            del sys.modules[name]
        sys.modules.update({name: before[name] for name in NAMES if name in before})
