package api

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// TemplateRequest asks for a build of a template. Its team need not have a key, but has to be there.
type TemplateRequest struct {
	builds.Request
	// Plan says what is to be built, unless it is the disk of Sandbox, one of the team's that runs.
	Plan    builds.Plan `json:"plan"`
	Sandbox string      `json:"sandbox,omitempty"`
}

// BuildID names a build and its template.
type BuildID struct {
	Template string `json:"template"`
	Build    string `json:"build"`
}

// Template is what is known of a template.
type Template struct {
	ID        string     `json:"id"`
	Team      string     `json:"team"`
	Names     []string   `json:"names"`
	Public    bool       `json:"public"`
	Created   time.Time  `json:"created"`
	Updated   time.Time  `json:"updated"`
	Spawned   *time.Time `json:"spawned,omitempty"`  // when a sandbox was last made of it
	Sandboxes int64      `json:"sandboxes"`          // that were ever made of it
	Outdated  string     `json:"outdated,omitempty"` // why another build of what a tag stands for wouldn't be the same
	Tags      []Tag      `json:"tags"`
	Builds    []Build    `json:"builds"` // newest first; of a list, the newest
}

// Tag is what stands for a build.
type Tag struct {
	Name     string    `json:"name"`
	Build    string    `json:"build"`
	Assigned time.Time `json:"assigned"`
}

// Build is one of a template's.
type Build struct {
	ID       string          `json:"id"`
	State    db.JobState     `json:"state"`
	Created  time.Time       `json:"created"`
	Finished *time.Time      `json:"finished,omitempty"`
	CPUs     int             `json:"cpus"`
	MemoryMB int             `json:"memory_mb"`
	DiskMB   int             `json:"disk_mb"`
	Tags     []string        `json:"tags,omitempty"` // that were to stand for it
	Envd     string          `json:"envd,omitempty"` // its version
	Plan     *builds.Plan    `json:"plan,omitempty"`
	Product  *builds.Product `json:"product,omitempty"`
	Reason   *builds.Reason  `json:"reason,omitempty"`
}

// Progress is what a build has told, and what has become of it.
type Progress struct {
	State  db.JobState    `json:"state"`
	Lines  []builds.Line  `json:"lines"`
	Reason *builds.Reason `json:"reason,omitempty"`
}

// Done tells whether it has told all.
func (p Progress) Done() bool { return p.State == db.JobReady || p.State == db.JobError }

type (
	offsetRequest struct {
		Offset int `json:"offset"`
	}
	rebuildRequest struct {
		Outdated bool `json:"outdated"` // only if it is
	}
)

// followLines is how many lines of a build's log are told at once, and followTime how long a client waits for them in one request.
const (
	followLines = 1000
	followTime  = 30 * time.Second
)

// OpenTemplates has the service make templates.
func (s *Service) OpenTemplates(b *builds.Service) { s.builds.Store(b) }

// templates are routes, by pattern.
func (s *Service) templates(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/templates", withBuilds(s, func(r *http.Request, b *builds.Service, _ nothing) ([]Template, error) {
		return listTemplates(r.Context(), b)
	}))
	mux.HandleFunc("POST /v1/templates", withBuilds(s, func(r *http.Request, b *builds.Service, in TemplateRequest) (BuildID, error) {
		return build(r.Context(), b, in)
	}))
	mux.HandleFunc("GET /v1/templates/{team}/{name}", withBuilds(s, func(r *http.Request, b *builds.Service, _ nothing) (Template, error) {
		return inspectTemplate(r.Context(), b, r.PathValue("team"), r.PathValue("name"))
	}))
	mux.HandleFunc("DELETE /v1/templates/{team}/{name}", withBuilds(s, func(r *http.Request, b *builds.Service, _ nothing) (nothing, error) {
		return nothing{}, b.Delete(r.Context(), r.PathValue("team"), r.PathValue("name"))
	}))
	mux.HandleFunc("POST /v1/templates/{team}/{name}/rebuild", withBuilds(s, func(r *http.Request, b *builds.Service, in rebuildRequest) (BuildID, error) {
		ref, err := db.ParseRef(r.PathValue("name"))
		if err != nil {
			return BuildID{}, err
		}
		made, err := b.Rebuild(r.Context(), r.PathValue("team"), ref, in.Outdated)
		return BuildID{made.Template, made.Build}, err
	}))
	mux.HandleFunc("POST /v1/builds/{build}/cancel", withBuilds(s, func(r *http.Request, b *builds.Service, _ nothing) (nothing, error) {
		return nothing{}, b.Cancel(r.Context(), r.PathValue("build"))
	}))
	mux.HandleFunc("POST /v1/builds/{build}/log", withBuilds(s, func(r *http.Request, b *builds.Service, in offsetRequest) (Progress, error) {
		ctx, cancel := context.WithTimeout(r.Context(), followTime)
		defer cancel()
		seen, lines, err := b.Follow(ctx, r.PathValue("build"), max(in.Offset, 0), followLines)
		if ctx.Err() != nil && r.Context().Err() == nil { // it may ask again
			return Progress{State: db.JobBuilding, Lines: []builds.Line{}}, nil
		}
		p := Progress{State: seen.State, Lines: lines, Reason: seen.Reason}
		if len(lines) == followLines && p.Done() { // there may be more
			p.State, p.Reason = db.JobBuilding, nil
		}
		return p, err
	}))
}

