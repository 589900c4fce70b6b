package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	shimrecord "github.com/cubesandbox/cube/shim/record"
)

// findDisks finds disks of machines whose pods are gone without having removed them, as in a crash of the host: what pods
// have is forgotten then, and the store isn't.
func (p *plan) findDisks() error {
	all, err := entries(p.cfg.DiskDir()) // before the pods: each is in its pod's state before it is made
	if err != nil || len(all) == 0 {
		return err
	}
	var errs []error
	for _, e := range all {
		dir := filepath.Join(p.cfg.DiskDir(), e.Name())
		stray, err := areStray(p.cfg, dir)
		errs = append(errs, err)
		if !stray {
			continue
		}
		p.add("disks", e.Name(), "no pod has them", p.tally.ownOf(dir), func(context.Context) (bool, error) {
			gone, err := shimrecord.SweepDisks(dir, func() (bool, error) { return areStray(p.cfg, dir) })
			if errors.Is(err, flock.ErrLocked) {
				return false, nil // they are being replaced, or swept by another
			}
			return gone, err
		})
	}
	return errors.Join(errs...)
}

// areStray tells whether neither a pod's state names the directory nor a process has any of the disks. Where that can't be
// told they are somebody's.
func areStray(cfg *config.Config, dir string) (bool, error) {
	pods, err := shimrecord.Pods(cfg.PodDir())
	if err != nil {
		return false, err
	}
	for _, pod := range pods {
		state, err := pod.State()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || state.HasDisks(dir) {
			return false, err
		}
	}
	open, err := haveOpen(dir)
	return !open && err == nil, err
}

// haveOpen tells whether any process has a file of the directory open: a machine may outlive the run directory.
func haveOpen(dir string) (bool, error) {
	type file struct{ dev, ino uint64 }
	files := map[file]bool{}
	all, err := entries(dir)
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	for _, e := range all {
		err := unix.Lstat(filepath.Join(dir, e.Name()), &st)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("who has disk %s: %w", e.Name(), err)
		}
		files[file{st.Dev, st.Ino}] = true
	}
	if len(files) == 0 {
		return false, nil
	}
	fds, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return false, err
	}
	for _, fd := range fds {
		if unix.Stat(fd, &st) == nil && files[file{st.Dev, st.Ino}] { // or it is closed by now
			return true, nil
		}
	}
	return false, nil
}
