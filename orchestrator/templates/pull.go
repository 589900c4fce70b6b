package templates

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"

	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

func (b *Builder) hosts(ctx context.Context, name string, r *Registry) docker.RegistryHosts {
	if r == nil {
		r = &Registry{}
	}
	return b.Store.Hosts(ctx, name, r.User, r.Password)
}

// pulling is the pull of a template.
type pulling struct {
	*Builder
	Recipe
	artefact *registry.Artefact
	tell     Report
}

// pull is Make for a template of a registry. Where its machine can't be restored, or isn't to be, another one begins with its disk, runs
// what the template runs, and is saved as those of other templates are.
func (b *Builder) pull(ctx context.Context, r Recipe, tell Report, snapshot string) (made Made, err error) {
	began := time.Now()
	p := &pulling{Builder: b, Recipe: r, tell: tell}
	if err := r.completeArtefact(); err != nil {
		return Made{}, err
	}
	fail := func(err error) (Made, error) { return Made{}, failed(stepBase, err) }
	if p.artefact, err = b.open(ctx, r.Artefact, r.Registry); err != nil {
		return fail(err)
	}
	t := p.artefact.Template
	if t.CPUs != r.CPUs || t.MemoryMB != r.MemoryMB {
		return fail(invalid("the template in the registry has %d CPUs and %d MiB, not %d and %d", t.CPUs, t.MemoryMB, r.CPUs, r.MemoryMB))
	}
	why, err := p.unfit(ctx)
	if err != nil {
		return fail(err)
	}
	tell(stepBase, lifecycle.Info, "FROM "+p.artefact.Name)
	if why == "" {
		made, err = p.whole(ctx, snapshot)
	} else {
		tell(stepBase, lifecycle.Info, "only its disk is taken, and a machine begins with that: "+why)
		made, err = p.anew(ctx, snapshot)
	}
	if err != nil {
		return fail(err)
	}
	made.Digest, made.Settings.Digest = t.Digest, t.Digest
	if why == "" {
		tell(stepFinal, lifecycle.Info, fmt.Sprintf("ready after %.1f s", time.Since(began).Seconds()))
	}
	return made, nil
}

// completeArtefact checks what isn't the artefact's.
func (r *Recipe) completeArtefact() error {
	switch {
	case r.Image != "" || r.Base != nil || len(r.Steps) > 0:
		return invalid("a template of a registry is what it is: nothing is done to it")
	case !ValidUser(r.User):
		return invalid("%.100q is no name of a user", r.User)
	}
	return nil
}

// unfit says why the machine isn't restored, "" if it is.
func (p *pulling) unfit(ctx context.Context) (why string, err error) {
	machine := &p.artefact.Machine.Snapshot
	if host := registry.Host(p.artefact.Name); !slices.Contains(p.Config.Templates.TrustedRegistries, host) {
		return host + " isn't one of templates.trusted_registries", nil
	}
	if machine.DisksOnly() {
		return "it has no memory", nil
	}
	err = p.Fits(ctx, machine)
	if errdefs.IsFailedPrecondition(err) {
		return err.Error(), nil
	}
	return "", err
}

// fill fetches what a snapshot is to have.
func (p *pulling) fill(ctx context.Context) func(*snapshot.Info, snapshot.Put) error {
	return func(i *snapshot.Info, put snapshot.Put) error {
		if err := p.room(registry.Bytes(i)); err != nil {
			return err
		}
		return p.artefact.Fetch(ctx, i, put, func(message string) { p.tell(stepBase, lifecycle.Info, message) })
	}
}

// room refuses what would fill the store.
func (p *pulling) room(bytes int64) error {
	if err := space.Check(p.Config); err != nil {
		return err
	}
	r, err := space.Of(p.Config.StoreDir())
	if err != nil {
		return err
	}
	if r.Free -= bytes; r.Above(p.Config.Store.HighWatermark) {
		return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("the template has %s, for which there isn't room in the store %s: `cube df` tells what takes it",
			units.BytesSize(float64(bytes)), p.Config.StoreDir()))
	}
	return nil
}

// settings are what sandboxes of it have.
func (p *pulling) settings(ctx context.Context) (db.Settings, error) {
	t := p.artefact.Template
	s := db.Settings{
		EnvdVersion: t.EnvdVersion, User: p.User, Workdir: p.Workdir, Hook: p.Hook, Run: p.Run, Ready: p.Ready, Start: p.Start, Profile: string(p.Profile),
		Digest: t.Digest, Builder: t.Builder, Inputs: t.Inputs,
	}
	var command []string
	if s.Run != "" {
		command = shell(bash, s.Run)
	}
	var err error
	s.Container, err = p.Store.Blueprint(ctx, lifecycle.Beginning{
		ID: "template", Team: p.Team, Args: initArgs(place{User: s.User, Workdir: s.Workdir}, command...), Env: t.Env,
		CPUs: p.CPUs, MemoryMB: p.MemoryMB, DiskMB: p.artefact.Machine.DiskMB(),
	})
	return s, err
}

// whole takes the machine as it was saved, and proves it.
func (p *pulling) whole(ctx context.Context, snapshot string) (_ Made, err error) {
	s, err := p.settings(ctx)
	if err != nil {
		return Made{}, err
	}
	if err := p.Store.Import(ctx, snapshot, p.artefact.Machine, true, p.fill(ctx)); err != nil {
		return Made{}, err
	}
	m := &making{Builder: p.Builder, plan: &plan{Recipe: p.Recipe}, tell: p.tell}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return m.forget(ctx, snapshot) })
	done, err := m.admit(ctx, p.artefact.Machine.DiskMB())
	if err != nil {
		return Made{}, err
	}
	defer done()
	if err := m.prove(ctx, snapshot, s); err != nil {
		return Made{}, failed(stepFinal, err)
	}
	return Made{Settings: s, DiskMB: p.artefact.Machine.DiskMB(), Digest: s.Digest, Builder: s.Builder, Inputs: s.Inputs}, nil
}

// anew makes a template of nothing but the disk.
func (p *pulling) anew(ctx context.Context, snapshot string) (_ Made, err error) {
	s, err := p.settings(ctx)
	if err != nil {
		return Made{}, err
	}
	sum := digest(cacheVersion, p.Team, p.artefact.Digest)
	disk, release, err := p.layer(ctx, p.Team, sum)
	if errdefs.IsNotFound(err) {
		disk, release, err = p.addLayer(ctx, p.Team, sum, func(name string) (int64, error) {
			disks := p.artefact.Machine.Snapshot.WithoutMemory()
			return registry.Bytes(&disks), p.Store.Import(ctx, name, p.artefact.Machine, false, p.fill(ctx))
		})
		if err != nil {
			err = errors.Join(err, release())
		}
	}
	if err != nil {
		return Made{}, err
	}
	defer func() { err = errors.Join(err, release()) }()
	return p.Make(ctx, Recipe{
		Team: p.Team, Base: &db.Build{ID: string(p.artefact.Digest), Team: p.Team, Snapshot: disk, DiskMB: p.artefact.Machine.DiskMB(), Settings: s},
		CPUs: p.CPUs, MemoryMB: p.MemoryMB, DiskMB: p.DiskMB,
	}, nil, p.tell, snapshot)
}
