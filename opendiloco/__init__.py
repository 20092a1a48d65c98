"""Low-communication training of language models over the internet: the library."""

from importlib.metadata import version

__version__ = version("opendiloco")
