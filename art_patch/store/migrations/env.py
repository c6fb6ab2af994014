"""Alembic's entry: runs the migrations on the connection that `upgrade` hands over."""

from alembic import context

from art_patch.store.tables import metadata

given = context.config.attributes
context.configure(connection=given["connection"], target_metadata=metadata, version_table_schema=given["schema"])
with context.begin_transaction():
    context.run_migrations()
