package e2b

import (
	"context"
	"net/http"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Templates knows what sandboxes can be made of: a db.DB. What a team may not use isn't found.
type Templates interface {
	Template(ctx context.Context, team string, r db.Ref) (db.Template, error)
	Templates(ctx context.Context, team string, p db.Page) ([]db.Template, error)
	// Builds are those of a template, by its id, newest first.
	Builds(ctx context.Context, template string) ([]db.BuildInfo, error)
	Tags(ctx context.Context, template string) ([]db.Tag, error)
}

// buildStatus is a build's state as E2B calls it: one that waits for its turn waits.
func buildStatus(s db.JobState) string {
	if s == db.JobQueued {
		s = db.JobWaiting
	}
	return string(s)
}

type templateBody struct {
	TemplateID    string     `json:"templateID"`
	BuildID       string     `json:"buildID"`
	CPUCount      int        `json:"cpuCount"`
	MemoryMB      int        `json:"memoryMB"`
	DiskSizeMB    int        `json:"diskSizeMB"`
	Public        bool       `json:"public"`
	Aliases       []string   `json:"aliases"`
	Names         []string   `json:"names"`
	CreatedAt     time.Time  `json:"createdAt"`
	UpdatedAt     time.Time  `json:"updatedAt"`
	CreatedBy     *struct{}  `json:"createdBy"` // keys are a team's, not a user's
	LastSpawnedAt *time.Time `json:"lastSpawnedAt"`
	SpawnCount    int64      `json:"spawnCount"`
	BuildCount    int        `json:"buildCount"`
	EnvdVersion   string     `json:"envdVersion"`
	BuildStatus   string     `json:"buildStatus"`
}

func template(t db.Template, newest db.BuildInfo) templateBody {
	aliases, names := namesOf(t)
	return templateBody{
		TemplateID: t.ID, BuildID: newest.ID, CPUCount: newest.CPUs, MemoryMB: newest.MemoryMB, DiskSizeMB: newest.DiskMB,
		Public: t.Public, Aliases: aliases, Names: names, CreatedAt: t.CreatedAt.UTC(), UpdatedAt: t.UpdatedAt.UTC(),
		LastSpawnedAt: timeOrNull(t.SpawnedAt), SpawnCount: t.Spawns, BuildCount: t.Builds,
		EnvdVersion: newest.EnvdVersion, BuildStatus: buildStatus(newest.State),
	}
}

// namesOf are a template's names without and with the team.
func namesOf(t db.Template) (aliases, names []string) {
	aliases, names = []string{}, []string{}
	for _, n := range t.Names {
		aliases, names = append(aliases, n), append(names, db.Ref{Team: t.Team, Name: n}.String())
	}
	return aliases, names
}

func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

// page is a page of templates, and where the next one begins.
func (s *Server) page(c *call, after lifecycle.Cursor, limit int) (bodies []templateBody, next lifecycle.Cursor, err error) {
	// One more tells whether there is a next page.
	page, err := s.templates.Templates(c.ctx, c.team, db.Page{After: after.At, AfterID: after.ID, Limit: limit + 1})
	if err != nil {
		return nil, next, err
	}
	if len(page) > limit {
		page = page[:limit]
		next = lifecycle.Cursor{At: page[limit-1].CreatedAt, ID: page[limit-1].ID}
	}
	bodies = []templateBody{}
	for _, t := range page {
		builds, err := s.templates.Builds(c.ctx, t.ID)
		if err != nil {
			return nil, next, err
		}
		if len(builds) > 0 { // or it has been deleted since
			bodies = append(bodies, template(t, builds[0]))
		}
	}
	return bodies, next, nil
}

func (s *Server) listTemplates(c *call) (answer, error) {
	limit := int(c.query.number("limit", maxPage, 1, maxPage))
	l := listOf("templates", c.team)
	after, err := l.place(c.query.text("nextToken"))
	c.note(err)
	ownTeam(c)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	bodies, next, err := s.page(c, after, limit)
	if err != nil {
		return answer{}, err
	}
	return ok(bodies).with(nextHeader, l.cursor(next)), nil
}

// listTemplatesV1 is all of them at once.
func (s *Server) listTemplatesV1(c *call) (answer, error) {
	ownTeam(c)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	all := []templateBody{}
	var after lifecycle.Cursor
	for {
		bodies, next, err := s.page(c, after, maxPage)
		if err != nil {
			return answer{}, err
		}
		if all = append(all, bodies...); next == (lifecycle.Cursor{}) {
			return ok(all), nil
		}
		after = next
	}
}

// ownTeam refuses to list another team's.
func ownTeam(c *call) {
	if t := c.query.text("teamID"); t != "" && t != c.team {
		c.note(fail(http.StatusForbidden, "teamID: the key isn't one of team %s", quote(t)))
	}
}

type buildBody struct {
	BuildID     string     `json:"buildID"`
	Status      string     `json:"status"`
	CreatedAt   time.Time  `json:"createdAt"`
	UpdatedAt   time.Time  `json:"updatedAt"`
	FinishedAt  *time.Time `json:"finishedAt,omitempty"`
	CPUCount    int        `json:"cpuCount"`
	MemoryMB    int        `json:"memoryMB"`
	DiskSizeMB  int        `json:"diskSizeMB"`
	EnvdVersion string     `json:"envdVersion,omitempty"`
}

type templateBuildsBody struct {
	TemplateID    string      `json:"templateID"`
	Public        bool        `json:"public"`
	Aliases       []string    `json:"aliases"`
	Names         []string    `json:"names"`
	CreatedAt     time.Time   `json:"createdAt"`
	UpdatedAt     time.Time   `json:"updatedAt"`
	LastSpawnedAt *time.Time  `json:"lastSpawnedAt"`
	SpawnCount    int64       `json:"spawnCount"`
	Builds        []buildBody `json:"builds"`
}

// find is the template of a name or id. field is what an error names.
func (s *Server) find(c *call, field, name string) (db.Template, error) {
	ref, err := parseRef(field, name)
	c.note(err)
	if err := c.checked(); err != nil {
		return db.Template{}, err
	}
	return s.templates.Template(c.ctx, c.team, ref)
}

func (s *Server) getTemplate(c *call) (answer, error) {
	limit := int(c.query.number("limit", maxPage, 1, maxPage))
	l := listOf("builds", c.path("templateID"))
	after, err := l.place(c.query.text("nextToken"))
	c.note(err)
	t, err := s.find(c, "templateID", c.path("templateID"))
	if err != nil {
		return answer{}, err
	}
	builds, err := s.templates.Builds(c.ctx, t.ID)
	if err != nil {
		return answer{}, err
	}
	aliases, names := namesOf(t)
	body := templateBuildsBody{
		TemplateID: t.ID, Public: t.Public, Aliases: aliases, Names: names, CreatedAt: t.CreatedAt.UTC(), UpdatedAt: t.UpdatedAt.UTC(),
		LastSpawnedAt: timeOrNull(t.SpawnedAt), SpawnCount: t.Spawns, Builds: []buildBody{},
	}
	next := ""
	for _, b := range builds {
		if after.ID != "" && !b.CreatedAt.Before(after.At) && (b.CreatedAt.After(after.At) || b.ID >= after.ID) {
			continue
		}
		if len(body.Builds) == limit {
			last := body.Builds[limit-1]
			next = l.cursor(lifecycle.Cursor{At: last.CreatedAt, ID: last.BuildID})
			break
		}
		body.Builds = append(body.Builds, buildBody{
			BuildID: b.ID, Status: buildStatus(b.State), CreatedAt: b.CreatedAt.UTC(), UpdatedAt: b.UpdatedAt.UTC(), FinishedAt: timeOrNull(b.FinishedAt),
			CPUCount: b.CPUs, MemoryMB: b.MemoryMB, DiskSizeMB: b.DiskMB, EnvdVersion: b.EnvdVersion,
		})
	}
	return ok(body).with(nextHeader, next), nil
}

type aliasBody struct {
	TemplateID string `json:"templateID"`
	Public     bool   `json:"public"`
}

// ofTemplate is templates/aliases/ALIAS or templates/TEMPLATE/tags, which a mux can't have both.
func (s *Server) ofTemplate(c *call) (answer, error) {
	switch first, second := c.path("templateID"), c.path("of"); {
	case first == "aliases":
		return s.alias(c, second)
	case second == "tags":
		return s.tags(c, first)
	}
	return answer{}, fail(http.StatusNotFound, "of a template there is only /tags")
}

func (s *Server) alias(c *call, name string) (answer, error) {
	t, err := s.find(c, "alias", name)
	if err != nil {
		return answer{}, err
	}
	return ok(aliasBody{t.ID, t.Public}), nil
}

type tagBody struct {
	Tag       string    `json:"tag"`
	BuildID   string    `json:"buildID"`
	CreatedAt time.Time `json:"createdAt"`
}

func (s *Server) tags(c *call, template string) (answer, error) {
	t, err := s.find(c, "templateID", template)
	if err != nil {
		return answer{}, err
	}
	tags, err := s.templates.Tags(c.ctx, t.ID)
	if err != nil {
		return answer{}, err
	}
	bodies := make([]tagBody, 0, len(tags))
	for _, t := range tags {
		bodies = append(bodies, tagBody{t.Name, t.Build, t.AssignedAt.UTC()})
	}
	return ok(bodies), nil
}

// deleteTemplate deletes a template or snapshot of the team's own.
func (s *Server) deleteTemplate(c *call) (answer, error) {
	ref, err := parseRef("templateID", c.path("templateID"))
	c.note(err)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.builds.Delete(c.ctx, c.team, ref.String())
}
