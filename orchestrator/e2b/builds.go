package e2b

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// Builds has templates be built and changed: a builds.Service. What a team may not use isn't found; what it may use that is another
// team's is errdefs.ErrPermissionDenied.
type Builds interface {
	Create(ctx context.Context, r builds.Request) (builds.Created, error)
	// Start says what is to be built. A build that has been told already is errdefs.ErrFailedPrecondition.
	Start(ctx context.Context, team string, of db.Ref, id string, p builds.Plan, registry *templates.Registry) error
	Find(ctx context.Context, team string, of db.Ref, id string) (builds.Build, error)
	Lines(ctx context.Context, id string, q builds.LogQuery) ([]builds.Line, error)
	// Link is where a file may be uploaded, as a path with a query, and Upload does that.
	Link(ctx context.Context, team string, of db.Ref, sum string) (present bool, path string, err error)
	Upload(ctx context.Context, template, sum string, query url.Values, body io.Reader, size int64) error
	// Delete deletes a snapshot or template of the team's own. That sandboxes are made of it is errdefs.ErrInvalidArgument.
	Delete(ctx context.Context, team, id string) error
	SetPublic(ctx context.Context, team string, of db.Ref, public bool) (db.Template, error)
	AddTags(ctx context.Context, team string, of db.Ref, tags []string) (build string, err error)
	RemoveTags(ctx context.Context, team string, of db.Ref, tags []string) error
}

type createdBuildBody struct {
	TemplateID string   `json:"templateID"`
	BuildID    string   `json:"buildID"`
	Public     bool     `json:"public"`
	Names      []string `json:"names"`
	Tags       []string `json:"tags"`
	Aliases    []string `json:"aliases"`
}

// create has a build of a template be written down.
func (s *Server) readBuild(c *call, name string, r builds.Request) (builds.Created, error) {
	b := c.body
	r.Team = c.team
	r.CPUs, r.MemoryMB = b.Int("cpuCount", 0, 1, maxInt), b.Int("memoryMB", 0, 1, maxInt)
	if t := b.String("teamID"); t != "" && t != c.team {
		c.note(fail(http.StatusForbidden, "teamID: the key isn't one of team %s", quote(t)))
	}
	if b.Has(name) {
		ref, err := parseRef(name, b.String(name))
		c.note(err)
		r.Name = ref.String()
	}
	if err := c.checked(); err != nil {
		return builds.Created{}, err
	}
	return s.builds.Create(c.ctx, r)
}

// maxInt leaves a bound to whoever knows it.
const maxInt = 1<<31 - 1

// createBuild has a build of a template be asked for, which Start goes on with.
func (s *Server) createBuild(c *call) (answer, error) {
	b := c.body
	name := "name"
	switch {
	case b.Has("name") && b.Has("alias"):
		b.Fail("alias", "it is the former word for name, which there is, too")
	case b.Has("alias"):
		name = "alias"
	default:
		b.Require("name")
	}
	made, err := s.readBuild(c, name, builds.Request{Tags: b.Strings("tags"), FreeDiskMB: b.Int("minFreeDiskMb", 0, 0, maxInt)})
	if err != nil {
		return answer{}, err
	}
	return taken(createdBuildBody{
		TemplateID: made.Template, BuildID: made.Build, Public: made.Public, Tags: made.Tags,
		Names: []string{db.Ref{Team: c.team, Name: made.Name}.String()}, Aliases: []string{made.Name},
	}), nil
}

// createBuildV2 is what SDKs before tags have asked.
func (s *Server) createBuildV2(c *call) (answer, error) {
	c.body.Require("alias")
	made, err := s.readBuild(c, "alias", builds.Request{})
	if err != nil {
		return answer{}, err
	}
	t, err := s.templates.Template(c.ctx, c.team, db.Ref{Name: made.Template})
	if err != nil {
		return answer{}, err
	}
	body := template(t, db.BuildInfo{ID: made.Build, State: db.JobWaiting, CPUs: made.CPUs, MemoryMB: made.MemoryMB, DiskMB: made.DiskMB})
	return taken(body), nil
}

type linkBody struct {
	Present bool   `json:"present"`
	URL     string `json:"url"`
}

// uploadLink tells where files of a step are uploaded, whether they are there already or not.
func (s *Server) uploadLink(c *call) (answer, error) {
	ref, err := parseRef("templateID", c.path("templateID"))
	c.note(err)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	present, path, err := s.builds.Link(c.ctx, c.team, ref, c.path("hash"))
	if err != nil {
		return answer{}, err
	}
	return created(linkBody{present, c.at + path}), nil
}

// startBuild says what a build is to be of.
func (s *Server) startBuild(c *call) (answer, error) {
	ref, err := parseRef("templateID", c.path("templateID"))
	c.note(err)
	p, registry := readPlan(c)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return taken(nil), s.builds.Start(c.ctx, c.team, ref, c.path("buildID"), p, registry)
}

// readyByDefault is when what runs in a template is ready whose client says nothing of that.
const readyByDefault = "sleep 20"

