"""Load AR Model: a file or folder becomes a decoder, its text encoder and its picture codec."""

import hashlib

from comfy_api.latest import io

from ..scd_core.errors import UserError
from ..scd_core.models.load import DTYPES
from . import host, weights
from .sockets import MODEL, TEXT, VQ, TextHandle


class LoadARModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_LoadARModel",
            display_name="Load AR Model",
            category="SCD",
            description="Loads an autoregressive picture or video model. The bundled one works at once; put others "
            "into models/ar_models.",
            inputs=[
                io.Combo.Input(
                    "model",
                    options=host.model_names(),
                    tooltip="The bundled model, or a file or folder from models/ar_models and the ar_models "
                    "folders of extra_model_paths.yaml.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=["auto", *DTYPES],
                    default="auto",
                    tooltip="Number format of the weights. auto: bf16 where the device has it in hardware. fp32: the "
                    "same seed gives the same tokens with autoregressive and seed-exact, bit for bit.",
                ),
            ],
            outputs=[
                MODEL.Output(display_name="AR_MODEL", tooltip="The model, for the sampler."),
                TEXT.Output(display_name="AR_TEXT", tooltip="The model's way to read prompts, for Text Encode."),
                VQ.Output(display_name="AR_VQ", tooltip="The model's picture codec, for VQ Decode."),
            ],
            **host.newer(search_aliases=["autoregressive", "janus", "vq", "checkpoint loader"]),
        )

    @classmethod
    def validate_inputs(cls, model=None):
        # naming the input switches the host's own list check off, so names from other machines get their chance
        if model is None:
            return True
        try:
            host.model_path(model)
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model=None, weight_dtype="auto"):
        try:
            stamp = repr(weights.stamp(host.model_path(model)))
            # the host writes this into every saved picture, where folders of a machine have no business
            return hashlib.sha256(stamp.encode()).hexdigest()
        except (UserError, OSError):
            return f"no model {model}"

    @classmethod
    def execute(cls, model, weight_dtype="auto"):
        decoder, codec = weights.load(host.model_path(model), weight_dtype)
        return io.NodeOutput(decoder, TextHandle(decoder.name, decoder.family), codec)
