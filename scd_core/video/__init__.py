"""Frames to clips and back: MP4, WebM and MOV through PyAV; GIF, WebP and PNG through Pillow."""

from .clip import still_path, write_frames
from .encoders import check_encoders, working_formats
from .formats import DEFAULT_QUALITY, FORMATS, check_settings, find_format, frame_rate
from .read import read_video

__all__ = [
    "DEFAULT_QUALITY", "FORMATS", "check_encoders", "check_settings", "find_format", "frame_rate", "read_video",
    "still_path", "working_formats", "write_frames",
]
