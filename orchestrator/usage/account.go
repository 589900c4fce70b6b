package usage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// The kinds, in the order of their names below.
const (
	layers = iota
	disks
	snapshots
	paused
	bases
	artefacts
	contents
	uploads
	logs
	numKinds
)

var kindNames = [numKinds]string{"layers", "disks", "snapshots", "paused", "base snapshots", "artefacts", "image contents", "uploads", "logs"}

// tally is who has which part of the disk.
type tally struct {
	items []tallied
	spans []span
	union [numKinds]int64
	own   [numKinds]int64
}

type tallied struct {
	Item
	path string
	kind int
}

// span is a part of the store's device that an item has, in bytes.
type span struct {
	start, end uint64
	item       int
}

// account finds all that takes space.
func account(ctx context.Context, cfg *config.Config) (*tally, error) {
	t := &tally{}
	for _, find := range []func(context.Context, *config.Config) error{t.addImages, t.addDisks, t.addSnapshots, t.addBases, t.addOthers} {
		if err := find(ctx, cfg); err != nil {
			return nil, err
		}
	}
	t.sum()
	return t, nil
}

// addImages adds the snapshotter's images. Those that a guest has, or had, are disks.
func (t *tally) addImages(ctx context.Context, cfg *config.Config) error {
	dir := filepath.Join(cfg.SnapshotterDir(), "images")
	all, err := entries(dir)
	if err != nil {
		return err
	}
	for _, e := range all {
		path := filepath.Join(dir, e.Name())
		kind := layers
		marked, err := guestmark.IsSet(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("measure what takes space: %w", err)
		}
		if marked {
			kind = disks
		}
		if err := t.add(ctx, kind, path); err != nil {
			return err
		}
	}
	return nil
}

// addDisks adds those of machines that were made from snapshots.
func (t *tally) addDisks(ctx context.Context, cfg *config.Config) error {
	return t.addAll(ctx, cfg.DiskDir(), func(string) int { return disks })
}

func (t *tally) addSnapshots(ctx context.Context, cfg *config.Config) error {
	s := snapshot.New(cfg, slog.New(slog.DiscardHandler))
	of := map[string]string{}
	err := t.addAll(ctx, cfg.SnapshotDir(), func(id string) int {
		if info, err := s.Inspect(id); err == nil {
			if p, err := saved.Decode(info.Note); err == nil {
				of[id] = p.ID
				if p.Purpose == saved.ForPause {
					return paused
				}
			}
		}
		return snapshots
	})
	for i := range t.items {
		if k := t.items[i].kind; k == snapshots || k == paused {
			t.items[i].Of = of[t.items[i].Name]
		}
	}
	return err
}

func (t *tally) addBases(ctx context.Context, cfg *config.Config) error {
	return t.addAll(ctx, cfg.BaseDir(), func(string) int { return bases })
}

// addAll adds what is in a directory, half-made things too.
func (t *tally) addAll(ctx context.Context, dir string, kind func(name string) int) error {
	all, err := entries(dir)
	if err != nil {
		return err
	}
	for _, e := range all {
		if !e.IsDir() {
			continue
		}
		if err := t.add(ctx, kind(e.Name()), filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// addOthers adds what shares nothing.
func (t *tally) addOthers(_ context.Context, cfg *config.Config) error {
	for _, current := range []string{cfg.QEMUDir(), cfg.GuestDir()} {
		kept, err := artefact.List(filepath.Dir(current))
		if err != nil {
			return err
		}
		for _, k := range kept {
			t.plain(artefacts, k.Dir, filepath.Join(filepath.Base(filepath.Dir(k.Dir)), k.Digest))
		}
	}
	if cfg.Containerd.Address == "" { // another's is nothing of ours
		blobs := filepath.Join(cfg.StateDir, "containerd", "io.containerd.content.v1.content", "blobs", "sha256")
		all, err := entries(blobs)
		if err != nil {
			return err
		}
		for _, e := range all {
			t.plain(contents, filepath.Join(blobs, e.Name()), e.Name())
		}
	}
	return errors.Join(t.below(uploads, cfg.UploadDir()), t.below(logs, cfg.LogDir()))
}

// below adds all files below a directory.
func (t *tally) below(kind int, dir string) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			t.plain(kind, path, e.Name())
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// plain adds a file or directory on which nobody else has a part.
func (t *tally) plain(kind int, path, name string) {
	n := treeSize(path)
	t.items = append(t.items, tallied{Item: Item{Name: name, Bytes: n, Own: n}, path: path, kind: kind})
	t.union[kind] += n
	t.own[kind] += n
}

// add adds a file, or a directory with its files, of the store.
func (t *tally) add(ctx context.Context, kind int, path string) error {
	n := len(t.items)
	t.items = append(t.items, tallied{Item: Item{Name: filepath.Base(path)}, path: path, kind: kind})
	return filepath.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			err = t.addFile(path, n)
		}
		if errors.Is(err, fs.ErrNotExist) { // it has gone meanwhile
			err = nil
		}
		if err != nil {
			return fmt.Errorf("measure what takes space: %w", err)
		}
		return ctx.Err()
	})
}

