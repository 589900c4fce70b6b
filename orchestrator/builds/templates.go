package builds

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// Template is a template with all that is known of it.
type Template struct {
	db.Template
	Tags   []db.Tag
	Builds []Build // newest first
}

// Templates lists the templates of all teams, newest first.
func (s *Service) Templates(ctx context.Context) ([]Template, error) {
	all, err := s.db.AllTemplates(ctx)
	if err != nil {
		return nil, err
	}
	list := make([]Template, 0, len(all))
	for _, t := range all {
		one, err := s.whole(ctx, t)
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// Template tells of a template of the team's own.
func (s *Service) Template(ctx context.Context, team string, of db.Ref) (Template, error) {
	t, err := s.ownTemplate(ctx, team, of)
	if err != nil {
		return Template{}, err
	}
	return s.whole(ctx, t)
}

func (s *Service) whole(ctx context.Context, of db.Template) (t Template, err error) {
	t.Template = of
	if t.Tags, err = s.db.Tags(ctx, of.ID); err != nil {
		return t, err
	}
	infos, err := s.db.Builds(ctx, of.ID)
	if err != nil {
		return t, err
	}
	for _, info := range infos {
		b := madeOf(of, info)
		j, err := s.db.Job(ctx, info.ID)
		if err == nil {
			b, err = buildOf(j)
			b.EnvdVersion = info.EnvdVersion
		}
		if err != nil && !errdefs.IsNotFound(err) { // it was made otherwise
			return t, err
		}
		t.Builds = append(t.Builds, b)
	}
	return t, nil
}

// Outdated tells why another build of what a build that is ready is of would be another one, as far as that is known here; "" if it
// wouldn't.
func (s *Service) Outdated(ctx context.Context, b Build) (why string, err error) {
	if b.State != db.JobReady || b.Product == nil || b.Plan == nil || b.Plan.Sandbox != "" || b.Plan.Artefact != "" {
		return "", nil
	}
	if b.Product.Builder != s.Version {
		return fmt.Sprintf("it was made by %s, and this is %s", b.Product.Builder, s.Version), nil
	}
	if b.Plan.Image != "" {
		digest, err := s.Digest(ctx, b.Plan.Image)
		if errdefs.IsNotFound(err) { // it isn't known before it is pulled
			return "", nil
		}
		if err == nil && digest != b.Product.Digest {
			why = fmt.Sprintf("image %s is another one since", b.Plan.Image)
		}
		return why, err
	}
	ref, err := db.ParseRef(b.Plan.Template)
	if err != nil {
		return "", err
	}
	_, base, err := s.db.Resolve(ctx, b.Team, ref)
	switch {
	case errdefs.IsNotFound(err):
		return "", nil // there is nothing that it could be made of
	case err == nil && base.ID != b.Product.Base:
		why = fmt.Sprintf("template %s has another build since", b.Plan.Template)
	}
	return why, err
}

// Rebuild asks for another build of what a tag of a template of the team's own stands for. With outdated it does so only if that
// would be another one; otherwise there is none.
func (s *Service) Rebuild(ctx context.Context, team string, of db.Ref, outdated bool) (Created, error) {
	t, err := s.ownTemplate(ctx, team, of)
	if err != nil {
		return Created{}, err
	}
	_, current, err := s.db.Resolve(ctx, team, db.Ref{Team: t.Team, Name: t.ID, Tag: of.Tag})
	if errdefs.IsNotFound(err) {
		return Created{}, of.NotFound()
	}
	if err != nil {
		return Created{}, err
	}
	j, err := s.db.Job(ctx, current.ID)
	if err != nil && !errdefs.IsNotFound(err) {
		return Created{}, err
	}
	b := Build{}
	if err == nil {
		if b, err = buildOf(j); err != nil {
			return Created{}, err
		}
	}
	refuse := func(format string, args ...any) (Created, error) {
		return Created{}, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
	}
	switch {
	case len(t.Names) == 0 || b.Plan == nil:
		return refuse("it isn't known what template '%s' was made of: build it again of that", of)
	case b.Plan.Sandbox != "":
		return refuse("template '%s' was made of sandbox %s as it was then: make it again of one", of, b.Plan.Sandbox)
	case b.Plan.Artefact != "":
		return refuse("template '%s' was pulled from %s: pull it again to have what is there by now", of, b.Plan.Artefact)
	case b.Plan.Secret:
		return refuse("template '%s' was made of an image whose registry wants a password, which isn't kept: build it again of that", of)
	}
	if outdated {
		if why, err := s.Outdated(ctx, b); err != nil || why == "" {
			return Created{}, err
		}
	}
	all, err := s.db.Tags(ctx, t.ID)
	if err != nil {
		return Created{}, err
	}
	var tags []string // those that stand for it: others that did are another build's by now
	for _, tag := range all {
		if tag.Build == current.ID {
			tags = append(tags, tag.Name)
		}
	}
	return s.Ask(ctx, Request{Team: team, Name: t.Names[0], Tags: tags, CPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB}, *b.Plan)
}

// Ask asks for a build and says what it is to be of.
func (s *Service) Ask(ctx context.Context, r Request, p Plan) (Created, error) {
	made, err := s.Create(ctx, r)
	if err != nil {
		return Created{}, err
	}
	if err := s.Start(ctx, r.Team, db.Ref{Name: made.Template}, made.Build, p, nil); err != nil {
		s.giveUp(ctx, made.Build)
		return Created{}, err
	}
	return made, nil
}
