package base

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/vmm/memory"
)

// tmpPrefix marks what is being made or removed; what a kill leaves of it is swept.
const tmpPrefix = ".tmp-"

// lockFile is held by whoever makes or removes snapshots: one at a time on the host, since each takes the machine's
// processors for seconds.
const lockFile = ".lock"

// cache is the directory of base snapshots, shared by all launching processes of the host.
type cache struct {
	dir  string
	max  int // snapshots kept
	pool *memory.Pool
	log  *slog.Logger
}

func newCache(cfg *config.Config, log *slog.Logger) *cache {
	return &cache{dir: cfg.BaseDir(), max: cfg.VM.BaseSnapshots, pool: memory.NewPool(filepath.Join(cfg.RunDir, "base")), log: log}
}

// ready is a snapshot that can be restored: its state is checked and its memory is sealed.
type ready struct {
	*stored
	held *memory.Held
}

// Close lets go of it; machines that were restored from it go on.
func (r *ready) Close() error {
	r.stored.Close()
	return r.held.Release()
}

// get returns the snapshot of that key, made by build where there is none that is usable.
func (c *cache) get(ctx context.Context, key Key, tscKHz int, build func(ctx context.Context, dir string) error) (*ready, error) {
	r, err := c.find(ctx, key, tscKHz)
	if !errors.Is(err, errUnusable) {
		return r, err
	}
	if err := c.make(ctx, key, tscKHz, build); err != nil {
		return nil, err
	}
	r, err = c.find(ctx, key, tscKHz)
	if err != nil {
		return nil, fmt.Errorf("the base snapshot just made: %w", err)
	}
	return r, nil
}

// find opens a snapshot. Its memory is checked in full whenever it is copied: at least once per boot of the host.
func (c *cache) find(ctx context.Context, key Key, tscKHz int) (*ready, error) {
	dir := filepath.Join(c.dir, key.ID())
	s, err := open(dir, key, tscKHz)
	if err != nil {
		return nil, err
	}
	held, err := c.pool.Hold(ctx, key.ID()+"-"+s.Memory.Digests.String()[:16], s.Memory.Size, func() (*os.File, error) {
		start := time.Now()
		f, digests, err := memory.Seal(s.memory, s.Memory.Size)
		if err != nil {
			return nil, err
		}
		if err := s.Memory.Digests.Compare(digests); err != nil {
			return nil, errors.Join(fmt.Errorf("%w: its memory is %w", errUnusable, err), f.Close())
		}
		c.log.Debug("copied the memory of a base snapshot", "shape", key.Shape, "took", time.Since(start))
		return f, nil
	})
	if err != nil {
		s.Close()
		return nil, err
	}
	// For the order in which snapshots are given up.
	now := time.Now()
	_ = os.Chtimes(filepath.Join(dir, descFile), now, now)
	return &ready{stored: s, held: held}, nil
}

// make has build make a snapshot, unless somebody else has done so meanwhile, and removes what is too many then.
func (c *cache) make(ctx context.Context, key Key, tscKHz int, build func(ctx context.Context, dir string) error) (err error) {
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return fmt.Errorf("make a base snapshot: %w", err)
	}
	unlock, err := flock.Lock(ctx, filepath.Join(c.dir, lockFile))
	if err != nil {
		return fmt.Errorf("make a base snapshot: %w", err)
	}
	defer unlock()
	r, why := c.find(ctx, key, tscKHz)
	if why == nil {
		return r.Close()
	}
	if !errors.Is(why, errUnusable) {
		return why
	}
	c.sweep()
	start := time.Now()
	reason := why.Error()
	if errors.Is(why, fs.ErrNotExist) {
		reason = "there is none"
	}
	c.log.Info("making a base snapshot, once per shape", "shape", key.Shape.String(), "accelerator", key.Accel, "why", reason)

	tmp, err := os.MkdirTemp(c.dir, tmpPrefix)
	if err != nil {
		return fmt.Errorf("make a base snapshot: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	if err := build(ctx, tmp); err != nil {
		return fmt.Errorf("make a base snapshot of %s: %w", key.Shape, err)
	}
	if err := c.publish(tmp, key.ID()); err != nil {
		return fmt.Errorf("make a base snapshot: %w", err)
	}
	c.log.Info("made a base snapshot", "shape", key.Shape.String(), "took", time.Since(start).Round(time.Millisecond))
	return c.evict(key.ID())
}