func readPlan(c *call) (p builds.Plan, registry *templates.Registry) {
	b := c.body
	p = builds.Plan{Image: b.String("fromImage"), Template: b.String("fromTemplate"), Run: b.String("startCmd"), Ready: b.String("readyCmd"), Force: b.Bool("force", false)}
	if p.Run != "" && p.Ready == "" {
		p.Ready = readyByDefault
	}
	for _, o := range b.Objects("steps") {
		o.Require("type")
		p.Steps = append(p.Steps, templates.Step{
			Type: templates.StepType(o.String("type")), Args: o.Strings("args"), Files: o.String("filesHash"), Force: o.Bool("force", false),
		})
		// How the client was to make the upload: SDKs tell that, too.
		for _, name := range []string{"forceUpload", "resolveSymlinks", "gzip"} {
			o.Bool(name, false)
		}
	}
	o := b.Object("fromImageRegistry")
	if !b.Has("fromImageRegistry") {
		return p, nil
	}
	o.Require("type")
	need := func(name string) string {
		o.Require(name)
		return o.String(name)
	}
	switch t := o.String("type"); t {
	case "registry":
		return p, &templates.Registry{User: need("username"), Password: need("password")}
	case "gcp": // as Google's registries take the key of a service account
		return p, &templates.Registry{User: "_json_key", Password: need("serviceAccountJson")}
	case "aws":
		for _, name := range []string{"awsAccessKeyId", "awsSecretAccessKey", "awsRegion"} {
			o.String(name)
		}
		o.Fail("type", "%s isn't supported here: type registry is, with the user AWS and a password of `aws ecr get-login-password`", quote(t))
	default:
		o.Fail("type", "%s isn't one of registry, gcp", quote(t))
	}
	return p, nil
}

type logEntryBody struct {
	Timestamp time.Time       `json:"timestamp"`
	Message   string          `json:"message"`
	Level     lifecycle.Level `json:"level"`
	Step      string          `json:"step,omitempty"`
}

type reasonBody struct {
	Message    string         `json:"message"`
	Step       string         `json:"step,omitempty"`
	LogEntries []logEntryBody `json:"logEntries"`
}

type buildStatusBody struct {
	TemplateID string         `json:"templateID"`
	BuildID    string         `json:"buildID"`
	Status     string         `json:"status"`
	Logs       []string       `json:"logs"`
	LogEntries []logEntryBody `json:"logEntries"`
	Reason     *reasonBody    `json:"reason,omitempty"`
}

// readLogQuery reads what is asked for of a build's log by both its routes.
func readLogQuery(c *call) builds.LogQuery {
	return builds.LogQuery{
		Limit: int(c.query.number("limit", maxPage, 0, maxPage)),
		Level: lifecycle.Level(c.query.choice("level", "", "debug", "info", "warn", "error")),
	}
}

// findBuild finds the build in the call's path.
func (s *Server) findBuild(c *call) (builds.Build, error) {
	ref, err := parseRef("templateID", c.path("templateID"))
	c.note(err)
	if err := c.checked(); err != nil {
		return builds.Build{}, err
	}
	return s.builds.Find(c.ctx, c.team, ref, c.path("buildID"))
}

func (s *Server) buildStatus(c *call) (answer, error) {
	q := readLogQuery(c)
	q.Offset = int(c.query.number("logsOffset", 0, 0, maxInt))
	// What it has told is read after how it is: an end that is told comes with all of that.
	b, err := s.findBuild(c)
	if err != nil {
		return answer{}, err
	}
	entries, err := s.entries(c, b.ID, q)
	if err != nil {
		return answer{}, err
	}
	body := buildStatusBody{TemplateID: b.Template, BuildID: b.ID, Status: buildStatus(b.State), Logs: []string{}, LogEntries: entries}
	for _, e := range entries {
		body.Logs = append(body.Logs, e.Message)
	}
	if r := b.Reason; r != nil {
		body.Reason = &reasonBody{Message: r.Message, Step: r.Step, LogEntries: []logEntryBody{}}
		for _, line := range r.Last {
			body.Reason.LogEntries = append(body.Reason.LogEntries, logEntryBody{b.FinishedAt.UTC(), line, lifecycle.Error, r.Step})
		}
	}
	return ok(body), nil
}

func (s *Server) buildLogs(c *call) (answer, error) {
	q := readLogQuery(c)
	q.From = c.query.milliseconds("cursor")
	q.Backward = c.query.choice("direction", "forward", "backward") == "backward"
	c.query.choice("source", "", "temporary", "persistent") // they are in one place
	b, err := s.findBuild(c)
	if err != nil {
		return answer{}, err
	}
	entries, err := s.entries(c, b.ID, q)
	if err != nil {
		return answer{}, err
	}
	return ok(map[string]any{"logs": entries}), nil
}

func (s *Server) entries(c *call, build string, q builds.LogQuery) ([]logEntryBody, error) {
	lines, err := s.builds.Lines(c.ctx, build, q)
	if err != nil {
		return nil, err
	}
	entries := make([]logEntryBody, 0, len(lines))
	for _, l := range lines {
		entries = append(entries, logEntryBody{l.At.UTC(), l.Message, l.Level, l.Step})
	}
	return entries, nil
}
