-- One row: where the store stands. All three numbers only grow.
CREATE TABLE standing (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    revision INTEGER NOT NULL,
    term INTEGER NOT NULL,
    sequence INTEGER NOT NULL
);
INSERT INTO standing VALUES (1, 0, 0, 0);

-- Nodes, quota policies and services: few, and always live.
CREATE TABLE objects (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;

CREATE TABLE tasks (
    id TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL,
    live INTEGER NOT NULL,
    status TEXT NOT NULL,
    project TEXT NOT NULL,
    user TEXT NOT NULL,
    name TEXT NOT NULL,
    task_group TEXT,
    service TEXT,
    ended_at_ms INTEGER,
    body BLOB NOT NULL
);
CREATE INDEX tasks_live ON tasks (id) WHERE live = 1;
CREATE INDEX tasks_revision ON tasks (revision);
CREATE INDEX tasks_group ON tasks (task_group, revision) WHERE task_group IS NOT NULL;
CREATE INDEX tasks_project ON tasks (project, id);
CREATE INDEX tasks_user ON tasks (user, id);
CREATE INDEX tasks_name ON tasks (name, id);
CREATE INDEX tasks_service ON tasks (service, id) WHERE service IS NOT NULL;
CREATE INDEX tasks_ended ON tasks (ended_at_ms) WHERE live = 0;

CREATE TABLE labels (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    task TEXT NOT NULL,
    PRIMARY KEY (name, value, task)
) WITHOUT ROWID;
CREATE INDEX labels_task ON labels (task);

CREATE TABLE allocations (
    id TEXT NOT NULL PRIMARY KEY,
    task TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    live INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX allocations_task ON allocations (task, attempt);

CREATE TABLE submit_keys (
    key TEXT NOT NULL,
    user TEXT NOT NULL,
    task TEXT NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (key, user)
) WITHOUT ROWID;
CREATE INDEX submit_keys_task ON submit_keys (task);

CREATE TABLE events (
    sequence INTEGER PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    subject TEXT NOT NULL,
    id TEXT NOT NULL,
    task_group TEXT,
    body BLOB NOT NULL
);
CREATE INDEX events_of ON events (subject, id, sequence);
CREATE INDEX events_group ON events (task_group, sequence) WHERE task_group IS NOT NULL;
CREATE INDEX events_at ON events (at_ms);

CREATE TABLE usage (
    allocation TEXT NOT NULL PRIMARY KEY,
    from_ms INTEGER NOT NULL,
    to_ms INTEGER NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX usage_to ON usage (to_ms);
