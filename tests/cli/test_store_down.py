"""A server whose database is down: what it says when it ends, and what it leaves."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from art_patch.policies import base_fingerprint
from art_patch.store import open_store
from tests.support.command_line import Serving
from tests.support.postgres import new_server
from tests.support.proxies import until


@pytest.mark.slow
def test_a_server_that_ends_while_the_database_is_down_says_that_the_route_stays(tmp_path: Path, base: Path):
    database = new_server()
    try:
        url = database.url(database.new_database())
        with closing(open_store(url, project="default")) as store:
            store.ledger.add_base("agent@0", str(base.absolute()), base_fingerprint(base), who="test")
        server = Serving(base, tmp_path, "--store", url)
        database.stop("immediate")
        code, said = server.stop()
        assert (code, said.count("the route still names this server")) == (0, 1), said
        assert "Traceback" not in said
        database.start()
        with closing(open_store(url, project="default")) as store:
            assert store.ledger.route().base_url == server.ready["base_url"]
        # The next one takes the route, and nothing of the first one is left.
        server = Serving(base, tmp_path, "--store", url)
        with closing(open_store(url, project="default")) as store:
            assert store.ledger.route().base_url == server.ready["base_url"]
            until(lambda: len(store.servers.all()) == 1)
        assert server.stop()[0] == 0
    finally:
        database.end()
