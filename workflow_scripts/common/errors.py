"""The one exception that users are meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: bad config, data or a missing file.

    The message is one line that names the file, key or probe, says what is wrong and how to mend it.
    Scripts and the Snakefile print it without a traceback and exit with status 1.
    """
