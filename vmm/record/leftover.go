package record

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
)

// youth is how old a directory must be to count as left without a record: the longest that an owner needs to write one.
const youth = time.Minute

// Leftover is a machine's directory whose owner is gone.
type Leftover struct {
	Dir   string
	Since time.Time // when its content last changed
	// State is what the record tells; the zero value where it doesn't.
	State State
}

// Machine is a machine's directory with its record.
type Machine struct {
	Dir   string
	State State
	// Full: it stands still because the store is full.
	Full bool
}

// Machines lists the machines whose owners live. Those that hold nothing yet aren't among them.
func Machines(cfg *config.Config) ([]Machine, error) {
	dirs, err := machineDirs(cfg)
	if err != nil {
		return nil, err
	}
	var all []Machine
	for _, dir := range dirs {
		if s, err := Read(dir); err == nil && s.Owner.Alive() {
			all = append(all, Machine{Dir: dir, State: s, Full: isFull(dir)})
		}
	}
	return all, nil
}

// Leftovers lists the machines that nobody owns. A directory without a record counts when it is older than the longest
// time that an owner needs to write one.
func Leftovers(cfg *config.Config) ([]Leftover, error) {
	dirs, err := machineDirs(cfg)
	if err != nil {
		return nil, err
	}
	var left []Leftover
	for _, dir := range dirs {
		if l, ok := judge(cfg, dir); ok {
			left = append(left, l)
		}
	}
	return left, nil
}

func machineDirs(cfg *config.Config) ([]string, error) {
	entries, err := os.ReadDir(cfg.VMDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list machines: %w", err)
	}
	var dirs []string
	for _, e := range entries {
		dirs = append(dirs, filepath.Join(cfg.VMDir(), e.Name()))
	}
	return dirs, nil
}

// judge says whether the directory is a leftover.
func judge(cfg *config.Config, dir string) (Leftover, bool) {
	info, err := os.Lstat(dir)
	if err != nil {
		return Leftover{}, false // gone
	}
	l := Leftover{Dir: dir, Since: info.ModTime()}
	s, err := Read(dir)
	if err == nil {
		l.State = s
		return l, !s.Owner.Alive()
	}
	if errors.Is(err, fs.ErrNotExist) {
		return l, time.Since(l.Since) >= cfg.Timeout(youth)
	}
	return l, true
}

// Cleanup is the package's Cleanup for a leftover; one that has got an owner meanwhile is left alone.
func (l Leftover) Cleanup(cfg *config.Config) error {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(cleanupTimeout))
	defer cancel()
	unlock, err := lockAll(ctx, cfg)
	if err != nil {
		return err
	}
	defer unlock()
	if _, ok := judge(cfg, l.Dir); !ok {
		return nil
	}
	return cleanup(ctx, cfg, l.Dir)
}

// lockAll keeps others from beginning a record or cleaning up.
func lockAll(ctx context.Context, cfg *config.Config) (unlock func(), err error) {
	unlock, err = flock.LockDir(ctx, cfg.VMDir(), false)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil // there can't be a machine before its directory
	}
	if err != nil {
		return nil, fmt.Errorf("lock the machines: %w", err)
	}
	return unlock, nil
}

// CgroupName is what the control group of the machine (or of a helper) in dir is called: by the id, for people; a word for
// dir, since one id may have several in as many containerd namespaces; and one that all groups of the stack end with, so
// that stacks on one host know their own. What it is for takes a uid for dir before it makes the group, and gives it back
// after the group is gone.
func CgroupName(cfg *config.Config, dir, id string) string {
	return id + "-" + groupSuffix(cfg, dir)
}

func groupSuffix(cfg *config.Config, dir string) string { return word(dir) + word(cfg.VMDir()) }

func word(path string) string {
	sum := sha256.Sum256([]byte(path))
	return fmt.Sprintf("%x", sum[:4])
}

// OrphanGroups lists the control groups of this stack that nobody owns and no leftover machine stands for.
func OrphanGroups(cfg *config.Config) ([]string, error) {
	names, err := cgroup.List() // first: whoever owns one has its uid before and after
	if err != nil {
		return nil, err
	}
	dirs, err := machineDirs(cfg)
	if err != nil {
		return nil, err
	}
	taken, err := jail.NewUIDs(cfg).Taken()
	if err != nil {
		return nil, err
	}
	owned := make(map[string]bool)
	for _, dir := range dirs {
		owned[groupSuffix(cfg, dir)] = true
	}
	for _, t := range taken {
		if t.Owner.Alive() {
			owned[groupSuffix(cfg, t.Dir)] = true
		}
	}
	var orphans []string
	for _, name := range names {
		suffix := name[strings.LastIndexByte(name, '-')+1:]
		if ours := len(suffix) == len(groupSuffix(cfg, "")) && strings.HasSuffix(suffix, word(cfg.VMDir())); ours && !owned[suffix] && cgroup.Exists(name) {
			orphans = append(orphans, name)
		}
	}
	return orphans, nil
}

// RemoveOrphanGroup kills what is in such a group and removes it; one that has got a machine meanwhile is left alone.
func RemoveOrphanGroup(ctx context.Context, cfg *config.Config, name string) error {
	unlock, err := lockAll(ctx, cfg)
	if err != nil {
		return err
	}
	defer unlock()
	orphans, err := OrphanGroups(cfg)
	if err != nil {
		return err
	}
	if !slices.Contains(orphans, name) {
		return nil
	}
	return cgroup.Remove(ctx, name)
}
