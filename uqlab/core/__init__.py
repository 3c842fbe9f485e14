"""What every room may use: records, files."""

from uqlab.core.recording import FOLDER, begin, describe_figure, output_dir, plain, processor, read_json, record, write

__all__ = [
    "FOLDER", "begin", "describe_figure", "output_dir", "plain", "processor", "read_json", "record", "write",
]  # fmt: skip
