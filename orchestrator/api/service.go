// Package api is the stack's own API: what `cube up` does for clients on its control socket beyond what containerd can be
// asked for, that is snapshots of containers and the space that all takes, and a client for it. HTTP with JSON, below /v1/.
// It knows how operations get along with each other, with clients that go away and with the end of the stack; what they do is
// of others.
package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/machines"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/usage"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// maxClones bounds what one request makes.
const maxClones = 100

// cloneTimeout is what each clone adds to operationTimeout.
const cloneTimeout = 10 * time.Second

// Service does what the API offers. All methods may be called from many goroutines.
//
// Of several operations on one container each waits for the one before it. A client that goes away gives up a save or a
// clone, of which nothing is there then; a pause, resume or rollback, once begun, is finished without it.
type Service struct {
	cfg   *config.Config
	ops   *operations
	store *snapshot.Store
	// client is there once the service is open.
	client *sandbox.Client
	// builds are there once the service makes templates.
	builds atomic.Pointer[builds.Service]
	// own is there once it is known whose things are.
	own atomic.Pointer[Ownership]
}

// New makes a service that refuses to do anything until it is open.
func New(cfg *config.Config, log *slog.Logger) *Service {
	return &Service{cfg: cfg, ops: newOperations(cfg, log), store: snapshot.New(cfg, log)}
}

// Open has the service serve, and tell a record of what is done to containers. The client and the record are to stay until Close has
// returned.
func (s *Service) Open(client *sandbox.Client, to audit.Recorder) {
	s.client = client
	s.ops.open(to)
}

// Close gives up what can be undone, waits for what is to be finished, at most for DrainTimeout, and then for what is undone.
// Nothing begins any more.
func (s *Service) Close() { s.ops.close() }

// on does something to a container.
func (s *Service) on(ctx context.Context, op operation, id string, limit time.Duration, f func(context.Context, *sandbox.Client) error) error {
	if err := validID(id); err != nil {
		return err
	}
	return s.ops.run(ctx, op, id, limit, func(ctx context.Context) error {
		if err := s.client.Await(ctx); err != nil {
			return err
		}
		return f(ctx, s.client)
	})
}

// Save makes a snapshot of a running container, which goes on, and returns its name. "" has it named after the container.
func (s *Service) Save(ctx context.Context, id, name string) (saved string, err error) {
	if err := validName(name); name != "" && err != nil {
		return "", err
	}
	err = s.on(ctx, opSave, id, operationTimeout, func(ctx context.Context, c *sandbox.Client) error {
		saved, err = c.Save(ctx, id, name)
		return err
	})
	return saved, err
}

// Pause saves a running container to disk, and ends its machine.
func (s *Service) Pause(ctx context.Context, id string) error {
	return s.on(ctx, opPause, id, operationTimeout, func(ctx context.Context, c *sandbox.Client) error {
		return c.Pause(ctx, id)
	})
}

// Resume has a paused container go on. note says why it didn't from its memory, but began anew with its disk; "" if it did.
func (s *Service) Resume(ctx context.Context, id string) (note string, err error) {
	err = s.on(ctx, opResume, id, operationTimeout, func(ctx context.Context, c *sandbox.Client) error {
		note, err = c.Resume(ctx, id)
		return err
	})
	return note, err
}

// Rollback puts a running container back to a snapshot of it. One of E2B's sandboxes isn't, as its engine has to tell who is
// connected, and what runs there, of it.
func (s *Service) Rollback(ctx context.Context, id, name string) error {
	if err := validName(name); err != nil {
		return err
	}
	return s.on(ctx, opRollback, id, operationTimeout, func(ctx context.Context, c *sandbox.Client) error {
		k, err := c.Get(ctx, id)
		if err != nil {
			return err
		}
		if k.Labels[machines.Label] != "" {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%s is a sandbox of the E2B API, which rolls it back to snapshots of its own: POST /sandboxes/%[1]s/rollback", id))
		}
		return c.Rollback(ctx, id, name)
	})
}

// Clone makes n containers that go on from where a running one is, which goes on, too. It returns the ids of those that there
// are, and an error for each that there isn't.
func (s *Service) Clone(ctx context.Context, id string, n int) (ids []string, failed []error) {
	if n < 1 || n > maxClones {
		return nil, []error{errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%d clones: from 1 to %d can be made at once", n, maxClones))}
	}
	// The container has its turn while it is saved. What is made of that isn't its concern.
	var origin *sandbox.Origin
	err := s.on(ctx, opClone, id, operationTimeout, func(ctx context.Context, c *sandbox.Client) (err error) {
		origin, err = c.Origin(ctx, id)
		return err
	})
	if err != nil {
		return nil, []error{err}
	}
	err = s.ops.run(ctx, opClone, "", operationTimeout+time.Duration(n)*cloneTimeout, func(ctx context.Context) error {
		ids, failed = origin.Clone(ctx, n)
		return errors.Join(failed...)
	})
	if err != nil && len(failed) == 0 { // it hasn't begun
		failed = []error{err}
	}
	if err := origin.Close(); err != nil {
		failed = append(failed, err)
	}
	return ids, failed
}

// Usage tells what takes the disk's space.
func (s *Service) Usage(ctx context.Context) (u usage.Usage, err error) {
	err = s.ops.run(ctx, opUsage, "", spaceTimeout, func(ctx context.Context) error {
		if u, err = usage.Measure(ctx, s.cfg); err != nil {
			return err
		}
		owners, err := s.owners(ctx)
		for _, k := range u.Kinds {
			for i := range k.Items {
				item := &k.Items[i]
				item.Team, item.Key = owners.of(item.Name, item.Of)
			}
		}
		return err
	})
	return u, err
}

// validID checks what is to be a container's id.
func validID(id string) error {
	if err := identifiers.Validate(id); err != nil {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%q can't be a container's id", id))
	}
	return nil
}
