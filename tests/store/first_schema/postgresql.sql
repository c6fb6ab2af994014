CREATE TABLE agents (
  id INTEGER NOT NULL,
  project_id INTEGER NOT NULL,
  name TEXT,
  PRIMARY KEY (id, project_id),
  CONSTRAINT agents_name UNIQUE (project_id, name)
);
CREATE TABLE apps (
  id TEXT NOT NULL,
  at FLOAT NOT NULL,
  facts JSON NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE TABLE audit (
  id INTEGER NOT NULL,
  at FLOAT NOT NULL,
  who TEXT NOT NULL,
  action TEXT NOT NULL,
  detail JSON NOT NULL,
  previous TEXT NOT NULL,
  hash TEXT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX audit_id ON audit (project_id, id);
CREATE TABLE blobs (
  id BYTEA NOT NULL,
  body BYTEA NOT NULL,
  project_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE TABLE calls (
  id TEXT NOT NULL,
  trajectory_id TEXT NOT NULL,
  span_id TEXT,
  started_at FLOAT NOT NULL,
  duration_ms FLOAT NOT NULL,
  ttft_ms FLOAT,
  requested_model TEXT NOT NULL,
  policy TEXT,
  prompt BYTEA NOT NULL,
  tools BYTEA,
  params JSON NOT NULL,
  prompt_token_ids BYTEA,
  prompt_tokens BIGINT NOT NULL,
  completion_tokens BIGINT NOT NULL,
  status TEXT NOT NULL,
  error TEXT,
  fallback TEXT,
  untrainable TEXT,
  api TEXT DEFAULT 'chat' NOT NULL,
  shadow_of TEXT,
  prompt_block BYTEA,
  session_id TEXT,
  user_id TEXT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX calls_prompt ON calls (project_id, prompt);
CREATE INDEX calls_prompt_block ON calls (project_id, prompt_block) WHERE prompt_block IS NOT NULL;
CREATE INDEX calls_started ON calls (project_id, started_at);
CREATE INDEX calls_trajectory ON calls (project_id, trajectory_id, started_at);
CREATE TABLE choices (
  call_id TEXT NOT NULL,
  index BIGINT NOT NULL,
  answer BYTEA NOT NULL,
  finish_reason TEXT,
  token_ids BYTEA,
  logprobs BYTEA,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (call_id, index, project_id)
);
CREATE INDEX choices_answer ON choices (project_id, answer);
CREATE TABLE control (
  key TEXT NOT NULL,
  value TEXT NOT NULL,
  updated_at FLOAT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (key, project_id, agent_id)
);
CREATE TABLE corrections (
  id TEXT NOT NULL,
  trajectory_id TEXT NOT NULL,
  call_id TEXT,
  at FLOAT NOT NULL,
  source TEXT NOT NULL,
  message JSON NOT NULL,
  comment TEXT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX corrections_trajectory ON corrections (project_id, trajectory_id);
CREATE TABLE export_members (
  trajectory_id TEXT NOT NULL,
  export_id TEXT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (trajectory_id, export_id, project_id)
);
CREATE TABLE exports (
  id TEXT NOT NULL,
  at FLOAT NOT NULL,
  who TEXT NOT NULL,
  path TEXT NOT NULL,
  format TEXT NOT NULL,
  trajectories BIGINT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE TABLE groups (
  id TEXT NOT NULL,
  scenario_key TEXT NOT NULL,
  how TEXT NOT NULL,
  held_out BOOLEAN NOT NULL,
  created_at FLOAT NOT NULL,
  state TEXT NOT NULL,
  reason TEXT,
  policy TEXT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX groups_scenario ON groups (project_id, scenario_key);
CREATE INDEX groups_state ON groups (project_id, state, held_out);
CREATE TABLE judgements (
  id TEXT NOT NULL,
  group_id TEXT,
  at FLOAT NOT NULL,
  judge TEXT NOT NULL,
  rubric TEXT NOT NULL,
  purpose TEXT NOT NULL,
  state TEXT NOT NULL,
  reason TEXT,
  calls BIGINT NOT NULL,
  prompt_tokens BIGINT NOT NULL,
  completion_tokens BIGINT NOT NULL,
  cost_usd FLOAT,
  facts JSON NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX judgements_at ON judgements (project_id, at);
CREATE INDEX judgements_group ON judgements (project_id, group_id);
CREATE TABLE leases (
  name TEXT NOT NULL,
  token BIGINT NOT NULL,
  beat BIGINT NOT NULL,
  owner TEXT,
  host TEXT,
  pid BIGINT,
  boot TEXT,
  started TEXT,
  renewed_at FLOAT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (name, project_id, agent_id)
);
CREATE TABLE nodes (
  id BYTEA NOT NULL,
  parent BYTEA NOT NULL,
  body BYTEA NOT NULL,
  project_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX nodes_parent ON nodes (project_id, parent);
CREATE TABLE policies (
  name TEXT NOT NULL,
  base TEXT NOT NULL,
  base_sha256 TEXT NOT NULL,
  state TEXT NOT NULL,
  created_at FLOAT NOT NULL,
  path TEXT,
  parent TEXT,
  metrics JSON NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (name, project_id)
);
CREATE TABLE projects (
  id INTEGER NOT NULL,
  name TEXT,
  PRIMARY KEY (id),
  UNIQUE (name)
);
CREATE TABLE promotions (
  id INTEGER NOT NULL,
  policy TEXT NOT NULL,
  from_state TEXT,
  to_state TEXT NOT NULL,
  at FLOAT NOT NULL,
  who TEXT NOT NULL,
  reason TEXT NOT NULL,
  metrics JSON NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX promotions_id ON promotions (project_id, id);
CREATE TABLE scenarios (
  key TEXT NOT NULL,
  held_out BOOLEAN NOT NULL,
  first_seen_at FLOAT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (key, project_id)
);
CREATE TABLE scores (
  id TEXT NOT NULL,
  trajectory_id TEXT NOT NULL,
  name TEXT NOT NULL,
  value FLOAT NOT NULL,
  source TEXT NOT NULL,
  at FLOAT NOT NULL,
  comment TEXT,
  group_id TEXT,
  rubric TEXT,
  judge TEXT,
  session_id TEXT,
  user_id TEXT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX scores_trajectory ON scores (project_id, trajectory_id);
CREATE TABLE sent (
  target TEXT NOT NULL,
  item TEXT NOT NULL,
  trajectory_id TEXT,
  digest TEXT NOT NULL,
  at FLOAT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (target, item, project_id)
);
CREATE INDEX sent_trajectory ON sent (project_id, trajectory_id);
CREATE TABLE spans (
  id TEXT NOT NULL,
  trajectory_id TEXT NOT NULL,
  parent_id TEXT,
  name TEXT NOT NULL,
  started_at FLOAT NOT NULL,
  ended_at FLOAT,
  kind TEXT DEFAULT 'span' NOT NULL,
  attributes JSON DEFAULT '{}' NOT NULL,
  error TEXT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX spans_trajectory ON spans (project_id, trajectory_id);
CREATE TABLE token_blocks (
  id BYTEA NOT NULL,
  parent BYTEA NOT NULL,
  ids BYTEA NOT NULL,
  project_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX token_blocks_parent ON token_blocks (project_id, parent);
CREATE TABLE trained_rows (
  policy TEXT NOT NULL,
  call_id TEXT NOT NULL,
  choice BIGINT NOT NULL,
  trajectory_id TEXT NOT NULL,
  group_id TEXT NOT NULL,
  advantage FLOAT NOT NULL,
  weight FLOAT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (policy, call_id, choice, project_id)
);
CREATE INDEX trained_rows_trajectory ON trained_rows (project_id, trajectory_id);
CREATE TABLE trainings (
  policy TEXT NOT NULL,
  group_id TEXT NOT NULL,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (policy, group_id, project_id)
);
CREATE INDEX trainings_group ON trainings (project_id, group_id);
CREATE TABLE trajectories (
  id TEXT NOT NULL,
  origin TEXT NOT NULL,
  started_at FLOAT NOT NULL,
  ended_at FLOAT,
  last_call_at FLOAT,
  name TEXT,
  scenario_key TEXT,
  group_key TEXT,
  session_id TEXT,
  user_id TEXT,
  tags JSON NOT NULL,
  metadata JSON NOT NULL,
  error TEXT,
  group_id TEXT,
  project_id INTEGER NOT NULL,
  agent_id INTEGER NOT NULL,
  PRIMARY KEY (id, project_id)
);
CREATE INDEX trajectories_group ON trajectories (project_id, group_id) WHERE group_id IS NOT NULL;
CREATE INDEX trajectories_recent ON trajectories (project_id, last_call_at);
CREATE INDEX trajectories_session ON trajectories (project_id, session_id) WHERE session_id IS NOT NULL;
CREATE INDEX trajectories_ungrouped ON trajectories (project_id, last_call_at) WHERE group_id IS NULL;
CREATE INDEX trajectories_user ON trajectories (project_id, user_id) WHERE user_id IS NOT NULL;
CREATE TABLE alembic_version (
  version_num VARCHAR(32) NOT NULL,
  CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO alembic_version VALUES ('0001');
INSERT INTO projects (id) VALUES (1);
INSERT INTO agents (id, project_id) VALUES (1, 1);
