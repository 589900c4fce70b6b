package templates

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// lookTimeout bounds how long a registry may take to say what an artefact is.
const lookTimeout = time.Minute

// Push has a registry have a build, by that name and tag, and returns the name that it has by its digest.
func (b *Builder) Push(ctx context.Context, of db.Build, to string, r *Registry, tell registry.Report) (at string, err error) {
	name, err := registry.Name(to)
	if err != nil {
		return "", err
	}
	if strings.Contains(name, "@") {
		return "", invalid("%s: a template is pushed to a tag: its digest is what it comes to", name)
	}
	c, err := describe(of)
	if err != nil {
		return "", err
	}
	machine, read, done, err := b.Store.Export(ctx, of.Snapshot)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, done()) }()
	c.Machine = machine
	return registry.Push(ctx, name, b.hosts(ctx, name, r), c, read, tell)
}

// describe is what an artefact says of a build, but for its machine.
func describe(of db.Build) (c registry.Config, err error) {
	if of.Settings.Image != "" {
		return c, errdefs.ErrFailedPrecondition.WithMessage("it is of image " + of.Settings.Image + " as it is: nothing has been saved of it that could be pushed")
	}
	container, err := containerOf(&of)
	if err != nil {
		return c, err
	}
	t := registry.Template{Settings: of.Settings, ImageName: container.Image, Env: container.Spec.Process.Env, CPUs: of.CPUs, MemoryMB: of.MemoryMB}
	if t.ImageName == sandbox.Blank {
		t.ImageName = ""
	}
	t.Container = nil
	return registry.Config{Created: of.CreatedAt, Template: t}, nil
}

// Artefact is a template in a registry.
type Artefact struct {
	// Name is its name with its digest.
	Name string
	// Settings are what sandboxes of it have, but for their container.
	Settings               db.Settings
	CPUs, MemoryMB, DiskMB int
}

// Look finds out what a registry has by a name.
func (b *Builder) Look(ctx context.Context, from string, r *Registry) (Artefact, error) {
	name, err := registry.Name(from)
	if err != nil {
		return Artefact{}, err
	}
	a, err := b.open(ctx, name, r)
	if err != nil {
		return Artefact{}, err
	}
	t := a.Template
	return Artefact{Name: a.Name, Settings: t.Settings, CPUs: t.CPUs, MemoryMB: t.MemoryMB, DiskMB: a.Machine.DiskMB()}, nil
}

func (b *Builder) open(ctx context.Context, name string, r *Registry) (*registry.Artefact, error) {
	ctx, cancel := context.WithTimeout(ctx, b.Config.Timeout(lookTimeout))
	defer cancel()
	return registry.Open(ctx, name, b.hosts(ctx, name, r))
}
