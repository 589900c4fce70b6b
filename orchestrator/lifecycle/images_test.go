package lifecycle

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// imageStand is an engine that makes sandboxes of images, and a template with a snapshot after three of one.
func imageStand(t *testing.T) (s *stand, promoted *[]string, fail *error) {
	t.Helper()
	promoted, fail = new([]string), new(error)
	s = newStand(t, Options{})
	s.stop()
	s.o.Images = ImageOptions{
		CPUs: 1, MemoryMB: 256, DiskMB: 512, PromoteAfter: 3,
		Fetch: func(_ context.Context, _, ref string) (name, digest string, err error) {
			if strings.Contains(ref, "none") {
				return "", "", errdefs.ErrNotFound.WithMessage("the registry has none")
			}
			return ref, "sha256:" + ref, nil
		},
		Promote: func(ctx context.Context, team, name string, cold db.Build) error {
			*promoted = append(*promoted, cold.Settings.Image)
			if *fail != nil {
				return *fail
			}
			warm := cold
			warm.ID, warm.Settings = uuid.NewString(), db.Settings{EnvdVersion: "0.6.13"}
			snapshot, done, err := s.Begin(ctx, warm)
			if err != nil {
				return err
			}
			defer done()
			s.host.mu.Lock()
			s.host.snapshots[snapshot] = true
			s.host.mu.Unlock()
			_, err = s.db.Publish(ctx, db.Publication{Build: warm.ID, Team: team, Name: name, Tag: db.DefaultTag})
			return err
		},
	}
	s.boot()
	return s, promoted, fail
}

// TestOfImage: a sandbox of an image begins with it, and is like others from then on; when the image is used often, later ones go on from a
// snapshot.
func TestOfImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, promoted, _ := imageStand(t)
		defer s.stop()
		ctx := t.Context()
		of := func(image string) func(*Create) {
			return func(c *Create) { c.Template, c.Image = "", image }
		}
		const python, debian = "docker.io/library/python:3.12", "docker.io/library/debian:12"
		first := s.create(of(python))
		if m := s.machine(first.ID); m.image != python || len(m.told) != 1 || m.told[0].User != "root" || m.told[0].Env["X"] != "1" {
			t.Errorf("its machine is %+v", m)
		}
		if first.Alias != python || first.CPUs != 1 || first.MemoryMB != 256 || first.EnvdVersion != "0.6.13" || first.TemplateID == "" {
			t.Errorf("%+v", first)
		}
		other := s.create(of(debian))
		byID := s.create(func(c *Create) { c.Template = first.TemplateID })
		if other.TemplateID == first.TemplateID || s.machine(byID.ID).image != python {
			t.Errorf("another image's template is %s; of its id, a sandbox begins with %q", other.TemplateID, s.machine(byID.ID).image)
		}
		// It is saved as others are.
		snap, err := s.Snapshot(ctx, team, first.ID, "mine")
		must(t, err)
		_, b, err := s.db.Resolve(ctx, team, db.Ref{Name: "mine"})
		must(t, err)
		if string(b.Settings.Container) != `{"of":"`+python+`"}` || b.Settings.Image != "" || snap.ID == "" {
			t.Errorf("its snapshot has %+v", b.Settings)
		}
		children, err := s.Fork(ctx, team, first.ID, time.Hour, 1)
		must(t, errors.Join(err, children[0].Err))
		s.create(of(python))
		pass(time.Minute)
		if len(*promoted) != 1 || (*promoted)[0] != python {
			t.Errorf("promoted: %v", *promoted)
		}
		warm := s.create(of(python))
		if m := s.machine(warm.ID); m.image != "" || warm.TemplateID != first.TemplateID || warm.BuildID == first.BuildID {
			t.Errorf("after that, a machine begins with %q, and is of %s, %s", m.image, warm.TemplateID, warm.BuildID)
		}
		pass(time.Minute)
		if len(*promoted) != 1 {
			t.Errorf("promoted again: %v", *promoted)
		}
		s.Limits.Templates = 3 // base and those two
		if _, err := s.Create(ctx, Create{Team: team, Image: "docker.io/library/third:1", Timeout: time.Hour}); !errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "limits.templates") {
			t.Errorf("a template too many: %v", err)
		}
		if _, err := s.Create(ctx, Create{Team: team, Image: "docker.io/none/x", Timeout: time.Hour}); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "image docker.io/none/x: the registry has none") {
			t.Errorf("an image that isn't there: %v", err)
		}
		must(t, s.killAll(ctx, team))
		pass(time.Minute)
		if len(s.promoting) != 0 {
			t.Errorf("it still knows of builds that are gone: %v", s.promoting)
		}
	})
}

// TestOfImageAtOnce: of many that are the first of an image, all are of one build, and none of one that is gone.
func TestOfImageAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, _ := imageStand(t)
		defer s.stop()
		s.Images.PromoteAfter = 0
		fetch := s.Images.Fetch
		s.Images.Fetch = func(ctx context.Context, team, ref string) (string, string, error) {
			time.Sleep(time.Second) // all of them come to the same moment
			return fetch(ctx, team, ref)
		}
		made := make([]Sandbox, 16)
		var all sync.WaitGroup
		for i := range made {
			all.Go(func() {
				var err error
				if made[i], err = s.Create(t.Context(), Create{Team: team, Image: "docker.io/library/x:1", Timeout: time.Hour}); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		for _, sb := range made {
			if sb.BuildID != made[0].BuildID || sb.TemplateID != made[0].TemplateID {
				t.Errorf("%s is of %s, and %s of %s", sb.ID, sb.BuildID, made[0].ID, made[0].BuildID)
			}
		}
		pass(time.Minute)
		if loose, err := s.db.Loose(t.Context()); err != nil || len(loose) > 0 {
			t.Errorf("left: %+v, %v", loose, err)
		}
	})
}

// TestPromotionFails: it is tried again when the image has been used twice as often, and sandboxes are made as before.
func TestPromotionFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, promoted, fail := imageStand(t)
		defer s.stop()
		*fail = errFake
		for n, want := range []int{0, 0, 1, 1, 1, 2, 2} {
			sb := s.create(func(c *Create) { c.Template, c.Image = "", "docker.io/library/x:1" })
			pass(time.Second)
			if len(*promoted) != want || s.machine(sb.ID).image == "" {
				t.Errorf("after %d: promoted %v, and it began with %q", n+1, *promoted, s.machine(sb.ID).image)
			}
		}
	})
}

// TestNoImages: where there are none, that is said.
func TestNoImages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		if _, err := s.Create(t.Context(), Create{Team: team, Image: "docker.io/library/x:1", Timeout: time.Hour}); !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), "templates.images") {
			t.Error(err)
		}
	})
}
