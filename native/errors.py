"""The exceptions of the bindings. Loads nothing, so that they have a name even where the library can't be loaded."""

from __future__ import annotations


class NativeError(Exception):
    """A kernel refused its arguments or could not run. Names the kernel, the status and the shapes."""


class LibraryError(NativeError):
    """The compiled library is missing, incomplete, or not of this source. Trying again without a build is useless."""
