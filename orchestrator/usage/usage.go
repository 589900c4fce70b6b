// Package usage tells what takes the host's disk space, and frees what nobody needs: what is only a cache of another time,
// snapshots whose reasons are gone, what killed processes have left half-made, disks whose pods are gone, and layers that no
// image and no container has. What somebody uses, or has given a name, stays.
//
// Nothing of it depends on a running daemon but the layers, whose references are containerd's. What is in use is known by the
// locks and holds that whoever uses it has, and looked at again when it is removed.
package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/snapshotter/store"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Usage is what takes space on the disk. All sizes are bytes of real disk, holes don't count.
type Usage struct {
	Store Store `json:"store"`
	// Kinds are in a fixed order, empty ones among them.
	Kinds []Kind `json:"kinds"`
	// Lingering are deleted snapshots that somebody still uses: their space comes free with the last of them.
	Lingering []Lingering `json:"lingering"`
}

// Store is the file system of images, disks and snapshots.
type Store struct {
	Dir string `json:"dir"`
	// Kind is directory, mount or image; Image is the file of the last.
	Kind  string `json:"kind"`
	Image string `json:"image,omitempty"`
	space.Room
	HighWatermark int `json:"high_watermark"` // percent
	// Full is the line that creates are refused with; "" when there is room.
	Full string `json:"full,omitempty"`
}

// Kind is all that there is of one kind.
type Kind struct {
	Name  string `json:"name"`
	Count int    `json:"count"`
	// Bytes is what all of the kind take together: what they share among themselves is counted once.
	Bytes int64 `json:"bytes"`
	// Own is the part of it that they share with nothing of another kind: it would come free if all of them went.
	Own int64 `json:"own"`
	// Items are those that have names, the largest Own first.
	Items []Item `json:"items,omitempty"`
}

// Item is one of a kind.
type Item struct {
	Name string `json:"name"`
	// Bytes is what it takes, shared with others or not; Own is what would come free if it alone went.
	Bytes int64 `json:"bytes"`
	Own   int64 `json:"own"`
	// Of is the container, or pod of several, that a snapshot was made of.
	Of string `json:"of,omitempty"`
	// Team is whose it is, and Key the id of the API key that has made it, as far as the caller of Measure knows.
	Team string `json:"team,omitempty"`
	Key  string `json:"key,omitempty"`
}

// Lingering is a deleted snapshot that is in use.
type Lingering struct {
	Name  string   `json:"name"`
	Users []string `json:"users"` // machines, or whoever else has it open
	Bytes int64    `json:"bytes"` // shared with others or not
}

// Measure looks at all of it. What goes or comes meanwhile may be in it or not.
func Measure(ctx context.Context, cfg *config.Config) (Usage, error) {
	st, err := store.Inspect(cfg)
	if err != nil {
		return Usage{}, err
	}
	u := Usage{Store: Store{
		Dir: st.Dir, Kind: string(st.Kind), Image: st.Image, Room: space.Room{Size: st.Size, Free: st.Free}, HighWatermark: cfg.Store.HighWatermark,
	}}
	if err := space.Check(cfg); err != nil {
		u.Store.Full = err.Error()
	}
	t, err := account(ctx, cfg)
	if err != nil {
		return Usage{}, err
	}
	u.Kinds = t.kinds()
	u.Lingering, err = lingering(cfg)
	return u, err
}

func lingering(cfg *config.Config) ([]Lingering, error) {
	all, err := snapshot.New(cfg, slog.New(slog.DiscardHandler)).Lingering()
	if err != nil {
		return nil, err
	}
	list := []Lingering{} // an empty list is one, in JSON too
	for _, id := range slices.Sorted(maps.Keys(all)) {
		l := Lingering{Name: id}
		files := map[uint64]int64{} // by inode
		for _, user := range all[id] {
			l.Users = append(l.Users, user.Name)
			deletedFiles(user.PID, id, files)
		}
		for _, n := range files {
			l.Bytes += n
		}
		list = append(list, l)
	}
	return list, nil
}

// deletedFiles adds what a process has open of a deleted snapshot's files.
func deletedFiles(pid int, id string, files map[uint64]int64) {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid)) // none of a process that is gone
	for _, fd := range fds {
		to, err := os.Readlink(fd)
		var st unix.Stat_t
		if err != nil || !snapshot.DeletedAs(filepath.Base(filepath.Dir(to)), id) || unix.Stat(fd, &st) != nil || st.Nlink > 0 {
			continue
		}
		files[st.Ino] = st.Blocks * blockUnit
	}
}

// blockUnit is what st_blocks counts in, in bytes; see stat(2).
const blockUnit = 512

// fileSize is how much disk a file takes, 0 if it is gone.
func fileSize(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * blockUnit
}

func treeSize(dir string) (sum int64) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, _ error) error {
		sum += fileSize(path)
		return nil
	})
	return sum
}

// entries lists a directory; one that isn't there is empty.
func entries(dir string) ([]fs.DirEntry, error) {
	all, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("measure what takes space: %w", err)
	}
	return all, nil
}
