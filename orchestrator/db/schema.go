package db

// migrations are the schema's versions, the first to begin with. One that was released is never changed.
var migrations = []string{`
CREATE TABLE teams (
	id TEXT PRIMARY KEY CHECK (id GLOB '[a-z0-9]*' AND id NOT GLOB '*[^a-z0-9_-]*' AND length(id) <= 64),
	created INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
	id TEXT PRIMARY KEY,
	team TEXT NOT NULL REFERENCES teams,
	hash BLOB NOT NULL UNIQUE CHECK (length(hash) = 32), -- SHA-256 of the key
	prefix TEXT NOT NULL, -- what may be shown of it
	suffix TEXT NOT NULL,
	created INTEGER NOT NULL,
	used INTEGER NOT NULL DEFAULT 0,
	revoked INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE templates (
	id TEXT PRIMARY KEY,
	team TEXT NOT NULL REFERENCES teams,
	public INTEGER NOT NULL CHECK (public IN (0, 1)),
	snapshot INTEGER NOT NULL CHECK (snapshot IN (0, 1)), -- of sandboxes
	created INTEGER NOT NULL,
	updated INTEGER NOT NULL,
	spawned INTEGER NOT NULL DEFAULT 0,
	spawns INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX templates_of ON templates (team, snapshot, created, id);

CREATE TABLE names (
	team TEXT NOT NULL REFERENCES teams,
	name TEXT NOT NULL,
	template TEXT NOT NULL REFERENCES templates ON DELETE CASCADE,
	PRIMARY KEY (team, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX names_of ON names (template);

-- One without a template is being made, or nobody asks for it any more. It stays while sandboxes are of it.
CREATE TABLE builds (
	id TEXT PRIMARY KEY,
	template TEXT REFERENCES templates ON DELETE SET NULL,
	snapshot TEXT NOT NULL UNIQUE,
	origin TEXT NOT NULL, -- the sandbox that it is a snapshot of, or ''
	created INTEGER NOT NULL,
	cpus INTEGER NOT NULL,
	memory INTEGER NOT NULL, -- MiB
	disk INTEGER NOT NULL,   -- MiB
	settings TEXT NOT NULL CHECK (json_valid(settings))
) STRICT, WITHOUT ROWID;
CREATE INDEX builds_of ON builds (template, created);

CREATE TABLE tags (
	template TEXT NOT NULL REFERENCES templates ON DELETE CASCADE,
	tag TEXT NOT NULL,
	build TEXT NOT NULL REFERENCES builds,
	assigned INTEGER NOT NULL,
	PRIMARY KEY (template, tag)
) STRICT, WITHOUT ROWID;
CREATE INDEX tags_of ON tags (build);

CREATE TABLE sandboxes (
	id TEXT PRIMARY KEY,
	team TEXT NOT NULL REFERENCES teams,
	template TEXT NOT NULL,
	build TEXT NOT NULL REFERENCES builds,
	state TEXT NOT NULL,
	started INTEGER NOT NULL,
	deadline INTEGER NOT NULL,
	spec TEXT NOT NULL CHECK (json_valid(spec))
) STRICT, WITHOUT ROWID;
CREATE INDEX sandboxes_listed ON sandboxes (team, started, id, state);
CREATE INDEX sandboxes_in ON sandboxes (team, state);
CREATE INDEX sandboxes_of ON sandboxes (build);

CREATE TABLE metadata (
	sandbox TEXT NOT NULL REFERENCES sandboxes ON DELETE CASCADE,
	key TEXT NOT NULL,
	value TEXT NOT NULL,
	PRIMARY KEY (sandbox, key)
) STRICT, WITHOUT ROWID;

-- Why there is no sandbox of that id any more, if nobody asked for that.
CREATE TABLE ended (
	id TEXT PRIMARY KEY,
	team TEXT NOT NULL,
	at INTEGER NOT NULL,
	reason TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX ended_at ON ended (at);
`, `
-- Disks as they are after the steps of templates' builds.
CREATE TABLE layers (
	snapshot TEXT PRIMARY KEY,
	team TEXT NOT NULL REFERENCES teams,
	sum TEXT NOT NULL,
	bytes INTEGER NOT NULL DEFAULT 0,
	created INTEGER NOT NULL,
	used INTEGER NOT NULL,
	ready INTEGER NOT NULL DEFAULT 0 CHECK (ready IN (0, 1))
) STRICT, WITHOUT ROWID;
CREATE INDEX layers_of ON layers (team, sum);
`, `
-- Machines that are kept for sandboxes to come, by the ids that these are going to have.
CREATE TABLE members (
	id TEXT PRIMARY KEY,
	build TEXT NOT NULL REFERENCES builds,
	ready INTEGER NOT NULL CHECK (ready IN (0, 1)),
	created INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX members_of ON members (build);
`, `
ALTER TABLE teams ADD COLUMN closed INTEGER NOT NULL DEFAULT 0; -- it is being removed
ALTER TABLE builds ADD COLUMN team TEXT NOT NULL DEFAULT '';
ALTER TABLE builds ADD COLUMN key TEXT NOT NULL DEFAULT ''; -- the id of the one that has made it
UPDATE builds SET team = coalesce((SELECT team FROM templates WHERE id = builds.template), (SELECT team FROM sandboxes WHERE build = builds.id LIMIT 1), '');
CREATE INDEX builds_in ON builds (team);
`, `
-- What is asked for to be a build of a template, from then on, and what has become of it. It has the build's id.
CREATE TABLE build_jobs (
	id TEXT PRIMARY KEY,
	template TEXT NOT NULL REFERENCES templates ON DELETE CASCADE,
	team TEXT NOT NULL REFERENCES teams,
	state TEXT NOT NULL CHECK (state IN ('waiting', 'queued', 'building', 'ready', 'error')),
	created INTEGER NOT NULL,
	updated INTEGER NOT NULL,
	finished INTEGER NOT NULL DEFAULT 0,
	cpus INTEGER NOT NULL,
	memory INTEGER NOT NULL, -- MiB
	disk INTEGER NOT NULL,   -- MiB
	tags TEXT NOT NULL CHECK (json_valid(tags)),
	plan TEXT NOT NULL DEFAULT 'null' CHECK (json_valid(plan)),
	reason TEXT NOT NULL DEFAULT 'null' CHECK (json_valid(reason)),
	made TEXT NOT NULL DEFAULT 'null' CHECK (json_valid(made))
) STRICT, WITHOUT ROWID;
CREATE INDEX build_jobs_of ON build_jobs (template, created, id);
CREATE INDEX build_jobs_in ON build_jobs (state, team);

CREATE TABLE build_log (
	job TEXT NOT NULL REFERENCES build_jobs ON DELETE CASCADE,
	seq INTEGER NOT NULL, -- from 0 on
	at INTEGER NOT NULL,
	level INTEGER NOT NULL, -- 0 to 3
	step TEXT NOT NULL,
	message TEXT NOT NULL,
	PRIMARY KEY (job, seq)
) STRICT, WITHOUT ROWID;
`}