// publish makes a complete and synced directory the snapshot of that name. Whoever has the previous one open keeps it.
func (c *cache) publish(tmp, name string) error {
	final := filepath.Join(c.dir, name)
	if err := c.discard(name); err != nil {
		return err
	}
	if err := os.Rename(tmp, final); err != nil {
		return err
	}
	return syncDir(c.dir)
}

// discard removes a snapshot: out of sight at once, then for good. It makes nothing, so that it works in a store without any
// space. The lock is held.
func (c *cache) discard(name string) error {
	grave := filepath.Join(c.dir, tmpPrefix+name)
	if err := os.RemoveAll(grave); err != nil { // of a process that was killed
		return err
	}
	err := os.Rename(filepath.Join(c.dir, name), grave)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, os.RemoveAll(grave))
}

// sweep removes what a killed process was making or removing. The lock is held, so nobody is at it now.
func (c *cache) sweep() {
	for _, dir := range c.halfMade() {
		c.log.Info("removing a half-made base snapshot", "dir", dir)
		if err := os.RemoveAll(dir); err != nil {
			c.log.Warn("a half-made base snapshot stays", "err", err)
		}
	}
}

func (c *cache) halfMade() []string {
	left, _ := filepath.Glob(filepath.Join(c.dir, tmpPrefix+"*")) // the pattern is well-formed
	return left
}

// HalfMade lists the directories of base snapshots that a killed process was making or removing. While somebody makes
// one there are none: that process has removed them.
func HalfMade(cfg *config.Config) []string {
	c := newCache(cfg, slog.New(slog.DiscardHandler))
	if len(c.halfMade()) == 0 {
		return nil
	}
	unlock, err := flock.TryLock(filepath.Join(c.dir, lockFile))
	if err != nil {
		return nil
	}
	defer unlock()
	return c.halfMade()
}

// RemoveHalfMade removes them, unless somebody makes a base snapshot.
func RemoveHalfMade(cfg *config.Config, log *slog.Logger) { newCache(cfg, log).sweepIfIdle() }

// sweepIfIdle sweeps, unless somebody is making a snapshot, who has done so already.
func (c *cache) sweepIfIdle() {
	if unlock, err := flock.TryLock(filepath.Join(c.dir, lockFile)); err == nil {
		c.sweep()
		unlock()
	}
}

// evict removes the least recently used snapshots beyond the bound, but neither the one named keep nor one whose memory
// a process holds: its machines wouldn't mind, but the next one would need it again.
func (c *cache) evict(keep string) error {
	all, err := c.list()
	if err != nil {
		return err
	}
	excess := len(all) - c.max
	for _, s := range all {
		if excess <= 0 {
			return nil
		}
		if s.name == keep || c.pool.InUse(s.name) {
			continue
		}
		c.log.Info("removing a base snapshot that was not used for long", "dir", s.name, "last use", s.used)
		if err := c.discard(s.name); err != nil {
			return fmt.Errorf("remove a base snapshot: %w", err)
		}
		excess--
	}
	c.log.Info("more base snapshots in use than are to be kept (vm.base_snapshots)", "kept", c.max)
	return nil
}

// entry is a snapshot's directory and its last use.
type entry struct {
	name string
	used time.Time
}

// list lists the snapshots, least recently used first.
func (c *cache) list() ([]entry, error) {
	entries, err := os.ReadDir(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list base snapshots: %w", err)
	}
	var all []entry
	for _, e := range entries {
		if !e.IsDir() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		s := entry{name: e.Name()}
		if info, err := os.Stat(filepath.Join(c.dir, e.Name(), descFile)); err == nil {
			s.used = info.ModTime()
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b entry) int { return a.used.Compare(b.used) })
	return all, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
