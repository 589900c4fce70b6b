package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/shim/saved"
)

// Spent is what a container was paused with, and needs no more.
type Spent struct {
	Ref
	Snapshot string // "" if what names it can't be read
	Why      string
}

// SpentPaused lists what containers were paused with that are no more, as somebody has removed them in containerd, and of
// those that run again, as whoever resumed them has died.
func (c *Client) SpentPaused(ctx context.Context) ([]Spent, error) {
	refs, err := c.pausedRefs()
	errs := []error{err}
	var all []Spent
	for _, r := range refs {
		s := Spent{Ref: r}
		s.Snapshot, s.Why, err = c.spent(ctx, r)
		errs = append(errs, err)
		if s.Why != "" {
			all = append(all, s)
		}
	}
	return all, errors.Join(errs...)
}

// pausedRefs are the containers that have a directory of paused ones.
func (c *Client) pausedRefs() ([]Ref, error) {
	spaces, err := os.ReadDir(c.cfg.PausedDir())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	var refs []Ref
	for _, ns := range spaces {
		dirs, err := os.ReadDir(filepath.Join(c.cfg.PausedDir(), ns.Name()))
		errs = append(errs, err)
		for _, d := range dirs {
			refs = append(refs, Ref{ns.Name(), d.Name()})
		}
	}
	return refs, errors.Join(errs...)
}

// spent says why a container doesn't need what it was paused with; "" if it may.
func (c *Client) spent(ctx context.Context, r Ref) (snapshot, why string, err error) {
	ctx = namespaces.WithNamespace(ctx, r.Namespace)
	cp, broken := saved.PausedOf(c.cfg, r.Namespace, r.ID).Checkpoint()
	if errdefs.IsNotFound(broken) {
		return "", "", nil
	}
	ctr, err := c.ctrd.LoadContainer(ctx, r.ID)
	if errdefs.IsNotFound(err) {
		return cp.Snapshot, "the container is no more", nil
	}
	if err = errors.Join(err, broken); err != nil {
		return "", "", fmt.Errorf("container %s, which is paused: %w", r, err)
	}
	if _, runs, err := c.resumed(ctx, ctr, cp.Snapshot); err != nil || !runs {
		return "", "", err
	}
	return cp.Snapshot, "the container runs again", nil
}

// Settle removes what the container was paused with, if that is of no use. gone is false otherwise, and while somebody pauses
// the container, has it go on or removes it.
func (c *Client) Settle(ctx context.Context, r Ref) (gone bool, err error) {
	paused := saved.PausedOf(c.cfg, r.Namespace, r.ID)
	unlock, locked, err := paused.TryLock()
	if err != nil || !locked {
		return false, err
	}
	defer unlock()
	if _, why, err := c.spent(ctx, r); err != nil || why == "" {
		return false, err
	}
	err = c.forget(paused)
	return err == nil, err
}

// SettlePaused is Settle for all that there are, with directories in which a pause was about to write.
func (c *Client) SettlePaused(ctx context.Context) error {
	refs, err := c.pausedRefs()
	errs := []error{err}
	for _, r := range refs {
		_, err := c.Settle(ctx, r)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// forget removes what a container was paused with, if it was. It is locked.
func (c *Client) forget(paused saved.Paused) error {
	cp, err := paused.Checkpoint()
	if errdefs.IsNotFound(err) {
		return nil
	}
	// Of one that can't be read nothing is known, but it goes, too; then nothing names its snapshot.
	if err := paused.Forget(); err != nil || cp.Snapshot == "" {
		return err
	}
	return deleteSnapshot(c.cfg, cp.Snapshot)
}
