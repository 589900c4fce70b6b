package base

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/vmm"
)

// Cached is a base snapshot that is kept.
type Cached struct {
	Name, Dir string
	Shape     vmm.Shape
	Used      time.Time // last
	// Stale says why no machine will be made of it any more, as things are.
	Stale string
	// InUse: a process holds its memory.
	InUse bool
}

// Kept lists the base snapshots, least recently used first.
func Kept(cfg *config.Config) ([]Cached, error) {
	c := newCache(cfg, slog.New(slog.DiscardHandler))
	entries, err := c.list()
	if err != nil || len(entries) == 0 {
		return nil, err
	}
	art, err := currentArtefacts(cfg)
	if err != nil {
		return nil, err
	}
	var all []Cached
	for _, e := range entries {
		k := Cached{Name: e.name, Dir: filepath.Join(c.dir, e.name), Used: e.used, InUse: c.pool.InUse(e.name)}
		var d struct{ Key Key }
		b, err := readBounded(filepath.Join(k.Dir, descFile), maxDesc)
		if err == nil {
			err = json.Unmarshal(b, &d)
		}
		if err != nil {
			k.Stale = "it can't be read"
		} else if k.Stale, err = d.Key.stale(art); err != nil {
			return nil, err
		}
		k.Shape = d.Key.Shape
		all = append(all, k)
	}
	return all, nil
}

// stale says why nobody asks for a snapshot of that key, "" if somebody may.
func (k Key) stale(art artefacts) (string, error) {
	want, err := newKey(art, k.Accel, k.Shape)
	switch {
	case err != nil:
		return "", err
	case k == want:
		return "", nil
	case k.QEMU != want.QEMU:
		return "it is of another QEMU", nil
	case k.Guest != want.Guest:
		return "it is of another guest image", nil
	case k.CPU != want.CPU:
		return "it is of another CPU", nil
	}
	return "it is of another version of cube", nil
}

// Remove removes it, unless it is in use by now. It tells whether it is gone.
func (k Cached) Remove(ctx context.Context, cfg *config.Config) (gone bool, err error) {
	c := newCache(cfg, slog.New(slog.DiscardHandler))
	unlock, err := flock.Lock(ctx, filepath.Join(c.dir, lockFile))
	if err != nil {
		return false, fmt.Errorf("remove a base snapshot: %w", err)
	}
	defer unlock()
	if c.pool.InUse(k.Name) {
		return false, nil
	}
	if err := c.discard(k.Name); err != nil {
		return false, fmt.Errorf("remove a base snapshot: %w", err)
	}
	return true, nil
}

// MakeRoom is asked before anything is made in the store. Above the high watermark it removes base snapshots that nobody
// uses, and artefacts that nobody needs where they are on the same file system, least recently used first, until the store is
// down to the low one. The error is that of space.Check if the store is above the high one even so.
func MakeRoom(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	if space.Check(cfg) == nil {
		return nil
	}
	if !above(cfg, cfg.Store.HighWatermark) {
		return nil
	}
	c := newCache(cfg, log)
	if err := c.shrink(ctx, func() bool { return !above(cfg, cfg.Store.LowWatermark) }); err != nil {
		log.Warn("remove base snapshots from a full store", "error", err)
	}
	if above(cfg, cfg.Store.LowWatermark) && sameFS(cfg.StoreDir(), cfg.Artefacts) {
		removeArtefacts(ctx, cfg, log, func() bool { return !above(cfg, cfg.Store.LowWatermark) })
	}
	space.Settle(cfg.StoreDir())
	return space.Check(cfg)
}

// Room implements vmm.Launcher.
func (l *Launcher) Room(ctx context.Context) error { return MakeRoom(ctx, l.cfg, l.log) }

func above(cfg *config.Config, percent int) bool {
	space.Settle(cfg.StoreDir())
	r, err := space.Of(cfg.StoreDir())
	return err == nil && r.Above(percent)
}

// shrink removes snapshots, least recently used first, until it is enough.
func (c *cache) shrink(ctx context.Context, enough func() bool) error {
	all, err := c.list()
	if err != nil || len(all) == 0 {
		return err
	}
	unlock, err := flock.Lock(ctx, filepath.Join(c.dir, lockFile))
	if err != nil {
		return err
	}
	defer unlock()
	for _, s := range all {
		if enough() {
			return nil
		}
		if c.pool.InUse(s.name) {
			continue
		}
		c.log.Info("removing a base snapshot, because the store is full", "dir", s.name, "last use", s.used)
		if err := c.discard(s.name); err != nil {
			return err
		}
	}
	return nil
}
