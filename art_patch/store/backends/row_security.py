"""The SQL that limits a PostgreSQL role to one project: row-level security, which holds whatever SQL the role sends.

Each table gets a policy for the role (`CREATE POLICY ... TO role`), with the project's id as a constant. No setting and
no table of ours decides, so the role cannot change who it is. The owner of the tables, superusers and roles with
BYPASSRLS are not limited. Every other role sees no row until it is granted a project, too.
"""

from art_patch.store.schema import tables


def sql_for(role: str, project_id: int, schema: str) -> str:
    """Return statements that the owner of the tables runs; run again, they move the role to this project."""
    name, place, literal = _quoted(role), _quoted(schema), "'" + role.replace("'", "''") + "'"
    literal_of_calls = "'" + f"{place}.calls".replace("'", "''") + "'"
    lines = [
        "BEGIN;",
        # Policies do not apply to these, so the role would still reach every project.
        f"""DO $check$ BEGIN
  IF EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = {literal} AND (r.rolsuper OR r.rolbypassrls
      OR pg_has_role(r.oid, (SELECT relowner FROM pg_class WHERE oid = {literal_of_calls}::regclass), 'MEMBER'))) THEN
    RAISE EXCEPTION 'a superuser, a role with BYPASSRLS or the owner of the tables cannot be limited';
  END IF;
END $check$;""",
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {place} FROM {name};",
        f"GRANT USAGE ON SCHEMA {place} TO {name};",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {place} TO {name};",
        f"GRANT SELECT ON {place}.alembic_version, {place}.projects TO {name};",
    ]
    for table in tables.metadata.sorted_tables:
        its = f"{place}.{_quoted(table.name)}"
        column = "id" if table is tables.projects else "project_id"
        if table is not tables.projects:
            lines.append(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {its} TO {name};")
        lines += [
            f"ALTER TABLE {its} ENABLE ROW LEVEL SECURITY;",
            f"DROP POLICY IF EXISTS {name} ON {its};",
            f"CREATE POLICY {name} ON {its} TO {name} USING ({column} = {project_id}) "
            f"WITH CHECK ({column} = {project_id});",
        ]
    return "\n".join([*lines, "COMMIT;"])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
