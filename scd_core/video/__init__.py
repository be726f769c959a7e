"""Frames to clips and back: MP4 and WebM through PyAV, GIF, WebP and PNG through Pillow."""

from .clip import read_video, write_frames
from .formats import DEFAULT_QUALITY, FORMATS

__all__ = ["DEFAULT_QUALITY", "FORMATS", "read_video", "write_frames"]
