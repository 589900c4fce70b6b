package templates

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// cacheVersion changes with what steps do to a disk.
const cacheVersion = 1

// The steps of Report and Failure beside the recipe's own.
const (
	stepBase  = "base"
	stepFinal = "finalize"
)

// foundation is what a recipe's steps begin with.
type foundation struct {
	Name   string // of the image that containers are of
	Digest string // "" of a template's build
	// Disk is the snapshot with the disk, "" for the image's.
	Disk string
	Env  map[string]string
}

// stage is a step, and where it begins and leads to.
type stage struct {
	Step
	Number       string // as Report has it
	Before, Then place
	// Sum is the digest of all that has gone into the disk with it.
	Sum string
	// Kept: the disk is kept as it is then.
	Kept bool
}

// plan is what is to be done for a recipe.
type plan struct {
	Recipe
	foundation
	First  place // before the steps
	Sum    string
	Stages []stage
}

// last is the place that sandboxes have.
func (p *plan) last() place {
	if n := len(p.Stages); n > 0 {
		return p.Stages[n-1].Then
	}
	return p.First
}

// inputs is the digest of all that goes into the disk.
func (p *plan) inputs() string {
	if n := len(p.Stages); n > 0 {
		return p.Stages[n-1].Sum
	}
	return p.Sum
}

// plan looks at a recipe, and has its image be here. Steps are looked at before anything is done.
func (b *Builder) plan(ctx context.Context, r Recipe, tell Report) (*plan, error) {
	if err := r.complete(b.Config); err != nil {
		return nil, err
	}
	if err := r.CheckSteps(); err != nil {
		return nil, err
	}
	p := &plan{Recipe: r, First: place{User: r.User, Workdir: r.Workdir}}
	var err error
	if r.Base != nil {
		p.foundation, err = onBuild(r.Base)
	} else {
		p.foundation, err = b.onImage(ctx, r, tell)
	}
	if err != nil {
		return nil, failed(stepBase, err)
	}
	build := ""
	if r.Base != nil {
		build = r.Base.ID
	}
	p.Sum = digest(cacheVersion, r.Team, p.Digest, build, r.User, r.Workdir, r.DiskMB)
	return p, p.walk(p.Env)
}

// CheckSteps tells what is wrong with the steps whatever the recipe begins with: errdefs.ErrInvalidArgument, in a *Failure if it is
// one of them.
func (r Recipe) CheckSteps() error {
	if len(r.Steps) > maxSteps {
		return invalid("a template can have %d steps, not %d", maxSteps, len(r.Steps))
	}
	p := &plan{Recipe: r, First: place{User: r.User, Workdir: r.Workdir}}
	return p.walk(nil)
}

// complete checks a recipe, and fills in what it leaves to its base.
func (r *Recipe) complete(cfg *config.Config) error {
	s := db.Settings{User: DefaultUser, Workdir: homeOf(DefaultUser)}
	if r.Base != nil {
		s = r.Base.Settings
		r.DiskMB = max(r.DiskMB, r.Base.DiskMB)
		if r.Run == "" && r.Ready == "" {
			r.Run, r.Ready = s.Run, s.Ready
			if r.Hook == nil {
				r.Hook = s.Hook
			}
		}
		if r.Start == "" {
			r.Start = s.Start
		}
		r.Profile = cmp.Or(r.Profile, admission.Profile(s.Profile))
	}
	if r.User == "" {
		r.User = s.User
		if r.Workdir == "" {
			r.Workdir = s.Workdir
		}
	}
	r.DiskMB = max(r.DiskMB, int(cfg.Store.DiskSize>>20)) // an image's disk grows, and doesn't shrink
	if _, err := admission.ParseProfile(string(r.Profile)); err != nil {
		return err
	}
	switch {
	case (r.Base == nil) == (r.Image == ""):
		return invalid("a template is made of an image or of another template")
	case r.CPUs < 1 || r.MemoryMB < 1:
		return invalid("a template has CPUs and memory")
	case !ValidUser(r.User):
		return invalid("%.100q is no name of a user", r.User)
	}
	return nil
}

// walk goes through the steps. base are the variables of what the recipe is made of.
func (p *plan) walk(base map[string]string) error {
	at, sum, places := p.First, p.Sum, 0
	p.Stages = p.Stages[:0]
	last := -1 // that does anything to the disk
	for i, s := range p.Steps {
		number := strconv.Itoa(i + 1)
		then, err := at.after(s, base)
		if s.Type == Env && err == nil {
			if places += then.text() + entrySize*len(then.Env); places > maxPlaces {
				err = invalid("ENV: the steps up to here lead to more than %d MiB of variables, counted after each: set more of them in one step", maxPlaces>>20)
			}
		}
		if err != nil {
			return &Failure{Step: number, Err: err}
		}
		sum = digest(sum, s.Type, s.Args, s.Files)
		p.Stages = append(p.Stages, stage{Step: s, Number: number, Before: at, Then: then, Sum: sum, Kept: s.Type == Run || s.Type == Copy})
		if s.Type != Env {
			last = i
		}
		at = then
	}
	if last >= 0 {
		p.Stages[last].Kept = true
	}
	return nil
}

// digest is one of values.
func digest(values ...any) string {
	b, err := json.Marshal(values)
	if err != nil {
		panic(err) // of values that are none of JSON's
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// onBuild begins with another template's disk.
func onBuild(b *db.Build) (foundation, error) {
	c, err := containerOf(b)
	if err != nil {
		return foundation{}, err
	}
	return foundation{Name: c.Image, Disk: b.Snapshot, Env: variables(c.Spec.Process.Env)}, nil
}

// containerOf is what containers of a build have.
func containerOf(b *db.Build) (c sandbox.Blueprint, err error) {
	if err := json.Unmarshal(b.Settings.Container, &c); err != nil || c.Spec == nil || c.Spec.Process == nil {
		return c, fmt.Errorf("what is known of the container of build %s is damaged: %w", b.ID, errors.Join(err, errdefs.ErrDataLoss))
	}
	return c, nil
}

// onImage begins with an image.
func (b *Builder) onImage(ctx context.Context, r Recipe, tell Report) (foundation, error) {
	f := sandbox.Fetch{Ref: r.Image, Team: r.Team, Progress: func(what string) func() {
		began := time.Now()
		return func() { tell(stepBase, lifecycle.Info, fmt.Sprintf("%s: %.1f s", what, time.Since(began).Seconds())) }
	}}
	if r.Registry != nil {
		f.User, f.Secret = r.Registry.User, r.Registry.Password
	}
	img, err := b.Machines.Fetch(ctx, f)
	if err != nil {
		return foundation{}, err
	}
	tell(stepBase, lifecycle.Info, fmt.Sprintf("FROM %s, %s", img.Name, img.Digest))
	return foundation{Name: img.Name, Digest: img.Digest, Env: variables(img.Env)}, nil
}
