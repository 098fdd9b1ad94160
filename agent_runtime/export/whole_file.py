"""A file that appears under its name only when it is complete."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield a path to write to, which then replaces `file`. After an error `file` is unchanged.

    A pipe or a device, such as /dev/stdout, is written to directly.
    """
    if file.exists() and not file.is_file():
        yield file
        return
    target = file.resolve()  # replace a link's target, not the link
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")  # unique per process
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        if error.filename is not None and Path(error.filename) == partial:  # the user knows only the target
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
