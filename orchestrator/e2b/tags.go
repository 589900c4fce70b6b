package e2b

import (
	"fmt"
	"net/http"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// changeTemplate says whether all teams may use a template, and answers its names.
func (s *Server) changeTemplate(c *call) (answer, error) {
	t, err := s.publish(c)
	if err != nil {
		return answer{}, err
	}
	_, names := namesOf(t)
	return ok(map[string]any{"names": names}), nil
}

// changeTemplateV1 answers nothing.
func (s *Server) changeTemplateV1(c *call) (answer, error) {
	_, err := s.publish(c)
	return answer{status: http.StatusOK}, err
}

func (s *Server) publish(c *call) (db.Template, error) {
	ref, err := parseRef("templateID", c.path("templateID"))
	c.note(err)
	c.body.Require("public")
	public := c.body.Bool("public", false)
	if err := c.checked(); err != nil {
		return db.Template{}, err
	}
	return s.builds.SetPublic(c.ctx, c.team, ref, public)
}

type taggedBody struct {
	Tags    []string `json:"tags"`
	BuildID string   `json:"buildID"`
}

func (s *Server) addTags(c *call) (answer, error) {
	ref, tags, err := readTags(c, "target")
	if err != nil {
		return answer{}, err
	}
	build, err := s.builds.AddTags(c.ctx, c.team, ref, tags)
	if err != nil {
		return answer{}, err
	}
	return created(taggedBody{tags, build}), nil
}

func (s *Server) removeTags(c *call) (answer, error) {
	ref, tags, err := readTags(c, "name")
	if err != nil {
		return answer{}, err
	}
	if ref.Tag != "" {
		return answer{}, invalid("name: %s has a tag, and those that are removed are in tags", quote(ref.String()))
	}
	return done, s.builds.RemoveTags(c.ctx, c.team, ref, tags)
}

// maxTags bounds how many tags a request is about.
const maxTags = 100

// readTags reads tags, and the member that says of which template.
func readTags(c *call, of string) (ref db.Ref, tags []string, err error) {
	b := c.body
	b.Require(of)
	b.Require("tags")
	if b.Has(of) {
		ref, err = parseRef(of, b.String(of))
		c.note(err)
	}
	tags = b.Strings("tags")
	switch {
	case b.Has("tags") && len(tags) == 0:
		b.Fail("tags", "there are none")
	case len(tags) > maxTags:
		b.Fail("tags", "there are %d, there can be %d", len(tags), maxTags)
	}
	for i, t := range tags {
		if err := db.ParseTag(t); err != nil {
			c.note(fmt.Errorf("tags[%d]: %w", i, err))
		}
	}
	return ref, tags, c.checked()
}
