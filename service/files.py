"""Files that are always whole under their names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to; it gets the name of `file` at the end, in one go. Makes the
    folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    yield partial
    partial.replace(file)
