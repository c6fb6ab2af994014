"""The database's password may stand in a file that PGPASSFILE names, so that no URL and no variable has it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from art_patch.errors import StoreError
from art_patch.store import open_store
from tests.support.postgres import new_server


def test_the_password_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = new_server()
    try:
        url = server.url(server.new_database())
        server.execute("ALTER USER postgres PASSWORD 'from-a-file'")
        ((rules,),) = server.execute("SHOW hba_file")
        Path(rules).write_text("local all all scram-sha-256\n")
        server.execute("SELECT pg_reload_conf()")
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(StoreError, match="PGPASSFILE"):
            open_store(url, project="shop").close()
        file = tmp_path / "password"
        file.write_text("*:*:*:postgres:from-a-file\n")
        file.chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(file))
        with closing(open_store(url, project="shop")) as store:
            assert store.read.counts()["calls"] == 0
    finally:
        server.end()