// withBuilds serves requests that need the builds of templates.
func withBuilds[In, Out any](s *Service, f func(*http.Request, *builds.Service, In) (Out, error)) http.HandlerFunc {
	return serve(func(r *http.Request, in In) (out Out, err error) {
		b := s.builds.Load()
		if b == nil {
			return out, errNotReady
		}
		return f(r, b, in)
	})
}

// build asks for a build and says what it is to be of.
func build(ctx context.Context, b *builds.Service, r TemplateRequest) (BuildID, error) {
	ask := b.Ask
	if r.Sandbox != "" {
		ask = func(ctx context.Context, of builds.Request, _ builds.Plan) (builds.Created, error) {
			return b.OfSandbox(ctx, of, r.Sandbox)
		}
	}
	made, err := ask(ctx, r.Request, r.Plan)
	if err != nil {
		return BuildID{}, err
	}
	return BuildID{made.Template, made.Build}, nil
}

func listTemplates(ctx context.Context, b *builds.Service) ([]Template, error) {
	all, err := b.Templates(ctx)
	if err != nil {
		return nil, err
	}
	list := []Template{}
	for _, t := range all {
		one, err := templateOf(ctx, b, t)
		if err != nil {
			return nil, err
		}
		one.Builds = one.Builds[:min(len(one.Builds), 1)]
		list = append(list, one)
	}
	return list, nil
}

func inspectTemplate(ctx context.Context, b *builds.Service, team, name string) (Template, error) {
	ref, err := db.ParseRef(name)
	if err != nil {
		return Template{}, err
	}
	t, err := b.Template(ctx, team, ref)
	if err != nil {
		return Template{}, err
	}
	return templateOf(ctx, b, t)
}

func templateOf(ctx context.Context, b *builds.Service, of builds.Template) (Template, error) {
	t := Template{ID: of.ID, Team: of.Team, Names: of.Names, Public: of.Public, Created: of.CreatedAt, Updated: of.UpdatedAt, Sandboxes: of.Spawns, Spawned: timeOrNil(of.SpawnedAt), Tags: []Tag{}, Builds: []Build{}}
	for _, tag := range of.Tags {
		t.Tags = append(t.Tags, Tag{tag.Name, tag.Build, tag.AssignedAt})
	}
	for _, one := range of.Builds {
		k := Build{ID: one.ID, State: one.State, Created: one.CreatedAt, Finished: timeOrNil(one.FinishedAt), CPUs: one.CPUs, MemoryMB: one.MemoryMB, DiskMB: one.DiskMB,
			Tags: one.Tags, Envd: one.EnvdVersion, Plan: one.Plan, Product: one.Product, Reason: one.Reason}
		t.Builds = append(t.Builds, k)
		if t.Outdated != "" || !slices.ContainsFunc(t.Tags, func(tag Tag) bool { return tag.Build == one.ID }) {
			continue
		}
		var err error
		if t.Outdated, err = b.Outdated(ctx, one); err != nil {
			return Template{}, err
		}
	}
	return t, nil
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// Build asks for a build of a template.
func (c *Client) Build(ctx context.Context, r TemplateRequest) (id BuildID, err error) {
	err = control.Send(ctx, c.socket, http.MethodPost, Root+"templates", r, &id)
	return id, err
}

// Rebuild asks for another build of what a template's tag stands for; with outdated only if it wouldn't be the same, otherwise there
// is none.
func (c *Client) Rebuild(ctx context.Context, team, name string, outdated bool) (id BuildID, err error) {
	path, err := templatePath(team, name)
	if err != nil {
		return id, err
	}
	err = control.Send(ctx, c.socket, http.MethodPost, path+"/rebuild", rebuildRequest{outdated}, &id)
	return id, err
}

// BuildLog waits until a build has told more than the first offset lines, or has ended.
func (c *Client) BuildLog(ctx context.Context, build string, offset int) (p Progress, err error) {
	if err := validID(build); err != nil {
		return p, err
	}
	err = control.Send(ctx, c.socket, http.MethodPost, Root+"builds/"+build+"/log", offsetRequest{offset}, &p)
	return p, err
}

// CancelBuild gives a build up and waits until nothing of it is left.
func (c *Client) CancelBuild(ctx context.Context, build string) error {
	if err := validID(build); err != nil {
		return err
	}
	return control.Send(ctx, c.socket, http.MethodPost, Root+"builds/"+build+"/cancel", nothing{}, nil)
}

// Templates lists all teams' templates, each with its newest build, the newest first.
func (c *Client) Templates(ctx context.Context) (list []Template, err error) {
	err = control.Ask(ctx, c.socket, http.MethodGet, Root+"templates", nil, &list)
	return list, err
}

// Template tells of a team's template.
func (c *Client) Template(ctx context.Context, team, name string) (t Template, err error) {
	path, err := templatePath(team, name)
	if err != nil {
		return t, err
	}
	err = control.Ask(ctx, c.socket, http.MethodGet, path, nil, &t)
	return t, err
}

// DeleteTemplate deletes a team's template, or a tag of it.
func (c *Client) DeleteTemplate(ctx context.Context, team, name string) error {
	path, err := templatePath(team, name)
	if err != nil {
		return err
	}
	return control.Ask(ctx, c.socket, http.MethodDelete, path, nil, nil)
}

// templatePath is where a template is. What can't be one is no part of a path.
func templatePath(team, name string) (string, error) {
	if _, err := db.ParseRef(team + "/" + name); err != nil {
		return "", err
	}
	return Root + "templates/" + team + "/" + name, nil
}
