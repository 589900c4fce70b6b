package e2b

import (
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

type snapshotBody struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

func snapshot(s lifecycle.Snapshot) snapshotBody {
	names := s.Names
	if names == nil {
		names = []string{}
	}
	return snapshotBody{s.ID, names}
}

// save makes a snapshot of a sandbox, which goes on.
func (s *Server) save(c *call, id string) (answer, error) {
	name := c.body.String("name")
	if c.body.Has("name") {
		ref, err := parseRef("name", name)
		if err == nil && ref.Team != "" && ref.Team != c.team {
			err = invalid("name: %s is of another team", quote(name))
		}
		c.note(err)
		ref.Team = ""
		name = ref.String()
	}
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	made, err := s.engine.Snapshot(c.ctx, c.team, id, name)
	if err != nil {
		return answer{}, err
	}
	return created(snapshot(made)), nil
}

// rollback puts a sandbox back to a snapshot of itself.
func (s *Server) rollback(c *call, id string) (answer, error) {
	c.body.Require("snapshotID")
	var to string
	if c.body.Has("snapshotID") {
		ref, err := parseRef("snapshotID", c.body.String("snapshotID"))
		c.note(err)
		to = ref.String()
	}
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.Rollback(c.ctx, c.team, id, to)
}

func (s *Server) snapshots(c *call) (answer, error) {
	q := c.query
	f := lifecycle.SnapshotFilter{Sandbox: q.text("sandboxID"), Name: q.text("name"), Limit: int(q.number("limit", maxPage, 1, maxPage))}
	var err error
	if f.Sandbox != "" {
		f.Sandbox, err = parseSandboxID("sandboxID", f.Sandbox)
		c.note(err)
	}
	if f.Name != "" {
		ref, err := parseRef("name", f.Name)
		c.note(err)
		f.Name = ref.String()
	}
	of := f
	of.Limit = 0
	l := listOf("snapshots", of)
	f.After, err = l.place(q.text("nextToken"))
	c.note(err)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	page, next, err := s.engine.Snapshots(c.ctx, c.team, f)
	if err != nil {
		return answer{}, err
	}
	bodies := make([]snapshotBody, 0, len(page))
	for _, one := range page {
		bodies = append(bodies, snapshot(one))
	}
	return ok(bodies).with(nextHeader, l.cursor(next)), nil
}
