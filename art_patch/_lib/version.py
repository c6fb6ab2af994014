"""The version of this release, for every part of the package."""

__version__ = "0.1.0"
