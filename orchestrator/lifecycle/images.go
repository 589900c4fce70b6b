package lifecycle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// ImageOptions are of sandboxes that are made of an image, without a template that somebody has made of it. What they need to be
// like others is a template that the engine keeps for the team and the image; nothing is saved for it at first.
type ImageOptions struct {
	// Fetch has an image be here for a team, whose registry may have to be asked, and returns its name here and its digest; nil:
	// there are no such sandboxes.
	Fetch func(ctx context.Context, team, ref string) (name, digest string, err error)
	// CPUs, MemoryMB and DiskMB (both MiB) are the sandboxes'.
	CPUs, MemoryMB, DiskMB int
	// Promote has a build that has a snapshot be made, by that name, of the image of one that has none: sandboxes are of it when it is
	// there. It is called when so many sandboxes have been made of the image; 0 is never.
	Promote      func(ctx context.Context, team, name string, cold db.Build) error
	PromoteAfter int
}

// imageUser runs commands in a sandbox of an image, of which it isn't known whom it has besides.
const imageUser = "root"

// pullTimeout bounds how long a create waits for its image. What has come until then is there for the next one.
const pullTimeout = 10 * time.Minute

// ofImage finds the template that the engine keeps for an image of a team's, or makes it.
func (e *Engine) ofImage(ctx context.Context, team, image string) (db.Template, db.Build, error) {
	if e.Images.Fetch == nil {
		return db.Template{}, db.Build{}, errdefs.ErrNotImplemented.WithMessage("sandboxes are made of templates here, not of images: templates.images of the configuration says so")
	}
	fctx, cancel := context.WithTimeoutCause(ctx, e.Timeout(pullTimeout), &late{e.Timeout(pullTimeout)})
	defer cancel()
	name, digest, err := e.Images.Fetch(fctx, team, image)
	if err != nil {
		return db.Template{}, db.Build{}, fmt.Errorf("image %s: %w", image, err)
	}
	sum := sha256.Sum256([]byte(name + " " + digest))
	ref := db.Ref{Team: team, Name: "image-" + hex.EncodeToString(sum[:10])}
	t, b, err := e.db.Resolve(ctx, team, ref)
	if !errdefs.IsNotFound(err) {
		return t, b, err
	}
	// Of those that ask at the same time each makes it, and has what the first one has made.
	cold := db.Build{
		ID: uuid.NewString(), Team: team, Key: audit.Of(ctx).Key, CreatedAt: time.Now(), CPUs: e.Images.CPUs, MemoryMB: e.Images.MemoryMB, DiskMB: e.Images.DiskMB,
		Settings: db.Settings{User: imageUser, Image: name, Digest: digest},
	}
	_, done, err := e.Begin(ctx, cold)
	if err != nil {
		return t, b, err
	}
	defer done()
	limits, _ := e.Limits.Of(team)
	if _, err := e.db.Publish(ctx, db.Publication{Build: cold.ID, Team: team, Name: ref.Name, Template: randomID(20), MaxTemplates: limits.Templates, Tag: db.DefaultTag, New: true}); err != nil && !errdefs.IsAlreadyExists(err) {
		return t, b, err
	}
	return e.db.Resolve(ctx, team, ref)
}

// beginning makes the machine of a sandbox whose build has no snapshot. known makes the row one that says what snapshots of it need.
func (e *Engine) beginning(ctx context.Context, r *row) (addr netip.Addr, known func(*row), err error) {
	var container json.RawMessage
	addr, container, err = e.machines.Begin(ctx, Beginning{
		ID: r.ID, Team: r.Team, Image: r.Settings.Image, Args: []string{"init", "-user", r.Settings.User, "-workdir", r.Settings.Workdir},
		CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB, Network: r.egress(),
	})
	if err != nil {
		return addr, nil, err
	}
	return addr, func(r *row) { r.Settings.Container, r.Settings.Image = container, "" }, nil
}

// promote has a build with a snapshot made of an image that is used often.
func (e *Engine) promote(t db.Template, b db.Build) {
	if e.Images.Promote == nil || e.Images.PromoteAfter == 0 || t.Spawns+1 < int64(e.Images.PromoteAfter) || b.Settings.Image == "" {
		return
	}
	e.mu.Lock()
	due := t.Spawns+1 >= e.promoting[b.ID]
	if due { // if it fails, that is tried again after twice as many
		e.promoting[b.ID] = 2 * (t.Spawns + 1)
	}
	e.mu.Unlock()
	if !due {
		return
	}
	e.background(func() {
		log := e.Log.With("team", t.Team, "image", b.Settings.Image, "template", t.ID)
		if err := e.Images.Promote(audit.With(e.life, audit.By{Via: audit.Host}), t.Team, t.Names[0], b); err != nil {
			log.Warn("a template can't be built of an image that is used often", "error", err)
			return
		}
		log.Info("a template is being built of an image that is used often", "sandboxes", t.Spawns+1)
	})
}
