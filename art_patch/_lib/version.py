"""The version number of this release, which every part of the package reads from here."""

__version__ = "0.1.0"
