"""The SQL that limits a PostgreSQL role to one project: row-level security, which holds whatever SQL the role sends.

Each table gets a policy for the role (`CREATE POLICY ... TO role`), with the project's id as a constant. No setting and
no table of ours decides, so the role cannot change who it is. A role that could get round the policies, such as one
that may become the owner of the tables, is refused. Every other role sees no row until it is granted a project, too.
"""

from art_patch.store.schema import tables

# What voids the policies, as conditions on `its`: the role, or one that it is a member of and may become by SET ROLE.
_VOIDS = """
    (its.rolsuper OR its.rolbypassrls, 'is a superuser or has BYPASSRLS'),
    (its.rolreplication OR its.rolcreaterole, 'has REPLICATION or CREATEROLE'),
    (its.rolname IN ('pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program'),
      'reaches the files of the server'),
    (its.oid = (SELECT datdba FROM pg_database WHERE datname = current_database()), 'owns the database'),
    (its.oid = (SELECT nspowner FROM pg_namespace WHERE nspname = {schema}), 'owns the schema'),
    (its.oid IN (SELECT relowner FROM pg_class WHERE oid = ANY (ours)), 'owns a table of the store'),
    (EXISTS (SELECT FROM pg_policy WHERE polrelid = ANY (ours)
      AND (0 = ANY (polroles) OR its.oid = ANY (polroles) AND its.rolname <> {role})),
      'has another policy, as for another project'),
    (has_database_privilege(its.oid, current_database(), 'CREATE'), 'may CREATE schemas in the database'),
    (has_schema_privilege(its.oid, {schema}, 'CREATE'), 'may CREATE functions in the schema, perhaps as PUBLIC'),
    (EXISTS (SELECT FROM unnest(ours) AS one WHERE has_table_privilege(its.oid, one, 'TRUNCATE, TRIGGER')
      OR has_any_column_privilege(its.oid, one, 'REFERENCES')), 'may TRUNCATE, TRIGGER or REFERENCES a table')
"""


def sql_for(role: str, project_id: int, schema: str) -> str:
    """Return statements that the owner of the tables runs; run again, they move the role to this project."""
    name, place = _quoted(role), _quoted(schema)
    names = [f"{place}.{_quoted(table)}" for table in (*tables.metadata.tables, "alembic_version")]
    lines = [
        "BEGIN;",
        f"REVOKE ALL ON {', '.join(names)} FROM PUBLIC, {name};",
        f"REVOKE CREATE ON SCHEMA {place} FROM {name};",
        f"GRANT USAGE ON SCHEMA {place} TO {name};",
        f"GRANT SELECT ON {place}.alembic_version, {place}.projects TO {name};",
    ]
    for table in tables.metadata.sorted_tables:
        its, column = f"{place}.{_quoted(table.name)}", "id" if table is tables.projects else "project_id"
        lines += [
            f"ALTER TABLE {its} ENABLE ROW LEVEL SECURITY;",
            f"DROP POLICY IF EXISTS {name} ON {its};",
            f"CREATE POLICY {name} ON {its} TO {name} USING ({column} = {project_id});",
        ]
        if table is not tables.projects:
            lines.append(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {its} TO {name};")
    # Last, so that it sees what is left after the lines above.
    lines.append(f"""DO $check$
DECLARE
  ours CONSTANT oid[] := ARRAY[{", ".join(map(_literal, names))}]::regclass[]::oid[];
  why text;
BEGIN
  SELECT string_agg(DISTINCT v.why, ', ') INTO why FROM pg_roles AS its, LATERAL (VALUES {
        _VOIDS.format(role=_literal(role), schema=_literal(schema))
    }) AS v (voids, why) WHERE v.voids AND pg_has_role({_literal(role)}, its.oid, 'MEMBER');
  IF why IS NOT NULL THEN
    RAISE EXCEPTION 'role % cannot be limited to a project: it, or a role that it is a member of, %',
      {_literal(role)}, why USING HINT = 'Take these rights away, or make another role: CREATE ROLE ... LOGIN';
  END IF;
END $check$;""")
    return "\n".join([*lines, "COMMIT;"])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