func (t *tally) addFile(path string, item int) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	i := &t.items[item]
	alone := func(n int64) {
		i.Bytes += n
		i.Own += n
		t.union[i.kind] += n
		t.own[i.kind] += n
	}
	err = reflink.EachExtent(f, func(e reflink.Extent) error {
		if !e.Known() {
			alone(int64(e.Length))
			return nil
		}
		i.Bytes += int64(e.Length)
		t.spans = append(t.spans, span{e.Physical, e.Physical + e.Length, item})
		return nil
	})
	if errors.Is(err, reflink.ErrUnmapped) {
		alone(fileSize(path))
		return nil
	}
	return err
}

// edge is where a span begins or ends.
type edge struct {
	at   uint64
	item int
	by   int // 1 or -1
}

// sum goes along the device and gives each part to those who have it.
func (t *tally) sum() {
	edges := make([]edge, 0, 2*len(t.spans))
	for _, s := range t.spans {
		edges = append(edges, edge{s.start, s.item, 1}, edge{s.end, s.item, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	has := make([]int, len(t.items)) // how many spans of the item the place is in
	var items, which int             // how many items have the place, and the sum of their numbers: that of the only one
	var kinds [numKinds]int          // how many items of the kind have the place
	at := uint64(0)
	for _, e := range edges {
		if n := int64(e.at - at); n > 0 && items > 0 {
			if items == 1 {
				t.items[which].Own += n
			}
			t.share(kinds, n)
		}
		at = e.at
		before := has[e.item]
		has[e.item] += e.by
		if before == 0 || has[e.item] == 0 { // it begins or ends to have the place
			items += e.by
			which += e.by * e.item
			kinds[t.items[e.item].kind] += e.by
		}
	}
}

// share counts n bytes that items of these kinds have.
func (t *tally) share(kinds [numKinds]int, n int64) {
	only, some := 0, 0
	for k, count := range kinds {
		if count > 0 {
			t.union[k] += n
			only, some = k, some+1
		}
	}
	if some == 1 {
		t.own[only] += n
	}
}

// kinds is the sum for people.
func (t *tally) kinds() []Kind {
	all := make([]Kind, numKinds)
	for k := range all {
		all[k] = Kind{Name: kindNames[k], Bytes: t.union[k], Own: t.own[k]}
	}
	for _, i := range t.items {
		k := &all[i.kind]
		k.Count++
		if named := i.kind >= snapshots && i.kind <= artefacts; named && !strings.HasPrefix(i.Name, ".") {
			k.Items = append(k.Items, i.Item)
		}
	}
	for k := range all {
		slices.SortStableFunc(all[k].Items, func(a, b Item) int { return cmp.Compare(b.Own, a.Own) })
	}
	return all
}

// ownOf is what would come free with what is at the path.
func (t *tally) ownOf(path string) int64 {
	for _, i := range t.items {
		if i.path == path {
			return i.Own
		}
	}
	return 0
}
