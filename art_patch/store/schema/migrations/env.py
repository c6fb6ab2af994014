"""The script that alembic executes. It runs the migrations on the connection that `migrations.upgrade` was given."""

from alembic import context

from art_patch._lib.forking import got_on
from art_patch.store.schema.tables import metadata


def _applied(*_: object, **__: object) -> None:
    got_on()  # a process that exits waits for the store as long as it sees progress


given = context.config.attributes
context.configure(
    connection=given["connection"],
    target_metadata=metadata,
    version_table_schema=given["schema"],
    on_version_apply=_applied,
)
with context.begin_transaction():
    context.run_migrations()
