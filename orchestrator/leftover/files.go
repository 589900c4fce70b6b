package leftover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/stack"
	"github.com/cubesandbox/cube/snapshotter/store"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// mounts finds disks that a killed `cube run` has mounted to look at. Such a mount lasts a moment, and each changes the
// directory that they are all in.
func mounts(_ context.Context, s *search) ([]Leftover, error) {
	dir := sandbox.MountDir(s.cfg)
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for mounts: %w", err)
	}
	if !s.old(info.ModTime()) {
		return nil, nil
	}
	all, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return nil, fmt.Errorf("look for mounts: %w", err)
	}
	if len(all) == 0 {
		return nil, nil
	}
	// One leftover for all: the removal of the first makes the directory young.
	return []Leftover{{
		Name:   dir,
		Detail: plural(len(all), "forgotten mount") + ", the last of " + all[len(all)-1].Source,
		Since:  info.ModTime(),
		Remedy: "unmounts what is there",
		remove: func(context.Context) error {
			if err := stack.UnmountBelow(dir); err != nil {
				return err
			}
			var errs []error
			for _, m := range all {
				if err := unix.Rmdir(m.Mountpoint); err != nil && !errors.Is(err, unix.ENOENT) {
					errs = append(errs, fmt.Errorf("remove %s: %w", m.Mountpoint, err))
				}
			}
			return errors.Join(errs...)
		},
	}}, nil
}

// loops finds loop devices that nobody will detach.
func loops(_ context.Context, s *search) ([]Leftover, error) {
	idle, err := store.IdleLoops(s.cfg.StateDir)
	var found []Leftover
	for _, l := range idle {
		found = append(found, Leftover{
			Name:   l.Device,
			Detail: "of " + l.File + ", mounted nowhere",
			Size:   fileSize(l.File),
			Remedy: "detaches it; the file stays",
			remove: func(context.Context) error { return store.DetachIdle(l) },
		})
	}
	return found, err
}

// logName is a container's log or an older part of it.
var logName = regexp.MustCompile(`^(.+)\.log(\.[0-9]+)?$`)

// logs finds the logs of containers that are gone.
func logs(_ context.Context, s *search) ([]Leftover, error) {
	dir := filepath.Dir(sandbox.LogPath(s.cfg, "x"))
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for logs: %w", err)
	}
	ids := make(map[string]bool)
	for r := range s.inv.Containers {
		ids[r.ID] = true
	}
	var found []Leftover
	for _, e := range entries {
		info, err := e.Info()
		m := logName.FindStringSubmatch(e.Name())
		if err != nil || m == nil || ids[m[1]] || !s.old(info.ModTime()) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		found = append(found, Leftover{
			Name:   path,
			Detail: "there is no container " + m[1],
			Since:  info.ModTime(),
			Size:   info.Size(),
			Remedy: "removes it",
			remove: func(context.Context) error { return removeFile(path) },
		})
	}
	return found, nil
}

// snapshots finds those that a killed process was making or removing.
func snapshots(_ context.Context, s *search) ([]Leftover, error) {
	store := snapshot.New(s.cfg, slog.New(slog.DiscardHandler))
	left, err := store.HalfMade()
	return halfMade(left, store.Sweep), err
}

// baseSnapshots finds those that a killed process was making.
func baseSnapshots(_ context.Context, s *search) ([]Leftover, error) {
	return halfMade(base.HalfMade(s.cfg), func() error {
		base.RemoveHalfMade(s.cfg, slog.New(slog.DiscardHandler))
		return nil
	}), nil
}

// artefacts finds those that a killed set-up was making.
func artefacts(_ context.Context, s *search) (found []Leftover, err error) {
	for _, dir := range []string{filepath.Dir(s.cfg.QEMUDir()), filepath.Dir(s.cfg.GuestDir())} {
		left, e := artefact.HalfMade(dir)
		err = errors.Join(err, e)
		found = append(found, halfMade(left, func() error { return artefact.RemoveHalfMade(dir) })...)
	}
	return found, err
}

func halfMade(dirs []string, remove func() error) (found []Leftover) {
	for _, dir := range dirs {
		l := Leftover{Name: dir, Detail: "half-made", Size: treeSize(dir), Remedy: "removes it", remove: func(context.Context) error { return remove() }}
		if info, err := os.Stat(dir); err == nil {
			l.Since = info.ModTime()
		}
		found = append(found, l)
	}
	return found
}

// fileSize is how much disk a file takes, 0 if it can't be told.
func fileSize(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512 // st_blocks is in 512-byte units, see stat(2)
}

func treeSize(dir string) (sum int64) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, _ error) error {
		sum += fileSize(path)
		return nil
	})
	return sum
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// plural is "1 mount" and "3 mounts".
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
