-- One row: where the store stands, and who leads. Revision, term and sequence only grow.
CREATE TABLE standing (
    only_row integer PRIMARY KEY CHECK (only_row = 1),
    revision bigint NOT NULL,
    term bigint NOT NULL,
    sequence bigint NOT NULL,
    leader text,
    leader_url text NOT NULL DEFAULT '',
    lease_ms bigint NOT NULL DEFAULT 0,
    renewed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO standing VALUES (1, 0, 0, 0);

-- The last commits as they were made, for those who follow.
CREATE TABLE commits (
    revision bigint PRIMARY KEY,
    body bytea NOT NULL
);

-- Nodes, quota policies and services: few, and always live.
CREATE TABLE objects (
    kind text NOT NULL,
    id text COLLATE "C" NOT NULL,
    revision bigint NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (kind, id)
);

CREATE TABLE tasks (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    revision bigint NOT NULL,
    live integer NOT NULL,
    status text NOT NULL,
    project text NOT NULL,
    "user" text NOT NULL,
    name text NOT NULL,
    task_group text,
    service text,
    ended_at_ms bigint,
    body bytea NOT NULL
);
CREATE INDEX tasks_live ON tasks (id) WHERE live = 1;
CREATE INDEX tasks_revision ON tasks (revision);
CREATE INDEX tasks_group ON tasks (task_group, revision) WHERE task_group IS NOT NULL;
CREATE INDEX tasks_project ON tasks (project, id);
CREATE INDEX tasks_user ON tasks ("user", id);
CREATE INDEX tasks_name ON tasks (name, id);
CREATE INDEX tasks_service ON tasks (service, id) WHERE service IS NOT NULL;
CREATE INDEX tasks_ended ON tasks (ended_at_ms) WHERE live = 0;

CREATE TABLE labels (
    name text NOT NULL,
    value text NOT NULL,
    task text NOT NULL,
    PRIMARY KEY (name, value, task)
);
CREATE INDEX labels_task ON labels (task);

CREATE TABLE allocations (
    id text COLLATE "C" NOT NULL PRIMARY KEY,
    task text NOT NULL,
    attempt integer NOT NULL,
    live integer NOT NULL,
    body bytea NOT NULL
);
CREATE INDEX allocations_task ON allocations (task, attempt);

CREATE TABLE submit_keys (
    key text NOT NULL,
    "user" text NOT NULL,
    task text NOT NULL,
    digest bytea NOT NULL,
    PRIMARY KEY (key, "user")
);
CREATE INDEX submit_keys_task ON submit_keys (task);

CREATE TABLE events (
    sequence bigint PRIMARY KEY,
    at_ms bigint NOT NULL,
    subject text NOT NULL,
    id text COLLATE "C" NOT NULL,
    task_group text,
    body bytea NOT NULL
);
CREATE INDEX events_of ON events (subject, id, sequence);
CREATE INDEX events_group ON events (task_group, sequence) WHERE task_group IS NOT NULL;
CREATE INDEX events_at ON events (at_ms);

CREATE TABLE usage (
    allocation text NOT NULL PRIMARY KEY,
    from_ms bigint NOT NULL,
    to_ms bigint NOT NULL,
    body bytea NOT NULL
);
CREATE INDEX usage_to ON usage (to_ms);
