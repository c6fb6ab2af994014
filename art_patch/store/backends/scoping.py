"""Limits a store's connections to the rows of its project, and a PostgreSQL role to those of one project.

**Statements** (`limit_to_project`) are limited when they are compiled. A table in FROM becomes `(SELECT * FROM calls
WHERE project_id = 3) AS calls`, in every subquery, join and alias; both databases merge it into the query around it.
UPDATE and DELETE get the condition in their WHERE. The columns' defaults give an INSERT its project. So no query can
forget its project, and none has to name it. These are not limited:

- the tables of `tables.whole`, for what concerns the whole store (`verify`, sizes), and `projects`, the list of them;
- SQL that is written as text: the writer's statements (`rows.py`) and the route, which name the project themselves.

**Roles** (`sql_for`) are limited by row-level security, which holds whatever SQL the role sends. Each table gets a
policy for the role (`CREATE POLICY ... TO role`), with the project's id as a constant. No setting and no table of ours
decides, so the role cannot change who it is. A role that could get round the policies, such as one that may become the
owner of the tables, is refused. Every other role sees no row until it is granted a project, too.
"""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, literal_column

from art_patch.store.schema import tables


def limit_to_project(dialect: Dialect, project_id: Callable[[], int]) -> None:
    """Make `dialect` compile statements for this project. When its id changes, clear the engine's compiled cache."""
    # On our own dialect: a hook of SQLAlchemy itself would change the statements of the app's engines, too.
    plain: Any = dialect.statement_compiler

    class ForProject(plain):
        def visit_table(self, table: Any, **kw: Any) -> str:
            name = super().visit_table(table, **kw)
            if not kw.get("asfrom") or kw.get("iscrud") or not _is_limited(table):
                return name
            inner = f"(SELECT * FROM {name} WHERE {name}.project_id = {project_id()})"
            alias = kw.get("enclosing_alias")
            return inner if alias is not None and alias.element is table else f"{inner} AS {name}"

        def visit_update(self, update_stmt: Any, **kw: Any) -> str:
            return super().visit_update(_limited(update_stmt, project_id()), **kw)

        def visit_delete(self, delete_stmt: Any, **kw: Any) -> str:
            return super().visit_delete(_limited(delete_stmt, project_id()), **kw)

    dialect.statement_compiler = ForProject


def _is_limited(table: Any) -> bool:
    return table.metadata is tables.metadata and "project_id" in table.c


def _limited(statement: Any, project_id: int) -> Any:
    table = statement.table
    return statement.where(table.c.project_id == literal_column(str(project_id))) if _is_limited(table) else statement


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
