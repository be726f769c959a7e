"""Speculative Coupled Decoding: exact, fast sampling of autoregressive image and video models. Plain PyTorch."""

__version__ = "0.1.0"
