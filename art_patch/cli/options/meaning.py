"""The embedding model that settings name, for every command that groups runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from art_patch.grouping import Embed
    from art_patch.settings import Settings


def make_embed(settings: Settings) -> Embed | None:
    """Return what asks the embedding model; `None` if none is named. Asks nothing yet.

    Raises:
        ConfigError: it is named without an address, or numpy is missing.
    """
    from art_patch.errors import ConfigError
    from art_patch.grouping import embed_with

    if settings.embeddings is None:
        return None
    if settings.embeddings_base_url is None:
        raise ConfigError(
            f"embeddings names {settings.embeddings} and no address; set ART_PATCH_EMBEDDINGS_BASE_URL, such as "
            "http://127.0.0.1:8000/v1: what users asked would be sent there, so it is not guessed"
        )
    if find_spec("numpy") is None:
        raise ConfigError('grouping by meaning needs numpy; run: pip install "art-patch[train]"')
    return embed_with(settings.embeddings_base_url, settings.embeddings, api_key=settings.embeddings_api_key)
