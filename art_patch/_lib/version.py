"""The release, as a name that every part of the package may import."""

__version__ = "0.1.0"
