// Package snapshot keeps saved machines: a directory each, which appears complete and synced or not at all, never changes,
// and can be deleted at any time: it is out of sight at once, and its space is free when the last one who uses it has ended.
// What is in it is checked before a guest runs from it. The package knows nothing of QEMU, nor of what runs in the guest.
package snapshot

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

// tmpPrefix marks what is being made or removed; what a kill leaves of it is swept.
const tmpPrefix = ".tmp-"

// idForm is what a snapshot may be called: what a container may, and no hidden file.
var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,75}$`)

// killpoint is where tests kill the process. It does nothing otherwise.
var killpoint = func(string) {}

// Store is the directory of snapshots, shared by all processes of the host.
type Store struct {
	dir  string
	run  runDir
	pool *memory.Pool
	log  *slog.Logger
}

// New returns the host's store. It touches nothing yet.
func New(cfg *config.Config, log *slog.Logger) *Store {
	run := filepath.Join(cfg.RunDir, "snapshots")
	return &Store{dir: cfg.SnapshotDir(), run: runDir(run), pool: memory.NewPool(filepath.Join(run, "memory")), log: log}
}

// Note is what the owner of a machine keeps with a snapshot of it; see Info.Note. It is asked when the machine is saved,
// and an error of it is one of the save.
type Note func() (json.RawMessage, error)

// Save makes a snapshot of a running machine, which goes on. The snapshot is there, for good, when Save returns without an
// error; otherwise nothing of it is. note may be nil.
func (s *Store) Save(ctx context.Context, id string, m vmm.Machine, q vmm.Quiesce, note Note) (*Info, error) {
	return s.save(ctx, id, "", m, vmm.SaveRequest{Quiesce: q}, note, nil)
}

// SaveDisks is Save for the disks alone: what the guest hadn't written to them is lost, unless Info.Frozen. like is a snapshot with
// which they share blocks, so that these need not be read again; "" or one that is gone is none.
func (s *Store) SaveDisks(ctx context.Context, id, like string, m vmm.Machine, q vmm.Quiesce, note Note) (*Info, error) {
	return s.save(ctx, id, like, m, vmm.SaveRequest{Quiesce: q, DisksOnly: true}, note, nil)
}

// SaveLast is Save for a machine whose life ends with it: nothing happens in it after the moment that is saved. settle is
// called when the snapshot is there. If that fails, or anything before, the machine goes on and there is no snapshot;
// otherwise it stands still, and is only to be stopped. disksOnly leaves its memory out.
func (s *Store) SaveLast(ctx context.Context, id string, m vmm.Machine, q vmm.Quiesce, disksOnly bool, note Note, settle func(*Info) error) (*Info, error) {
	return s.save(ctx, id, "", m, vmm.SaveRequest{Quiesce: q, DisksOnly: disksOnly, Still: true}, note, settle)
}

func (s *Store) save(ctx context.Context, id, like string, m vmm.Machine, r vmm.SaveRequest, note Note, settle func(*Info) error) (_ *Info, err error) {
	if err := ValidID(id); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("make snapshot %s: %w", id, err)
		}
	}()
	if _, err := os.Lstat(filepath.Join(s.dir, id)); err == nil {
		return nil, errExists
	}
	began := time.Now()
	tmp, release, err := s.scratch()
	if err != nil {
		return nil, err
	}
	defer release()
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(tmp) })

	r.Dir = tmp
	saved, err := m.Save(ctx, r)
	if err != nil {
		return nil, err
	}
	if r.Still {
		u.Push(saved.GoOn)
	}
	killpoint("saved")
	format := formatVersion
	if r.DisksOnly {
		format = formatDisks
	}
	info := &Info{Format: format, ID: id, Created: time.Now().UTC(), Parent: saved.Parent,
		Platform: saved.Platform, Shape: saved.Shape, Frozen: saved.Frozen}
	if note != nil {
		if info.Note, err = note(); err != nil {
			return nil, err
		}
	}
	if like == "" {
		like = saved.Parent
	}
	parent := s.disksOf(like)
	defer parent.close()
	known, err := info.describe(tmp, saved, parent)
	if err != nil {
		return nil, err
	}
	killpoint("described")
	if err := s.publish(tmp, id); err != nil {
		return nil, err
	}
	err = syncDir(s.dir)
	if err == nil && settle != nil {
		err = settle(info)
	}
	if err != nil {
		return nil, errors.Join(err, s.discard(id))
	}
	s.setChecked(id, known)
	s.log.Debug("made a snapshot", "id", id, "stopped", saved.Stopped, "pages", saved.Memory.Pages, "written", saved.Memory.Bytes,
		"frozen", saved.Frozen, "took", time.Since(began))
	return info, nil
}

// publish has a directory whose files are synced be the snapshot of that name, for good once the store's directory is synced.
func (s *Store) publish(tmp, id string) error {
	if err := syncDir(tmp); err != nil {
		return err
	}
	err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, filepath.Join(s.dir, id), unix.RENAME_NOREPLACE)
	if errors.Is(err, fs.ErrExist) {
		return errExists
	}
	if err == nil {
		killpoint("published")
	}
	return err
}

var errExists = errdefs.ErrAlreadyExists.WithMessage("there is a snapshot of that name: delete it or choose another name")

func notFound(id string) error {
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("there is no snapshot %s", id))
}

// ValidID tells whether a snapshot may be called so; the error is errdefs.ErrInvalidArgument.
func ValidID(id string) error {
	if !idForm.MatchString(id) {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("snapshot name %q: up to 76 letters, digits, dots, underscores and hyphens are possible, a letter or digit first", id))
	}
	return nil
}

// scratch makes a directory that is swept when this process ends without having called release. It is the caller's to
// remove.
func (s *Store) scratch() (dir string, release func(), err error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return "", nil, err
	}
	dir, release, err = s.claim("")
	if err != nil {
		return "", nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		release()
		return "", nil, err
	}
	return dir, release, nil
}

// claim gives a path for a directory that is swept when this process ends without having called release.
func (s *Store) claim(suffix string) (path string, release func(), err error) {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	name := tmpPrefix + hex.EncodeToString(b[:]) + suffix
	release, err = s.run.hold("making", name, User{})
	return filepath.Join(s.dir, name), release, err
}

// DeletedAs tells whether a directory of that name is what is left of a snapshot with that id.
func DeletedAs(name, id string) bool {
	rest, ok := strings.CutPrefix(name, tmpPrefix)
	digits, of, _ := strings.Cut(rest, ".")
	return ok && digits != "" && of == id
}

// List describes all snapshots, by name. One that can't be read has an Info with nothing but its name and Damage.
func (s *Store) List() ([]Info, error) {
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	var all []Info
	for _, id := range names {
		if strings.HasPrefix(id, ".") {
			continue
		}
		info, err := s.Inspect(id)
		switch {
		case errdefs.IsNotFound(err): // deleted meanwhile
			continue
		case err != nil:
			info = Info{ID: id, Damage: err.Error()}
		}
		all = append(all, info)
	}
	return all, nil
}

// Inspect describes a snapshot. Its files aren't looked at.
func (s *Store) Inspect(id string) (Info, error) {
	if err := ValidID(id); err != nil {
		return Info{}, err
	}
	dir, err := os.OpenRoot(filepath.Join(s.dir, id))
	if errors.Is(err, fs.ErrNotExist) {
		return Info{}, notFound(id)
	}
	if err != nil {
		return Info{}, err
	}
	defer dir.Close()
	info, err := readInfo(dir, id)
	if err != nil {
		return Info{}, s.gone(dir, id, err)
	}
	return *info, nil
}

// gone turns the error of whoever reads a snapshot into that it isn't there, if it has been deleted under the hands.
func (s *Store) gone(dir *os.Root, id string, err error) error {
	have, e := dir.Stat(".")
	if e == nil {
		var at fs.FileInfo
		if at, e = os.Lstat(filepath.Join(s.dir, id)); e == nil && os.SameFile(have, at) {
			return fmt.Errorf("snapshot %s: %w", id, err)
		}
	}
	if e != nil && !errors.Is(e, fs.ErrNotExist) {
		return e
	}
	return notFound(id)
}

// names lists what is in the directory.
func (s *Store) names() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the snapshots: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// Delete removes a snapshot, whatever state it is in, and tells who still uses it. Nobody finds it any more; who uses it
// goes on, and its space is free when the last of them has ended, in whatever way.
func (s *Store) Delete(id string) ([]User, error) {
	if err := ValidID(id); err != nil {
		return nil, err
	}
	if err := s.discard(id); err != nil {
		return nil, err
	}
	return s.Users(id)
}

// discard moves a snapshot out of sight and removes it. It makes nothing, so that it works in a store without any space.
func (s *Store) discard(id string) error {
	grave, release, err := s.claim("." + id)
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", id, err)
	}
	defer release()
	err = os.Rename(filepath.Join(s.dir, id), grave)
	if errors.Is(err, fs.ErrNotExist) {
		return notFound(id)
	}
	if err == nil {
		err = syncDir(s.dir)
	}
	killpoint("hidden")
	// What is open stays on the disk until it is closed.
	if err := errors.Join(err, os.RemoveAll(grave), s.run.forget(id)); err != nil {
		return fmt.Errorf("delete snapshot %s: %w", id, err)
	}
	return nil
}

// HalfMade lists the directories that killed processes were making or removing.
func (s *Store) HalfMade() ([]string, error) {
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	var left []string
	for _, name := range names {
		if strings.HasPrefix(name, tmpPrefix) && !s.run.held("making", name) {
			left = append(left, filepath.Join(s.dir, name))
		}
	}
	return left, nil
}

// Sweep removes what killed processes were making or removing, and what is remembered of snapshots that are no more.
func (s *Store) Sweep() error {
	left, err := s.HalfMade()
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range left {
		s.log.Info("removing a half-made snapshot", "dir", dir)
		errs = append(errs, os.RemoveAll(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove half-made snapshots: %w", err)
	}
	names, err := s.names()
	if err != nil {
		return err
	}
	err = errors.Join(
		s.run.sweep(func(id string) bool { return slices.Contains(names, id) }),
		s.pool.Sweep(func(key string) bool {
			return slices.ContainsFunc(names, func(id string) bool { return strings.HasPrefix(key, id+"@") })
		}))
	if err != nil {
		return fmt.Errorf("forget deleted snapshots: %w", err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
