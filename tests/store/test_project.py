"""A store is one project's: the first that makes it, or opens it to write, and nobody else's after that."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from art_patch.errors import WrongProject
from art_patch.store import Store, open_store, read_route
from tests.support.postgres import Execute
from tests.support.store_samples import call, info

OWNER = "SELECT name FROM projects"
REFUSED = r"belongs to project 'shop', and this is project 'billing': say --project shop .*ART_PATCH_STORE"


def owner_of(execute: Execute) -> str | None:
    return execute(OWNER)[0][0]


def test_a_store_belongs_to_whoever_made_it(url: str, execute: Execute):
    open_store(url, project="shop").close()
    assert owner_of(execute) == "shop"
    for create in (True, False):
        with pytest.raises(WrongProject, match=REFUSED):
            open_store(url, create=create, project="billing")
        open_store(url, create=create, project="shop").close()
    assert owner_of(execute) == "shop"


def test_a_store_that_nobody_named_is_bound_by_whoever_writes(url: str, execute: Execute):
    store = open_store(url)
    store.write([info(), call("c1")])
    store.close()
    open_store(url, create=False, project="billing").close()
    assert owner_of(execute) is None, "a command that is mistyped must not take it"
    open_store(url, project="shop").close()
    assert owner_of(execute) == "shop"
    with pytest.raises(WrongProject, match=REFUSED):
        open_store(url, create=False, project="billing")


def test_apps_are_told_whose_store_it_is(url: str):
    store = open_store(url, project="shop")
    assert read_route(url).project == "shop"
    store.close()


def test_programs_that_name_no_project_are_not_asked(url: str):
    open_store(url, project="shop").close()
    store = open_store(url)
    assert store.verify() == []
    store.close()


def test_the_password_is_not_shown(url: str):
    open_store(url, project="shop").close()
    if url.startswith("postgresql"):
        url = url.replace("postgres@", "postgres:s3cret@")
    with pytest.raises(WrongProject, match=REFUSED) as refused:
        open_store(url, project="billing")
    assert "s3cret" not in str(refused.value)


def test_of_two_that_make_it_at_once_one_wins(url: str, execute: Execute):
    opened: list[Store] = []
    refused: list[WrongProject] = []
    start = threading.Barrier(4)

    def make(project: str) -> None:
        start.wait()
        try:
            opened.append(open_store(url, project=project))
        except WrongProject as error:
            refused.append(error)

    threads = [threading.Thread(target=make, args=(name,)) for name in ("shop", "billing", "shop", "billing")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner = owner_of(execute)
    assert (len(opened), len(refused), owner in ("shop", "billing")) == (2, 2, True)
    assert all(f"belongs to project {owner!r}" in str(error) for error in refused)
    for store in opened:
        store.close()


def test_schemas_of_one_database_belong_to_different_projects(server, database: str):
    urls = {}
    for project in ("shop", "billing"):
        server.execute(f"CREATE SCHEMA {project}", database)
        urls[project] = server.url(database, query=f"&options=-csearch_path%3D{project}")
        open_store(urls[project], project=project).close()
    with pytest.raises(WrongProject, match=REFUSED):
        open_store(urls["shop"], project="billing")


def test_a_file_that_is_made_anew_under_a_writer_is_the_writers(sqlite_url: str):
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    store = open_store(sqlite_url, project="shop")
    store.write([info(), call("c1")])
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    store.write([info("t2"), call("c2", "t2")])
    assert read_route(sqlite_url).project == "shop"
    store.close()


def test_a_writer_does_not_write_into_another_projects_file_that_took_the_place(sqlite_url: str, tmp_path: Path):
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    store = open_store(sqlite_url, project="shop")
    store.write([info(), call("c1")])
    other = tmp_path / "other.db"
    open_store(f"sqlite:///{other}", project="billing").close()
    for file in path.parent.glob(f"{path.name}-*"):
        file.unlink()
    other.replace(path)
    with pytest.raises(WrongProject, match="belongs to project 'billing'"):
        store.write([info("t2"), call("c2", "t2")])
    store.close()
    foreign = open_store(sqlite_url)
    assert foreign.read.counts()["calls"] == 0
    foreign.close()
