package stack

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// What sandboxes of images have, as those of templates do that ask for nothing else.
const (
	imageCPUs     = 2
	imageMemoryMB = 1024
)

// images are what sandboxes are made of that have no template.
func (s *stack) images(m *machines.Machines) lifecycle.ImageOptions {
	if !s.cfg.Templates.Images {
		return lifecycle.ImageOptions{}
	}
	o := lifecycle.ImageOptions{CPUs: imageCPUs, MemoryMB: imageMemoryMB, DiskMB: int(s.cfg.Store.DiskSize / units.MiB), PromoteAfter: s.cfg.Templates.PromoteAfter}
	if most := s.cfg.VM.MaxVCPUs; most > 0 {
		o.CPUs = min(o.CPUs, most)
	}
	if most := int(s.cfg.VM.MaxMemory / units.MiB); most > 0 {
		o.MemoryMB = min(o.MemoryMB, most)
	}
	o.Fetch = func(ctx context.Context, team, ref string) (name, digest string, err error) {
		f, err := m.Fetch(ctx, sandbox.Fetch{Ref: ref, Team: team})
		return f.Name, f.Digest, err
	}
	o.Promote = func(ctx context.Context, team, name string, cold db.Build) error {
		_, digest, err := o.Fetch(ctx, team, cold.Settings.Image)
		if err != nil {
			return err
		}
		if digest != cold.Settings.Digest {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%s is another image by now", cold.Settings.Image))
		}
		_, err = s.builds.Ask(ctx, builds.Request{Team: team, Name: name, CPUs: cold.CPUs, MemoryMB: cold.MemoryMB, DiskMB: cold.DiskMB},
			builds.Plan{Image: cold.Settings.Image, User: cold.Settings.User})
		return err
	}
	return o
}
