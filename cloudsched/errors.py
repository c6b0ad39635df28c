"""Every error that a user's mistake can raise.

Each takes one finished sentence, so that all of them survive pickling between Ray processes. The
sentence says what is wrong, shows the value and names the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CloudschedError(Exception):
    """Base of all errors that cloudsched raises for a mistake of its caller."""


class ConfigError(CloudschedError, ValueError):
    """A setting is out of range, of the wrong type, or unknown."""


class UnknownNameError(CloudschedError, KeyError):
    """A name is not in the registry that was asked for it."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would put quotes around our sentence.
        return str(self.args[0])


class InvalidJobsError(CloudschedError, ValueError):
    """A job table holds values that no cluster can run, such as a NaN demand."""


class InvalidActionError(CloudschedError, ValueError):
    """An action array has the wrong shape or type (an illegal action is not an error)."""


class TraceFileError(CloudschedError, ValueError):
    """A trace file is missing or broken; names file, line and column."""


class BundleError(CloudschedError, ValueError):
    """A policy bundle is missing, damaged, or made for another encoder."""


class DatasetError(CloudschedError, ValueError):
    """A dataset of decisions is missing, damaged, or of another version; names file and column."""


class EpisodeError(CloudschedError, RuntimeError):
    """An environment was used out of order, for example stepped before its first reset."""


def suggestion(name: str, known: Iterable[str], *, path: str = "") -> str:
    """Return the end of an error sentence: the likely name, or the list of all names.

    Args:
        path: what stands before every name when it is shown, such as `fleet.`.
    """
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {path + close[0]!r}?"
    return f"Known: {', '.join(path + each for each in names)}."
