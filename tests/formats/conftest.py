from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from art_patch.store import Store, open_store
from tests.support.run_samples import fill


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def filled(url: str) -> Iterator[Store]:
    store = open_store(url)
    fill(store)
    yield store
    store.close()
